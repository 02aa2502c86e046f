import itertools

import numpy as np
import pytest
from helpers.drawn_images import drawing, encoded
from helpers.paths import PARITY
from PIL import Image, ImageDraw

from mlmoe_jax import load_config
from mlmoe_jax.config import default_config
from mlmoe_jax.data import randaugment, transforms
from mlmoe_jax.data.image_reader import ImageReader
from mlmoe_jax.data.images import ArrayImages
from mlmoe_jax.data.transforms import (
    brightness,
    contrast,
    cutout,
    erase,
    evaluated_part,
    flip,
    hue,
    multi_scale_crop,
    random_resized_crop,
    resize_and_crop,
    resize_and_pad,
    saturation,
)
from tools.parity import text_towers as twins

BILINEAR = Image.Resampling.BILINEAR
SIZES = [(90, 140), (140, 90), (100, 100), (64, 301), (37, 23)]


def resized(image: np.ndarray, width: int, height: int, box=None) -> np.ndarray:
    """Return Pillow's resize of the image cropped to `box`."""
    return np.asarray(Image.fromarray(image).crop(box or (0, 0, *image.shape[1::-1])).resize((width, height), BILINEAR))


class Scripted(np.random.Generator):
    """A generator with given numbers: indices in order, and uniform draws at a fixed fraction of their range."""

    def __init__(self, *indices: int, place: float = 0.5):
        super().__init__(np.random.PCG64(0))
        self.indices, self.place, self.limits = list(indices), place, []

    def integers(self, limit):
        self.limits.append(limit)
        return self.indices.pop(0)

    def uniform(self, low, high):
        return low + self.place * (high - low)


def drawn_sides(random, area: int, shares, ratios, limits) -> tuple[int, int]:
    """Draw two sides until both are within `limits`; their area and the logarithm of their ratio are uniform."""
    while True:
        product, ratio = area * random.uniform(*shares), np.exp(random.uniform(*np.log(ratios)))
        sides = round((product * ratio) ** 0.5), round((product / ratio) ** 0.5)
        if sides[0] <= limits[0] and sides[1] <= limits[1]:
            return sides


# ------------------------------------------------------------------------------------------------------------ geometry
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_the_short_side_is_resized_and_the_center_cropped(height, width):
    image = drawing(height, width)
    side = 32
    long = side * max(height, width) // min(height, width)
    shorter = resized(image, *((side, long) if height >= width else (long, side)))
    top, left = (round((length - 28) / 2) for length in shorter.shape[:2])
    np.testing.assert_array_equal(resize_and_crop(image, side, 28), shorter[top : top + 28, left : left + 28])


@pytest.mark.parametrize(("height", "width"), [*SIZES, (1, 900), (900, 1)])
@pytest.mark.parametrize("as_array", [True, False])
def test_the_long_side_is_resized_and_the_rest_filled(height, width, as_array):
    image, fill, size = drawing(height, width), (0.485, 0.5, 1.0), 28
    across, down = (max(1, round(size * side / max(height, width))) for side in (width, height))
    top, left = (size - down) // 2, (size - across) // 2
    found = resize_and_pad(image if as_array else Image.fromarray(image), size, fill)
    inside = np.zeros((size, size), bool)
    inside[top : top + down, left : left + across] = True
    assert (found[~inside] == (124, 128, 255)).all()
    np.testing.assert_array_equal(found[inside], resized(image, across, down).reshape(-1, 3))


def test_a_padded_image_has_the_mean_of_its_backbone_around_it():
    for backbone, given, level in (
        ("clip_vitb16", {}, 123),
        ("dinov2_vits14", {}, 124),
        ("clip_vitb16", {"fill": "1,1,1"}, 255),
    ):
        pairs = {"model.backbone.name": backbone, "data.resize": "pad", "data.image_size": "28"}
        config = load_config(
            "linear_probe:dataset=digits", pairs | {f"data.{key}": value for key, value in given.items()}
        )
        image = np.zeros((10, 40, 3), np.uint8)
        found = ImageReader.from_config(config.data)(ArrayImages(image[None]), 0)
        assert found[0, 0, 0] == level
        assert found[14].max() == 0
        assert evaluated_part(image, config.data).shape == (40, 40, 3)
        assert evaluated_part(image, config.data)[0, 0, 0] == level


@pytest.mark.parametrize(("resize", "kind"), [("clip", "clip"), ("square", "siglip2")])
def test_images_are_those_of_the_processors_of_transformers(resize, kind):
    """Of some, the margin beside the crop is odd. Versions of Pillow differ by up to 3 of 255."""
    data, _ = settings(resize=resize)
    data.image_size = twins.SIDE
    expected = np.load(PARITY / "text_towers.npz")[f"{kind}/images"]
    for picture, image in zip(twins.pictures(), expected, strict=True):
        found = ImageReader.from_config(data)(ArrayImages(picture[None]), 0)
        assert np.abs(found.astype(int) - image).max() <= 3


@pytest.mark.parametrize(("clip", "most"), [(False, 2), (True, 16)])
@pytest.mark.parametrize(("height", "width"), [(3, 1200), (1200, 3), (2, 999)])
def test_of_an_elongated_image_only_the_center_is_resized(height, width, clip, most, monkeypatch):
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    found = resize_and_crop(image, 32, 28, clip=clip).astype(int)
    huge = resize_and_crop(np.full((1, 50_000, 3), 7, np.uint8), 256, 224)  # 3 billion pixels with a side of 256
    np.testing.assert_array_equal(huge, np.full((224, 224, 3), 7))
    monkeypatch.setattr(transforms, "ELONGATED", 10**6)
    assert np.abs(found - resize_and_crop(image, 32, 28, clip=clip)).max() <= most


def test_a_random_crop_is_the_rectangle_of_torchvision():
    image, scale, ratio = drawing(60, 80), (0.5, 1.0), (3 / 4, 4 / 3)
    for seed in range(100):
        random = np.random.default_rng(seed)
        across, down = drawn_sides(random, 60 * 80, scale, ratio, (80, 60))
        y, x = random.integers(61 - down), random.integers(81 - across)
        crop = random_resized_crop(image, np.random.default_rng(seed), 24, scale, ratio)
        np.testing.assert_array_equal(crop, resized(image, 24, 24, (x, y, x + across, y + down)))


@pytest.mark.parametrize(
    ("height", "width", "scale", "box"),
    [
        (6, 100, (1.0, 1.0), (46, 0, 54, 6)),
        (100, 6, (1.0, 1.0), (0, 46, 6, 54)),
        (50, 60, (1.5, 2.0), (0, 0, 60, 50)),
    ],
)
def test_a_random_crop_that_never_fits_is_central(height, width, scale, box):
    image = drawing(height, width)
    crop = random_resized_crop(image, np.random.default_rng(0), 16, scale, (3 / 4, 4 / 3))
    np.testing.assert_array_equal(crop, resized(image, 16, 16, box))


@pytest.mark.parametrize(("height", "width"), [(150, 103), (66, 66)])
def test_multi_scale_crops_have_19_shapes_at_13_positions(height, width):
    image, size = drawing(height, width), 64
    sides = [int(min(height, width) * scale) for scale in (1, 0.875, 0.75, 0.66, 0.5)]
    sides = [64 if abs(side - 64) < 3 else side for side in sides]
    shapes = [(w, h) for i, h in enumerate(sides) for j, w in enumerate(sides) if abs(i - j) <= 2]
    corners = [(0, 0), (4, 0), (0, 4), (4, 4), (2, 2)]
    places = [*corners, (0, 2), (4, 2), (2, 4), (2, 0), (1, 1), (3, 1), (1, 3), (3, 3)]
    assert len(shapes) == 19
    expected = {
        resized(image, size, size, (x, y, x + w, y + h)).tobytes()
        for w, h in shapes
        for x, y in (((width - w) // 4 * right, (height - h) // 4 * down) for right, down in places)
    }
    found = set()
    for indices in itertools.product(range(19), range(13)):
        random = Scripted(*indices)
        found.add(multi_scale_crop(image, random, size).tobytes())
        assert random.limits == [19, 13]
    assert found == expected


def test_a_side_below_the_output_size_has_no_border():
    small = drawing(63, 80)
    np.testing.assert_array_equal(multi_scale_crop(small, Scripted(0, 0), 64), resized(small, 64, 64, (0, 0, 64, 63)))
    assert multi_scale_crop(drawing(1, 3), np.random.default_rng(0), 8).shape == (8, 8, 3)


# -------------------------------------------------------------------------------------------------------------- pixels
def test_a_flip_mirrors_half_of_the_images():
    image, random = drawing(9, 14), np.random.default_rng(0)
    mirrored = 0
    for _ in range(400):
        changed = flip(image, random)
        if not np.array_equal(changed, image):
            np.testing.assert_array_equal(changed, image[:, ::-1])
            mirrored += 1
    assert 170 < mirrored < 230


@pytest.mark.parametrize("place", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_jitter_equals_its_rounded_formula(name, place):
    image = drawing(30, 41)
    values = image.astype(np.float64)
    origin = {
        "brightness": 0.0,
        "contrast": values.mean(),
        "saturation": (values @ [0.299, 0.587, 0.114])[..., None],
    }[name]
    expected = np.clip(origin + (0.4 + 1.2 * place) * (values - origin), 0, 255)
    changed = getattr(transforms, name)(image, Scripted(place=place), 0.6)
    assert changed.dtype == np.uint8
    assert np.abs(changed - expected).max() <= 0.501


@pytest.mark.parametrize("place", [0.0, 0.13, 0.5, 0.7, 1.0])
def test_the_hue_is_turned_by_whole_levels_as_in_torchvision(place):
    """Pillow's own HSV with a table for the first channel, whose levels are modulo 256."""
    image = drawing(30, 41)
    levels = int(255 * (place - 0.5))
    turned, *others = Image.fromarray(image).convert("HSV").split()
    turned = turned.point([(level + levels) % 256 for level in range(256)])
    expected = np.asarray(Image.merge("HSV", [turned, *others]).convert("RGB"))
    np.testing.assert_array_equal(hue(image, Scripted(place=place), 0.5), expected)
    if place == 0.5:
        assert np.abs(expected.astype(int) - image).max() <= 8, "HSV in 8 bits"


def test_random_order_of_the_jitter_is_drawn_per_image():
    names = ("contrast", "brightness", "saturation", "hue")
    changes = dict.fromkeys(names, 0.4)
    read = reader(augmented=True, jitter_order="random", **changes)
    image, orders = drawing(48, 48), set()
    for seed in range(60):
        random = np.random.default_rng(seed)
        order = tuple(random.permutation(4))
        expected = image
        for place in order:
            expected = getattr(transforms, names[place])(expected, random, 0.4)
        np.testing.assert_array_equal(read(image, np.random.default_rng(seed)), expected)
        orders.add(order)
    assert len(orders) > 18, "of 24"


@pytest.mark.parametrize(("side", "fraction"), [(16, 0.5), (15, 0.5), (20, 0.3), (24, 1.0)])
def test_a_cutout_equals_the_rectangle_of_the_authors(side, fraction):
    image = drawing(side, side)
    half, centers = int(fraction * side + 0.5) // 2, []
    for seed in range(200):
        covered = cutout(image, np.random.default_rng(seed), fraction)
        random = np.random.default_rng(seed)
        (row, column), color = random.integers((side, side)), random.integers(256, size=3)
        expected = Image.fromarray(image)
        top, left = max(row - half, 0), max(column - half, 0)
        ImageDraw.Draw(expected).rectangle((left, top, min(column + half, side), min(row + half, side)), tuple(color))
        np.testing.assert_array_equal(covered, np.asarray(expected))
        centers.append((row, column))
    assert {row for row, _ in centers} == {column for _, column in centers} == set(range(side))


def test_erasing_replaces_the_rectangle_of_torchvision_by_noise():
    image = drawing(60, 90)
    for seed in range(100):
        random, expected = np.random.default_rng(seed), image.copy()
        if random.random() < 0.5:
            down, across = drawn_sides(random, 60 * 90, (0.02, 0.33), (0.3, 3.3), (59, 89))
            y, x = random.integers(61 - down), random.integers(91 - across)
            expected[y : y + down, x : x + across] = random.integers(256, size=(down, across, 3))
        np.testing.assert_array_equal(erase(image, np.random.default_rng(seed), 0.5), expected)


# --------------------------------------------------------------------------------------------------------- image reader
def settings(**changes):
    """Return (data, augment) of the default config with `changes` to keys of either section."""
    config = default_config()
    data, augment = config.data, config.augment
    data.image_size = 48
    for name, value in changes.items():
        section = augment if name in augment else data
        section[name] = value
    return data, augment


def reader(*, augmented: bool, **changes):
    """Return a function of an image and a generator, which reads the image."""
    data, augment = settings(**changes)
    one = ImageReader.from_config(data, augment if augmented else None)
    return lambda image, random=None: one(ArrayImages(image[None]), 0, random)


PIXELS = {"flip": True, "contrast": 0.4, "brightness": 0.4, "saturation": 0.4, "hue": 0.2, "cutout": 0.5, "erase": 0.5}
EVERYTHING = {"geometry": "random_resized_crop", "margin": 8, "randaugment": "standard", **PIXELS}


@pytest.mark.parametrize(("augmented", "changes"), [(False, {}), (False, EVERYTHING), (True, {})])
def test_evaluation_resizes_only_and_training_does_no_more_by_default(augmented, changes):
    square, crop = (reader(augmented=augmented, resize=how, **changes) for how in ("square", "crop"))
    for height, width in SIZES:
        image = drawing(height, width)
        np.testing.assert_array_equal(square(image), resized(image, 48, 48))
        np.testing.assert_array_equal(crop(image), resize_and_crop(image, round(48 / 0.875), 48))


def test_transforms_are_applied_in_order():
    changes = {"geometry": "multi_scale_crop", "margin": 16, "randaugment": "uda", **PIXELS}
    read = reader(augmented=True, **changes)
    image = drawing(90, 140)
    for seed in range(5):
        random = np.random.default_rng(seed)
        expected = multi_scale_crop(resized(image, 64, 64), random, 48)
        expected = contrast(flip(expected, random), random, 0.4)
        expected = brightness(expected, random, 0.4)
        expected = hue(saturation(expected, random, 0.4), random, 0.2)
        expected = cutout(expected, random, 0.5)
        expected = randaugment.apply(np.ascontiguousarray(expected), random, randaugment.UDA)
        expected = erase(expected, random, 0.5)
        found = read(image, np.random.default_rng(seed))
        np.testing.assert_array_equal(found, expected)
        assert found.flags.c_contiguous
    expected = random_resized_crop(image, np.random.default_rng(3), 48, (0.2, 0.9), (3 / 4, 4 / 3))
    read = reader(augmented=True, geometry="random_resized_crop", crop_scale=(0.2, 0.9))
    np.testing.assert_array_equal(read(image, np.random.default_rng(3)), expected)


@pytest.mark.parametrize(
    ("changes", "training", "side"),
    [
        ({}, True, 48),
        ({"resize": "crop"}, True, 55),
        ({"resize": "crop", "crop_fraction": 0.5}, False, 96),
        ({"resize": "clip", "crop_fraction": 0.5}, False, 48),
        ({"resize": "pad"}, False, 48),
        ({"geometry": "random_resized_crop"}, True, 0),
        ({"geometry": "random_resized_crop"}, False, 48),
        ({"geometry": "multi_scale_crop"}, True, 0),
        ({"geometry": "multi_scale_crop", "margin": 16}, True, 64),
        ({"margin": 16}, True, 48),
        ({"randaugment": "uda", **PIXELS}, True, 48),
    ],
)
def test_reduced_decoding_keeps_the_side_that_the_resize_needs(changes, training, side):
    data, augment = settings(**changes)
    assert ImageReader.from_config(data, augment if training else None).decoding.at_least == 0, "it is off by default"
    data.reduced_decoding = True
    assert ImageReader.from_config(data, augment if training else None).decoding.at_least == side


def test_the_bytes_of_a_file_give_the_result_of_its_array():
    array, one = drawing(48, 48), ImageReader.from_config(settings(resize="crop")[0])
    image, has_frames = one.encoded(encoded(array))
    np.testing.assert_array_equal(image, one(ArrayImages(array[None]), 0))
    assert not has_frames
