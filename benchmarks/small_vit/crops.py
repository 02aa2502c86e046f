"""Parts of photographs: their pixels, and what a map of the photograph holds at each patch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

RATIO = (3 / 4, 4 / 3)  # of the sides of a crop, relative to those of the photograph


@dataclass(frozen=True)
class Crop:
    """A part of an image, in fractions of its sides."""

    top: float
    left: float
    height: float
    width: float
    flipped: bool = False

    def of(self, outer: Crop) -> Crop:
        """Return this part of another crop, which is not flipped, as a part of the whole image."""
        top, left = outer.top + self.top * outer.height, outer.left + self.left * outer.width
        return Crop(top, left, self.height * outer.height, self.width * outer.width, self.flipped)


WHOLE = Crop(0.0, 0.0, 1.0, 1.0)


def draw_crop(random: np.random.Generator, area: tuple[float, float]) -> Crop:
    """Return a random crop whose area is a share between two of the image's; half of them are flipped."""
    share, ratio = random.uniform(*area), np.exp(random.uniform(*np.log(RATIO)))
    height, width = min(1.0, np.sqrt(share * ratio)), min(1.0, np.sqrt(share / ratio))
    top, left = random.uniform(0, 1 - height), random.uniform(0, 1 - width)
    return Crop(top, left, height, width, bool(random.random() < 0.5))


def cut(image: Image.Image, crop: Crop, side: int) -> np.ndarray:
    """Return the pixels of a crop, u8[side,side,3]."""
    box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
    pixels = [fraction * length for fraction, length in zip(box, image.size * 2, strict=True)]
    found = np.asarray(image.resize((side, side), Image.Resampling.BILINEAR, box=pixels))
    return found[:, ::-1] if crop.flipped else found


def at_patches(cells: np.ndarray, crop: Crop, grid: int) -> np.ndarray:
    """Return a map f[h,w,K] of an image at the centers of the patches of a crop, f32[grid,grid,K]; bilinear."""
    centers = (np.arange(grid) + 0.5) / grid
    rows = _weights(crop.top + centers * crop.height, cells.shape[0])
    columns = _weights(crop.left + centers * crop.width, cells.shape[1])
    found = np.einsum("ah,hwk,bw->abk", rows, cells.astype(np.float32), columns, optimize=True)
    return found[:, ::-1] if crop.flipped else found


def _weights(places: np.ndarray, cells: int) -> np.ndarray:
    """Return the weight f32[n,cells] of each cell at each place in 0…1; at the edges, that of the outer cell is 1."""
    distance = np.abs(np.clip(places * cells - 0.5, 0, cells - 1)[:, None] - np.arange(cells))
    return np.maximum(0, 1 - distance).astype(np.float32)
