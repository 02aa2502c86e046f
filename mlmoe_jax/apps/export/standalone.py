"""Label images with this exported model, without the code that trained it.

    python load.py photo.jpg more/*.jpg

    from load import Model
    model = Model()
    scores = model(images)         # images u8[B,H,W,3], RGB at the model's size -> probabilities f32[B,K]
    scores = model([model.read("photo.jpg")])
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
        images, size = np.asarray(images), self.description["preprocess"]["image_size"]
        if images.dtype != np.uint8 or images.shape[1:] != (size, size, 3):
            raise ValueError(f"images should be uint8 [B,{size},{size},3], not {images.dtype} {list(images.shape)}")
        return self._run(images)

    def read(self, path: str | Path) -> np.ndarray:
        """Read and resize an image file as in training; return u8[H,W,3] with the image size of the model.

        This requires Pillow.
        """
        from PIL import Image, ImageOps

        how = self.description["preprocess"]
        size = how["image_size"]
        short = round(size / how["crop_fraction"]) if how["resize"] == "crop" else size
        with Image.open(path) as file:
            if how["reduced_decoding"]:
                file.draft(None, (short, short))
            image = ImageOps.exif_transpose(file) if how["exif"] == "apply" else file.copy()
        if image.mode == "F" or image.mode.startswith("I"):
            raise ValueError(f"{path} should have 8 bits per channel")
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        image = image.convert("RGB")
        if how["resize"] == "square":
            return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))
        if how["resize"] == "pad":
            return _resize_and_pad(image, size, how["fill"])
        return _resize_and_crop(image, short, size, clip=how["resize"] == "clip")


def _resize_and_pad(image: Any, size: int, fill: Sequence[float]) -> np.ndarray:
    """Resize an image so that its long side has `size` pixels, add a border, and return u8[size,size,3]."""
    from PIL import Image

    scaled = tuple(max(1, round(size * side / max(image.size))) for side in image.size)
    padded = Image.new("RGB", (size, size), tuple(round(255 * value) for value in fill))
    padded.paste(image.resize(scaled, Image.Resampling.BILINEAR), tuple((size - side) // 2 for side in scaled))
    return np.asarray(padded)


def _resize_and_crop(image: Any, short: int, size: int, *, clip: bool) -> np.ndarray:
    """Resize an image so that its short side has `short` pixels, crop the center square, and return u8[size,size,3]."""
    from PIL import Image

    resample, whole = (Image.Resampling.BICUBIC, math.floor) if clip else (Image.Resampling.BILINEAR, round)
    scaled = tuple(short * side // min(image.size) for side in image.size)
    x, y = (whole((side - size) / 2) for side in scaled)
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
        assigned = [k for k in np.argsort(-scores, kind="stable") if scores[k] >= model.thresholds[k]]
        text = "  ".join(f"{model.labels[k]} {100 * scores[k]:.0f} %" for k in assigned)
        print(f"{path}  {text or '(no label reaches its threshold)'}")
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
