"""What happens to a picture on the host, before it is part of a batch.

Everything here takes u8[h,w,3] and leaves it untouched; what is random draws from a NumPy generator, so that a
picture's augmentation is decided by that generator alone.
"""

import math
from dataclasses import dataclass

import numpy as np
from ml_collections import ConfigDict
from PIL import Image

from mlmoe_jax.data import randaugment
from mlmoe_jax.data.randaugment import Policy

# ITU-R 601-2, as Pillow converts RGB to grey.
LUMA = (0.299, 0.587, 0.114)

# ML-GCN's crop: the sides as fractions of the short side; height and width lie at most two places apart here.
CROP_SCALES = (1.0, 0.875, 0.75, 0.66, 0.5)
CROP_DISTORTION = 2
# A side this near to the wanted one, in pixels, is taken as the wanted one, which then needs no resampling.
CROP_SNAP = 2
# Where the crop lies, (right, down) in quarters of the free room: corners, centre, edge middles, quarter points.
CROP_PLACES = (
    *((0, 0), (4, 0), (0, 4), (4, 4)),
    (2, 2),
    *((0, 2), (4, 2), (2, 4), (2, 0)),
    *((1, 1), (3, 1), (1, 3), (3, 3)),
)


# ----------------------------------------------------------------------------------------------------------- geometry
def resize_square(image: np.ndarray | Image.Image, size: int) -> np.ndarray:
    """Resize u8[h,w,3], or Pillow's RGB picture, to u8[size,size,3] whatever its aspect.

    The filter is Pillow's antialiased bilinear one.

    ML-VPT's code does this in training and in evaluation. A picture of that size already is returned as it is.
    """
    return _resize(image, (size, size))


def resize_short_side(image: np.ndarray, side: int) -> np.ndarray:
    """Resize u8[h,w,3] so that its short side has `side` pixels; the long side is rounded down, as torchvision does."""
    height, width = image.shape[:2]
    if width <= height:
        return _resize(image, (side, side * height // width))
    return _resize(image, (side * width // height, side))


def centre_crop(image: np.ndarray, size: int) -> np.ndarray:
    """Cut u8[size,size,3] from the middle of u8[h,w,3], whose sides are at least `size`."""
    top, left = (round((side - size) / 2) for side in image.shape[:2])
    return image[top : top + size, left : left + size]


def random_resized_crop(
    image: np.ndarray,
    random: np.random.Generator,
    size: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> np.ndarray:
    """Cut a random rectangle from u8[h,w,3] and resize it to u8[size,size,3].

    scale: its share of the area. ratio: its width / height, uniform in the logarithm. After ten draws that do not fit
    it is the largest central rectangle within `ratio`. (Inception's crop, with torchvision's rounding.)
    """
    height, width = image.shape[:2]
    for _ in range(10):
        area = height * width * random.uniform(*scale)
        aspect = math.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1])))
        across, down = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < across <= width and 0 < down <= height:
            top, left = random.integers(height - down + 1), random.integers(width - across + 1)
            break
    else:
        across = min(width, round(height * ratio[1]))
        down = min(height, round(width / ratio[0]))
        top, left = (height - down) // 2, (width - across) // 2
    return _resize(image[top : top + down, left : left + across], (size, size))


def multi_scale_crop(image: np.ndarray, random: np.random.Generator, size: int) -> np.ndarray:
    """Cut one of 19 rectangles at one of 13 places from u8[h,w,3] and resize it to u8[size,size,3].

    The sides are two of CROP_SCALES times the short side, rounded down (ML-GCN, ADD-GCN, after TSN). Snapping never
    makes the crop larger than the picture here, where the authors' code would add a black border.
    """
    height, width = image.shape[:2]
    sides = [max(1, int(min(height, width) * scale)) for scale in CROP_SCALES]
    sides = [size if abs(side - size) <= CROP_SNAP else side for side in sides]
    shapes = [
        (min(across, width), min(down, height))
        for i, down in enumerate(sides)
        for j, across in enumerate(sides)
        if abs(i - j) <= CROP_DISTORTION
    ]
    across, down = shapes[random.integers(len(shapes))]
    right, below = CROP_PLACES[random.integers(len(CROP_PLACES))]
    left, top = right * ((width - across) // 4), below * ((height - down) // 4)
    return _resize(image[top : top + down, left : left + across], (size, size))


def _resize(image: np.ndarray | Image.Image, size: tuple[int, int]) -> np.ndarray:
    """Resize a picture to `size` (width, height)."""
    if isinstance(image, np.ndarray):
        if image.shape[1::-1] == size:
            return image
        image = Image.fromarray(image)
    # Pillow's own `box` would let pixels outside a crop into its borders; torchvision and the papers crop first.
    return np.array(image.resize(size, Image.Resampling.BILINEAR))


# ---------------------------------------------------------------------------------------- pixels; the size is the same
# The same definitions as on the device (mlmoe_jax.data.augment), with the result rounded to whole grey levels.
def flip(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Mirror u8[h,w,3] left to right, every second time."""
    return image[:, ::-1] if random.random() < 0.5 else image


def shift(image: np.ndarray, random: np.random.Generator, fraction: float) -> np.ndarray:
    """Translate u8[h,w,3] by whole pixels, up to `fraction` of each side either way; borders are repeated."""
    height, width = image.shape[:2]
    down, right = np.rint(random.uniform(-1, 1, 2) * (fraction * height, fraction * width)).astype(int)
    rows = np.clip(np.arange(height) - down, 0, height - 1)
    columns = np.clip(np.arange(width) - right, 0, width - 1)
    return image[rows][:, columns]


def contrast(image: np.ndarray, random: np.random.Generator, strength: float) -> np.ndarray:
    """Scale u8[h,w,3] about the mean of all its values by a factor from 1 ± `strength`."""
    return _between(image.mean(dtype=np.float64), image, random, strength)


def brightness(image: np.ndarray, random: np.random.Generator, strength: float) -> np.ndarray:
    """Multiply u8[h,w,3] by a factor from 1 ± `strength`."""
    return _between(0.0, image, random, strength)


def saturation(image: np.ndarray, random: np.random.Generator, strength: float) -> np.ndarray:
    """Scale u8[h,w,3] about each pixel's grey by a factor from 1 ± `strength`."""
    return _between((image @ np.array(LUMA, np.float32))[..., None], image, random, strength)


def cutout(image: np.ndarray, random: np.random.Generator, fraction: float) -> np.ndarray:
    """Cover one square of u8[h,w,3], of side `fraction`·h, with one random colour.

    The centre is uniform over the pixels and the square is clipped at the borders; both edges are covered, which makes
    an unclipped square one pixel larger than its nominal side, as in the authors' code of ASL and ML-VPT.
    """
    height, width = image.shape[:2]
    half = cutout_reach(fraction, height)
    row, column = random.integers((height, width))
    rows = slice(max(0, row - half), row + half + 1)
    columns = slice(max(0, column - half), column + half + 1)
    covered = image.copy()
    covered[rows, columns] = random.integers(256, size=3)
    return covered


def cutout_reach(fraction: float, height: int) -> int:
    """Return how many pixels a cutout of nominal side `fraction`·`height` reaches from its centre each way."""
    return int(fraction * height + 0.5) // 2


def _between(origin: np.ndarray | float, image: np.ndarray, random: np.random.Generator, strength: float) -> np.ndarray:
    """Return origin + factor·(image − origin) in whole levels, with one factor from 1 ± `strength`."""
    factor = np.float32(random.uniform(1 - strength, 1 + strength))
    origin = np.asarray(origin, np.float32)
    return np.rint(np.clip(origin + factor * (image - origin), 0, 255)).astype(np.uint8)


# ------------------------------------------------------------------------------------------------------ the whole way
@dataclass(frozen=True)
class Geometry:
    """From an image of any size to one of S × S pixels: `image_size` and the keys under `config.data` and `.augment`.

    fit: square | crop | random_resized_crop | multi_scale_crop.
    """

    image_size: int
    fit: str
    crop_fraction: float
    crop_scale: tuple[float, float] = (1.0, 1.0)
    crop_ratio: tuple[float, float] = (1.0, 1.0)
    margin: int = 0

    def __call__(self, image: np.ndarray | Image.Image, random: np.random.Generator | None) -> np.ndarray:
        """Return u8[S,S,3] of u8[h,w,3] or of Pillow's RGB image."""
        if self.fit == "square":
            return resize_square(image, self.image_size)
        image = np.asarray(image)
        if self.fit == "crop":
            return centre_crop(resize_short_side(image, self.short_side), self.image_size)
        if self.fit == "random_resized_crop":
            return random_resized_crop(image, random, self.image_size, self.crop_scale, self.crop_ratio)
        if self.margin:
            image = resize_square(image, self.image_size + self.margin)
        return multi_scale_crop(image, random, self.image_size)

    @property
    def short_side(self) -> int:
        """The short side in pixels before the centre crop."""
        return round(self.image_size / self.crop_fraction)


@dataclass(frozen=True)
class PixelTransforms:
    """What changes pixels and no size, with its strength from `config.augment`. policy: of RandAugment, or None."""

    flip: bool = False
    shift: float = 0.0
    contrast: float = 0.0
    brightness: float = 0.0
    saturation: float = 0.0
    cutout: float = 0.0
    policy: Policy | None = None

    def __call__(self, image: np.ndarray, random: np.random.Generator | None) -> np.ndarray:
        """Return u8[h,w,3] of u8[h,w,3]."""
        if self.flip:
            image = flip(image, random)
        for transform, strength in (
            (shift, self.shift),
            (contrast, self.contrast),
            (brightness, self.brightness),
            (saturation, self.saturation),
            (cutout, self.cutout),
        ):
            if strength:
                image = transform(image, random, strength)
        return randaugment.apply(image, random, self.policy) if self.policy else image


@dataclass(frozen=True)
class HostTransform:
    """From a decoded image to the one in the batch; picklable, for worker processes."""

    geometry: Geometry
    pixels: PixelTransforms = PixelTransforms()

    def __call__(self, image: np.ndarray | Image.Image, random: np.random.Generator | None = None) -> np.ndarray:
        """Return u8[S,S,3] of u8[h,w,3] or of Pillow's RGB image; in evaluation no generator is needed."""
        return np.ascontiguousarray(self.pixels(self.geometry(image, random), random))


def make_host_transform(data_config: ConfigDict, augment: ConfigDict | None, *, training: bool) -> HostTransform:
    """Build the host's part from `config.data` and `config.augment`; in evaluation that is `data.resize` alone.

    With `augment.where = device` only the geometry is the host's, and the rest happens in `prepare.prepare`. `augment`
    is read in training only. Raises UserError for a RandAugment that is not known.
    """
    size, fraction = data_config.image_size, data_config.crop_fraction
    if not training:
        return HostTransform(Geometry(size, data_config.resize, fraction))
    if augment.geometry == "none":
        geometry = Geometry(size, data_config.resize, fraction)
    else:
        scale, ratio = tuple(augment.crop_scale), tuple(augment.crop_ratio)
        geometry = Geometry(size, augment.geometry, fraction, scale, ratio, augment.margin)
    if augment.where == "device":
        return HostTransform(geometry)
    strengths = (augment.flip, augment.shift, augment.contrast, augment.brightness, augment.saturation, augment.cutout)
    return HostTransform(geometry, PixelTransforms(*strengths, randaugment.make_policy(augment)))


def smallest_useful_side(data_config: ConfigDict, augment: ConfigDict | None, *, training: bool) -> int:
    """Return how small, in pixels of the short side, an image may be decoded without the resize enlarging anything.

    0: only the full size will do, since a crop of unknown size is cut from the decoded image.
    """
    geometry = make_host_transform(data_config, augment, training=training).geometry
    if geometry.fit == "multi_scale_crop" and geometry.margin:
        return geometry.image_size + geometry.margin
    return {"square": geometry.image_size, "crop": geometry.short_side}.get(geometry.fit, 0)
