import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from PIL import Image

from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.config import load_config
from mlmoe_jax.data.decoding import STRICT, BadImage
from mlmoe_jax.data.images import ArrayImages
from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.label_matrix import LabelMatrix
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.data.split import Split
from mlmoe_jax.inference import explain
from mlmoe_jax.inference.explain import (
    choose_samples,
    explain_images,
    list_prompts,
    write_requested_samples,
    write_samples,
)
from mlmoe_jax.models.adapters.group_prompts import prompt_groups
from mlmoe_jax.models.outputs import Prediction
from mlmoe_jax.runs import restore
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import Run
from mlmoe_jax.runtime.sharding import make_mesh

K, IMAGES = 4, 11
CLASSES = ("a", "b", "c", "d")


class SomeUnreadable(ArrayImages):
    """All images except those in `bad`."""

    bad = (2,)

    def open(self, row, decoding=STRICT):
        if row in self.bad:
            raise BadImage(f"image {row} is damaged")
        return super().open(row, decoding)


def made_up(kind=ArrayImages):
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (IMAGES, 64, 64, 3)).astype(np.uint8)
    labels = draw.integers(-1, 3, (IMAGES, K)).astype(np.int8)
    return Split("test", CLASSES, labels, [f"folder/{row}.jpg" for row in range(IMAGES)], kind(images))


MLMOE = "mlmoe_dinov2:dataset=digits"  # has gates, prompts and label queries


@pytest.fixture(scope="module")
def runs():
    return {}


@pytest.fixture(scope="module")
def compiled():
    return {}


@pytest.fixture(autouse=True)
def compile_once(monkeypatch, compiled):
    """Lets all tests of a run share its steps, which take longer to compile than to run."""
    make = Run.eval_step

    def once(run, *returns):
        if id(run.definition) not in compiled:
            compiled[id(run.definition)] = make(run, *returns)
        return compiled[id(run.definition)]

    monkeypatch.setattr(Run, "eval_step", once)


@pytest.fixture
def make_run(tiny_vit, drawn_parts, runs):
    """A function that returns the run of a config, as if it had been trained."""

    def run(reference, **routing):
        if reference not in runs:
            config = load_config(reference, [])
            config.model.prompts.update({"num_groups": 2, "per_group": 3})
            config.model.head.routing.update({"expert_hidden": 4, "gate_hidden": 4, **routing})
            small = {"heads": 2, "hidden": 8, "width": 16, "encoder_layers": 0, "decoder_layers": 1}
            config.model.head.decoder.update({**small, "style": "independent"})
            config.eval.batch_size, config.data.bad_images = 8, "skip"
            space = synthetic_label_space(K, 2)
            parts, mesh = drawn_parts(config, space), make_mesh(config.mesh)
            look = Preprocess(64, (0.5,) * 3, (0.25,) * 3)
            values = {**parts.trainable, **parts.stats}
            placed = {"definition": parts.definition, "preprocess": look, "mesh": mesh}
            runs[reference] = Run(config, space, values, parts.frozen, {"step": 1}, **placed)
        return runs[reference]

    return run


def predicted(run, split) -> Prediction:
    """Return the prediction for all images of a split by the model itself."""
    model = run.definition.merge({**run.values, **run.frozen})
    return jax.jit(model)(run.preprocess(split.images.array))


# -------------------------------------------------------------------------------------------------- choose_samples
def test_every_label_is_among_the_samples():
    draw = np.random.default_rng(1)
    codes = np.where(draw.random((500, 40)) < 0.04, POSITIVE, draw.integers(-1, 3, (500, 40)))
    codes[codes == POSITIVE] *= draw.random((codes == POSITIVE).sum()) < 0.2  # some labels are rare
    codes = codes.astype(np.int8)
    labels = LabelMatrix.of(codes)
    rows = choose_samples(labels, 30)
    assert len(rows) == len(set(rows)) == 30
    assert (np.diff(rows) > 0).all()
    occurs = (codes == POSITIVE).any(axis=0)
    assert occurs.sum() > 30, "some images need several labels"
    assert ((codes[rows] == POSITIVE).any(axis=0) == occurs).all()
    np.testing.assert_array_equal(rows, choose_samples(labels, 30))


# ---------------------------------------------------------------------------------------------------- list_prompts
def test_prompt_places_are_in_the_order_of_the_model():
    config = load_config("mlvpt_digits", [])
    config.model.prompts.num_groups, config.model.prompts.per_group = 3, 2
    places = list_prompts(config)
    groups = [3 * ("co", "dc").index(side) + group for side, group, _ in places]
    np.testing.assert_array_equal(groups, prompt_groups(2, 3, 2))
    assert len(set(places)) == 12
    assert {expert for *_, expert in places} == {1, 2}
    # in ML-VPT's order expert e of a group is prompt e·G + group
    assert [expert for side, _, expert in places if side == "co"] == [1, 1, 1, 2, 2, 2]
    assert list_prompts(load_config("vpt", [])) is None


# ------------------------------------------------------------------------------------------------------- the samples
@pytest.mark.parametrize("reference", [MLMOE, pytest.param("mlvpt_digits", marks=pytest.mark.slow)])
def test_samples_have_the_scores_gates_and_attention_of_the_model(make_run, tmp_path, reference):
    run, folder = make_run(reference), RunFolder(tmp_path)
    split = made_up(SomeUnreadable)
    folder.write_bytes("samples/0063.jpg", b"earlier")
    write_samples(folder, run, split, count=10)

    index = folder.read_json("samples/index.json")
    assert list(index) == ["split", "grid", "prompt_groups", "entries", "samples"]
    assert (index["split"], index["grid"]) == ("test", [2, 2])
    assert index["prompt_groups"] == [list(place) for place in list_prompts(run.config)]
    rows = [split.ids.index(sample["id"]) for sample in index["samples"]]
    chosen = [row for row in choose_samples(split.labels, 10) if row != 2]
    assert rows == chosen
    assert len(rows) == 9
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
        *(f"{number:04}.jpg" for number in range(9)),
        "explained.npz",
        "index.json",
    ]
    prediction = predicted(run, split)
    for sample, row in zip(index["samples"], rows, strict=True):
        assert sample["codes"] == split.labels[row].tolist()
        np.testing.assert_allclose(sample["scores"], jax.nn.sigmoid(prediction.logits[row]), atol=6e-5)
    with np.load(tmp_path / "samples" / "explained.npz") as stored:
        arrays = dict(stored)
    for name, weights in prediction.gates.items():
        np.testing.assert_allclose(arrays[f"gates/{name}"], np.asarray(weights)[rows], atol=1e-3)
        assert arrays[f"gates/{name}"].shape[2] == len(index["entries"][name])
    shapes = {"attention/prompts": (9, 12, 4), "attention/labels": (9, K, 4)}
    assert {name: x.shape for name, x in arrays.items() if name.startswith("attention/")} == shapes
    assert {x.dtype for x in arrays.values()} == {np.dtype(np.float16)}

    folder.write_json("config.json", json.loads(run.config.to_json_best_effort()))
    read = RunFiles(folder).samples  # as the report reads it
    assert list(read.images) == [split.ids[row] for row in rows]
    assert set(read.gates) == set(prediction.gates)
    assert read.entries == index["entries"]


def test_fewer_samples_are_kept_if_they_are_too_large(make_run, tmp_path, monkeypatch, capsys):
    run, folder = make_run(MLMOE), RunFolder(tmp_path)
    size = sum(array.nbytes for array in explain_images(run, made_up().take(np.arange(4), "test")).arrays.values())
    monkeypatch.setattr(explain, "UNPACKED_BYTES", size)
    write_samples(folder, run, made_up(), count=8)
    assert len(folder.read_json("samples/index.json")["samples"]) == 4
    assert {len(array) for array in folder.read_npz("samples/explained.npz").values()} == {4}
    assert "4 of 8 sample images are kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("resize", "size"), [("square", (160, 120)), ("crop", (90, 90)), ("clip", (120, 120)), ("pad", (160, 160))]
)
def test_samples_have_their_own_size_and_show_what_the_model_saw(make_run, tmp_path, resize, size):
    run = replace(make_run(MLMOE), config=make_run(MLMOE).config.copy_and_resolve_references())
    run.config.data.resize, run.config.data.crop_fraction = resize, 0.75
    pixels = np.zeros((2, 120, 160, 3), np.uint8)
    pixels[:, :, 80:] = 200
    split = Split("test", CLASSES, np.ones((2, K), np.int8), ["a", "b"], ArrayImages(pixels))
    write_samples(RunFolder(tmp_path), run, split, count=2)
    with Image.open(tmp_path / "samples" / "0000.jpg") as opened:
        assert opened.size == size
        shown = np.asarray(opened.resize((64, 64))).astype(int)
    seen = explain_images(run, split).images[0].astype(int)
    assert np.abs(shown - seen)[:, [4, 60]].max() < (16 if resize == "pad" else 8)  # JPEG, at the border


def test_nothing_is_written_if_no_image_can_be_read(make_run, tmp_path, refusal):
    run, folder = make_run(MLMOE), RunFolder(tmp_path)
    nothing = made_up(SomeUnreadable).take(np.array([2]), "val")
    assert "none of 1 images of val" in refusal(write_samples, folder, run, nothing, count=2)

    assert not list(tmp_path.iterdir())


def test_samples_are_neither_removed_nor_written_through_a_link(make_run, tmp_path, refusal):
    run, outside, folder = make_run(MLMOE), tmp_path / "outside", RunFolder(tmp_path / "run")
    outside.mkdir()
    (outside / "holiday.jpg").write_bytes(b"precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "samples").symlink_to(outside)
    assert "samples is a link out of the run folder" in refusal(write_samples, folder, run, made_up(), count=10)
    assert [path.read_bytes() for path in outside.iterdir()] == [b"precious"]


def test_a_run_explains_its_first_test_split(make_run, tmp_path, monkeypatch):
    run, names = make_run(MLMOE), []
    run = replace(run, config=run.config.copy_and_resolve_references())
    run.config.data.test_splits = ("test_shift", "test")

    def open_split(data, name, **how):
        names.append((name, how["classes"]))
        return made_up()

    monkeypatch.setattr(restore, "open_split", open_split)
    run.config.report.samples = 2
    write_requested_samples(RunFolder(tmp_path), run.config, run)
    assert names == [("test_shift", run.label_space.names)]
    assert len(RunFolder(tmp_path).read_json("samples/index.json")["samples"]) == 2
    run.config.data.test_splits, run.config.data.val_split = (), "dev"
    write_requested_samples(RunFolder(tmp_path), run.config, run)
    assert names[1][0] == "dev"


@pytest.mark.slow
def test_static_gates_are_stored_once(make_run):
    run, split = make_run("drmoe_resnet101:dataset=digits", gate="static"), made_up()
    explained = explain_images(run, split)
    experts = run.config.model.head.routing.shared_experts + run.config.model.head.routing.task_experts
    assert explained.arrays["gates/experts"].shape == (1, K, experts)
