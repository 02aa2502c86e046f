"""`python -m benchmarks.small_vit`: crops and their targets, the student, resuming, and the probes."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.paths import REPOSITORY
from PIL import Image

import mlmoe_jax as mm
from mlmoe_jax.models.backbones.vit import ViTShape
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.pretrained.weights import find_weights

sys.path.insert(0, str(REPOSITORY))

from benchmarks.small_vit import student as students
from benchmarks.small_vit import teacher, training
from benchmarks.small_vit.crops import WHOLE, Crop, at_patches, cut, draw_crop
from benchmarks.small_vit.probes import probe
from benchmarks.small_vit.student import GRID, Student
from benchmarks.small_vit.teacher import Targets


@pytest.fixture
def small(monkeypatch):
    """A small student with the grid of the real one, in small batches."""
    shape = ViTShape(width=16, depth=2, heads=2, patch=4, native=4 * GRID)
    for module in (students, training):
        monkeypatch.setattr(module, "SHAPE", shape)
    for name, value in {"BATCH": 4, "SAVE_SECONDS": -1}.items():
        monkeypatch.setattr(training, name, value)


@pytest.fixture
def images():
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 256, (48, 64, 3), np.uint8)) for _ in range(3)]


@pytest.fixture
def targets():
    random = np.random.default_rng(1)
    maps = random.normal(size=(3, 2, 9, 9, 8)).astype(np.float16)
    values = (random.normal(size=shape).astype(np.float32) for shape in (12, (8, 12), (12, 5), 5))
    mean, basis, kernel, bias = values
    return Targets(maps, mean, basis, 0.3, kernel, bias)


# --------------------------------------------------------------------------------------------------------------- crops
def test_a_patch_gets_the_cell_at_its_place():
    cells = np.random.default_rng(0).normal(size=(GRID, GRID, 3)).astype(np.float16)
    np.testing.assert_array_equal(at_patches(cells, WHOLE, GRID), cells)
    np.testing.assert_array_equal(at_patches(cells, Crop(0, 0, 1, 1, flipped=True), GRID), cells[:, ::-1])
    np.testing.assert_allclose(at_patches(cells, Crop(0.5, 0, 0.5, 0.5), GRID // 2), cells[5:, :5], atol=1e-3)


def test_between_cells_targets_are_interpolated():
    """A map that holds its own coordinates gives those of the centers of the patches."""
    rows, columns = np.meshgrid((np.arange(12) + 0.5) / 12, (np.arange(16) + 0.5) / 16, indexing="ij")
    found = at_patches(np.stack([rows, columns], axis=-1).astype(np.float32), Crop(0.2, 0.3, 0.6, 0.5), GRID)
    centers = (np.arange(GRID) + 0.5) / GRID
    np.testing.assert_allclose(found[:, 0, 0], 0.2 + 0.6 * centers, atol=1e-6)
    np.testing.assert_allclose(found[0, :, 1], 0.3 + 0.5 * centers, atol=1e-6)


def test_pixels_and_targets_are_of_the_same_place():
    """The center of a patch shows the color that the target's coordinates have in the view."""
    side = 320
    ramp = np.broadcast_to(np.linspace(0, 255, side), (side, side)).astype(np.uint8)
    photograph = Image.fromarray(np.stack([ramp, ramp.T, ramp], axis=-1))
    for seed in range(8):
        view, crop = teacher.view(seed, 1), draw_crop(np.random.default_rng(seed), (0.4, 1.0))
        cells = cut(photograph, view, 180).reshape(9, 20, 9, 20, 3).mean(axis=(1, 3))
        pixels = cut(photograph, crop.of(view), 160).reshape(GRID, 16, GRID, 16, 3).mean(axis=(1, 3))
        np.testing.assert_allclose(pixels, at_patches(cells, crop, GRID), atol=10)


def test_a_crop_is_inside_its_image():
    for seed in range(50):
        crop = draw_crop(np.random.default_rng(seed), (0.15, 1.0))
        for part in (crop, crop.of(teacher.view(seed, 3))):
            assert min(part.top, part.left) >= 0
            assert max(part.top + part.height, part.left + part.width) <= 1 + 1e-9
        assert 0.1 < crop.height * crop.width <= 1


# ------------------------------------------------------------------------------------------------------------- teacher
def test_targets_hold_what_the_teacher_says(monkeypatch, images, tmp_path):
    for name, value in {"TEACHER": "efficientnet_lite0", "SIDE": 96, "COMPONENTS": 16, "VIEWS": 2}.items():
        monkeypatch.setattr(teacher, name, value)
    path = tmp_path / "teacher.npz"
    found = teacher.said_by_teacher(images, str(find_weights("efficientnet_lite0")), path)
    again = teacher.said_by_teacher(images, "not read again", path)
    np.testing.assert_array_equal(again.maps, found.maps)
    assert found.maps.shape == (3, 2, 3, 3, 16)
    backbone = mm.load_backbone("efficientnet_lite0")
    for number, tolerance in ((0, 0.05), (1, 0.5)):  # the components are those of whole photographs
        pixels = cut(images[2], teacher.view(2, number), 96)[None]
        features = np.asarray(backbone(backbone.preprocess(pixels), read=("patches",)).patches).reshape(3, 3, -1)
        rebuilt = found.mean + found.maps[2, number].astype(np.float32) @ found.basis
        assert np.mean((rebuilt - features) ** 2) < tolerance * np.mean((features - found.mean) ** 2)
    assert found.maps[:, 0].reshape(-1, 16).astype(np.float32).var(axis=0, ddof=1).mean() == pytest.approx(1, abs=0.02)
    assert found.spread == pytest.approx(found.maps.astype(np.float32).mean(axis=(2, 3)).std(), rel=1e-3)
    assert (found.kernel.shape, found.bias.shape) == ((1280, 1000), (1000,))


def test_moments_are_those_of_all_rows():
    rows = np.random.default_rng(0).normal(3, 2, (5000, 4)).astype(np.float16)  # more than are read at a time
    mean, covariance = teacher.moments(rows)
    np.testing.assert_allclose(mean, rows.astype(np.float64).mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(covariance, np.cov(rows.astype(np.float64).T), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- student
def test_the_student_computes_what_the_vit_does(small):
    student = Student(8, 5, nnx.Rngs(0))
    side = students.SHAPE.native
    image = jax.random.normal(jax.random.key(0), (2, side, side, 3))
    expected = student.vit(image, read=("cls", "patches"))
    tokens = student.tokens(image, None)
    np.testing.assert_allclose(tokens[:, 0], expected.cls, atol=2e-6)
    np.testing.assert_allclose(tokens[:, 1:], expected.patches, atol=2e-6)
    order = jnp.tile(jnp.arange(GRID**2)[::-1], (2, 1))
    np.testing.assert_allclose(student.tokens(image, order)[:, 1:], expected.patches[:, ::-1], atol=2e-6)
    assert student.tokens(image, order[:, :7]).shape == (2, 8, 16)


@pytest.mark.parametrize("dropping", [False, True])
def test_the_loss_is_small_only_for_what_the_teacher_says(small, targets, dropping):
    definition, params, _ = ModelDef.split(Student(8, 5, nnx.Rngs(0)))
    constant = jnp.ones((4, GRID**2, 8))  # which biases alone can say
    zero = {path: jnp.zeros_like(value) if path.split("/")[0] != "vit" else value for path, value in params.items()}
    right = zero | {"dense/bias": jnp.ones(8), "pooled/bias": jnp.ones(8) / targets.spread}
    features = targets.mean + jnp.ones(8) @ targets.basis
    right["classes/bias"] = features @ targets.kernel + targets.bias
    loss, key = students.make_loss(definition, targets), jax.random.key(1)
    image = np.zeros((4, 40, 40, 3), np.uint8)
    _, parts = loss(right, image, constant, key, dropping=dropping)
    assert parts["dense"] < 1e-10
    assert parts["pooled"] < 1e-10
    probabilities = jax.nn.softmax(right["classes/bias"])
    assert parts["classes"] == pytest.approx(-float(probabilities @ jnp.log(probabilities)), abs=1e-4), "its entropy"
    _, wrong = loss(zero, image, constant, key, dropping=dropping)
    assert wrong["dense"] == pytest.approx(1)
    assert wrong["pooled"] == pytest.approx(1 / targets.spread**2, rel=1e-5)


def test_the_patch_embedding_starts_with_equal_variances(small, images, targets):
    pixels = np.concatenate([image for image, _ in training.batches(images, targets, 0, 40)])
    student = Student(8, 5, nnx.Rngs(0))
    students.whiten(student, pixels)
    student.vit.pos_embed[...] = jnp.zeros_like(student.vit.pos_embed[...])
    tokens, _ = student.vit.embed(students.normalized(pixels.astype(np.float32)))
    rows = np.asarray(tokens[:, 1:]).reshape(-1, 16)
    np.testing.assert_allclose(rows.mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(np.cov(rows.T), np.eye(16) * students.PATCH_SCALE**2, atol=0.02)


def test_the_distillation_learns_and_resumes_bit_for_bit(small, images, targets, tmp_path, monkeypatch):
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    definition, whole = training.distill(images, targets, 8, tmp_path / "whole")
    made = training.batches

    def interrupted(*arguments):
        for count, batch in enumerate(made(*arguments)):
            if count == 3:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(training, "batches", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.distill(images, targets, 8, tmp_path / "parts")
    monkeypatch.setattr(training, "batches", made)
    _, resumed = training.distill(images, targets, 8, tmp_path / "parts")
    for path, value in whole.items():
        np.testing.assert_array_equal(value, resumed[path], err_msg=path)
    image, goal = next(made(images, targets, 0, 1))
    loss, key = students.make_loss(definition, targets), jax.random.key(0)
    _, start, _ = ModelDef.split(Student(8, 5, nnx.Rngs(0)))
    assert loss(whole, image, goal, key, dropping=False)[0] < loss(start, image, goal, key, dropping=False)[0]


# -------------------------------------------------------------------------------------------------------------- probes
def test_the_probe_finds_a_label_that_features_hold_and_no_other():
    random = np.random.default_rng(0)
    features = random.normal(size=(300, 6))
    labels = np.stack([features[:, 2] > 0, random.random(300) < 0.3], axis=1)
    held = probe(features[:200], labels[:200, :1], features[200:], labels[200:, :1])
    absent = probe(features[:200], labels[:200, 1:], features[200:], labels[200:, 1:])
    assert held["mAP"] > 0.95
    assert absent["mAP"] < 0.6
