from collections import Counter

import numpy as np
import pytest
from helpers.drawn_images import drawing
from PIL import Image, ImageEnhance, ImageOps

from mlmoe_jax.config.table import KEYS
from mlmoe_jax.data.randaugment import (
    EITHER_WAY,
    OPERATIONS,
    POLICIES,
    RANDAUGMENT,
    TRIVIAL,
    UDA,
    WIDE,
    Draw,
    Policy,
    apply,
    operate,
    sample,
)

AFFINE, BICUBIC = Image.Transform.AFFINE, Image.Resampling.BICUBIC
GRAY = (128, 128, 128)

# The published magnitudes, index 0 … 9, and definitions in terms of Pillow; `m` includes the sign.
MAGNITUDES = {
    **dict.fromkeys(("shear_x", "shear_y"), np.linspace(0, 0.3, 10)),
    **dict.fromkeys(("translate_x", "translate_y"), np.linspace(0, 150 / 331, 10)),
    "rotate": np.linspace(0, 30, 10),
    **dict.fromkeys(("color", "contrast", "sharpness", "brightness"), np.linspace(0, 0.9, 10)),
    "posterize": [8, 8, 7, 7, 6, 6, 5, 5, 4, 4],
    "solarize": np.linspace(256, 0, 10),
    "cutout": [0, 2, 4, 7, 9, 11, 13, 16, 18, 20],
    **dict.fromkeys(("invert", "autocontrast", "equalize", "identity"), [0] * 10),
}


def rotated_over_gray(image, degrees):
    turned = image.convert("RGBA").rotate(degrees)
    return Image.composite(turned, Image.new("RGBA", image.size, (128,) * 4), turned).convert("RGB")


DEFINITIONS = {
    "shear_x": lambda im, m: im.transform(im.size, AFFINE, (1, m, 0, 0, 1, 0), BICUBIC, fillcolor=GRAY),
    "shear_y": lambda im, m: im.transform(im.size, AFFINE, (1, 0, 0, m, 1, 0), BICUBIC, fillcolor=GRAY),
    "translate_x": lambda im, m: im.transform(im.size, AFFINE, (1, 0, m * im.size[0], 0, 1, 0), fillcolor=GRAY),
    "translate_y": lambda im, m: im.transform(im.size, AFFINE, (1, 0, 0, 0, 1, m * im.size[1]), fillcolor=GRAY),
    "rotate": rotated_over_gray,
    "color": lambda im, m: ImageEnhance.Color(im).enhance(1 + m),
    "contrast": lambda im, m: ImageEnhance.Contrast(im).enhance(1 + m),
    "sharpness": lambda im, m: ImageEnhance.Sharpness(im).enhance(1 + m),
    "brightness": lambda im, m: ImageEnhance.Brightness(im).enhance(1 + m),
    "posterize": lambda im, m: ImageOps.posterize(im, int(m)),
    "solarize": lambda im, m: ImageOps.solarize(im, m),
    "invert": lambda im, m: ImageOps.invert(im),
    "autocontrast": lambda im, m: ImageOps.autocontrast(im),
    "equalize": lambda im, m: ImageOps.equalize(im),
    "identity": lambda im, m: im,
}


# --------------------------------------------------------------------------------------------------------- operations
def test_the_magnitudes_are_the_published_ones():
    assert set(OPERATIONS) == set(MAGNITUDES)
    for name, published in MAGNITUDES.items():
        ours = [OPERATIONS[name].magnitude(index, 9) for index in range(10)]
        np.testing.assert_array_equal(ours, published, err_msg=name)


def check_definition(name: str, image: np.ndarray):
    before = Image.fromarray(image)
    for level in range(10):
        for sign in (1, -1) if name in EITHER_WAY | {"rotate"} else (1,):
            expected = DEFINITIONS[name](before, sign * MAGNITUDES[name][level])
            ours = operate(before, Draw(name, sign * OPERATIONS[name].magnitude(level, 9), (0.5, 0.5)))
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(expected), err_msg=f"{name} {sign * level}")
    np.testing.assert_array_equal(np.asarray(before), image, err_msg="the input has changed")


@pytest.mark.parametrize("name", DEFINITIONS)
def test_an_operation_is_its_pillow_definition(name):
    check_definition(name, drawing(40, 53))
    check_definition(name, np.full((9, 7, 3), (0, 128, 255), np.uint8))


def test_cutout_covers_a_half_open_square_clipped_at_the_borders():
    image = drawing(12, 17)
    for side in (0, 2, 7, 20):
        for row in range(12):
            for column in range(17):
                at = ((row + 0.5) / 12, (column + 0.5) / 17)
                covered = np.asarray(operate(Image.fromarray(image), Draw("cutout", float(side), at)))
                half = side // 2
                expected = image.copy()
                expected[max(row - half, 0) : row + half, max(column - half, 0) : column + half] = (125, 122, 113)
                np.testing.assert_array_equal(covered, expected)


# ----------------------------------------------------------------------------------------------------------- policies
def test_the_policies():
    assert set(POLICIES) == set(KEYS["augment.randaugment"].choices)
    assert len(UDA.operations) == len(set(UDA.operations)) == 15
    assert set(UDA.operations) == set(OPERATIONS) - {"identity"}
    assert len(RANDAUGMENT.operations) == len(set(RANDAUGMENT.operations)) == 14
    assert set(RANDAUGMENT.operations) == set(OPERATIONS) - {"invert", "cutout"}


# ------------------------------------------------------------------------------------------------------------ drawing
def draws(policy: Policy, count: int, seed: int = 0) -> list[list[Draw]]:
    random = np.random.default_rng(seed)
    return [sample(policy, random) for _ in range(count)]


def even(counts, of: int) -> bool:
    """Return whether `of` kinds are equally frequent: chi-square within six deviations of its mean."""
    counts = np.array(list(counts))
    if len(counts) != of:
        return False
    expected = counts.sum() / of
    return ((counts - expected) ** 2 / expected).sum() < of - 1 + 6 * np.sqrt(2 * (of - 1))


def test_uda_draws_pairs_of_135_each_applied_half_the_time():
    images = draws(UDA, 20_000)
    applied = Counter(map(len, images))
    for number, share in enumerate((0.25, 0.5, 0.25)):
        assert abs(applied[number] / len(images) - share) < 0.015
    every = [drawn for image in images for drawn in image]
    assert even(Counter(drawn.name for drawn in every).values(), 15)
    pairs = Counter((first.name, second.name) for first, second in (image for image in images if len(image) == 2))
    assert even(pairs.values(), 225), "the second is independent of the first"
    for name in UDA.operations:
        found = [drawn.magnitude for drawn in every if drawn.name == name]
        allowed = np.unique(np.round(np.abs(MAGNITUDES[name][1:]), 9))
        assert set(np.unique(np.round(np.abs(found), 9))) == set(allowed), "all levels except 0"
        negative = np.mean(np.sign(found) < 0)
        assert abs(negative - 0.5) < 0.05 if name in EITHER_WAY else negative == 0, name
    levels = Counter(round(abs(drawn.magnitude), 9) for drawn in every if drawn.name == "rotate")
    assert even(levels.values(), 9)
    at = np.array([drawn.at for drawn in every])
    assert 0 <= at.min() < 0.001
    assert 0.999 < at.max() < 1
    assert abs(np.corrcoef(at.T)[0, 1]) < 0.02


def test_standard_applies_the_given_number_of_operations_at_one_level():
    images = draws(RANDAUGMENT, 9000)
    assert set(map(len, images)) == {2}
    every = [drawn for image in images for drawn in image]
    assert even(Counter(drawn.name for drawn in every).values(), 14)
    turns = [drawn.magnitude for drawn in every if drawn.name == "rotate"]
    np.testing.assert_allclose(np.abs(turns), 27)
    assert abs(np.mean(np.sign(turns))) < 0.1, "both directions"


def test_trivial_applies_one_operation_at_any_of_31_levels():
    images = draws(TRIVIAL, 8000)
    assert set(map(len, images)) == {1}
    every = [image[0] for image in images]
    assert even(Counter(drawn.name for drawn in every).values(), 14)
    # the ranges of torchvision.transforms.TrivialAugmentWide
    largest = {"rotate": 135, "shear_x": 0.99, "translate_y": 32, "color": 0.99, "sharpness": 0.99, "posterize": 8}
    for name, magnitude in largest.items():
        assert max(abs(drawn.magnitude) for drawn in every if drawn.name == name) == pytest.approx(magnitude), name
    assert {drawn.magnitude for drawn in every if drawn.name == "posterize"} == {2, 3, 4, 5, 6, 7, 8}
    assert {drawn.magnitude for drawn in every if drawn.name == "solarize"} == set(np.linspace(255, 0, 31))
    rotations = Counter(round(abs(drawn.magnitude), 6) for drawn in every if drawn.name == "rotate")
    assert even(rotations.values(), 31)


def test_wide_translations_are_pixels():
    image = drawing(40, 90)
    shifted = np.asarray(operate(Image.fromarray(image), Draw("translate_x", 32.0, (0, 0)), WIDE))
    np.testing.assert_array_equal(shifted[:, :58], image[:, 32:])


@pytest.mark.parametrize("policy", [UDA, RANDAUGMENT], ids=["uda", "standard"])
def test_an_image_gets_the_drawn_operations_in_order(policy):
    image = drawing(40, 53)
    changed = 0
    for seed in range(60):
        augmented = apply(image, np.random.default_rng(seed), policy)
        assert augmented.dtype == np.uint8
        assert augmented.shape == image.shape
        np.testing.assert_array_equal(apply(image, np.random.default_rng(seed), policy), augmented)
        expected = Image.fromarray(image)
        for drawn in sample(policy, np.random.default_rng(seed)):
            expected = operate(expected, drawn)
        np.testing.assert_array_equal(augmented, np.asarray(expected))
        changed += not np.array_equal(augmented, image)
    assert changed > 35
