"""Augmentation on the device: batched, jitted, on images of one size.

Each transform draws its own random numbers per image, all from `key`, so the augmentation of a step is a function of
the seed and the step.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mlmoe_jax.data.device_randaugment import randaugment
from mlmoe_jax.data.moves import window
from mlmoe_jax.data.randaugment import make_policy
from mlmoe_jax.data.transforms import LUMA, cutout_reach


def augment(image: jax.Array, key: jax.Array, settings, mesh: Mesh | None = None) -> jax.Array:
    """Augment f32[B,H,W,3] in 0…255 according to `config.augment`; the result stays within 0…255.

    mesh: the one over which the batch is sharded, if it is. With `where = host` the images are returned unchanged: the
    host has augmented them (`transforms.HostTransform`).
    """
    if settings.where == "host":
        return image
    # A transform's key does not depend on which others are enabled.
    keys = [*jax.random.split(key, 7), *(jax.random.fold_in(key, number) for number in (7, 8))]
    if settings.flip:
        image = flip(image, keys[4])
    if settings.shift:
        image = shift(image, keys[0], settings.shift)
    jitter = [
        functools.partial(transform, key=keys[number], strength=strength)
        for transform, number, strength in (
            (contrast, 1, settings.contrast),
            (brightness, 2, settings.brightness),
            (saturation, 5, settings.saturation),
            (hue, 7, settings.hue),
        )
        if strength
    ]
    if settings.jitter_order == "random" and jitter:
        image = in_random_order(image, keys[8], jitter)
    else:
        for transform in jitter:
            image = transform(image)
    if settings.cutout:
        image = cutout(image, keys[3], settings.cutout)
    if policy := make_policy(settings):
        image = randaugment(image, keys[6], policy, mesh)
    return image


def flip(image: jax.Array, key: jax.Array) -> jax.Array:
    """Mirror each f32[B,H,W,3] left to right with probability 1/2."""
    chosen = jax.random.bernoulli(key, 0.5, (image.shape[0], 1, 1, 1))
    return jnp.where(chosen, image[:, :, ::-1], image)


def shift(image: jax.Array, key: jax.Array, fraction: float) -> jax.Array:
    """Translate each f32[B,H,W,3] by whole pixels, up to ±`fraction` of the side; borders are repeated."""
    limits = [fraction * side for side in image.shape[1:3]]
    offset = jnp.round(jax.random.uniform(key, (len(image), 2), minval=-1, maxval=1) * jnp.array(limits)).astype(int)
    for axis, limit in enumerate(limits, start=1):
        most = math.ceil(limit)
        bordered = jnp.pad(image, [(most, most) if at == axis else (0, 0) for at in range(4)], mode="edge")
        image = window(bordered, most - offset[:, axis - 1].reshape(-1, 1, 1, 1), image.shape[axis], axis)
    return image


def brightness(image: jax.Array, key: jax.Array, strength: float) -> jax.Array:
    """Multiply each f32[B,H,W,3] by a factor in 1 ± `strength`."""
    factor = jax.random.uniform(key, (image.shape[0], 1, 1, 1), minval=1 - strength, maxval=1 + strength)
    return jnp.clip(image * factor, 0, 255)


def contrast(image: jax.Array, key: jax.Array, strength: float) -> jax.Array:
    """Scale each f32[B,H,W,3] about its mean by a factor in 1 ± `strength`."""
    factor = jax.random.uniform(key, (image.shape[0], 1, 1, 1), minval=1 - strength, maxval=1 + strength)
    mean = image.mean(axis=(1, 2, 3), keepdims=True)
    return jnp.clip(mean + (image - mean) * factor, 0, 255)


def saturation(image: jax.Array, key: jax.Array, strength: float) -> jax.Array:
    """Scale each f32[B,H,W,3] about the gray of each pixel by a factor in 1 ± `strength`."""
    factor = jax.random.uniform(key, (image.shape[0], 1, 1, 1), minval=1 - strength, maxval=1 + strength)
    gray = (image * jnp.array(LUMA)).sum(axis=-1, keepdims=True)
    return jnp.clip(gray + (image - gray) * factor, 0, 255)


def hue(image: jax.Array, key: jax.Array, strength: float) -> jax.Array:
    """Turn the hue of each f32[B,H,W,3] by a share of the circle in ± `strength`, in HSV without rounding.

    The largest and the smallest value of a pixel, which are its value and its saturation, do not change.
    """
    turn = jax.random.uniform(key, (image.shape[0], 1, 1), minval=-strength, maxval=strength)
    high, chroma = image.max(axis=-1), image.max(axis=-1) - image.min(axis=-1)
    red, green, blue = jnp.moveaxis(image, -1, 0)
    sector = jnp.where(high == red, 0, jnp.where(high == green, 2, 4))  # sixths of the circle, from red over green
    within = jnp.where(high == red, green - blue, jnp.where(high == green, blue - red, red - green))
    place = sector + within / jnp.where(chroma > 0, chroma, 1) + 6 * turn
    distance = (place[..., None] + jnp.array([5, 3, 1])) % 6  # of each channel from the sector in which it falls
    fallen = jnp.clip(jnp.minimum(distance, 4 - distance), 0, 1)
    return high[..., None] - chroma[..., None] * fallen


def in_random_order(
    image: jax.Array, key: jax.Array, transforms: Sequence[Callable[[jax.Array], jax.Array]]
) -> jax.Array:
    """Apply all `transforms` of a batch to each f32[B,H,W,3], in an order that is drawn per image.

    Each transform must draw the same numbers whenever it is called, as with a fixed key. Every one is computed for the
    whole batch at each place in the order, since the images differ in which one they need.
    """
    keys = jax.random.split(key, len(image))
    orders = jax.vmap(lambda one: jax.random.permutation(one, len(transforms)))(keys)

    def apply(image: jax.Array, chosen: jax.Array) -> tuple[jax.Array, None]:
        result = image
        for number, transform in enumerate(transforms):
            result = jnp.where((chosen == number)[:, None, None, None], transform(image), result)
        return result, None

    return jax.lax.scan(apply, image, orders.T)[0]


def cutout(image: jax.Array, key: jax.Array, fraction: float) -> jax.Array:
    """Cover one square of each f32[B,H,W,3], of side `fraction`·H, with one random color.

    The center is uniform over the pixels and the square is clipped at the borders. Both edges are covered, so an
    unclipped square is one pixel larger than its nominal side, as in the authors' code of ASL and ML-VPT.
    """
    batch, height, width, _ = image.shape
    at, color = jax.random.split(key)
    center = jax.random.randint(at, (batch, 2), 0, jnp.array([height, width]))
    half = cutout_reach(fraction, height)
    rows = jnp.abs(jnp.arange(height) - center[:, :1]) <= half
    columns = jnp.abs(jnp.arange(width) - center[:, 1:]) <= half
    hole = (rows[:, :, None] & columns[:, None, :])[..., None]
    fill = jnp.floor(jax.random.uniform(color, (batch, 1, 1, 3)) * 256)
    return jnp.where(hole, fill, image)
