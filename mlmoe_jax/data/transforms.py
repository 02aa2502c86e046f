"""What happens to a picture on the host, before it is part of a batch."""

import numpy as np
from PIL import Image


def resize_square(image: np.ndarray, size: int) -> np.ndarray:
    """Resize u8[h,w,3] to u8[size,size,3] whatever its aspect, with Pillow's antialiased bilinear filter.

    ML-VPT's code does this in training and in evaluation. A picture of that size already is returned as it is.
    """
    if image.shape[:2] == (size, size):
        return image
    return np.array(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR))
