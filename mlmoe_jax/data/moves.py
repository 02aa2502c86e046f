"""Pixels moved along rows on the device, without a gather: shears, translations and rotations as in Pillow.

A TPU reads an array at arbitrary places one entry at a time, but shifts whole lines fast. So a line is shifted by the
binary digits of its distance, and a rotation is two moves in which neighboring pixels of a line move almost equally
far. The three bytes of a pixel move together, in one integer.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

# Pillow computes the nearest pixel in fixed point with this number of fractional bits.
FRACTION_BITS = 16
_ONE = 1 << FRACTION_BITS


def window(values: jax.Array, start: jax.Array, length: int, axis: int = -1) -> jax.Array:
    """Return `length` consecutive entries of each line of `values` along `axis`, from entry `start` of the line on.

    start: i32, 0 … size of the axis − length; its shape is that of `values` with 1 along `axis`, or broadcasts to it.
    """
    bits = (values.shape[axis] - length).bit_length()
    never_read = length + (1 << bits) - 1 - values.shape[axis]
    values = jnp.pad(values, [(0, never_read if at == axis % values.ndim else 0) for at in range(values.ndim)])
    for bit in reversed(range(bits)):
        kept = length + (1 << bit) - 1
        here = jax.lax.slice_in_dim(values, 0, kept, axis=axis)
        there = jax.lax.slice_in_dim(values, 1 << bit, (1 << bit) + kept, axis=axis)
        values = jnp.where((start >> bit) & 1 == 1, there, here)
    return values


def slide(planes: jax.Array, offset: jax.Array, reach: int, fill: int) -> jax.Array:
    """Return i32[3,H,W] whose entry x of row y is that of `planes` i32[3,H,W], 0…255, at x + offset[y].

    Between two pixels the values are Pillow's bicubic interpolation. offset: f32[H], of at most `reach` pixels. fill:
    the value more than half a pixel outside the image.
    """
    width, margin = planes.shape[-1], reach + 2
    whole = jnp.floor(offset).astype(jnp.int32)[:, None]
    fraction = offset[:, None] - whole
    bordered = jnp.pad(_packed(planes), ((0, 0), (margin, margin)), mode="edge")
    lines = _unpacked(window(bordered, whole + margin - 1, width + 3))
    between = _cubic(*(lines[..., first : first + width] for first in range(4)), fraction)
    place = jnp.arange(width) + whole + fraction
    return jnp.where((place >= -0.5) & (place < width - 0.5), between, fill)


def rotate(planes: jax.Array, degrees: jax.Array, most: float, fill: int) -> jax.Array:
    """Turn i32[3,H,W], 0…255, counter-clockwise about its center; every pixel is the nearest one, exactly as in Pillow.

    degrees: f32[], within ±`most`, which is at most 45. fill: the value outside the image.

    Pixel (y, x) of the result is (row(y, x), column(y, x)) of `planes`. The first move, along rows, brings it to
    (row(y, x), x), and the second, along columns, to (y, x). One or two pixels of a column of the result come from the
    same row, perhaps from two columns, so the first move is made twice: for the upper and for the lower one.
    """
    _, height, width = planes.shape
    row, column, upper = _rotation(height, width, degrees)
    y = jnp.arange(height)[:, None]
    rows, columns = row(y), column(y)

    cosine, sine = math.cos(math.radians(most)), math.sin(math.radians(most))
    farthest_x = math.ceil(((1 - cosine) * width + sine * height) / 2) + 1
    farthest_y = math.ceil(((1 - cosine) * height + sine * width) / 2) + 1
    packed, first = _packed(planes), upper(y)
    steps = math.ceil((1 / cosine - 1) * width) + 3
    pair = jnp.stack([_read(packed, column(first + lower), farthest_x, steps) for lower in (0, 1)])
    steps = math.ceil((1 - cosine) * height) + 2
    pair = _read(pair.swapaxes(1, 2), rows.T, farthest_y, steps).swapaxes(1, 2)
    nearest = _unpacked(jnp.where(row(y - 1) == rows, pair[1], pair[0]))
    return jnp.where((rows >= 0) & (rows < height) & (columns >= 0) & (columns < width), nearest, fill)


def _rotation(height: int, width: int, degrees: jax.Array) -> tuple[Callable[[jax.Array], jax.Array], ...]:
    """Return three functions of i32[H,1], in Pillow's fixed point: (y -> row, y -> column, row -> smallest y)."""
    angle = jnp.deg2rad(degrees)
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    middle_x, middle_y = width / 2 - 0.5, height / 2 - 0.5

    def fixed(value: jax.Array) -> jax.Array:
        return jnp.floor(value * _ONE + 0.5).astype(jnp.int32)

    start_x = fixed(middle_x + 0.5 - cosine * middle_x + sine * middle_y)
    start_y = fixed(middle_y + 0.5 - cosine * middle_y - sine * middle_x)
    cosine, sine = fixed(cosine), fixed(sine)
    x = jnp.arange(width)
    return (
        lambda y: (start_y + sine * x + cosine * y) >> FRACTION_BITS,
        lambda y: (start_x + cosine * x - sine * y) >> FRACTION_BITS,
        lambda row: -((start_y + sine * x - row * _ONE) // cosine),
    )


def _read(lines: jax.Array, index: jax.Array, farthest: int, steps: int) -> jax.Array:
    """Return lines[…, n, index[n, t]] for `lines` i32[…,N,T] and `index` i32[N,T].

    index[n, t] − t varies by at most `steps` within a line n. Entries with an index outside 0…T−1 or farther than
    `farthest` from t are arbitrary.
    """
    length = index.shape[-1]
    distance = index - jnp.arange(length)
    least = jnp.clip(distance.min(axis=1, keepdims=True), -farthest - steps, farthest)
    margin = farthest + steps
    padded = jnp.pad(lines, [*((0, 0) for _ in lines.shape[:-1]), (margin, margin)])
    near = window(padded, least + margin, length + steps)
    read = near[..., :length]
    for step in range(1, steps + 1):
        read = jnp.where(distance - least == step, near[..., step : step + length], read)
    return read


def _packed(planes: jax.Array) -> jax.Array:
    """Return i32[H,W] with the three bytes of i32[3,H,W]."""
    red, green, blue = planes
    return red | green << 8 | blue << 16


def _unpacked(pixels: jax.Array) -> jax.Array:
    return jnp.stack([pixels & 255, pixels >> 8 & 255, pixels >> 16])


def _cubic(before: jax.Array, here: jax.Array, after: jax.Array, beyond: jax.Array, fraction: jax.Array) -> jax.Array:
    """Interpolate between `here` and `after`: Pillow's bicubic in one dimension (Keys, a = −1), truncated."""
    slope = after - before
    second = 2 * (before - here) + after - beyond
    third = here - before + beyond - after
    value = here + fraction * (slope + fraction * (second + fraction * third))
    return jnp.clip(value, 0, 255).astype(jnp.int32)
