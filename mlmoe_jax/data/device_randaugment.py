"""RandAugment on the device: the operations of `randaugment.py` on a whole batch, drawn separately per image.

An accelerator computes every branch of a choice made per image, so the sixteen operations are grouped into four
families, and the result of each image is selected from one of them:

    tables     maps from value to value: one table of 256 entries per image and channel, made from its histogram
    moves      cubic interpolation between four neighbors in a line (enough for a shear), then a gather by whole pixels
    blends     between the image and a degenerate one, gray or smoothed
    cutout     a square of one color

Values are integers, rounded at the same points and in the same way as in Pillow: tables, blends and cutout give
Pillow's own result except for the last bit of a product (one level, on few pixels); moves read the pixels that Pillow
reads, and the cubic is computed in f32 instead of f64. Images are processed independently, so a batch sharded over
devices needs no communication. A table look-up and a move are gathers, which are fast on GPUs and slow on TPUs. Without
an accelerator Pillow is an order of magnitude faster: on a CPU `augment.where = host` is the better choice, and on a
TPU it may be.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mlmoe_jax.data.randaugment import CUTOUT_FILL, FILL, OPERATIONS, Policy

NAMES = tuple(OPERATIONS)
TABLES = ("invert", "posterize", "solarize", "autocontrast", "equalize", "brightness", "contrast")
MOVES = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
BLENDS = ("color", "sharpness")

# Pillow computes the nearest pixel in fixed point with this number of fractional bits.
FRACTION_BITS = 16


class Draw(NamedTuple):
    """One operation per image: its index in NAMES, its signed magnitude in its own units, and the center of a cutout.

    `at` holds the center as fractions of height and width.
    """

    operation: jax.Array  # i32[B]
    magnitude: jax.Array  # f32[B]
    at: jax.Array  # f32[B,2]

    def has(self, *names: str) -> jax.Array:
        """Return bool[B], whether the operation is one of `names`."""
        return jnp.isin(self.operation, jnp.array([NAMES.index(name) for name in names]))


def randaugment(image: jax.Array, key: jax.Array, policy: Policy) -> jax.Array:
    """Draw operations for each of f32[B,H,W,3] in 0…255 and apply them; the result has integers in 0…255."""
    draws = sample(key, policy, len(image))
    # A scan compiles its body once, for any number of operations per image.
    values, _ = jax.lax.scan(lambda values, draw: (_operate(values, draw), None), _whole(image), draws)
    return values.astype(image.dtype)


def sample(key: jax.Array, policy: Policy, batch: int) -> Draw:
    """Draw `policy.count` operations for each of `batch` images: a Draw whose arrays have the count as leading axis."""
    shape = (policy.count, batch)
    which, level, sign, applied, at = jax.random.split(key, 5)
    operation = jnp.array([NAMES.index(name) for name in policy.operations])
    signed = jnp.array([name in policy.signed for name in policy.operations])
    magnitude = np.array(
        [[OPERATIONS[name].magnitude(x, policy.highest) for x in policy.levels] for name in policy.operations]
    )

    which = jax.random.randint(which, shape, 0, len(policy.operations))
    level = jax.random.randint(level, shape, 0, len(policy.levels))
    negative = signed[which] & jax.random.bernoulli(sign, 0.5, shape)
    drawn = jnp.asarray(magnitude, jnp.float32)[which, level]
    return Draw(
        operation=jnp.where(
            jax.random.bernoulli(applied, policy.probability, shape), operation[which], NAMES.index("identity")
        ),
        magnitude=jnp.where(negative, -drawn, drawn),
        at=jax.random.uniform(at, (*shape, 2)),
    )


def operate(image: jax.Array, draw: Draw) -> jax.Array:
    """Apply one operation to each of f32[B,H,W,3]; values are rounded to integers first."""
    return _operate(_whole(image), draw).astype(image.dtype)


def _whole(image: jax.Array) -> jax.Array:
    return jnp.clip(jnp.round(image), 0, 255).astype(jnp.int32)


def _operate(values: jax.Array, draw: Draw) -> jax.Array:
    luma = _luma(values)
    result = values
    for chosen, family in (
        (draw.has(*TABLES), _look_up(values, luma, draw)),
        (draw.has(*MOVES), _move(values, draw)),
        (draw.has(*BLENDS), _blend(values, luma, draw)),
        (draw.has("cutout"), _cover(values, draw)),
    ):
        result = jnp.where(chosen[:, None, None, None], family, result)
    return result


def _luma(values: jax.Array) -> jax.Array:
    """Return gray i32[B,H,W] of i32[B,H,W,3]: ITU-R 601-2 in 16-bit fixed point, as in Pillow."""
    red, green, blue = jnp.moveaxis(values, -1, 0)
    return (19595 * red + 38470 * green + 7471 * blue + (1 << 15)) >> 16


def _extrapolate(origin: jax.Array, values: jax.Array, factor: jax.Array) -> jax.Array:
    """Return origin + factor·(values − origin), clipped to 0…255 and truncated to integers, as Pillow blends."""
    origin = origin.astype(jnp.float32)
    return jnp.clip(origin + factor * (values - origin), 0, 255).astype(jnp.int32)


# ------------------------------------------------------------------------------------------------------------- tables
def _look_up(values: jax.Array, luma: jax.Array, draw: Draw) -> jax.Array:
    batch, height, width, channels = values.shape
    flat = values.reshape(batch, height * width, channels)
    table = _tables(flat, luma, draw)
    return jnp.take_along_axis(table, flat, axis=1, mode="promise_in_bounds").reshape(values.shape)


def _tables(flat: jax.Array, luma: jax.Array, draw: Draw) -> jax.Array:
    """Return i32[B,256,3], the new value for each value of i32[B,H·W,3]."""
    level = jnp.arange(256)[:, None]
    magnitude = draw.magnitude[:, None, None]
    histogram = jax.vmap(_histogram)(flat)
    dropped = jnp.clip(8 - magnitude, 0, 8).astype(jnp.int32)
    tables = {
        "invert": 255 - level,
        "posterize": (level >> dropped) << dropped,
        "solarize": jnp.where(level < magnitude, level, 255 - level),
        "autocontrast": _autocontrast(histogram),
        "equalize": _equalize(histogram),
        "brightness": _extrapolate(jnp.zeros((), jnp.int32), level, 1 + magnitude),
        "contrast": _extrapolate(_mean(luma)[:, None, None], level, 1 + magnitude),
    }
    # Selected by a product with 0 and 1, which is exact even in bfloat16: XLA would fuse a chain of selects into the
    # look-up and then recompute all the tables for every pixel.
    chosen = jnp.stack([draw.has(name) for name in tables], axis=1).astype(jnp.float32)
    stacked = jnp.stack([jnp.broadcast_to(table, histogram.shape) for table in tables.values()], axis=1)
    return jnp.einsum("bt,btvc->bvc", chosen, stacked.astype(jnp.float32)).astype(jnp.int32)


def _histogram(pixels: jax.Array) -> jax.Array:
    """Count the values of each channel of i32[H·W,3]: i32[256,3]."""
    # One flat index is four times as fast on a CPU as a pair of indices.
    places = pixels * 3 + jnp.arange(3)
    return jnp.zeros(256 * 3, jnp.int32).at[places].add(1, mode="promise_in_bounds").reshape(256, 3)


def _mean(luma: jax.Array) -> jax.Array:
    """Return i32[B], the mean of i32[B,H,W] rounded half up; exact below 4 million pixels."""
    pixels = luma[0].size
    return (2 * luma.sum((1, 2)) + pixels) // (2 * pixels)


def _autocontrast(histogram: jax.Array) -> jax.Array:
    """Return tables i32[B,256,3] that stretch the occurring values to 0…255; a channel of one value is unchanged."""
    level = jnp.arange(256)[:, None]
    occurs = histogram > 0
    low = jnp.argmax(occurs, axis=1, keepdims=True)
    high = 255 - jnp.argmax(occurs[:, ::-1], axis=1, keepdims=True)
    return jnp.where(high > low, jnp.clip(255 * (level - low) // jnp.maximum(high - low, 1), 0, 255), level)


def _equalize(histogram: jax.Array) -> jax.Array:
    """Return tables i32[B,256,3] that make the distribution of values uniform.

    Pillow divides the number of pixels below a value by an integer number of pixels per level, computed without those
    of the largest value. A channel with too few pixels besides those is unchanged.
    """
    level = jnp.arange(256)[:, None]
    last = 255 - jnp.argmax(histogram[:, ::-1] > 0, axis=1, keepdims=True)
    step = (histogram.sum(1, keepdims=True) - jnp.take_along_axis(histogram, last, axis=1)) // 255
    below = jnp.cumsum(histogram, axis=1) - histogram
    return jnp.where(step > 0, jnp.minimum((step // 2 + below) // jnp.maximum(step, 1), 255), level)


# -------------------------------------------------------------------------------------------------------------- moves
def _move(values: jax.Array, draw: Draw) -> jax.Array:
    """Shear, translate or rotate i32[B,H,W,3]; the other operations move no pixels.

    A shear moves a line of pixels along itself by one integer and one fraction for the whole line. So the bicubic
    interpolation reads four pixels instead of sixteen, and is done first, without a gather.
    """
    batch, height, width, channels = values.shape
    rows, columns = _nearest(height, width, draw)
    across = _where_drawn(draw, "shear_x")[:, None] * (jnp.arange(height) + 0.5)
    down = _where_drawn(draw, "shear_y")[:, None] * (jnp.arange(width) + 0.5)
    columns += jnp.floor(across).astype(jnp.int32)[:, :, None]
    rows += jnp.floor(down).astype(jnp.int32)[:, None, :]
    across, down = across - jnp.floor(across), down - jnp.floor(down)
    fine_columns, fine_rows = columns + across[:, :, None], rows + down[:, None, :]
    inside = (fine_columns >= -0.5) & (fine_columns < width - 0.5) & (fine_rows >= -0.5) & (fine_rows < height - 0.5)

    between = _between_pixels(values, across, down, draw.has("shear_y")).reshape(batch, -1, channels)
    row, column = jnp.clip(rows, -1, height - 1), jnp.clip(columns, -1, width - 1)
    index = ((row + 1) * (width + 1) + column + 1).reshape(batch, height * width, 1)
    moved = jnp.take_along_axis(between, index, axis=1).reshape(values.shape)
    return jnp.where(inside[..., None], moved, jnp.array(FILL))


def _where_drawn(draw: Draw, name: str) -> jax.Array:
    """Return f32[B], the magnitude for images with operation `name` and 0 for the others."""
    return jnp.where(draw.has(name), draw.magnitude, 0)


def _between_pixels(values: jax.Array, across: jax.Array, down: jax.Array, vertical: jax.Array) -> jax.Array:
    """Return i32[B,H+1,W+1,3], the images at fractions to the right of, or (`vertical`) below, each pixel.

    The first row and column belong to the pixel −1, outside the image, where borders are repeated; across f32[B,H] and
    down f32[B,W] are the fractions of each row and column of pixels; in every image one of the two is 0.
    """
    _, height, width, _ = values.shape
    padded = jnp.pad(values, ((0, 0), (2, 2), (2, 2), (0, 0)), mode="edge")
    vertical = vertical[:, None, None, None]

    def neighbor(steps: int) -> jax.Array:
        below = padded[:, 1 + steps : 2 + steps + height, 1 : 2 + width]
        right = padded[:, 1 : 2 + height, 1 + steps : 2 + steps + width]
        return jnp.where(vertical, below, right)

    fraction = jnp.pad(across, ((0, 0), (1, 0)))[:, :, None] + jnp.pad(down, ((0, 0), (1, 0)))[:, None, :]
    return _cubic(neighbor(-1), neighbor(0), neighbor(1), neighbor(2), fraction[..., None])


def _nearest(height: int, width: int, draw: Draw) -> tuple[jax.Array, jax.Array]:
    """Return source rows and columns i32[B,H,W] of a rotation or translation, in Pillow's fixed point."""
    fixed = 1 << FRACTION_BITS
    angle = jnp.deg2rad(_where_drawn(draw, "rotate"))
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    middle_x, middle_y = width / 2 - 0.5, height / 2 - 0.5

    def start(coordinate: jax.Array, name: str, side: int) -> jax.Array:
        moved = jnp.floor(_where_drawn(draw, name) * side + 0.5)
        return jnp.floor((coordinate + moved) * fixed + 0.5).astype(jnp.int32)[:, None, None]

    start_x = start(middle_x + 0.5 - cosine * middle_x + sine * middle_y, "translate_x", width)
    start_y = start(middle_y + 0.5 - cosine * middle_y - sine * middle_x, "translate_y", height)
    cosine, sine = (jnp.floor(part * fixed + 0.5).astype(jnp.int32)[:, None, None] for part in (cosine, sine))
    x, y = jnp.arange(width)[None, None, :], jnp.arange(height)[None, :, None]
    return (start_y + sine * x + cosine * y) >> FRACTION_BITS, (start_x + cosine * x - sine * y) >> FRACTION_BITS


def _cubic(before: jax.Array, here: jax.Array, after: jax.Array, beyond: jax.Array, fraction: jax.Array) -> jax.Array:
    """Interpolate between `here` and `after`: Pillow's bicubic in one dimension (Keys, a = −1), truncated."""
    slope = after - before
    second = 2 * (before - here) + after - beyond
    third = here - before + beyond - after
    value = here + fraction * (slope + fraction * (second + fraction * third))
    return jnp.clip(value, 0, 255).astype(jnp.int32)


# -------------------------------------------------------------------------------------------------- blends and cutout
def _blend(values: jax.Array, luma: jax.Array, draw: Draw) -> jax.Array:
    degenerate = jnp.where(draw.has("color")[:, None, None, None], luma[..., None], _smooth(values))
    return _extrapolate(degenerate, values, (1 + draw.magnitude)[:, None, None, None])


def _smooth(values: jax.Array) -> jax.Array:
    """Return the 3×3 mean of i32[B,H,W,3] with the center counted five times, rounded; the border is unchanged."""
    columns = values[:, :-2] + values[:, 1:-1] + values[:, 2:]
    total = columns[:, :, :-2] + columns[:, :, 1:-1] + columns[:, :, 2:] + 4 * values[:, 1:-1, 1:-1]
    return values.at[:, 1:-1, 1:-1].set((2 * total + 13) // 26)


def _cover(values: jax.Array, draw: Draw) -> jax.Array:
    half = draw.magnitude.astype(jnp.int32)[:, None] // 2
    lines = []
    for axis in (1, 2):
        side = values.shape[axis]
        center = (draw.at[:, axis - 1, None] * side).astype(jnp.int32)
        lines.append((jnp.arange(side) >= center - half) & (jnp.arange(side) < center + half))
    hole = lines[0][:, :, None, None] & lines[1][:, None, :, None]
    return jnp.where(hole, jnp.array(CUTOUT_FILL), values)
