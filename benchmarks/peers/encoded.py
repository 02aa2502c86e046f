"""The image that all sides classify."""

import io

import numpy as np
from PIL import Image


def encoded_image() -> bytes:
    """Return a smooth JPEG of 640×480."""
    small = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize((640, 480), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()
