"""Images given as values in Python: paths, encoded bytes, arrays or Pillow images, in any mixture."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import cast

import numpy as np
from ml_collections import ConfigDict
from PIL import Image

from mlmoe_jax.data.image_reader import ImageReader
from mlmoe_jax.data.images import EXIF_ORIENTATION, STRICT, BadImage, Decoding, Images, open_image

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
    data_config.exif = "apply"
    reader = ImageReader.of(data_config)
    return np.stack([reader(given, row) for row in range(len(given))])


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
        if isinstance(image, Image.Image):
            image = _encoded(image, name)
        elif not isinstance(image, str | os.PathLike | bytes):
            raise BadImage(f"{name} is a {type(image).__name__}, not a path, bytes, an array or a Pillow image")
        return open_image(image, name=name, decoding=decoding)


def _encoded(image: Image.Image, name: str) -> bytes:
    """Encode a Pillow image, so that mode, transparency and EXIF are handled as in image files."""
    buffer = io.BytesIO()
    try:
        image.load()  # also applies the orientation of a TIFF
        exif = Image.Exif()
        exif.update({tag: value for tag, value in image.getexif().items() if tag == EXIF_ORIENTATION})
        _in_png(image).save(buffer, "PNG", compress_level=0, exif=exif)
    except Exception as error:  # Pillow's decoders raise many types for damaged data
        raise BadImage(f"cannot read {name} as an image: {error or type(error).__name__}") from error
    return buffer.getvalue()


def _in_png(image: Image.Image) -> Image.Image:
    """Return an image in a mode that Pillow writes as PNG."""
    if image.mode == "I":
        values = np.asarray(image)
        if values.min() < 0 or values.max() >= 2**16:
            raise ValueError("its pixels are not from 0 to 65,535")
        return Image.fromarray(values.astype(np.uint16))
    rgb = dict.fromkeys(("CMYK", "YCbCr", "LAB", "HSV", "RGBX"), "RGB")
    mode = {"PA": "RGBA", "RGBa": "RGBA", "La": "LA", **rgb}.get(image.mode)
    return image.convert(mode) if mode else image
