import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from mlmoe_jax.config import default_config
from mlmoe_jax.data.augment import augment
from mlmoe_jax.data.device_randaugment import FUNCTIONS, NAMES, Draw, operate, randaugment, sample
from mlmoe_jax.data.randaugment import EITHER_WAY, OPERATIONS, UDA, Drawn, standard
from mlmoe_jax.data.randaugment import operate as host_operate

H, W = 60, 83
LEVELS = [sign * index for index in range(1, 10) for sign in (1, -1)]
KEY = jax.random.key(0)
AFFINE, GRAY = Image.Transform.AFFINE, (128, 128, 128)

compiled = jax.jit(lambda image, draw: operate(image, jax.tree.map(lambda drawn: drawn[None], draw)))
drawn_by = jax.jit(sample, static_argnums=(1, 2))


def affine(image, matrix, resample=Image.Resampling.NEAREST):
    return image.transform(image.size, AFFINE, matrix, resample, fillcolor=GRAY)


PILLOW = {
    "identity": lambda im, m: im,
    "shear_x": lambda im, m: affine(im, (1, m, 0, 0, 1, 0), Image.Resampling.BICUBIC),
    "shear_y": lambda im, m: affine(im, (1, 0, 0, m, 1, 0), Image.Resampling.BICUBIC),
    "translate_x": lambda im, m: affine(im, (1, 0, m * im.width, 0, 1, 0)),
    "translate_y": lambda im, m: affine(im, (1, 0, 0, 0, 1, m * im.height)),
    "rotate": lambda im, m: im.rotate(m, fillcolor=GRAY),
    "color": lambda im, m: ImageEnhance.Color(im).enhance(1 + m),
    "contrast": lambda im, m: ImageEnhance.Contrast(im).enhance(1 + m),
    "sharpness": lambda im, m: ImageEnhance.Sharpness(im).enhance(1 + m),
    "brightness": lambda im, m: ImageEnhance.Brightness(im).enhance(1 + m),
    "posterize": lambda im, m: ImageOps.posterize(im, int(m)),
    "solarize": lambda im, m: ImageOps.solarize(im, m),
    "invert": lambda im, m: ImageOps.invert(im),
    "autocontrast": lambda im, m: ImageOps.autocontrast(im),
    "equalize": lambda im, m: ImageOps.equalize(im),
}
# Smallest share of values that equal Pillow's, and of those that differ by at most one level. The others differ in the
# last bit of a product before it is truncated. A brightness of 1/10 is the worst case, with products near integers at
# every tenth value. Autocontrast is exact here, while Pillow's quotients are rounded below integers. If the source of
# a shear or rotation is exactly on the border, f32 may put it on the other side.
AGREEMENT = {
    **dict.fromkeys(("identity", "invert", "posterize", "solarize", "equalize", "translate_x", "translate_y"), (1, 1)),
    **dict.fromkeys(("color", "sharpness"), (0.995, 1)),
    "contrast": (0.99, 1),
    "autocontrast": (0.98, 1),
    "brightness": (0.96, 1),
    "rotate": (0.9999, 0.9999),
    "shear_x": (0.99, 0.9999),
    "shear_y": (0.99, 0.9999),
}


def magnitude(name: str, level: int) -> float:
    sign = -1 if level < 0 and name in EITHER_WAY | {"rotate"} else 1
    return sign * OPERATIONS[name].magnitude(abs(level), 9)


def draw(names, magnitudes, at=None) -> Draw:
    at = np.zeros((len(names), 2)) if at is None else at
    operation = [NAMES.index(name) for name in names]
    return Draw(jnp.array(operation), jnp.array(magnitudes, jnp.float32), jnp.array(at, jnp.float32))


def drawing(height: int = H, width: int = W) -> np.ndarray:
    """Return a smooth gradient with shapes and noise, u8[height,width,3]."""
    row, column = np.mgrid[:height, :width]
    image = np.stack([200 * row / height + 30, 180 * column / width + 40, 120 + 60 * np.sin(row / 7 + column / 5)], -1)
    image[height // 4 : height // 2, width // 5 : width // 2] = (230, 40, 60)
    image[(row - 0.7 * height) ** 2 + (column - 0.7 * width) ** 2 < (height / 5) ** 2] = (20, 90, 210)
    return np.clip(image + np.random.default_rng(0).normal(0, 6, image.shape), 0, 255).astype(np.uint8)


def difference(name: str, images: list[np.ndarray]) -> np.ndarray:
    """Return |ours − Pillow's| over all levels, both signs and all images."""
    cases = [(one, magnitude(name, level)) for one in images for level in LEVELS]
    image = np.stack([one for one, _ in cases])
    ours = compiled(jnp.asarray(image, jnp.float32), draw([name] * len(cases), [m for _, m in cases]))
    assert ours.shape == image.shape
    assert ours.dtype == jnp.float32
    expected = np.stack([np.asarray(PILLOW[name](Image.fromarray(one), m)) for one, m in cases])
    return np.abs(np.asarray(ours) - expected)


def check_agreement(name: str, images: list[np.ndarray]):
    distance = difference(name, images)
    equal, near = AGREEMENT[name]
    assert np.mean(distance == 0) >= equal
    assert np.mean(distance <= 1) >= near
    assert np.array_equal(distance, np.round(distance)), "integers"


# --------------------------------------------------------------------------------------------------------- operations
@pytest.mark.parametrize("name", PILLOW)
def test_an_operation_agrees_with_pillow(name):
    noise = np.random.default_rng(1).integers(0, 256, (H, W, 3), dtype=np.uint8)
    narrow = (drawing() // 3 + 60).astype(np.uint8)
    check_agreement(name, [drawing(), noise, narrow])


@pytest.mark.parametrize("name", PILLOW)
def test_an_operation_agrees_with_pillow_on_photographs(name, shared_data):
    files = sorted((shared_data / "VOCdevkit" / "VOC2012" / "JPEGImages").iterdir())[::267]
    check_agreement(name, [np.array(Image.open(file).convert("RGB").resize((W, H))) for file in files])


@pytest.mark.parametrize("name", [name for name in PILLOW if name not in ("brightness", "shear_x", "shear_y")])
def test_an_operation_agrees_with_pillow_on_hard_images(name):
    """Few pixels, one value, two values, and only the extremes: histograms with gaps."""
    random = np.random.default_rng(2)
    images = [
        np.zeros((20, 14, 3), np.uint8),
        np.full((20, 14, 3), (255, 128, 1), np.uint8),
        random.choice([100, 101], (20, 14, 3)).astype(np.uint8),
        random.choice([0, 255], (20, 14, 3)).astype(np.uint8),
        np.where(np.arange(280).reshape(20, 14, 1) < 3, 200, 17).repeat(3, -1).astype(np.uint8),
        random.integers(0, 256, (20, 14, 3), dtype=np.uint8),
    ]
    assert difference(name, images).max() <= 1


def test_cutout_covers_a_half_open_square_clipped_at_the_borders():
    random = np.random.default_rng(3)
    at, sides = random.random((64, 2)).astype(np.float32), random.integers(0, 21, 64)
    image = np.stack([drawing(24, 31)] * 64)
    covered = np.asarray(compiled(jnp.asarray(image, jnp.float32), draw(["cutout"] * 64, sides, at)))
    for one, (y, x), side in zip(image, at, sides, strict=True):
        row, column, half = int(y * 24), int(x * 31), side // 2
        one[max(row - half, 0) : row + half, max(column - half, 0) : column + half] = (125, 122, 113)
    np.testing.assert_array_equal(covered, image)


def test_each_image_of_a_batch_gets_its_own_operation():
    names = [*PILLOW, "cutout"]
    image = jnp.broadcast_to(jnp.asarray(drawing(), jnp.float32), (len(names), H, W, 3))
    magnitudes = [magnitude(name, -5) for name in names]
    at = np.full((len(names), 2), 0.5)
    together = np.asarray(compiled(image, draw(names, magnitudes, at)))
    for index, name in enumerate(names):
        alone = compiled(image, draw([name] * len(names), [magnitudes[index]] * len(names), at))[0]
        np.testing.assert_array_equal(together[index], alone, err_msg=name)
        assert name == "identity" or np.any(alone != image[0]), name


def test_values_are_rounded_and_clipped_first():
    image = jnp.array([-3.0, 0.4, 100.6, 254.7, 270.0]).reshape(1, 5, 1, 1).repeat(3, -1)
    whole = np.asarray(compiled(image, draw(["identity"], [0.0])))[0, :, 0, 0]
    np.testing.assert_array_equal(whole, [0, 0, 101, 255, 255])


@pytest.mark.parametrize("size", [(83, 60), (7, 5), (1, 9), (1, 1)], ids=str)
@pytest.mark.parametrize("name", ["rotate", "translate_x", "translate_y", "equalize", "cutout", "sharpness"])
def test_an_operation_agrees_with_pillow_at_any_size(name, size):
    image, at = np.random.default_rng(4).integers(0, 256, (*size, 3), dtype=np.uint8), (0.7, 0.2)
    amounts = [magnitude(name, level) for level in LEVELS]
    ours = compiled(
        jnp.asarray(np.stack([image] * len(amounts)), jnp.float32),
        draw([name] * len(amounts), amounts, [at] * len(amounts)),
    )
    for amount, found in zip(amounts, np.asarray(ours), strict=True):
        expected = np.asarray(host_operate(Image.fromarray(image), Drawn(name, amount, np.float32(at))))
        assert np.abs(found - expected).max() <= (1 if name == "sharpness" else 0), amount


# ------------------------------------------------------------------------------------------------------- the program
def equations(jaxpr):
    """Yield the equations of a jaxpr and of all those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def everything():
    """Return the settings of `config.augment` with all transforms on the device."""
    config = default_config().augment
    config.update({"where": "device", "flip": True, "shift": 0.1, "cutout": 0.5, "jitter_order": "random"})
    config.update(dict.fromkeys(("contrast", "brightness", "saturation", "hue"), 0.3))
    config.randaugment = "uda"
    return config


def test_no_pixel_is_gathered_or_scattered():
    """A TPU would read or write them one after another."""
    image = jax.ShapeDtypeStruct((4, 32, 32, 3), jnp.float32)
    program = jax.make_jaxpr(lambda image, key: augment(image, key, everything()))(image, KEY)
    found = {equation.primitive.name for equation in equations(program.jaxpr)}
    assert {"scan", "cond", "select_n", "dot_general"} <= found, "all of it was seen"
    for equation in equations(program.jaxpr):
        if equation.primitive.name.startswith(("gather", "scatter")):
            assert max(value.aval.size for value in [*equation.invars, *equation.outvars]) < 32 * 32, equation


def test_an_image_runs_only_the_operations_that_were_drawn_for_it():
    image = jax.ShapeDtypeStruct((4, 8, 8, 3), jnp.float32)
    program = jax.make_jaxpr(lambda image, key: randaugment(image, key, UDA))(image, KEY)
    [choice] = [equation for equation in equations(program.jaxpr) if equation.primitive.name == "cond"]
    assert len(choice.params["branches"]) == len(NAMES)
    assert choice.invars[0].aval.shape == (), "the choice is that of one image"
    assert all(value.aval.size <= 8 * 8 * 3 for value in choice.outvars)


@pytest.mark.parametrize("name", NAMES)
def test_an_operation_costs_less_than_a_tenth_of_the_first_block(name):
    """As counted before any optimization, for DINOv2-B at 224 px: the forward pass of 257 tokens of width 768."""
    block = 2 * 257 * (12 * 768**2 + 2 * 257 * 768)
    scalar, center = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.float32)
    planes = jax.ShapeDtypeStruct((3, 224, 224), jnp.int32)
    lowered = jax.jit(FUNCTIONS[name]).lower(planes, Draw(scalar, scalar, center))
    assert lowered.cost_analysis().get("flops", 0) < block / 10


# ------------------------------------------------------------------------------------------------------------ drawing
def even(counts: np.ndarray) -> bool:
    """Return whether all are equally frequent: chi-square within six deviations of its mean."""
    expected, freedom = counts.mean(), counts.size - 1
    return ((counts - expected) ** 2 / expected).sum() < freedom + 6 * np.sqrt(2 * freedom)


def test_uda_draws_pairs_of_135_each_applied_half_the_time():
    drawn = jax.tree.map(np.asarray, drawn_by(KEY, UDA, 60_000))
    assert drawn.operation.shape == drawn.magnitude.shape == (2, 60_000)
    names = np.array(NAMES)[drawn.operation]
    applied = names != "identity"
    np.testing.assert_allclose(
        [applied[0].mean(), applied[1].mean(), applied.all(0).mean()], (0.5, 0.5, 0.25), atol=0.01
    )
    assert set(np.unique(names[applied])) == set(UDA.operations)
    pairs = drawn.operation[:, applied.all(0)]
    table = np.zeros((len(NAMES), len(NAMES)))
    np.add.at(table, tuple(pairs), 1)
    used = [NAMES.index(name) for name in UDA.operations]
    assert even(table[np.ix_(used, used)]), "the second is independent of the first"
    for name in UDA.operations:
        found = drawn.magnitude[names == name]
        expected = np.unique(np.float32([OPERATIONS[name].magnitude(index, 9) for index in range(1, 10)]))
        np.testing.assert_array_equal(np.unique(np.abs(found)), expected)
        negative = np.mean(found < 0)
        assert abs(negative - 0.5) < 0.03 if name in EITHER_WAY else negative == 0, name
    _, counts = np.unique(drawn.magnitude[names == "rotate"], return_counts=True)
    assert even(counts)
    places = drawn.at.reshape(-1, 2)
    assert 0 <= places.min() < 0.001
    assert 0.999 < places.max() < 1
    assert abs(np.corrcoef(places.T)[0, 1]) < 0.01


def test_standard_applies_the_given_number_of_operations_at_one_level():
    drawn = jax.tree.map(np.asarray, drawn_by(KEY, standard(3, 9), 20_000))
    names = np.array(NAMES)[drawn.operation]
    assert names.shape == (3, 20_000)
    kinds, counts = np.unique(names, return_counts=True)
    assert len(kinds) == 14
    assert even(counts)
    turns = drawn.magnitude[names == "rotate"]
    np.testing.assert_allclose(np.abs(turns), 27, rtol=1e-6)
    assert abs(np.sign(turns).mean()) < 0.05, "both directions"


@pytest.mark.parametrize("policy", [UDA, standard(2, 9)], ids=["uda", "standard"])
def test_a_batch_gets_the_drawn_operations_in_order(policy):
    """Pillow, applied to the operations that the device drew, gives the same images up to small differences."""
    image = np.stack([drawing(), drawing()[::-1, ::-1]] * 32)
    jitted = jax.jit(lambda image, key: randaugment(image, key, policy))
    augmented = np.asarray(jitted(jnp.asarray(image, jnp.float32), KEY))
    np.testing.assert_array_equal(jitted(jnp.asarray(image, jnp.float32), KEY), augmented)
    assert np.any(np.asarray(jitted(jnp.asarray(image, jnp.float32), jax.random.key(1))) != augmented)
    assert 0 <= augmented.min() <= augmented.max() <= 255
    drawn, agree = jax.tree.map(np.asarray, drawn_by(KEY, policy, len(image))), []
    for index, one in enumerate(image):
        names = [NAMES[operation] for operation in drawn.operation[:, index]]
        if "cutout" in names:
            continue
        expected = Image.fromarray(one)
        for name, amount in zip(names, drawn.magnitude[:, index], strict=True):
            expected = PILLOW[name](expected, float(amount))
        agree.append(np.mean(np.abs(augmented[index] - np.asarray(expected)) <= 2))
    assert np.mean(agree) > 0.995
    assert np.min(agree) > 0.97
