"""What a prediction and an explanation refuse: images that cannot be read, requests, and models that fit neither."""

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from helpers.color_model import HALVES, color, make_run
from helpers.refusals import Refusal, each
from PIL import Image

from mlmoe_jax.config import default_config
from mlmoe_jax.data.decoding import BadImage
from mlmoe_jax.inference.explain import write_requested_samples
from mlmoe_jax.inference.inputs import MixedImages
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.runs.folder import RunFolder


def of_image(name: str, make, *says: str) -> Refusal:
    """A value that cannot be read as an image."""
    return Refusal(name, None, lambda _: MixedImages([make()]).read(0), *says, error=BadImage)


def half_a_jpeg() -> Image.Image:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(file, "JPEG")
    return Image.open(io.BytesIO(file.getvalue()[:1500]))


def of_request(name: str, *says: str, images=None, run=None, limits=HALVES, **options) -> Refusal:
    """A request that a predictor cannot fulfil."""
    images = [color(1)] if images is None else images
    return Refusal(name, None, lambda _: Predictor(make_run(**run or {}), limits)(images, **options), *says)


def without_split(at: Path):
    config = default_config()
    config.data.test_splits, config.data.val_split, config.report.samples = (), "", 4
    write_requested_samples(RunFolder(at), config, SimpleNamespace(config=config))


CANNOT = "cannot read image 0 as an image: "
REFUSALS = [
    of_image("floats", lambda: np.zeros((4, 4, 3)), "image 0 is an array float64[4, 4, 3] and should be uint8[h,w,3]"),
    *(
        of_image(f"{shape}", lambda shape=shape: np.zeros(shape, np.uint8), f"uint8{list(shape)}")
        for shape in ((4, 4), (4, 4, 4), (0, 4, 3))
    ),
    of_image("nothing", lambda: None, "image 0 is a NoneType"),
    of_image("no bytes", lambda: b"", f"{CANNOT}it is empty"),
    of_image("no file", lambda: "missing.jpg", "cannot read missing.jpg as an image: No such file"),
    of_image("mode F", lambda: Image.new("F", (2, 2)), f"{CANNOT}its pixels are float32 without"),
    of_image("mode I", lambda: Image.new("I", (6, 4), -1), "its pixels are int32 without a known white"),
    of_image("a part of a JPEG", half_a_jpeg, "truncated"),
    *(
        of_request(type(images).__name__, f"the type {type(images).__name__} and should be a sequence", images=images)
        for images in (iter(["a.jpg"]), {"a.jpg"}, {"a.jpg": "sea"}, 3)
    ),
    of_request("an address", "it is an address of the web; download the file", images="https://example.com/a.jpg"),
    of_request("a folder", "Is a directory; give the images in it", images="/"),
    of_request("no label", "top_k is 0 and should be from 1 to the 4", top_k=0),
    of_request("five labels", "top_k is 5 and should be from 1 to the 4", top_k=5),
    of_request("no batch", "the batch size is 0", batch_size=0),
    of_request("no gates", "has no gates", run={"gates": False}, gates=True),
    of_request("no threshold", "blue", limits={"red": 0.5, "green": 0.5, "dark": 0.5}),
    of_request("a diverged model", "diverged", run={"bias": np.nan}),
    Refusal("a stream", None, lambda _: Predictor(make_run(), HALVES).stream("a.jpg"), "put the image in a list"),
    Refusal("no split to explain", None, without_split, "name the split"),
]


@each(REFUSALS)
def test_refusals(case, tmp_path):
    case.check(tmp_path)
