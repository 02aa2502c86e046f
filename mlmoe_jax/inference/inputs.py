"""Images given as values in Python: paths, encoded bytes, arrays or Pillow images, in any mixture."""

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


def is_one_image(given: ImageLike | Sequence[ImageLike]) -> bool:
    """Return whether `given` is one image: a path, bytes, an array of at most three axes, or a Pillow image."""
    if isinstance(given, np.ndarray):
        return given.ndim <= 3 and given.dtype != object
    return isinstance(given, str | os.PathLike | bytes | Image.Image)


def read_images(images: ImageLike | Sequence[ImageLike], config: ConfigDict) -> np.ndarray:
    """Return images as the model of a config gets them in evaluation, u8[B,H,W,3], before they are normalized.

    Args:
      images: one image or a sequence: paths, encoded bytes, u8[h,w,3] RGB arrays or Pillow images, of any size. As in
        prediction, the orientation in EXIF data is applied.
      config: of `load_config`.

    Raises:
      UserError: an image that cannot be read (BadImage).
    """
    given = GivenImages(cast("Sequence[ImageLike]", [images] if is_one_image(images) else images))
    data_config = config.data.copy_and_resolve_references()
    data_config.exif, data_config.bad_images = "apply", "error"
    reader = ImageReader.of(data_config)
    return np.stack(cast("list[np.ndarray]", [reader(given, row) for row in range(len(given))]))


class GivenImages(Images):
    """Images given as paths, encoded bytes, u8[h,w,3] RGB arrays or Pillow images, in any mixture."""

    def __init__(self, given: Sequence[ImageLike]):
        self.given = given

    def __len__(self) -> int:
        return len(self.given)

    def name(self, row: int) -> str:
        """Return the path of image `row`, or its number."""
        image = self.given[row]
        return os.fspath(image) if isinstance(image, str | os.PathLike) else f"image {row}"

    def read(self, row: int, decoding: Decoding = STRICT) -> np.ndarray:
        """Return image `row` as u8[h,w,3]; BadImage if it cannot be read or is of another type."""
        return np.asarray(self.open(row, decoding))

    def open(self, row: int, decoding: Decoding = STRICT) -> np.ndarray | Image.Image:
        """Return image `row` as an array if it is given as one, else as a Pillow image."""
        image, name = self.given[row], self.name(row)
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
                raise BadImage(f"{name} is an array {image.dtype}{list(image.shape)} and should be uint8[h,w,3]")
            return image
        if not isinstance(image, str | os.PathLike | bytes | Image.Image):
            raise BadImage(f"{name} is a {type(image).__name__}, not a path, bytes, an array or a Pillow image")
        return open_image(image, name=name, decoding=decoding)
