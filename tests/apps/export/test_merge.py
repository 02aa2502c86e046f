"""Exports of runs with adapters: merged into the weights, and as files of PEFT."""

import json
import runpy

import numpy as np
import pytest
from safetensors.numpy import load_file

from mlmoe_jax.apps.export.run import export_run
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.pretrained.peft import CONFIG, read_peft


def pixels():
    return np.random.default_rng(1).integers(0, 256, (3, 8, 8, 3)).astype(np.uint8)


@pytest.mark.slow
def test_a_merged_program_gives_the_scores_of_the_run(folders, tmp_path, capsys):
    assert export_run(folders["linear"], str(tmp_path / "out"), "stablehlo", merge=True).exit_code == 0
    scores = runpy.run_path(str(tmp_path / "out" / "load.py"))["Model"](tmp_path / "out")(pixels())
    expected = [list(result.scores.values()) for result in Predictor.from_run(folders["linear"].path)(list(pixels()))]
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-6)
    assert np.ptp(scores, axis=0).max() > 1e-4, "the scores depend on the image"
    described = json.loads((tmp_path / "out" / "model.json").read_text())["model"]
    assert (described["adapters"], described["backbone"]["weights"]) == ({}, "none")
    assert "adapters merged, largest difference of a probability " in capsys.readouterr().err


@pytest.mark.slow
def test_merged_tensors_have_the_backbone_and_no_adapter(folders, tmp_path):
    sets = {}
    for name, merge in (("merged", True), ("unmerged", False)):
        file = tmp_path / f"{name}.safetensors"
        assert export_run(folders["lora"], str(file), "safetensors", include_frozen="auto", merge=merge).exit_code == 0
        sets[name] = set(load_file(file))
    assert "adapters/lora/query/a" in sets["unmerged"] - sets["merged"]
    assert "backbone/blocks/0/attn/qkv/kernel" in sets["merged"] - sets["unmerged"]


def test_a_lora_becomes_a_folder_of_peft(folders, tmp_path):
    outcome = export_run(folders["lora"], str(tmp_path / "out"), "peft")
    assert "; 6 tensors, with its classifier; " in outcome.text()
    adapter, values = read_peft(tmp_path / "out"), Predictor.from_run(folders["lora"].path).run.values
    assert dict(adapter.settings) == {"rank": 2, "alpha": 8.0, "targets": ("query", "value"), "rank_stabilized": False}
    for name, tensor in adapter.tensors.items():
        np.testing.assert_array_equal(tensor, values[f"adapters/lora/{name}"], err_msg=name)
    np.testing.assert_array_equal(adapter.classifier["bias"], values["head/classifier/bias"])
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["target_modules"] == [
        "attention.q_proj",
        "attention.v_proj",
    ]
