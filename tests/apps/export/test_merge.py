"""Exports of runs with adapters: merged into the weights, and as files of PEFT."""

import json
import runpy

import numpy as np
import pytest
from safetensors.numpy import load_file

from mlmoe_jax.apps.export.run import export_run
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.pretrained.peft import CONFIG, read_peft


@pytest.fixture(scope="module")
def adapted(runs):
    """Runs with linear adapters, with a LoRA alone, with a bottleneck beside prompts, and without adapters."""
    linear = {"dora": {"rank": 2}, "bitfit": {"targets": ("value", "norm1")}, "ssf": {"targets": ("fc1", "norm2")}}
    prompts = {"model__prompts__kind": "deep", "model__prompts__count": 2}
    with runs.world():
        yield {
            "linear": runs("published", adapters=linear).folder,
            "lora": runs("published", adapters={"lora": {"rank": 2}}).folder,
            "bottleneck": runs("published", adapters={"adaptformer": {}}, **prompts).folder,
            "plain": runs("published").folder,
        }


def pixels():
    return np.random.default_rng(1).integers(0, 256, (3, 8, 8, 3)).astype(np.uint8)


@pytest.mark.slow
def test_a_merged_program_gives_the_scores_of_the_run(adapted, tmp_path, capsys):
    assert export_run(adapted["linear"], str(tmp_path / "out"), "stablehlo", merge=True).exit_code == 0
    scores = runpy.run_path(str(tmp_path / "out" / "load.py"))["Model"](tmp_path / "out")(pixels())
    expected = [list(result.scores.values()) for result in Predictor.from_run(adapted["linear"].path)(list(pixels()))]
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-6)
    assert np.ptp(scores, axis=0).max() > 1e-4, "the scores depend on the image"
    described = json.loads((tmp_path / "out" / "model.json").read_text())["model"]
    assert (described["adapters"], described["backbone"]["weights"]) == ({}, "none")
    assert "adapters merged, largest difference of a probability " in capsys.readouterr().err


@pytest.mark.slow
def test_merged_tensors_have_the_backbone_and_no_adapter(adapted, tmp_path):
    sets = {}
    for name, merge in (("merged", True), ("unmerged", False)):
        file = tmp_path / f"{name}.safetensors"
        assert export_run(adapted["lora"], str(file), "safetensors", include_frozen="auto", merge=merge).exit_code == 0
        sets[name] = set(load_file(file))
    assert "adapters/lora/query/a" in sets["unmerged"] - sets["merged"]
    assert "backbone/blocks/0/attn/qkv/kernel" in sets["merged"] - sets["unmerged"]


def test_what_cannot_be_merged_leaves_nothing(adapted, tmp_path, refusal):
    def refuse(run, kind="stablehlo", **options):
        return refusal(export_run, adapted[run], str(tmp_path / "out"), kind, **options)

    assert refuse("plain", merge=True) == "the run has no adapters to merge; leave --merge out"
    assert refuse("bottleneck", merge=True).startswith("the adapter adaptformer is not linear")
    assert refuse("lora", "peft", merge=True) == "--format=peft does not take --merge here; leave it out"
    assert refuse("linear", "peft").startswith("PEFT's files hold one LoRA or DoRA and no prompts")
    assert not list(tmp_path.iterdir())


def test_a_lora_becomes_a_folder_of_peft(adapted, tmp_path):
    outcome = export_run(adapted["lora"], str(tmp_path / "out"), "peft")
    assert "; 6 tensors, with its classifier; " in outcome.text()
    adapter, values = read_peft(tmp_path / "out"), Predictor.from_run(adapted["lora"].path).run.values
    assert dict(adapter.settings) == {"rank": 2, "alpha": 8.0, "targets": ("query", "value"), "rank_stabilized": False}
    for name, tensor in adapter.tensors.items():
        np.testing.assert_array_equal(tensor, values[f"adapters/lora/{name}"], err_msg=name)
    np.testing.assert_array_equal(adapter.classifier["bias"], values["head/classifier/bias"])
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["target_modules"] == [
        "attention.q_proj",
        "attention.v_proj",
    ]
