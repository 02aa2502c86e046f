"""Programs of 16-bit floats and 8-bit integers: their size and their numbers."""

import re
from dataclasses import replace

import numpy as np
import pytest
from helpers import tiny
from helpers.drawn_images import noise
from helpers.exported import ON_VIT, model_of, operations, random_run
from PIL import Image
from scipy.special import logit

from mlmoe_jax.apps.export import onnx, quantize
from mlmoe_jax.apps.export.quantize import calibration_images
from mlmoe_jax.apps.export.run import export_run
from mlmoe_jax.apps.export.targets import ALWAYS, TARGETS, Export
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.runs.assemble import abstract_parts


@pytest.fixture
def library():
    """The package onnx."""
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    return pytest.importorskip("onnx", reason="the extra onnx is not installed")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """The path of a folder of 20 images."""
    folder = tmp_path_factory.mktemp("images")
    for name, image in enumerate(noise(20)):
        Image.fromarray(image).save(folder / f"{name}.png")
    return str(folder)


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


def test_unreadable_images_are_left_out_and_others_taken(images, tmp_path):
    run = random_run("linear_probe", abstract_parts, **ON_VIT)
    (tmp_path / "damaged.png").write_bytes(b"\x89PNG")
    assert len(calibration_images(run, [images, str(tmp_path)], 50)) == 20


# -------------------------------------------------------------------------------------------------------- the programs
# image -> 1/(1 + exp(−image·W)), where the columns of W have very different sizes.
LAYER = """<ir_version: 10, opset_import: ["" : 21]>
layer (uint8[B,2,2,3] image) => (float[B,3] probability) {
  number = Cast<to=1>(image)
  rows = Reshape(number, shape)
  [layer] logit = MatMul(rows, weights)
  probability = Sigmoid(logit)
}"""
WEIGHTS = (np.random.default_rng(1).normal(size=(12, 3)) / [5e2, 5e3, 5e4]).astype(np.float32)


def write_layer(job: Export) -> str:
    parser, numbers = pytest.importorskip("onnx.parser"), pytest.importorskip("onnx.numpy_helper")
    program, tensors = parser.parse_model(LAYER), {"weights": WEIGHTS, "shape": np.array([-1, 12])}
    program.graph.initializer.extend(numbers.from_array(value, name) for name, value in tensors.items())
    (job.path / "model.onnx").write_bytes(program.SerializeToString())
    return ""


@pytest.mark.parametrize(("kind", "kept", "error"), [("onnx_int8", "INT8", 0.02), ("onnx_float16", "FLOAT16", 0.01)])
def test_a_layer_has_the_numbers_of_float32_in_fewer_bits(kind, kept, error, library, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx, "TARGET", replace(onnx.TARGET, write=write_layer))
    target = TARGETS[kind]
    target.write(Export(None, tmp_path, {}, ALWAYS, noise(50, 2)))
    pixels = noise(20, 2)
    expected, scores = pixels.reshape(20, 12) @ WEIGHTS, target.load(tmp_path)(pixels)["probability"]
    assert (np.abs(logit(scores) - expected).max(axis=0) < error * np.ptp(expected, axis=0)).all()
    assert scores.dtype == np.float32
    assert len(np.unique(scores)) == scores.size, "probabilities are not rounded"
    tensors = {tuple(tensor.dims): tensor for tensor in library.load(tmp_path / "model.onnx").graph.initializer}
    assert tensors[12, 3].data_type == getattr(library.TensorProto, kept)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_calibration_that_fails_ends_its_progress(library, tmp_path, monkeypatch):
    """No line about it comes later: a test that leaves a timer fails."""
    monkeypatch.setattr(onnx, "TARGET", replace(onnx.TARGET, write=write_layer))
    monkeypatch.setattr(quantize._Batches, "get_next", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        TARGETS["onnx_int8"].write(Export(None, tmp_path, {}, ALWAYS, noise(50, 2)))


@pytest.mark.slow
def test_a_run_is_exported_as_integers(folders, images, library, tmp_path):
    pytest.importorskip("jax2onnx", reason="the extra onnx is not installed")
    out = tmp_path / "int8"
    printed = export_run(folders["no data"], str(out), "onnx_int8", images=[images], count=20).text()
    assert "raw weights of step 20 as onnx_int8; integers of 8 bits, from 16 images; " in printed
    similar = "; 0.0 MB, on 4 other images, probability has a correlation of (0.99|1.00)\\d\\d and differs"
    assert re.search(similar, printed)
    assert {path.name for path in out.iterdir()} == {"model.onnx", "model.json", "load.py", "README.md"}
    assert operations(out)["DequantizeLinear"] > 0
    assert model_of(out)(noise(5)).shape == (5, 3)
