"""Restoring a run from its folder, and the metadata files that this needs."""

import shutil
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny
from helpers.runs import CLASSES, Runs, published_config, write_published
from safetensors.numpy import load_file, save_file

from mlmoe_jax.config import default_config
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.models import rules
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.params import fingerprint
from mlmoe_jax.runs import assemble as assembling
from mlmoe_jax.runs.assemble import abstract_parts, assemble, cast_frozen, preprocess_for, trainable_rules
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import open_run, parts_of_run, require_same_frozen, write_run_metadata

SPACE = synthetic_label_space(len(CLASSES), 1)


@pytest.fixture
def config(tmp_path):
    """The config of a run on the backbone `tiny`, whose published weights a test may change."""
    with Runs(tmp_path).world():
        yield published_config()


def test_a_run_does_not_resume_with_other_frozen_weights(config, tmp_path, refusal):
    folder = RunFolder(tmp_path / "run")
    parts, _ = write_published(folder, config)
    require_same_frozen(folder, parts)
    other = replace(parts, frozen={path: value + 1 for path, value in parts.frozen.items()})
    assert "differ from the weights that" in refusal(require_same_frozen, folder, other)
    require_same_frozen(RunFolder(tmp_path / "new"), other)


def test_a_resume_reads_the_frozen_weights_once_for_their_fingerprint(config, tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    write_published(folder, config)
    calls = []
    monkeypatch.setattr(assembling, "fingerprint", lambda frozen: calls.append(frozen) or fingerprint(frozen))
    parts = parts_of_run(folder, config, SPACE)
    require_same_frozen(folder, parts)
    write_run_metadata(folder, config, SPACE, preprocess_for(config), parts)
    assert len(calls) == 1


def test_frozen_kernels_in_bfloat16_survive_the_run_folder(config, tmp_path):
    config.model.frozen_dtype, config.model.backbone.weights = "bfloat16", "none"
    folder = RunFolder(tmp_path / "run")
    parts, _ = write_published(folder, config)
    for path, value in parts.frozen.items():
        assert value.dtype == (jnp.bfloat16 if path.endswith("/kernel") else jnp.float32), path
    run = open_run(folder)
    for path, value in parts.frozen.items():
        assert run.frozen[path].dtype == value.dtype, path
        np.testing.assert_array_equal(run.frozen[path], value, err_msg=path)


def test_frozen_batch_norm_is_not_trained():
    config = default_config()
    config.trainable = ((r"", True),)

    def trains(path):
        return rules.first_match(trainable_rules(config), path, None)

    assert trains("backbone/stem/norm/scale")
    config.model.backbone.name = "resnet50"
    assert not trains("backbone/stem/norm/scale")
    assert not trains("backbone/stages/2/1/norm3/bias")
    assert trains("backbone/stages/2/1/conv3/kernel")
    config.model.backbone.batch_norm = "running"
    assert trains("backbone/stem/norm/scale")


def test_image_sizes_of_cnns(refusal):
    config = default_config()
    config.data.image_size, config.model.backbone.name = 100, "resnet101"
    assert preprocess_for(config).image_size == 100
    config.model.backbone.name = "convnext_tiny"
    assert "which is not a multiple of convnext_tiny's patch size 32" in refusal(preprocess_for, config)


def test_images_are_normalized_as_the_config_says():
    config = default_config()
    config.model.backbone.name, config.data.image_size = "vit_b16_in21k", 224
    means = {"auto": (0.5,) * 3, "imagenet": (0.485, 0.456, 0.406), "unit": (0.0,) * 3}
    stds = {"auto": (0.5,) * 3, "imagenet": (0.229, 0.224, 0.225), "unit": (1.0,) * 3}
    for how in means:
        config.model.backbone.normalization = how
        assert preprocess_for(config) == Preprocess(224, means[how], stds[how])


def test_metadata_files_of_a_run_folder(config, tmp_path):
    folder = RunFolder(tmp_path / "run")
    parts, _ = write_published(folder, config)
    assert folder.read_text("labels.txt") == "a\nb\nc\n"
    assert folder.read_json("thresholds.json") == {"thresholds": {"a": 0.5, "b": 0.5, "c": 0.5}}
    assert folder.read_json("preprocess.json") == {"image_size": 8, "mean": [0.5] * 3, "std": [0.25] * 3}
    assert folder.read_json("backbone.json") == {
        "name": "tiny",
        "weights": "auto",
        "frozen_parameters": sum(value.size for value in parts.frozen.values()),
        "fingerprint": fingerprint(parts.frozen),
    }


@pytest.mark.parametrize(("weights", "stored"), [("auto", False), ("none", True)])
def test_frozen_weights_are_stored_if_no_published_file_has_them(config, tmp_path, refusal, weights, stored):
    config.model.backbone.weights = weights
    folder = RunFolder(tmp_path / "run")
    parts, _ = write_published(folder, config)
    assert (folder / "frozen.safetensors").exists() == stored
    tiny.write_weights(tmp_path / "cache" / "tiny.safetensors", catalog.entry("tiny"), seed=6)
    if stored:
        run = open_run(folder)
        for path, value in parts.frozen.items():
            np.testing.assert_array_equal(run.frozen[path], value, err_msg=path)
    else:
        sentence = refusal(open_run, folder)
        assert sentence.startswith(
            f"the frozen weights of tiny (auto) differ from the weights that {folder} was trained with; "
        )


def test_folders_that_cannot_be_opened_are_refused(config, tmp_path, refusal):
    folder = RunFolder(tmp_path / "run")
    assert refusal(open_run, folder).startswith("there is no run folder ")
    write_published(folder, config)
    sentence = refusal(open_run, folder, [("model.dtype", "bfloat16")])
    assert sentence == (
        "--config.model.dtype cannot differ from the trained run's; keys under data, eval, calibration, metrics, "
        "report, serve, mesh can"
    )
    assert "has no effect on a trained model" in refusal(open_run, folder, [("calibration.method", "platt")])
    assert refusal(open_run, folder, [("eval.threshold", "2")]).startswith(
        "the config has mistakes: eval.threshold is 2"
    )
    shutil.rmtree(folder / "checkpoints" / "30")
    assert (
        refusal(open_run, folder)
        == f"{folder} holds no finished checkpoint yet; rerun its training command to resume it"
    )
    shutil.rmtree(folder / "checkpoints")
    assert refusal(open_run, folder) == f"{folder} is not the run folder of a training: it has no checkpoints"


def test_assemble_loads_the_backbone_and_draws_all_other_values_from_the_seed(config, tmp_path, refusal):
    published = load_file(tmp_path / "cache" / "tiny.safetensors")
    parts = assemble(config, SPACE)
    assert {path.removeprefix("backbone/") for path in parts.frozen} == set(published)
    for path, value in parts.frozen.items():
        np.testing.assert_array_equal(value, published[path.removeprefix("backbone/")], err_msg=path)
    assert set(parts.trainable) == {"head/classifier/kernel", "head/classifier/bias"}
    assert parts.stats == {}
    again, bare = assemble(config, SPACE), assemble(config, SPACE, load_backbone=False)
    config.seed = 1
    other = assemble(config, SPACE)
    kernels = [np.asarray(p.trainable["head/classifier/kernel"]) for p in (parts, again, bare, other)]
    assert np.array_equal(kernels[0], kernels[1])
    assert np.array_equal(kernels[0], kernels[2])
    assert not np.array_equal(kernels[0], kernels[3])
    assert fingerprint(bare.frozen) != fingerprint(parts.frozen)

    config.model.backbone.weights = str(tmp_path / "own.safetensors")
    save_file({name: 2 * value for name, value in published.items()}, tmp_path / "own.safetensors")
    doubled = assemble(config, SPACE).frozen["backbone/cls_token"]
    np.testing.assert_array_equal(doubled, 2 * published["cls_token"])
    config.trainable = ((r"", False),)
    sentence = refusal(assemble, config, SPACE)
    assert sentence == "config.trainable freezes every parameter; leave at least the head trainable"


@pytest.mark.parametrize("frozen_dtype", ["float32", "bfloat16"])
def test_abstract_parts_have_the_shapes_of_assemble(config, frozen_dtype):
    config.model.frozen_dtype = frozen_dtype
    shapes, parts = abstract_parts(config, SPACE), assemble(config, SPACE)
    for name in ("trainable", "frozen", "stats"):
        ours, theirs = getattr(shapes, name), getattr(parts, name)
        assert {p: (v.shape, v.dtype) for p, v in ours.items()} == {p: (v.shape, v.dtype) for p, v in theirs.items()}
    assert shapes.unpublished == parts.unpublished
    assert not any(isinstance(value, jnp.ndarray) for value in {**shapes.trainable, **shapes.frozen}.values())


def test_only_kernels_of_the_backbone_are_rounded(config):
    """Heads, gates and projections of prompts compute in float32."""
    config.model.frozen_dtype = "bfloat16"
    names = (
        "backbone/blocks/0/mlp/fc1/kernel",
        "backbone/norm/scale",
        "head/classifier/kernel",
        "prompts/projection/kernel",
    )
    cast = cast_frozen(dict.fromkeys(names, jnp.ones((2, 2))), config)
    assert [str(cast[name].dtype) for name in names] == ["bfloat16", "float32", "float32", "float32"]


_DAMAGE = {
    "not UTF-8": b"\xff\xfe",
    "nested": b"[" * 100_000,
    "empty": b"",
    "a number": b"5",
    "a list": b"[]",
    "another object": b'{"x": 1}',
    "null": b"null",
    "half": None,
}


@pytest.mark.parametrize("name", ["config.json", "backbone.json", "preprocess.json", "label_space.npz"])
def test_a_damaged_file_is_named(config, tmp_path, refusal, name):
    folder = RunFolder(tmp_path / "run")
    write_published(folder, config)
    good = (folder / name).read_bytes()
    for damage, content in _DAMAGE.items():
        (folder / name).write_bytes(good[: len(good) // 2] if content is None else content)
        sentence = refusal(open_run, folder)
        assert sentence.startswith(f"{folder / name} is damaged: "), (damage, sentence)
        assert "\n" not in sentence


def test_a_value_of_another_kind_is_damage(config, tmp_path, refusal):
    folder = RunFolder(tmp_path / "run")
    write_published(folder, config)
    stored = folder.read_json("preprocess.json")
    for key, value in (("mean", [0.5]), ("mean", None), ("std", [0.5, 0.5, "x"])):
        folder.write_json("preprocess.json", {**stored, key: value})
        assert refusal(open_run, folder).startswith(f"{folder / 'preprocess.json'} is damaged: ")


def test_a_label_space_whose_arrays_do_not_fit_together_is_damaged(config, tmp_path, refusal):
    folder = RunFolder(tmp_path / "run")
    write_published(folder, config)
    arrays = folder.read_npz("label_space.npz")
    changes = {name: arrays[name][:-1] for name in ("names", "positives", "co_group", "dc_group")}
    for name, value in {**changes, "together": np.array([[len(CLASSES)], [0], [1]])}.items():
        folder.write_npz("label_space.npz", **arrays | {name: value})
        assert refusal(open_run, folder).startswith(f"{folder / 'label_space.npz'} is damaged: ")


def test_checkpoints_have_a_name_or_a_number(config, tmp_path, refusal):
    folder = RunFolder(tmp_path / "run")
    write_published(folder, config)
    for which in ("last", "-1", "1.5", "", "٣"):
        assert refusal(open_run, folder, which=which) == (
            f"--checkpoint={which} is not best, latest or the step of a checkpoint"
        )
    assert open_run(folder, which="30").step == 20
