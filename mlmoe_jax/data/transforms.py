"""Transforms of single images on the host, before they are batched.

No function modifies its image. Random transforms draw from a NumPy generator, which alone determines the augmentation
of an image.
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8
from ml_collections import ConfigDict
from numpy.random import Generator
from PIL import Image

Pixels = UInt8[np.ndarray, "_ _ 3"]

# ITU-R 601-2, the weights of Pillow's conversion from RGB to gray.
LUMA = (0.299, 0.587, 0.114)

# The crop of ML-GCN: its sides as fractions of the short side; height and width are at most two entries apart.
CROP_SCALES = (1.0, 0.875, 0.75, 0.66, 0.5)
CROP_DISTORTION = 2
# If the long side of a resized image would exceed this many sides of the output, only the center is resized.
ELONGATED = 50
# A side that differs from the output size by at most this many pixels is set to it, to avoid resampling.
CROP_SNAP = 2
# The position of the crop, (right, down) in quarters of the margin: corners, center, edge midpoints, quarter points.
CROP_PLACES = (
    *((0, 0), (4, 0), (0, 4), (4, 4)),
    (2, 2),
    *((0, 2), (4, 2), (2, 4), (2, 0)),
    *((1, 1), (3, 1), (1, 3), (3, 3)),
)
# The rectangle of random erasing: its share of the area, and its height / width.
ERASED_AREA = (0.02, 0.33)
ERASED_RATIO = (0.3, 3.3)


# ------------------------------------------------------------------------------------------------------------ geometry
def resize_square(image: Pixels | Image.Image, size: int) -> Pixels:
    """Resize an image to `size` × `size` pixels, without keeping its aspect ratio.

    The image is an array u8[h,w,3] or an RGB image of Pillow. The filter is Pillow's antialiased bilinear filter, as in
    training and evaluation of ML-VPT. An image of the final size is returned unchanged.
    """
    return _resize(image, (size, size))


def resize_and_crop(image: Pixels, side: int, size: int, *, clip: bool = False) -> Pixels:
    """Resize an image so that its short side has `side` pixels, and crop its center of `size` × `size` pixels.

    The long side is rounded down, as in torchvision. With `clip`, the filter is bicubic, and half a pixel before the
    crop is rounded down, as in transformers' processor of CLIP. If the long side would exceed ELONGATED · size pixels,
    only the center of the image is resized. The values then differ by rounding. This limits the memory that an
    elongated image needs: a file of 100 bytes could otherwise fill the memory.
    """
    height, width = image.shape[:2]
    resample, whole = (Image.Resampling.BICUBIC, math.floor) if clip else (Image.Resampling.BILINEAR, round)
    scaled = tuple(side * length // min(width, height) for length in (width, height))
    x, y = (whole((length - size) / 2) for length in scaled)
    if max(scaled) <= ELONGATED * size:
        return _resize(image, scaled, resample)[y : y + size, x : x + size]
    across, down = width / scaled[0], height / scaled[1]
    box = (x * across, y * down, min((x + size) * across, width), min((y + size) * down, height))
    return np.asarray(Image.fromarray(image).resize((size, size), resample, box=box))


def resize_and_pad(image: Pixels | Image.Image, size: int, fill: Sequence[float]) -> Pixels:
    """Resize an image so that its long side has `size` pixels, and add a border to `size` × `size` pixels.

    The filter is Pillow's antialiased bilinear filter. The image is in the center, half a pixel to the left and up if
    necessary. `fill` is the color of the border, with values in 0…1.
    """
    width, height = image.size if isinstance(image, Image.Image) else image.shape[1::-1]
    across, down = (max(1, round(size * side / max(width, height))) for side in (width, height))
    x, y = (size - across) // 2, (size - down) // 2
    padded = np.full((size, size, 3), [round(255 * value) for value in fill], np.uint8)
    padded[y : y + down, x : x + across] = _resize(image, (across, down))
    return padded


def evaluated_part(image: Pixels, data_config: ConfigDict) -> Pixels:
    """Return the part of an image that the model sees in evaluation, with its border, at its original resolution."""
    if data_config.resize == "square":
        return image
    if data_config.resize == "pad":
        return resize_and_pad(image, max(image.shape[:2]), data_config.fill)
    fraction = data_config.crop_fraction if data_config.resize == "crop" else 1
    size = round(fraction * min(image.shape[:2]))
    y, x = (round((side - size) / 2) for side in image.shape[:2])
    return image[y : y + size, x : x + size]


def random_resized_crop(
    image: Pixels, random: Generator, size: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> Pixels:
    """Crop a random rectangle and resize it to `size` × `size` pixels (Inception crop, with torchvision's rounding).

    `scale` is the range of the area of the rectangle, as a fraction of the image. `ratio` is the range of width /
    height, whose logarithm is uniform. If ten drawn rectangles do not fit into the image, the crop is the largest
    central rectangle within `ratio`.
    """
    height, width = image.shape[:2]
    for _ in range(10):
        across, down = _draw_sides(height * width, random, scale, ratio)
        if 0 < across <= width and 0 < down <= height:
            y, x = random.integers(height - down + 1), random.integers(width - across + 1)
            break
    else:
        across = min(width, round(height * ratio[1]))
        down = min(height, round(width / ratio[0]))
        y, x = (height - down) // 2, (width - across) // 2
    return _resize(image[y : y + down, x : x + across], (size, size))


def _draw_sides(
    area: int, random: Generator, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int]:
    """Draw sides of a rectangle: a uniform fraction in `scale` of `area`, and a log-uniform ratio first / second."""
    area = area * random.uniform(*scale)
    aspect = math.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1])))
    return round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))


def multi_scale_crop(image: Pixels, random: Generator, size: int) -> Pixels:
    """Crop one of 19 rectangles at one of 13 positions, and resize it to `size` × `size` pixels.

    The crop is the crop of ML-GCN and ADD-GCN, after TSN. The sides of the rectangle are the short side of the image
    times two factors of CROP_SCALES, rounded down. A side close to `size` is set to `size`, but a crop is never larger
    than the image. If it would be larger, the authors' code adds a black border.
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
    x, y = right * ((width - across) // 4), below * ((height - down) // 4)
    return _resize(image[y : y + down, x : x + across], (size, size))


def _resize(
    image: np.ndarray | Image.Image, size: tuple[int, int], resample: Image.Resampling = Image.Resampling.BILINEAR
) -> np.ndarray:
    if isinstance(image, np.ndarray):
        if image.shape[1::-1] == size:
            return image
        image = Image.fromarray(image)
    # Pillow's own `box` would let pixels outside a crop affect its borders; torchvision and the papers crop first.
    return np.array(image.resize(size, resample))


# ----------------------------------------------------------------------------------------- pixels, at unchanged size
# Results are rounded to integer levels. For the hue, Pillow also rounds the coordinates of HSV, as in torchvision.
def flip(image: Pixels, random: Generator) -> Pixels:
    """Mirror an image left to right with probability 1/2."""
    return image[:, ::-1] if random.random() < 0.5 else image


def contrast(image: Pixels, random: Generator, strength: float) -> Pixels:
    """Multiply the differences from the mean of all values of the image by a random factor in 1 ± `strength`."""
    return _between(image.mean(dtype=np.float64), image, random, strength)


def brightness(image: Pixels, random: Generator, strength: float) -> Pixels:
    """Multiply all values of an image by a random factor in 1 ± `strength`."""
    return _between(0.0, image, random, strength)


def saturation(image: Pixels, random: Generator, strength: float) -> Pixels:
    """Multiply the differences from the gray value of each pixel by a random factor in 1 ± `strength`."""
    return _between((image @ np.array(LUMA, np.float32))[..., None], image, random, strength)


def hue(image: Pixels, random: Generator, strength: float) -> Pixels:
    """Rotate all hues by a random fraction of the color circle in ± `strength`, exactly as torchvision's adjust_hue."""
    levels = int(255 * random.uniform(-strength, strength))
    channels = list(Image.fromarray(image).convert("HSV").split())
    rotation = (np.asarray(channels[0], np.int16) + levels).astype(np.uint8)  # modulo 256
    return np.array(Image.merge("HSV", [Image.fromarray(rotation), *channels[1:]]).convert("RGB"))


def cutout(image: Pixels, random: Generator, fraction: float) -> Pixels:
    """Cover one square of an image u8[h,w,3] with one random color. The side of the square is `fraction`·h.

    The center is uniform over the pixels, and the square is clipped at the borders. Both edges are covered, so an
    unclipped square is one pixel larger than its nominal side, as in the authors' code of ASL and ML-VPT.
    """
    height, width = image.shape[:2]
    half = int(fraction * height + 0.5) // 2
    row, column = random.integers((height, width))
    rows = slice(max(0, row - half), row + half + 1)
    columns = slice(max(0, column - half), column + half + 1)
    covered = image.copy()
    covered[rows, columns] = random.integers(256, size=3)
    return covered


def erase(image: Pixels, random: Generator, probability: float) -> Pixels:
    """Replace a random rectangle by random pixels with probability `probability`.

    This is Random Erasing (alg. 1; Zhong et al., AAAI 2020). The area of the rectangle is uniform in ERASED_AREA, as a
    fraction of the image. The logarithm of height / width is uniform in the range ERASED_RATIO, as in torchvision. If
    ten drawn rectangles do not fit into the image, the image is returned unchanged.
    """
    if random.random() >= probability:
        return image
    height, width = image.shape[:2]
    for _ in range(10):
        down, across = _draw_sides(height * width, random, ERASED_AREA, ERASED_RATIO)
        if down < height and across < width:
            y, x = random.integers(height - down + 1), random.integers(width - across + 1)
            erased = image.copy()
            erased[y : y + down, x : x + across] = random.integers(256, size=(down, across, 3))
            return erased
    return image


def _between(origin: np.ndarray | float, image: np.ndarray, random: Generator, strength: float) -> np.ndarray:
    """Return origin + factor·(image − origin), rounded to u8, with one factor in 1 ± `strength` for all pixels."""
    factor = np.float32(random.uniform(1 - strength, 1 + strength))
    origin = np.asarray(origin, np.float32)
    return np.rint(np.clip(origin + factor * (image - origin), 0, 255)).astype(np.uint8)
