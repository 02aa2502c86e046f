"""RandAugment and TrivialAugment with Pillow: their operations and policies.

An image gets `count` operations in sequence, each drawn independently and uniformly from the policy's list. OPERATIONS
has the ranges of the magnitudes, from the lowest level to the highest. Shears are in pixels per pixel, translations in
fractions of the side, and rotations in degrees counter-clockwise. The magnitude of an enhancement is the difference of
its factor from 1. Areas uncovered by a geometric operation are filled with gray 128.

`uda` is the variant of ASL, Q2L and ML-VPT: two of 15 operations, levels 1, 2 … 9 of 9 equally often, each applied
with probability 1/2 (135 × 135 pairs). Rotation has one direction only, as in the authors' code.
`standard` is Cubuk et al. 2020, as in torchvision and timm: N of 14 operations (no invert and no cutout, but identity),
always applied, at level M of 10 without deviation, with rotation in both directions. torchvision and timm differ in
interpolation and fill. All policies here use the interpolation and the fill of `uda`.
`trivial` is TrivialAugment-Wide (Müller and Hutter, ICCV 2021): one of the 14 operations of `standard`, at one of 31
equally likely levels of the wide ranges in WIDE. Translations are up to 32 pixels, whatever the side.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageEnhance, ImageOps

BICUBIC, NEAREST = Image.Resampling.BICUBIC, Image.Resampling.NEAREST
FILL = (128, 128, 128)
CUTOUT_FILL = (125, 122, 113)


# --------------------------------------------------------------------------------------------------------- operations
@dataclass(frozen=True)
class Operation:
    """An image operation with magnitudes from `low` to `high`. If `whole`, they are rounded to integers."""

    function: Callable[..., Image.Image]
    low: float = 0.0
    high: float = 0.0
    whole: bool = False

    def magnitude(self, level: float, highest: int) -> float:
        """Return the unsigned magnitude for a `level` in 0…`highest`, by linear interpolation from `low` to `high`."""
        # Exactly equal to numpy.linspace, which computes the published magnitudes.
        value = self.high if level == highest else self.low + level * ((self.high - self.low) / highest)
        return float(round(value)) if self.whole else float(value)


def _affine(image: Image.Image, matrix: tuple[float, ...], resample: Image.Resampling) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample, fillcolor=FILL)


def _cutout(image: Image.Image, side: float, at: tuple[float, float]) -> Image.Image:
    """Cover a square of `side` pixels, without its lower and right edges. `at` is its center, as in `Draw`."""
    half = int(side) // 2
    row, column = int(at[0] * image.height), int(at[1] * image.width)
    box = (max(0, column - half), max(0, row - half), min(image.width, column + half), min(image.height, row + half))
    covered = image.copy()
    covered.paste(CUTOUT_FILL, box)
    return covered


OPERATIONS = {
    "identity": Operation(lambda image, _: image),
    "invert": Operation(lambda image, _: ImageOps.invert(image)),
    "cutout": Operation(_cutout, 0, 20, whole=True),
    "sharpness": Operation(lambda image, change: ImageEnhance.Sharpness(image).enhance(1 + change), 0, 0.9),
    "autocontrast": Operation(lambda image, _: ImageOps.autocontrast(image)),
    "posterize": Operation(lambda image, bits: ImageOps.posterize(image, int(bits)), 8, 4, whole=True),
    "shear_x": Operation(lambda image, x: _affine(image, (1, x, 0, 0, 1, 0), BICUBIC), 0, 0.3),
    "translate_x": Operation(lambda image, x: _affine(image, (1, 0, x * image.width, 0, 1, 0), NEAREST), 0, 150 / 331),
    "translate_y": Operation(lambda image, y: _affine(image, (1, 0, 0, 0, 1, y * image.height), NEAREST), 0, 150 / 331),
    "shear_y": Operation(lambda image, y: _affine(image, (1, 0, 0, y, 1, 0), BICUBIC), 0, 0.3),
    "rotate": Operation(lambda image, degrees: image.rotate(degrees, NEAREST, fillcolor=FILL), 0, 30),
    "equalize": Operation(lambda image, _: ImageOps.equalize(image)),
    "contrast": Operation(lambda image, change: ImageEnhance.Contrast(image).enhance(1 + change), 0, 0.9),
    "color": Operation(lambda image, change: ImageEnhance.Color(image).enhance(1 + change), 0, 0.9),
    "solarize": Operation(lambda image, threshold: ImageOps.solarize(image, threshold), 256, 0),
    "brightness": Operation(lambda image, change: ImageEnhance.Brightness(image).enhance(1 + change), 0, 0.9),
}
EITHER_WAY = frozenset(
    ("shear_x", "shear_y", "translate_x", "translate_y", "color", "contrast", "brightness", "sharpness")
)
STANDARD = tuple(name for name in OPERATIONS if name not in ("invert", "cutout"))
WIDE = OPERATIONS | {
    "translate_x": Operation(lambda image, x: _affine(image, (1, 0, x, 0, 1, 0), NEAREST), 0, 32),
    "translate_y": Operation(lambda image, y: _affine(image, (1, 0, 0, 0, 1, y), NEAREST), 0, 32),
    "posterize": replace(OPERATIONS["posterize"], high=2),
    "solarize": replace(OPERATIONS["solarize"], low=255),
    "rotate": replace(OPERATIONS["rotate"], high=135),
    **{
        name: replace(OPERATIONS[name], high=0.99)
        for name in ("shear_x", "shear_y", "color", "contrast", "brightness", "sharpness")
    },
}
TABLES = {"standard": OPERATIONS, "wide": WIDE}


# ----------------------------------------------------------------------------------------------------------- policies
@dataclass(frozen=True)
class Policy:
    """A policy of RandAugment: the distribution from which operations are drawn.

    Attributes:
      operations: names of the operations, equally likely.
      levels: levels of the magnitude in 0…`highest`, equally likely.
      count: the number of operations that are drawn per image.
      probability: the probability that a drawn operation is applied.
      signed: names of the operations whose magnitude is negative with probability 1/2.
      ranges: the ranges of the magnitudes, a key of TABLES.
    """

    operations: tuple[str, ...]
    levels: tuple[float, ...]
    highest: int
    count: int
    probability: float
    signed: frozenset[str]
    ranges: str = "standard"


UDA = Policy(
    operations=tuple(name for name in OPERATIONS if name != "identity"),
    levels=tuple(range(1, 10)),
    highest=9,
    count=2,
    probability=0.5,
    signed=EITHER_WAY,
)
TRIVIAL = Policy(
    operations=STANDARD,
    levels=tuple(range(31)),
    highest=30,
    count=1,
    probability=1.0,
    signed=EITHER_WAY | {"rotate"},
    ranges="wide",
)
RANDAUGMENT = Policy(
    operations=STANDARD,
    levels=(9,),
    highest=10,
    count=2,
    probability=1.0,
    signed=EITHER_WAY | {"rotate"},
)
POLICIES = {"none": None, "uda": UDA, "standard": RANDAUGMENT, "trivial": TRIVIAL}  # by augment.randaugment


# ------------------------------------------------------------------------------------------------------------ drawing
class Draw(NamedTuple):
    """An operation that was drawn for an image.

    `magnitude` is signed, in the units of the operation. `at` is the center of `_cutout`, as fractions of height and
    width.
    """

    name: str
    magnitude: float
    at: tuple[float, float]


def sample(policy: Policy, random: Generator) -> list[Draw]:
    """Draw operations for one image, and return the operations that are to be applied, in order."""
    draws = []
    for _ in range(policy.count):
        name = policy.operations[random.integers(len(policy.operations))]
        level = policy.levels[random.integers(len(policy.levels))]
        negative, applied, *at = random.random(4)
        if applied < policy.probability:
            sign = -1 if name in policy.signed and negative < 0.5 else 1
            operation = TABLES[policy.ranges][name]
            draws.append(Draw(name, sign * operation.magnitude(level, policy.highest), tuple(at)))
    return draws


def operate(image: Image.Image, draw: Draw, table: Mapping[str, Operation] = OPERATIONS) -> Image.Image:
    """Apply one drawn operation to an RGB image. `table` maps names to operations."""
    function = table[draw.name].function
    return function(image, draw.magnitude, draw.at) if draw.name == "cutout" else function(image, draw.magnitude)


def apply(image: np.ndarray, random: Generator, policy: Policy) -> np.ndarray:
    """Draw operations and apply them to an image u8[h,w,3]. If no operation is drawn, return the image itself."""
    draws = sample(policy, random)
    if not draws:
        return image
    result = Image.fromarray(image)
    for draw in draws:
        result = operate(result, draw, TABLES[policy.ranges])
    return np.array(result)
