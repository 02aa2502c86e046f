"""Label images with this exported model, without the code that trained it.

    python load.py photo.jpg more/*.jpg

    from load import Model
    model = Model()
    scores = model(images)         # images u8[B,H,W,3], RGB at the model's size -> probabilities f32[B,K]
    scores = model([model.read("photo.jpg")])
    outputs = model.outputs(images)    # all outputs of the program by name, as in `model.description["outputs"]`
    model.labels, model.thresholds

README.md lists the required packages.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence  # noqa: F401 - used by load_program
from pathlib import Path
from typing import Any

import numpy as np

ELONGATED = 50  # ratio of the long side to the model's input, above which only the center is resized


class Model:
    """The model of an exported folder, by default the folder of this file.

    Attributes:
      labels: the names of the K labels.
      thresholds: f64[K], the lowest probability at which a label is assigned; infinity = never.
      description: the content of model.json.
    """

    def __init__(self, folder: str | Path | None = None):
        folder = Path(folder or Path(__file__).resolve().parent)
        self.description: dict[str, Any] = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        self.labels: list[str] = self.description["labels"]
        self.thresholds = np.array([np.inf if value is None else value for value in self.description["thresholds"]])
        self._run = load_program(folder)  # noqa: F821 - the export adds this function of the format

    def __call__(self, images: np.ndarray | Sequence[np.ndarray]) -> np.ndarray:
        """Return the probabilities f32[B,K] of images u8[B,H,W,3] in RGB, with the image size of the model."""
        return self.outputs(images)["probability"]

    def outputs(self, images: np.ndarray | Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Return all outputs of the program by name, for images as in `__call__`."""
        images, size = np.asarray(images), self.description["preprocess"]["image_size"]
        if images.dtype != np.uint8 or images.shape[1:] != (size, size, 3):
            raise ValueError(f"images should be uint8 [B,{size},{size},3], not {images.dtype} {list(images.shape)}")
        return self._run(images)

    def assign(self, scores: np.ndarray) -> list[int]:
        """Return the numbers of the labels of an image, by decreasing probability, for its probabilities f32[K].

        They are those that reach their thresholds, and of each attribute the most probable label.
        """
        assigned = scores >= self.thresholds
        for labels in self.description["attributes"].values():
            assigned[labels] = np.arange(len(labels)) == np.argmax(scores[labels])
        return [int(k) for k in np.argsort(-scores, kind="stable") if assigned[k]]

    def map_box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return (left, top, right, bottom) of the output `map` in pixels of an upright image of `width` × `height`.

        Parts of the box may be outside the image, in its border.
        """
        described = self.description["outputs"]["map"]
        scaled, start = _place((width, height), self.description["preprocess"])
        factor = np.array([width, height]) / scaled
        begin, sides = factor * start, np.array(described["shape"][:1:-1]) * described["pixels_per_cell"]
        return tuple(np.rint([*begin, *(begin + factor * sides)]).astype(int).tolist())

    def read(self, path: str | Path) -> np.ndarray:
        """Read and resize an image file as in training; return u8[H,W,3] with the image size of the model.

        This requires Pillow.
        """
        from PIL import Image, ImageOps

        how = self.description["preprocess"]
        short = _short_side(how)
        with Image.open(path) as file:
            if how["reduced_decoding"]:
                file.draft(None, (short, short))
            image = ImageOps.exif_transpose(file) if how["exif"] == "apply" else file.copy()
        if image.mode == "F" or image.mode.startswith("I"):
            raise ValueError(f"{path} should have 8 bits per channel")
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        return _resize(image.convert("RGB"), how)


def _short_side(how: dict[str, Any]) -> int:
    """Return the short side of a resized image before the crop, for the dict `preprocess` of model.json."""
    return round(how["image_size"] / how["crop_fraction"]) if how["resize"] == "crop" else how["image_size"]


def _place(sides: tuple[int, int], how: dict[str, Any]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the sides of a resized image, and where the model's input begins in it, for an image of `sides`.

    Both are (x, y) in pixels. The beginning is negative if the input has a border.
    """
    size, short = how["image_size"], _short_side(how)
    if how["resize"] == "square":
        return (size, size), (0, 0)
    if how["resize"] == "pad":
        across, down = (max(1, round(size * side / max(sides))) for side in sides)
        return (across, down), (-((size - across) // 2), -((size - down) // 2))
    whole = math.floor if how["resize"] == "clip" else round
    across, down = (short * side // min(sides) for side in sides)
    return (across, down), (whole((across - size) / 2), whole((down - size) / 2))


def _resize(image: Any, how: dict[str, Any]) -> np.ndarray:
    """Resize an RGB image of Pillow to the model's input u8[size,size,3]."""
    from PIL import Image

    size = how["image_size"]
    scaled, (x, y) = _place(image.size, how)
    resample = Image.Resampling.BICUBIC if how["resize"] == "clip" else Image.Resampling.BILINEAR
    if how["resize"] == "pad":
        padded = Image.new("RGB", (size, size), tuple(round(255 * value) for value in how["fill"]))
        padded.paste(image.resize(scaled, resample), (-x, -y))
        return np.asarray(padded)
    if max(scaled) <= ELONGATED * size:
        return np.asarray(image.resize(scaled, resample))[y : y + size, x : x + size]
    # As in training, only the center is resized.
    across, down = (old / new for old, new in zip(image.size, scaled, strict=True))
    right, bottom = min((x + size) * across, image.width), min((y + size) * down, image.height)
    box = (x * across, y * down, right, bottom)
    return np.asarray(image.resize((size, size), resample, box=box))


def main(paths: Sequence[str]) -> int:
    """Print the labels of image files, sorted by decreasing probability; return the exit code.

    The exit code is 0, or 2 if no path is given or an image cannot be read.
    """
    if not paths:
        print("usage: python load.py IMAGE…", file=sys.stderr)
        return 2
    model, failed = Model(), False
    for path in paths:
        try:
            image = model.read(path)
        except Exception as error:  # Pillow's decoders raise many types for damaged data, such as SyntaxError
            print(f"error: cannot read {path}: {error or type(error).__name__}", file=sys.stderr)
            failed = True
            continue
        [scores] = model([image])
        assigned = model.assign(scores)
        text = "  ".join(f"{model.labels[k]} {100 * scores[k]:.0f} %" for k in assigned)
        print(f"{path}  {text or '(no label reaches its threshold)'}")
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
