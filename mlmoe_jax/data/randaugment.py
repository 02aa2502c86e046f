"""RandAugment: its operations, its two policies, and the host's version, which uses Pillow.

An image gets `count` operations in sequence, each drawn independently and uniformly from the policy's list. The ranges
are given below, from the lowest level to the highest.

    shear_x shear_y               0 … 0.3 of the other coordinate; bicubic
    translate_x translate_y       0 … 150/331 of the side; nearest pixel
    rotate                        0 … 30 degrees counter-clockwise around the center; nearest pixel
    color contrast brightness sharpness    factor 1 ± (0 … 0.9)
    posterize                     8 … 4 bits kept, rounded
    solarize                      values of at least 256 … 0 are inverted
    cutout                        a square of 0 … 20 pixels, rounded, then made even, in one fixed color
    invert autocontrast equalize identity  no magnitude

Areas uncovered by a geometric operation are filled with gray 128.

`uda` is the variant of ASL, Q2L and ML-VPT: two of 15 operations, levels 1, 2 … 9 of 9 equally often, each applied
with probability 1/2 (so that there are 135 × 135 pairs). Rotation has one direction only, as in their code.
`standard` is Cubuk et al. 2020, as in torchvision and timm: N of 14 operations (no invert and no cutout, but identity),
always applied, at level M of 10 without deviation, with rotation in both directions. These libraries differ in
interpolation and fill; here both are those of `uda`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

FILL = (128, 128, 128)
CUTOUT_FILL = (125, 122, 113)


# --------------------------------------------------------------------------------------------------------- operations
@dataclass(frozen=True)
class Operation:
    """A function of an image and a magnitude, and the magnitude's range from the lowest level to the highest.

    whole: the magnitude is rounded to an integer.
    """

    function: Callable[..., Image.Image]
    low: float = 0.0
    high: float = 0.0
    whole: bool = False

    def magnitude(self, level: float, highest: int) -> float:
        """Return the magnitude, without sign, at `level` of 0…`highest`."""
        # Equal to the last bit to numpy.linspace, with which the published magnitudes are computed.
        value = self.high if level == highest else self.low + level * ((self.high - self.low) / highest)
        return float(round(value)) if self.whole else float(value)


def _affine(image: Image.Image, matrix: tuple[float, ...], resample: Image.Resampling) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample, fillcolor=FILL)


def _shear_x(image: Image.Image, amount: float) -> Image.Image:
    return _affine(image, (1, amount, 0, 0, 1, 0), Image.Resampling.BICUBIC)


def _shear_y(image: Image.Image, amount: float) -> Image.Image:
    return _affine(image, (1, 0, 0, amount, 1, 0), Image.Resampling.BICUBIC)


def _translate_x(image: Image.Image, fraction: float) -> Image.Image:
    return _affine(image, (1, 0, fraction * image.width, 0, 1, 0), Image.Resampling.NEAREST)


def _translate_y(image: Image.Image, fraction: float) -> Image.Image:
    return _affine(image, (1, 0, 0, 0, 1, fraction * image.height), Image.Resampling.NEAREST)


def _rotate(image: Image.Image, degrees: float) -> Image.Image:
    return image.rotate(degrees, Image.Resampling.NEAREST, fillcolor=FILL)


def _color(image: Image.Image, change: float) -> Image.Image:
    return ImageEnhance.Color(image).enhance(1 + change)


def _contrast(image: Image.Image, change: float) -> Image.Image:
    return ImageEnhance.Contrast(image).enhance(1 + change)


def _brightness(image: Image.Image, change: float) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(1 + change)


def _sharpness(image: Image.Image, change: float) -> Image.Image:
    return ImageEnhance.Sharpness(image).enhance(1 + change)


def _posterize(image: Image.Image, bits: float) -> Image.Image:
    return ImageOps.posterize(image, int(bits))


def _solarize(image: Image.Image, threshold: float) -> Image.Image:
    return ImageOps.solarize(image, threshold)


def _autocontrast(image: Image.Image, _: float) -> Image.Image:
    return ImageOps.autocontrast(image)


def _equalize(image: Image.Image, _: float) -> Image.Image:
    return ImageOps.equalize(image)


def _invert(image: Image.Image, _: float) -> Image.Image:
    return ImageOps.invert(image)


def _identity(image: Image.Image, _: float) -> Image.Image:
    return image


def _cutout(image: Image.Image, side: float, at: tuple[float, float]) -> Image.Image:
    """Cover the half-open square of `side` pixels around the pixel at fractions `at` of height and width."""
    half = int(side) // 2
    row, column = int(at[0] * image.height), int(at[1] * image.width)
    box = (max(0, column - half), max(0, row - half), min(image.width, column + half), min(image.height, row + half))
    covered = image.copy()
    covered.paste(CUTOUT_FILL, box)
    return covered


OPERATIONS = {
    "identity": Operation(_identity),
    "invert": Operation(_invert),
    "cutout": Operation(_cutout, 0, 20, whole=True),
    "sharpness": Operation(_sharpness, 0, 0.9),
    "autocontrast": Operation(_autocontrast),
    "posterize": Operation(_posterize, 8, 4, whole=True),
    "shear_x": Operation(_shear_x, 0, 0.3),
    "translate_x": Operation(_translate_x, 0, 150 / 331),
    "translate_y": Operation(_translate_y, 0, 150 / 331),
    "shear_y": Operation(_shear_y, 0, 0.3),
    "rotate": Operation(_rotate, 0, 30),
    "equalize": Operation(_equalize),
    "contrast": Operation(_contrast, 0, 0.9),
    "color": Operation(_color, 0, 0.9),
    "solarize": Operation(_solarize, 256, 0),
    "brightness": Operation(_brightness, 0, 0.9),
}
EITHER_WAY = frozenset(
    ("shear_x", "shear_y", "translate_x", "translate_y", "color", "contrast", "brightness", "sharpness")
)


# ----------------------------------------------------------------------------------------------------------- policies
@dataclass(frozen=True)
class Policy:
    """The distribution of operations; see the module's docstring.

    levels: of 0…`highest`, equally likely. probability: that a drawn operation is applied. signed: the operations
    whose magnitude is negative with probability 1/2.
    """

    operations: tuple[str, ...]
    levels: tuple[float, ...]
    highest: int
    count: int
    probability: float
    signed: frozenset[str]


UDA = Policy(
    operations=tuple(name for name in OPERATIONS if name != "identity"),
    levels=tuple(range(1, 10)),
    highest=9,
    count=2,
    probability=0.5,
    signed=EITHER_WAY,
)


def standard(count: int, magnitude: float) -> Policy:
    """Return the policy of Cubuk et al.: `count` operations at `magnitude` of 10."""
    return Policy(
        operations=tuple(name for name in OPERATIONS if name not in ("invert", "cutout")),
        levels=(magnitude,),
        highest=10,
        count=count,
        probability=1.0,
        signed=EITHER_WAY | {"rotate"},
    )


def make_policy(augment) -> Policy | None:
    """Return the policy of `config.augment`, None for `none`."""
    if augment.randaugment == "standard":
        return standard(augment.randaugment_ops, augment.randaugment_magnitude)
    return {"none": None, "uda": UDA}[augment.randaugment]


# ------------------------------------------------------------------------------------------------------------ drawing
class Drawn(NamedTuple):
    """One operation to apply: signed magnitude in its own units, and position `at` as fractions of height and width."""

    name: str
    magnitude: float
    at: tuple[float, float]


def sample(policy: Policy, random: np.random.Generator) -> list[Drawn]:
    """Draw the operations for one image, in order; drawn operations that are not applied are left out."""
    drawn = []
    for _ in range(policy.count):
        name = policy.operations[random.integers(len(policy.operations))]
        level = policy.levels[random.integers(len(policy.levels))]
        negative, applied, *at = random.random(4)
        if applied < policy.probability:
            sign = -1 if name in policy.signed and negative < 0.5 else 1
            drawn.append(Drawn(name, sign * OPERATIONS[name].magnitude(level, policy.highest), tuple(at)))
    return drawn


def operate(image: Image.Image, drawn: Drawn) -> Image.Image:
    """Apply one drawn operation to an RGB image."""
    function = OPERATIONS[drawn.name].function
    return function(image, drawn.magnitude, drawn.at) if drawn.name == "cutout" else function(image, drawn.magnitude)


def apply(image: np.ndarray, random: np.random.Generator, policy: Policy) -> np.ndarray:
    """Draw operations and apply them to u8[h,w,3]; an image without any is returned unchanged."""
    operations = sample(policy, random)
    if not operations:
        return image
    result = Image.fromarray(image)
    for drawn in operations:
        result = operate(result, drawn)
    return np.array(result)
