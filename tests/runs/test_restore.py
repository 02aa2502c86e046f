"""Restoring a run from its folder, and the metadata files that this needs."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.runs import CLASSES, Runs, published_config, write_published
from safetensors.numpy import load_file, save_file

from mlmoe_jax.config import default_config
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.models import rules
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


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


def test_a_resume_reads_the_frozen_weights_once_for_their_fingerprint(config, folder, monkeypatch):
    write_published(folder, config)
    calls = []
    monkeypatch.setattr(assembling, "fingerprint", lambda frozen: calls.append(frozen) or fingerprint(frozen))
    parts = parts_of_run(folder, config, SPACE)
    require_same_frozen(folder, parts)
    write_run_metadata(folder, config, SPACE, preprocess_for(config), parts)
    assert len(calls) == 1
    (folder / "checkpoints").rename(folder / "removed")
    require_same_frozen(folder, assemble(config, SPACE, load_backbone=False))


def test_frozen_kernels_in_bfloat16_survive_the_run_folder(config, folder):
    """Without a published file that has them, they are stored."""
    config.model.frozen_dtype, config.model.backbone.weights = "bfloat16", "none"
    parts, _ = write_published(folder, config)
    assert (folder / "frozen.safetensors").exists()
    run = open_run(folder)
    for path, value in parts.frozen.items():
        assert run.frozen[path].dtype == value.dtype == (jnp.bfloat16 if path.endswith("/kernel") else jnp.float32), (
            path
        )
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


def test_images_are_normalized_as_the_config_says():
    config = default_config()
    config.model.backbone.name, config.data.image_size = "vit_b16_in21k", 224
    means = {"auto": (0.5,) * 3, "imagenet": (0.485, 0.456, 0.406), "unit": (0.0,) * 3}
    stds = {"auto": (0.5,) * 3, "imagenet": (0.229, 0.224, 0.225), "unit": (1.0,) * 3}
    for how in means:
        config.model.backbone.normalization = how
        assert preprocess_for(config) == Preprocess(224, means[how], stds[how])
    config.data.image_size, config.model.backbone.name = 100, "resnet101"
    assert preprocess_for(config).image_size == 100, "that of a CNN is free"


def test_metadata_files_of_a_run_folder(config, folder):
    parts, _ = write_published(folder, config)
    assert folder.read_text("labels.txt") == "a\nb\nc\n"
    assert folder.read_json("thresholds.json") == {"thresholds": {"a": 0.5, "b": 0.5, "c": 0.5}}
    assert folder.read_json("preprocess.json") == {
        "image_size": 8,
        "mean": [0.5] * 3,
        "std": [0.25] * 3,
        "flips": False,
    }
    assert folder.read_json("backbone.json") == {
        "name": "tiny",
        "weights": "auto",
        "frozen_parameters": sum(value.size for value in parts.frozen.values()),
        "fingerprint": fingerprint(parts.frozen),
    }
    assert not (folder / "frozen.safetensors").exists(), "a published file has them"
    assert open_run(folder, which="30").step == 20


def test_raw_weights_are_those_of_a_training_without_averages(run):
    averaged, plain = run("probe").folder, run("probe", ema__decay=0.0).folder
    raw, latest = open_run(averaged, which="raw"), open_run(averaged, which="latest")
    assert (raw.notes["kind"], latest.notes["kind"]) == ("raw", "ema")
    assert raw.values.keys() == latest.values.keys()
    for path, value in open_run(plain, which="raw").values.items():
        np.testing.assert_array_equal(raw.values[path], value, err_msg=path)
        assert (np.asarray(latest.values[path]) != value).any()


def test_assemble_loads_the_backbone_and_draws_all_other_values_from_the_seed(config, tmp_path):
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
