"""Images as Python values: paths, encoded bytes, arrays or Pillow images, in any mixture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

import numpy as np
from ml_collections import ConfigDict
from PIL import Image

from mlmoe_jax.data.image_reader import ImageReader
from mlmoe_jax.data.images import STRICT, BadImage, Decoding, Images, open_image

ImageLike = str | os.PathLike | bytes | np.ndarray | Image.Image


def is_one_image(value: ImageLike | Sequence[ImageLike]) -> bool:
    """Return whether a value is one image: a path, bytes, an array of at most three axes, or a Pillow image."""
    if isinstance(value, np.ndarray):
        return value.ndim <= 3 and value.dtype != object
    return isinstance(value, str | os.PathLike | bytes | Image.Image)


def read_images(images: ImageLike | Sequence[ImageLike], config: ConfigDict) -> np.ndarray:
    """Return the model input of a config in evaluation, u8[B,H,W,3], before normalization.

    Args:
      images: one image or a sequence: paths, encoded bytes, u8[h,w,3] RGB arrays or Pillow images, of any size. As in
        prediction, the orientation in EXIF data is applied.
      config: result of `load_config`.

    Raises:
      UserError: an image cannot be read (BadImage).
    """
    items = MixedImages(cast("Sequence[ImageLike]", [images] if is_one_image(images) else images))
    data_config = config.data.copy_and_resolve_references()
    data_config.exif, data_config.bad_images = "apply", "error"
    reader = ImageReader.from_config(data_config)
    return np.stack(cast("list[np.ndarray]", [reader(items, row) for row in range(len(items))]))


class MixedImages(Images):
    """Paths, encoded bytes, u8[h,w,3] RGB arrays or Pillow images, in any mixture."""

    def __init__(self, items: Sequence[ImageLike]):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def name(self, row: int) -> str:
        """Return the path of image `row`, or its number."""
        image = self.items[row]
        return os.fspath(image) if isinstance(image, str | os.PathLike) else f"image {row}"

    def open(self, row: int, decoding: Decoding = STRICT) -> np.ndarray | Image.Image:
        """Return image `row` as an array if it is an array, else as a Pillow image; BadImage if it cannot be read."""
        image, name = self.items[row], self.name(row)
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
                raise BadImage(f"{name} is an array {image.dtype}{list(image.shape)} and should be uint8[h,w,3]")
            return image
        if not isinstance(image, str | os.PathLike | bytes | Image.Image):
            raise BadImage(f"{name} is a {type(image).__name__}, not a path, bytes, an array or a Pillow image")
        return open_image(image, name=name, decoding=decoding)
