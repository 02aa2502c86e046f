"""Starting a run from an official checkpoint or from another run with other labels, and import and export."""

import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.bench import drawn_model
from helpers.runs import Runs, changed, published_config, write_published
from helpers.tables import settings, write
from safetensors.numpy import load_file, save_file

from mlmoe_jax.apps.export.run import export_run
from mlmoe_jax.config import load_config
from mlmoe_jax.config.recipes.prompt_tuning import use_ml_vpt
from mlmoe_jax.data.labels.space import LabelSpace, synthetic_label_space
from mlmoe_jax.evaluation.evaluate import evaluate_run
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.pretrained.official import _name_tensors, export_official
from mlmoe_jax.pretrained.rules.head_names import ML_DECODER_HEAD
from mlmoe_jax.runs import assemble as assembling
from mlmoe_jax.runs.assemble import assemble
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import open_run, parts_of_run
from mlmoe_jax.runs.starts import read_starts
from mlmoe_jax.training import initialization
from mlmoe_jax.training.import_run import import_run
from mlmoe_jax.training.initialization import find_origin
from mlmoe_jax.training.loop import train


@pytest.fixture(autouse=True)
def _values_drawn_in_numpy(monkeypatch):
    """Give models initial values without compiling anything; like the real ones they depend on the seed."""

    def build(config, space, *, rngs):
        model, prompts = drawn_model(config, space, seed=config.seed), config.model.prompts
        if prompts.pruning == "fixed":  # the config gives these values
            kept = prompts.kept_tokens or "1" * prompts.count
            model.prompts.token_mask[...] = jnp.array([float(digit) for digit in kept])
        return model

    monkeypatch.setattr(assembling, "build_model", build)


@pytest.fixture
def config(tmp_path):
    """The config of a run on the backbone `tiny`, whose published weights are in the cache."""
    with Runs(tmp_path).world():
        yield published_config()


def published(folder: Path) -> dict[str, np.ndarray]:
    return {f"backbone/{path}": value for path, value in load_file(folder / "cache" / "tiny.safetensors").items()}


def initial_parts(config, space: LabelSpace):
    return find_origin(config).parts(space)


def space_of(*names: str, groups: int = 1) -> LabelSpace:
    return replace(synthetic_label_space(len(names), groups), names=names)


def make_run(folder: RunFolder, config, space: LabelSpace) -> dict[str, np.ndarray]:
    """Write a run folder as training does, with random trainable values; return all its values."""
    parts, values = write_published(folder, config, space, initial_parts(config, space))
    return {**values, **parts.frozen}


def all_values(parts) -> dict:
    return {**parts.trainable, **parts.frozen, **parts.stats}


def same(ours: dict, theirs: dict) -> None:
    assert set(ours) == set(theirs)
    for path, value in theirs.items():
        np.testing.assert_array_equal(ours[path], value, err_msg=path)


# -------------------------------------------------------------------------------------------- official checkpoints
def test_a_checkpoint_does_not_need_a_published_backbone(config, tmp_path, capsys):
    (tmp_path / "cache" / "tiny.safetensors").unlink()
    space = space_of("a", "b", "c")
    config.model.prompts.kind, config.init_from = "deep", str(tmp_path / "in.npz")
    model = drawn_model(config, space, seed=4)
    export_official(model, tmp_path / "in.npz")
    parts = initial_parts(config, space)
    same(all_values(parts), ModelDef.split(model)[1])
    assert parts.unpublished == set(parts.frozen)
    told = capsys.readouterr().err
    assert f"init_from {tmp_path / 'in.npz'}: {len(all_values(parts))} parameters from the vpt_deep layout" in told
    config.model.backbone.normalization = "unit"
    initial_parts(config, space)
    assert "the authors' code computes something else: model.backbone.normalization is unit" in capsys.readouterr().err


# ----------------------------------------------------------------------------------- checkpoints of heads on features
SPACE = synthetic_label_space(4, 2)


def head_config(reference):
    config = load_config(reference, [])
    config.model.backbone.weights, config.seed = "none", 1  # the values of the files are drawn with another seed
    config.model.head.decoder.update({"width": 0, "heads": 2, "hidden": 16})
    return config


@pytest.mark.usefixtures("run")
def test_a_head_of_ml_decoder_fits_any_backbone(tmp_path, drawn_parts, capsys):
    config = head_config("ml_decoder_resnet101:dataset=digits")
    values = all_values(drawn_parts(config, SPACE))
    head = {path: value for path, value in values.items() if path.startswith("head/")}
    tensors = _name_tensors(ML_DECODER_HEAD, jax.device_get(head))
    assert "decoder.duplicate_pooling" in tensors
    np.savez(tmp_path / "head.npz", **tensors)
    config.init_from = str(tmp_path / "head.npz")
    taken = all_values(initial_parts(config, SPACE))
    same({path: taken[path] for path in head}, head)
    assert any((taken[path] != values[path]).any() for path in values if path.startswith("backbone/"))
    assert "only a head; the backbone is the pretrained vit_digits" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("run")
def test_alphabetical_labels_of_add_gcn_are_matched_by_name():
    """The reordered head gives the scores of the original head, which is in alphabetical order."""
    names = ("person", "car", "bird", "dog")  # ours; sorted: bird, car, dog, person
    config = head_config("addgcn_resnet101")
    config.model.head.graph.hidden = 8
    definition, params, stats = ModelDef.split(drawn_model(config, space_of(*names), scale=1.0))
    image = np.random.default_rng(1).normal(size=(2, 32, 32, 3)).astype(np.float32)
    theirs = jax.jit(lambda params: definition.merge(params, stats)(image).logits)
    before = theirs(params)
    model = definition.merge(params, stats)
    initialization._reorder(model, names)
    _, moved, _ = ModelDef.split(model)
    places = [sorted(names).index(name) for name in names]
    np.testing.assert_allclose(theirs(moved), before[:, np.array(places)], rtol=2e-4, atol=2e-4)


# ------------------------------------------------------------------------------------------------- another run
def test_labels_are_matched_by_name(config, tmp_path, capsys):
    theirs = make_run(RunFolder(tmp_path / "a"), config, space_of("cat", "dog", "cow"))
    config.init_from = str(tmp_path / "a")
    config.seed = 1
    space = space_of("cow", "elk", "cat")
    parts, first = initial_parts(config, space), assemble(changed(deepcopy(config), {"init_from": ""}), space)
    kernel, bias = (np.asarray(parts.trainable[f"head/classifier/{name}"]) for name in ("kernel", "bias"))
    for here, there in ((0, 2), (2, 0)):
        np.testing.assert_array_equal(kernel[:, here], theirs["head/classifier/kernel"][:, there])
        assert bias[here] == theirs["head/classifier/bias"][there]
    np.testing.assert_array_equal(kernel[:, 1], first.trainable["head/classifier/kernel"][:, 1])
    assert bias[1] == first.trainable["head/classifier/bias"][1]
    same(parts.frozen, published(tmp_path))
    assert parts.unpublished == frozenset(), "the published file has all of them"
    told = capsys.readouterr().err
    assert f"init_from {tmp_path / 'a'}: {len(theirs)} of {len(theirs)} parameters, as selected at step 20" in told
    assert "labels matched by name: cow, cat; new: elk; left out: dog" in told
    assert "not transferred" not in told


@pytest.mark.slow
def test_labels_that_change_their_groups_are_named(config, tmp_path, capsys):
    use_ml_vpt(config)
    config.model.prompts.num_groups, config.model.prompts.per_group = 2, 2
    theirs = make_run(RunFolder(tmp_path / "a"), config, space_of("cat", "dog", "cow", groups=2))
    config.init_from = str(tmp_path / "a")
    parts = initial_parts(config, space_of("cow", "cat", groups=2))  # cow was in group 0; cat moves to group 1
    path = "head/co/gate/kernel"
    np.testing.assert_array_equal(parts.trainable[path], theirs[path][:, [2, 0]])
    assert "1 of these labels change their groups (cat)" in capsys.readouterr().err

    config.model.prompts.num_groups = 3
    initial_parts(config, space_of("cow", "cat", "dog", groups=3))
    told = capsys.readouterr().err.replace("\n", " ")
    # with the same number of experts per group, only the groups show that the gates have another meaning
    assert path in told.partition("not transferred, other groups of prompts: ")[2]


@pytest.mark.slow
def test_unpublished_frozen_weights_are_transferred(config, tmp_path, capsys):
    config.model.backbone.weights = "none"
    theirs = make_run(RunFolder(tmp_path / "a"), config, space_of("cat", "dog"))
    config.init_from, config.model.backbone.weights, config.seed = str(tmp_path / "a"), "auto", 9
    parts = initial_parts(config, space_of("cat", "dog"))
    same(all_values(parts), theirs)
    assert parts.unpublished == set(parts.frozen)
    config.model.backbone.weights = "own.safetensors"
    capsys.readouterr()
    initial_parts(config, space_of("cat", "dog"))
    assert "model.backbone.weights=own.safetensors is not read" in capsys.readouterr().err


def test_a_trained_backbone_can_be_frozen(config, tmp_path):
    config.trainable = ((r"^backbone/norm/", True), (r"^backbone/", False), (r"", True))
    theirs = make_run(RunFolder(tmp_path / "a"), config, space_of("cat", "dog"))
    config.trainable = ((r"^backbone/", False), (r"", True))
    config.init_from = str(tmp_path / "a")
    parts = initial_parts(config, space_of("cat", "dog"))
    same(all_values(parts), theirs)
    assert parts.unpublished == {"backbone/norm/scale", "backbone/norm/bias"}


def test_a_published_backbone_is_read_again_for_another_precision(config, tmp_path):
    config.model.frozen_dtype = "bfloat16"
    make_run(RunFolder(tmp_path / "a"), config, space_of("cat", "dog"))
    config.model.frozen_dtype, config.init_from = "float32", str(tmp_path / "a")
    parts = initial_parts(config, space_of("cat", "dog"))
    same(parts.frozen, published(tmp_path))


@pytest.mark.slow
def test_a_resampled_position_table_is_kept_in_runs(config, refusal, tmp_path):
    config.model.prompts.kind = "deep"
    model = drawn_model(config, space_of("cat", "dog"), seed=4)
    model.backbone.pos_embed = nnx.Param(jnp.arange(17 * 8.0).reshape(1, 17, 8))
    export_official(model, tmp_path / "in.npz")
    config.init_from = str(tmp_path / "in.npz")
    theirs = make_run(RunFolder(tmp_path / "a"), config, space_of("cat", "dog"))
    run = open_run(RunFolder(tmp_path / "a"))
    same({**run.values, **run.frozen}, theirs)
    assert run.frozen["backbone/pos_embed"].shape == (1, 17, 8)
    for source in ("in.npz", "a"):
        config.init_from = str(tmp_path / source)
        assert initial_parts(config, space_of("cat", "dog")).frozen["backbone/pos_embed"].shape == (1, 17, 8)
    config.trainable = ((r"", True),)
    for source in ("in.npz", "a"):
        config.init_from = str(tmp_path / source)
        assert refusal(initial_parts, config, space_of("cat", "dog")) == (
            "the position table of config.init_from has 17 entries, and the table of the backbone has 5, so it cannot "
            "be trained; put (r'^backbone/pos_embed$', False) first in config.trainable"
        )


@pytest.mark.slow
def test_only_unpublished_values_are_stored(config, tmp_path):
    prompts = config.model.prompts
    prompts.kind, prompts.count, prompts.key_values, prompts.pruning = "e2vpt", 4, 2, "fixed"
    prompts.kept_tokens = "1011"
    theirs = make_run(RunFolder(tmp_path / "a"), config, space_of("cat", "dog"))
    stored = load_file(tmp_path / "a" / "frozen.safetensors")
    assert set(stored) == {"prompts/token_mask", "prompts/segment_mask"}
    run = open_run(RunFolder(tmp_path / "a"))
    same({**run.values, **run.frozen}, theirs)
    config.init_from = str(tmp_path / "a")
    for given, mask in (("", [1, 0, 1, 1]), ("0111", [0, 1, 1, 1])):  # the config has precedence
        prompts.kept_tokens = given
        parts = initial_parts(config, space_of("cat", "dog"))
        assert np.asarray(parts.frozen["prompts/token_mask"]).tolist() == mask
        assert parts.unpublished == set(stored)
    save_file({name: 2 * tensor for name, tensor in stored.items()}, tmp_path / "a" / "frozen.safetensors")
    with pytest.raises(Exception, match="differ from the weights that"):
        open_run(RunFolder(tmp_path / "a"))


def test_frozen_weights_of_a_training_without_a_checkpoint_are_removed(config, tmp_path):
    config.model.backbone.weights = "none"
    make_run(RunFolder(tmp_path / "a"), config, space_of("cat", "dog"))
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    config.model.backbone.weights = "auto"
    make_run(RunFolder(tmp_path / "a"), config, space_of("cat", "dog"))
    assert not (tmp_path / "a" / "frozen.safetensors").exists()
    open_run(RunFolder(tmp_path / "a"))


# ----------------------------------------------------------------------------------------------- import and export
@pytest.mark.slow
def test_a_checkpoint_becomes_a_run_that_is_evaluated_exported_and_trained(config, tmp_path):
    for split in ("train", "test"):
        images = {f"{split}{row}.png": labels for row, labels in enumerate(("a", "b;c", "a;c", "b", "c", "a;b"))}
        rows = [f"{name},{labels}" for name, labels in images.items()]
        write(tmp_path, f"{split}.csv", "\n".join(["image,labels", *rows]), images)
    file, folder = tmp_path / "in.safetensors", RunFolder(tmp_path / "run")
    config.data = settings(str(tmp_path), image_size=8, val_split="")
    config.init_from, config.eval.select_on = str(file), "none"
    config.model.prompts.kind, config.model.prompts.count = "deep", 3
    config.train.epochs, config.train.batch_size = 1, 3
    config.optim.learning_rate, config.ema.decay = 1e-30, 0.0
    model = drawn_model(config, space_of("a", "b", "c"), seed=4)
    export_official(model, file)
    import_run(config, folder)
    wanted, tensors = ModelDef.split(model)[1], load_file(file)
    file.unlink()  # the folder has all values
    assert set(evaluate_run(folder, [])) == {"test"}

    outcome = export_run(folder, str(tmp_path / "out.safetensors"), None)
    assert "imported weights of step 0 as official; in the vpt_deep layout; written to" in outcome.text()
    same(load_file(tmp_path / "out.safetensors"), tensors)

    train(config, folder)  # resumes from the imported values, and the steps leave them unchanged
    run = open_run(folder)
    assert (run.notes["step"], run.notes["kind"]) == (2, "raw")
    same({**run.values, **run.frozen}, wanted)
    assert [start["step"] for start in read_starts(folder)] == [0]


def test_a_resumed_run_needs_only_its_folder(config, tmp_path):
    config.model.prompts.kind, config.init_from = "deep", str(tmp_path / "in.npz")
    space, folder = space_of("a", "b"), RunFolder(tmp_path / "run")
    export_official(drawn_model(config, space, seed=4), tmp_path / "in.npz")
    fresh = initial_parts(config, space)
    make_run(folder, config, space)
    (tmp_path / "in.npz").unlink()
    again = parts_of_run(folder, config, space)
    same(again.frozen, fresh.frozen)
    assert again.unpublished == fresh.unpublished == set(fresh.frozen)
