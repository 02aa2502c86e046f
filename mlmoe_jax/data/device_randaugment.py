"""RandAugment on the device: the operations of `randaugment.py`, compiled, drawn separately per image.

The images of a device are processed one after another, and each runs only the operations that were drawn for it; a
batch would have to run all sixteen on every image. One image fits into the on-chip memory of a TPU, where its
intermediate values stay. No pixel is gathered or scattered: histograms and look-ups are products of one-hot matrices,
and `moves` shifts lines.

Values are integers, rounded at the same points and in the same way as in Pillow: the results are Pillow's own except
for the last bit of a product (one level, on few pixels); moves read the pixels that Pillow reads, and the cubic is
computed in f32 instead of f64. Images are processed independently, so a batch sharded over devices needs no
communication. On a CPU Pillow is faster (`augment.where=host`); on accelerators neither has been timed.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mlmoe_jax.data.moves import rotate, slide
from mlmoe_jax.data.randaugment import CUTOUT_FILL, FILL, OPERATIONS, Policy
from mlmoe_jax.runtime.sharding import BATCH

NAMES = tuple(OPERATIONS)


class Draw(NamedTuple):
    """Operations as indices into NAMES, their signed magnitudes in their own units, and the centers of cutouts.

    `at` holds a center as fractions of height and width. All arrays have the same leading axes, written … here.
    """

    operation: jax.Array  # i32[…]
    magnitude: jax.Array  # f32[…]
    at: jax.Array  # f32[…,2]


def randaugment(image: jax.Array, key: jax.Array, policy: Policy, mesh: Mesh | None = None) -> jax.Array:
    """Draw operations for each of f32[B,H,W,3] in 0…255 and apply them; the result has integers in 0…255.

    mesh: see `operate`.
    """
    return operate(image, sample(key, policy, len(image)), mesh)


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


def operate(image: jax.Array, draws: Draw, mesh: Mesh | None = None) -> jax.Array:
    """Apply `draws` [N,B], N operations per image in sequence, to f32[B,H,W,3]; values are rounded to integers first.

    mesh: the one over which the batch is sharded, if it is; each device then processes its own images.
    """

    def each(planes: jax.Array, draws: Draw) -> jax.Array:
        return jax.lax.map(lambda one: _operate_one(*one), (planes, draws))

    if mesh is not None:
        each = jax.shard_map(each, mesh=mesh, in_specs=(BATCH, BATCH), out_specs=BATCH)
    planes = jnp.clip(jnp.round(image), 0, 255).astype(jnp.uint8).transpose(0, 3, 1, 2)
    planes = each(planes, jax.tree.map(lambda drawn: drawn.swapaxes(0, 1), draws))
    return planes.transpose(0, 2, 3, 1).astype(image.dtype)


def _operate_one(planes: jax.Array, draws: Draw) -> jax.Array:
    """Apply `draws` [N] in sequence to one image u8[3,H,W]."""

    def step(planes: jax.Array, draw: Draw) -> tuple[jax.Array, None]:
        return jax.lax.switch(draw.operation, [on_bytes(FUNCTIONS[name]) for name in NAMES], planes, draw), None

    return jax.lax.scan(step, planes, draws)[0]


def on_bytes(function: Callable[[jax.Array, Draw], jax.Array]) -> Callable[[jax.Array, Draw], jax.Array]:
    """Return one of FUNCTIONS as a function of u8[3,H,W], in which an image is passed from one to the next."""
    return lambda planes, draw: function(planes.astype(jnp.int32), draw).astype(jnp.uint8)


# --------------------------------------------------------------- operations: (i32[3,H,W] in 0…255, draw) -> i32[3,H,W]
def _identity(planes: jax.Array, _: Draw) -> jax.Array:
    return planes


def _invert(planes: jax.Array, _: Draw) -> jax.Array:
    return 255 - planes


def _posterize(planes: jax.Array, draw: Draw) -> jax.Array:
    dropped = jnp.clip(8 - draw.magnitude, 0, 8).astype(jnp.int32)
    return (planes >> dropped) << dropped


def _solarize(planes: jax.Array, draw: Draw) -> jax.Array:
    return jnp.where(planes < draw.magnitude, planes, 255 - planes)


def _brightness(planes: jax.Array, draw: Draw) -> jax.Array:
    return _extrapolate(jnp.zeros((), jnp.int32), planes, draw)


def _contrast(planes: jax.Array, draw: Draw) -> jax.Array:
    # The mean is rounded half up; exact below 4 million pixels.
    luma = _luma(planes)
    return _extrapolate((2 * luma.sum() + luma.size) // (2 * luma.size), planes, draw)


def _color(planes: jax.Array, draw: Draw) -> jax.Array:
    return _extrapolate(_luma(planes), planes, draw)


def _sharpness(planes: jax.Array, draw: Draw) -> jax.Array:
    """Extrapolate from the 3×3 mean with the center counted five times, rounded; the border is unchanged."""
    _, height, width = planes.shape
    padded = jnp.pad(planes, ((0, 0), (1, 1), (1, 1)))
    columns = padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]
    total = columns[:, :, :-2] + columns[:, :, 1:-1] + columns[:, :, 2:] + 4 * planes
    inside = _within(height, 1, height - 1)[:, None] & _within(width, 1, width - 1)
    return _extrapolate(jnp.where(inside, _quotient(2 * total + 13, 26), planes), planes, draw)


def _autocontrast(planes: jax.Array, _: Draw) -> jax.Array:
    """Stretch the values that occur to 0…255; a channel of one value is unchanged."""
    low, high = planes.min((1, 2), keepdims=True), planes.max((1, 2), keepdims=True)
    return jnp.where(high > low, _quotient(255 * (planes - low), jnp.maximum(high - low, 1)), planes)


def _equalize(planes: jax.Array, _: Draw) -> jax.Array:
    """Make the distribution of values uniform.

    The rows of the histogram, and of the table of new values, are the high halves of a byte, the columns the low ones.
    Sums of up to 2²⁴ entries are exact, and so are bytes in products with 0 and 1, even in bfloat16.
    """
    flat = planes.reshape(3, -1)
    high, low = ((half[:, None] == jnp.arange(16)[:, None]).astype(jnp.float32) for half in (flat >> 4, flat & 15))
    histogram = jnp.einsum("chp,clp->chl", high, low, precision="default").astype(jnp.int32)
    table = _equalizing(histogram.reshape(3, 256)).reshape(3, 16, 16).astype(jnp.float32)
    rows = jnp.einsum("chl,chp->clp", table, high, precision="default")
    return (rows * low).sum(axis=1).astype(jnp.int32).reshape(planes.shape)


def _equalizing(histogram: jax.Array) -> jax.Array:
    """Return the new value of each value, i32[3,256], from the histogram i32[3,256].

    Pillow divides the number of pixels below a value by an integer number of pixels per level, computed without those
    of the largest value. A channel with too few pixels besides those is unchanged.
    """
    level = jnp.arange(256)
    largest = jnp.where(histogram > 0, level, 0).max(axis=1, keepdims=True)
    step = jnp.where(level == largest, 0, histogram).sum(axis=1, keepdims=True) // 255
    below = jnp.cumsum(histogram, axis=1) - histogram
    return jnp.where(step > 0, jnp.minimum((step // 2 + below) // jnp.maximum(step, 1), 255), level)


def _cutout(planes: jax.Array, draw: Draw) -> jax.Array:
    _, height, width = planes.shape
    half = draw.magnitude.astype(jnp.int32) // 2
    row, column = (draw.at * jnp.array([height, width])).astype(jnp.int32)
    rows, columns = _within(height, row - half, row + half), _within(width, column - half, column + half)
    return jnp.where(rows[:, None] & columns, jnp.array(CUTOUT_FILL)[:, None, None], planes)


def _shear_x(planes: jax.Array, draw: Draw) -> jax.Array:
    height = planes.shape[1]
    return slide(planes, draw.magnitude * (jnp.arange(height) + 0.5), _most("shear_x", height), FILL[0])


def _translate_x(planes: jax.Array, draw: Draw) -> jax.Array:
    _, height, width = planes.shape
    whole = jnp.floor(draw.magnitude * width + 0.5)
    return slide(planes, jnp.broadcast_to(whole, (height,)), _most("translate_x", width), FILL[0])


def _rotate(planes: jax.Array, draw: Draw) -> jax.Array:
    return rotate(planes, draw.magnitude, OPERATIONS["rotate"].high, FILL[0])


def _transposed(function: Callable[[jax.Array, Draw], jax.Array]) -> Callable[[jax.Array, Draw], jax.Array]:
    return lambda planes, draw: function(planes.swapaxes(1, 2), draw).swapaxes(1, 2)


FUNCTIONS = {
    "identity": _identity,
    "invert": _invert,
    "cutout": _cutout,
    "sharpness": _sharpness,
    "autocontrast": _autocontrast,
    "posterize": _posterize,
    "shear_x": _shear_x,
    "translate_x": _translate_x,
    "translate_y": _transposed(_translate_x),
    "shear_y": _transposed(_shear_x),
    "rotate": _rotate,
    "equalize": _equalize,
    "contrast": _contrast,
    "color": _color,
    "solarize": _solarize,
    "brightness": _brightness,
}


# --------------------------------------------------------------------------------------------------------- arithmetic
def _luma(planes: jax.Array) -> jax.Array:
    """Return gray i32[H,W]: ITU-R 601-2 in 16-bit fixed point, as in Pillow."""
    red, green, blue = planes
    return (19595 * red + 38470 * green + 7471 * blue + (1 << 15)) >> 16


def _extrapolate(origin: jax.Array, planes: jax.Array, draw: Draw) -> jax.Array:
    """Return origin + factor·(planes − origin), clipped to 0…255 and truncated to integers, as Pillow blends."""
    origin = origin.astype(jnp.float32)
    return jnp.clip(origin + (1 + draw.magnitude) * (planes - origin), 0, 255).astype(jnp.int32)


def _quotient(dividend: jax.Array, divisor: jax.Array | int) -> jax.Array:
    """Return the quotient of positive integers, rounded down; the half keeps rounding in f32 away from integers."""
    return jnp.floor((dividend + 0.5) / divisor).astype(jnp.int32)


def _within(size: int, start: jax.Array | int, stop: jax.Array | int) -> jax.Array:
    """Return bool[size], true from `start` to before `stop`."""
    place = jnp.arange(size)
    return (place >= start) & (place < stop)


def _most(name: str, side: int) -> int:
    """Return the largest distance in pixels that an operation moves a pixel, for a magnitude per pixel of `side`."""
    return math.ceil(OPERATIONS[name].high * side)
