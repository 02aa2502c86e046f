"""Programs that also return features and maps, and what their folder says about a map."""

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers.documents import program_with
from helpers.drawn_images import noise
from helpers.exported import CNNS, ON_RESNET, ON_VIT, model_of, random_run
from PIL import Image

from mlmoe_jax import load_config
from mlmoe_jax.apps.export import quantize, standalone
from mlmoe_jax.apps.export import run as export
from mlmoe_jax.apps.export.program import outputs_of, require_equal
from mlmoe_jax.apps.export.targets import ALWAYS, FEATURES, MAP, PROBABILITY, TARGETS, Export
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.runs.assemble import assemble

EVERY = (PROBABILITY, FEATURES, MAP)


@pytest.fixture(scope="module")
def made(folders, tmp_path_factory):
    """An exported folder with all outputs, beside the run that it is from."""
    out = tmp_path_factory.mktemp("outputs") / "out"
    names = "map,probability,features"
    printed = export.export_run(folders["plain"], str(out), "stablehlo", template="space", outputs=names).text()
    assert re.search(r"largest difference of probability \S+, features \S+, map \S+;", printed)
    return folders["plain"], out


def test_a_folder_has_and_describes_the_outputs(made):
    folder, out = made
    predictor, model, pixels = Predictor.from_run(folder.path), model_of(out), noise(5)
    outputs = model.outputs(pixels)
    [(_, scores, features)] = predictor.embed([*pixels], batch_size=5)
    np.testing.assert_allclose(outputs[FEATURES], features, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(outputs[PROBABILITY], scores, atol=1e-6)
    np.testing.assert_array_equal(model(pixels), outputs[PROBABILITY])
    expected = outputs_of(predictor.run, pixels, EVERY)
    np.testing.assert_allclose(outputs[MAP], expected[MAP], rtol=1e-5, atol=1e-6)
    assert np.ptp(outputs[MAP], axis=(2, 3)).min() > 1e-4, "a map differs between cells"
    described = json.loads((out / "model.json").read_text())["outputs"]
    shapes = {name: ["B", *outputs[name].shape[1:]] for name in EVERY}
    assert {name: one["shape"] for name, one in described.items()} == shapes
    assert described[MAP]["kind"] == "activation"
    assert described[MAP]["pixels_per_cell"] * outputs[MAP].shape[2] == 8
    assert "`map`, float32 [B,3," in (out / "README.md").read_text()
    assert (out / "app.py").exists()


@pytest.mark.budget(30)
@pytest.mark.variants("reference")
@pytest.mark.parametrize(
    ("reference", "changes"),
    [
        ("mlvpt_digits", ON_VIT),
        ("linear_probe", ON_VIT),
        ("linear_probe", CNNS["convnext_tiny"]),
        ("drmoe_resnet101", ON_RESNET),
    ],
)
def test_onnx_and_float16_give_the_outputs_of_the_run(reference, changes, small_backbones, drawn_parts, tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    run = random_run(reference, drawn_parts if changes is ON_VIT else assemble, **changes)
    for kind, largest in (("onnx", 1e-4), ("onnx_float16", 1e-2)):
        (tmp_path / kind).mkdir()
        TARGETS[kind].write(Export(run, tmp_path / kind, {}, ALWAYS, outputs=EVERY))
        program = TARGETS[kind].load(tmp_path / kind)
        assert list(program(noise(3, 32))) == [*EVERY]
        texts = require_equal(run, program, EVERY).split()
        assert max(float(word.rstrip(",")) for word in texts if word[0].isdigit()) < largest


def test_a_calibrated_program_is_compared_in_every_output(folders, tmp_path, refusal, monkeypatch):
    images = [*noise(20)]
    for number, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    run = Predictor.from_run(folders["plain"].path).run
    monkeypatch.setattr(quantize, "INT8", replace(quantize.INT8, write=lambda job: "", load=of_another_map, place=None))
    monkeypatch.setattr(quantize, "OUTPUTS", lambda pixels: outputs_of(run, pixels, EVERY), raising=False)
    options = {"images": [str(tmp_path)], "outputs": ",".join(EVERY)}
    sentence = refusal(export.export_run, folders["plain"], str(tmp_path / "out"), "onnx_int8", **options)
    assert sentence.startswith("map of the exported program has a correlation of ")


def of_another_map(folder):
    """The outputs of a run, with other maps."""
    from mlmoe_jax.apps.export import quantize

    return lambda images: quantize.OUTPUTS(images) | {"map": quantize.OUTPUTS(images)["map"][:, ::-1, ::-1]}


def test_a_head_without_a_map_is_named(small_backbones, refusal):
    run = random_run("linear_probe", **ON_VIT, **{"model.head.kind": "pat"})
    sentence = refusal(outputs_of, run, noise(1, 32), EVERY)
    assert sentence == "the head pat has no map of the labels; leave map out of --outputs"


# ------------------------------------------------------------------------------------------------------ on photographs
@pytest.mark.parametrize("resize", ["square", "crop", "clip", "pad"])
@pytest.mark.parametrize("sides", [(90, 60), (40, 101), (64, 64)])
def test_a_spot_is_where_the_box_of_the_map_says(resize, sides, tmp_path):
    config = load_config("linear_probe:dataset=digits").data
    config.image_size, config.resize, config.fill = 32, resize, (0, 0, 0)
    model = object.__new__(standalone.Model)
    described = {"shape": ["B", 3, 2, 2], "pixels_per_cell": 16}
    model.description = {"preprocess": config.to_dict(), "outputs": {MAP: described}}
    width, height = sides
    x, y = width // 2 + 7, height // 2 - 9
    photo = np.zeros((height, width, 3), np.uint8)
    photo[y - 3 : y + 3, x - 3 : x + 3] = 255
    Image.fromarray(photo).save(tmp_path / "photo.png")
    left, top, right, bottom = model.map_box(width, height)
    bright = model.read(tmp_path / "photo.png")[..., 0].astype(float)
    at = (np.arange(32) + 0.5) / 32
    down, across = (bright.sum(axis=axis) @ at / bright.sum() for axis in (1, 0))
    assert abs(left + across * (right - left) - x) < 1
    assert abs(top + down * (bottom - top) - y) < 1
    if resize == "pad" and width != height:
        assert left < 0 or top < 0, "the border"


def test_the_documented_program_draws_a_map(made, monkeypatch):
    _, out = made
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 44, 3)).astype(np.uint8))
    turned = Image.Exif()
    turned[0x0112] = 6
    monkeypatch.chdir(out)
    monkeypatch.syspath_prepend(str(out))
    monkeypatch.delitem(sys.modules, "load", raising=False)
    photo.save("photo.jpg", exif=turned)
    exec(program_with("map_box", "deployment.md"), {})
    drawn = np.asarray(Image.open("map.png"), int)
    assert drawn.shape == (44, 30, 3)
    upright = np.asarray(Image.open("photo.jpg").rotate(-90, expand=True).convert("RGB"), int)
    reddened = (upright - drawn)[..., 1] > 0
    assert 0.05 < reddened.mean() < 0.99
