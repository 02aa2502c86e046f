"""Images from Python: paths, encoded bytes, arrays or Pillow images. One sequence may mix these types."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import starmap
from typing import cast

import numpy as np
from ml_collections import ConfigDict
from PIL import Image

from mlmoe_jax.data.decoding import STRICT, BadImage, Decoding, has_frames, open_image
from mlmoe_jax.data.image_reader import ImageReader
from mlmoe_jax.data.images import MOST_OPENED, Images
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import PathLike

ImageLike = PathLike | bytes | np.ndarray | Image.Image


def is_one_image(value: object) -> bool:
    """Return whether a value is one image: a path, bytes, an array of at most three axes, or a Pillow image."""
    if isinstance(value, np.ndarray):
        return value.ndim <= 3 and value.dtype != object
    return isinstance(value, PathLike | bytes | Image.Image)


def read_images(images: ImageLike | Sequence[ImageLike], config: ConfigDict) -> np.ndarray:
    """Return images of any size resized for the model, u8[B,H,W,3], as in evaluation, but not normalized.

    The orientation in EXIF data is applied, as in prediction. Arrays are RGB, u8[h,w,3]. `config` is the result of
    `load_config`. Raises UserError if an image cannot be read (`BadImage`).
    """
    items = MixedImages(cast("Sequence[ImageLike]", [images] if is_one_image(images) else images))
    data_config = config.data.copy_and_resolve_references()
    data_config.exif, data_config.bad_images = "apply", "error"
    reader = ImageReader.from_config(data_config)
    items.warn_of_frames()
    return np.stack(cast("list[np.ndarray]", [reader(items, row) for row in range(len(items))]))


class MixedImages(Images):
    """Paths, encoded bytes, RGB arrays u8[h,w,3] or Pillow images, or a mixture of them.

    Raises UserError if they are not a sequence.
    """

    most_opened = MOST_OPENED

    def __init__(self, items: Sequence[ImageLike]):
        # A pandas Series would be read by its index, which can have another order.
        if not isinstance(items, Sequence | np.ndarray):
            raise UserError(f"the images have the type {type(items).__name__} and should be a sequence; give a list")
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def name(self, row: int) -> str:
        """Return the path of image `row`, or "image N" with its row number N."""
        return _name(row, self.items[row])

    def list_names(self) -> Iterator[str]:
        return starmap(_name, enumerate(self.items))

    def has_frames(self, row: int) -> bool:
        """Return whether image `row` is a file, or a Pillow image of a file, with several frames."""
        image = self.items[row]
        return isinstance(image, PathLike | bytes | Image.Image) and has_frames(image)

    def open(self, row: int, decoding: Decoding = STRICT) -> np.ndarray | Image.Image:
        """Open an image as Pillow image or array. BadImage if it cannot be read, or has another type or shape."""
        image, name = self.items[row], self.name(row)
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
                raise BadImage(f"{name} is an array {image.dtype}{list(image.shape)} and should be uint8[h,w,3]")
            return image
        if not isinstance(image, PathLike | bytes | Image.Image):
            raise BadImage(f"{name} is a {type(image).__name__}, not a path, bytes, an array or a Pillow image")
        return open_image(image, name=name, decoding=decoding)


def _name(row: int, image: ImageLike) -> str:
    return os.fspath(image) if isinstance(image, PathLike) else f"image {row}"
