"""Drawn images, and images as files."""

import io

import numpy as np
from PIL import Image


def drawing(height: int, width: int) -> np.ndarray:
    """Return a smooth gradient with a shape and noise, a read-only u8[height,width,3]."""
    row, column = np.mgrid[:height, :width]
    image = np.stack([200 * row / height + 30, 180 * column / width + 40, 120 + 60 * np.sin(row / 7 + column / 5)], -1)
    image[height // 4 : height // 2, width // 5 : width // 2] = (230, 40, 60)
    image = np.clip(image + np.random.default_rng(0).normal(0, 6, image.shape), 0, 255).astype(np.uint8)
    image.flags.writeable = False
    return image


def encoded(image, file_format="PNG", **options) -> bytes:
    """Return the file of an array or of an image of Pillow; `options` are those of `Image.save`."""
    file = io.BytesIO()
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(file, file_format, **options)
    return file.getvalue()


def noise(count: int, side: int = 8, seed: int = 1) -> np.ndarray:
    """Return images u8[count,side,side,3] without structure."""
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3)).astype(np.uint8)
