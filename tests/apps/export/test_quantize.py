"""Programs of 16-bit floats and 8-bit integers: their size, their numbers, and what is refused."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny
from helpers.exported import ON_VIT, model_of, operations, random_run
from PIL import Image
from scipy.special import logit

from mlmoe_jax.apps.export import onnx, quantize
from mlmoe_jax.apps.export import run as export
from mlmoe_jax.apps.export.program import scores_of
from mlmoe_jax.apps.export.quantize import calibration_images
from mlmoe_jax.apps.export.targets import ALWAYS, TARGETS, Export
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.runs.assemble import abstract_parts
from mlmoe_jax.runs.folder import RunFolder


@pytest.fixture
def library():
    """The package onnx."""
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    return pytest.importorskip("onnx", reason="the extra onnx is not installed")


@pytest.fixture(scope="module")
def made(runs, tmp_path_factory):
    """A run without its data set, and a folder with 20 images."""
    folder = tmp_path_factory.mktemp("quantized")
    (folder / "images").mkdir()
    draw = np.random.default_rng(3).integers
    for name in range(20):
        Image.fromarray(draw(0, 256, (9, 8, 3)).astype(np.uint8)).save(folder / "images" / f"{name}.png")
    with runs.world():
        runs("published", data__name="csv", data__root="/absent").copy(folder / "run")
        yield folder


def images_of(count: int, side: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, side, side, 3)).astype(np.uint8)


# ---------------------------------------------------------------------------------------------------------- the images
def test_the_sample_is_drawn_from_the_training_split(monkeypatch):
    tiny.use_scenes(monkeypatch)
    run = random_run("linear_probe:dataset=digits", abstract_parts, **ON_VIT)
    run = replace(run, label_space=replace(synthetic_label_space(10, 2), names=tuple("0123456789")))
    sample = np.stack(calibration_images(run, (), 6))
    np.testing.assert_array_equal(calibration_images(run, (), 9)[:6], sample)
    assert sample.shape == (6, 32, 32, 3)
    assert len(np.unique(sample.reshape(6, -1), axis=0)) == 6
    ranges, others = quantize.parts(sample)
    assert (len(ranges), len(others)) == (4, 2)
    np.testing.assert_array_equal([*ranges, *others], sample)


def test_unreadable_images_are_left_out_and_others_taken(made, tmp_path, refusal):
    run = random_run("linear_probe", abstract_parts, **ON_VIT)
    (tmp_path / "damaged.png").write_bytes(b"\x89PNG")
    items = [str(made / "images"), str(tmp_path)]
    assert len(calibration_images(run, items, 50)) == 20
    assert "has 0 readable images and needs at least 5" in refusal(calibration_images, run, items[1:], 50)


# -------------------------------------------------------------------------------------------------------- the programs
def test_the_scores_to_compare_with_are_the_predictors(made):
    predictor, pixels = export.Predictor.from_run(made / "run"), images_of(13, 8)  # a whole batch and a part of one
    expected = [list(result.scores.values()) for result in predictor(list(pixels))]
    np.testing.assert_allclose(scores_of(predictor.run, pixels), expected, atol=1e-6)


def write_layer(job: Export) -> str:
    """Write the program image -> 1/(1 + exp(−image·W)), whose columns of W have very different sizes."""
    helper, numbers = pytest.importorskip("onnx.helper"), pytest.importorskip("onnx.numpy_helper")
    tensors = {"weights": WEIGHTS, "shape": np.array([-1, 12], np.int64)}
    nodes = [
        helper.make_node("Cast", ["image"], ["float"], to=1),
        helper.make_node("Reshape", ["float", "shape"], ["rows"]),
        helper.make_node("MatMul", ["rows", "weights"], ["logit"], name="layer"),
        helper.make_node("Sigmoid", ["logit"], ["probability"]),
    ]
    inputs = [helper.make_tensor_value_info("image", 2, ["B", 2, 2, 3])]
    outputs = [helper.make_tensor_value_info("probability", 1, ["B", 3])]
    initial = [numbers.from_array(value, name) for name, value in tensors.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "layer", inputs, outputs, initial),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    (job.path / "model.onnx").write_bytes(model.SerializeToString())
    return ""


WEIGHTS = (np.random.default_rng(1).normal(size=(12, 3)) / [5e2, 5e3, 5e4]).astype(np.float32)


@pytest.mark.parametrize(("kind", "kept", "error"), [("onnx_int8", "INT8", 0.02), ("onnx_float16", "FLOAT16", 0.01)])
def test_a_layer_has_the_numbers_of_float32_in_fewer_bits(kind, kept, error, library, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx, "TARGET", replace(onnx.TARGET, write=write_layer))
    target = TARGETS[kind]
    target.write(Export(None, tmp_path, {}, ALWAYS, images_of(50, 2)))
    pixels = images_of(20, 2)
    expected, scores = pixels.reshape(20, 12) @ WEIGHTS, target.load(tmp_path)(pixels)
    assert (np.abs(logit(scores) - expected).max(axis=0) < error * np.ptp(expected, axis=0)).all()
    assert scores.dtype == np.float32
    assert len(np.unique(scores)) == scores.size, "probabilities are not rounded"
    tensors = {tuple(tensor.dims): tensor for tensor in library.load(tmp_path / "model.onnx").graph.initializer}
    assert tensors[12, 3].data_type == getattr(library.TensorProto, kept)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.slow
def test_a_run_is_exported_as_integers(made, library, capsys):
    pytest.importorskip("jax2onnx", reason="the extra onnx is not installed")
    how = {"images": [str(made / "images")], "count": 20}
    printed = export.export_run(RunFolder(made / "run"), str(made / "int8"), "onnx_int8", **how).text()
    assert "raw weights of step 20 as onnx_int8; integers of 8 bits, from 16 images; " in printed
    assert re.search(
        r"; 0.0 MB, on 4 other images, probabilities have a correlation of (0.99|1.00)\d\d and differ", printed
    )
    assert {path.name for path in (made / "int8").iterdir()} == {"model.onnx", "model.json", "load.py", "README.md"}
    assert operations(made / "int8")["DequantizeLinear"] > 0
    assert model_of(made / "int8")(images_of(5, 8)).shape == (5, 3)


def noise(folder: Path):
    return lambda images: np.random.default_rng(0).random((len(images), 3), np.float32)


def test_a_program_that_is_not_similar_is_not_written(made, tmp_path, refusal, monkeypatch):
    monkeypatch.setattr(quantize, "INT8", replace(quantize.INT8, write=lambda job: "", load=noise, place=Path))
    how = {"images": [str(made / "images")], "count": 20}
    sentence = refusal(export.export_run, RunFolder(made / "run"), str(tmp_path / "out"), "onnx_int8", **how)
    assert "and 0.99 is the least, so it was not written" in sentence
    assert not list(tmp_path.iterdir())


def test_images_for_another_format_and_without_a_data_set_are_refused(made, tmp_path, refusal):
    folder, output = RunFolder(made / "run"), str(tmp_path / "out")
    sentence = refusal(export.export_run, folder, output, "onnx", count=5)
    assert sentence == "--format=onnx does not take --images and --calibration-images here; leave it out"
    sentence = refusal(export.export_run, folder, output, "onnx_int8")
    assert "/absent" in sentence
    assert not list(tmp_path.iterdir())
