"""Drawn images for tests of transforms."""

import numpy as np


def drawing(height: int, width: int) -> np.ndarray:
    """Return a smooth gradient with a shape and noise, a read-only u8[height,width,3]."""
    row, column = np.mgrid[:height, :width]
    image = np.stack([200 * row / height + 30, 180 * column / width + 40, 120 + 60 * np.sin(row / 7 + column / 5)], -1)
    image[height // 4 : height // 2, width // 5 : width // 2] = (230, 40, 60)
    image = np.clip(image + np.random.default_rng(0).normal(0, 6, image.shape), 0, 255).astype(np.uint8)
    image.flags.writeable = False
    return image
