"""Augmentation on the device: batched, jitted, on images of one size.

Each transform draws its own random numbers per image, all from `key`, so the augmentation of a step is a function of
the seed and the step.
"""

import jax
import jax.numpy as jnp

from mlmoe_jax.data.device_randaugment import randaugment
from mlmoe_jax.data.randaugment import make_policy
from mlmoe_jax.data.transforms import LUMA, cutout_reach


def augment(image: jax.Array, key: jax.Array, settings) -> jax.Array:
    """Augment f32[B,H,W,3] in 0…255 according to `config.augment`; the result stays within 0…255.

    With `where = host` the images are returned unchanged: the host has augmented them (`transforms.HostTransform`).
    """
    if settings.where == "host":
        return image
    # A transform's key does not depend on which others are enabled.
    keys = jax.random.split(key, 7)
    if settings.flip:
        image = flip(image, keys[4])
    if settings.shift:
        image = shift(image, keys[0], settings.shift)
    if settings.contrast:
        image = contrast(image, keys[1], settings.contrast)
    if settings.brightness:
        image = brightness(image, keys[2], settings.brightness)
    if settings.saturation:
        image = saturation(image, keys[5], settings.saturation)
    if settings.cutout:
        image = cutout(image, keys[3], settings.cutout)
    if policy := make_policy(settings):
        image = randaugment(image, keys[6], policy)
    return image


def flip(image: jax.Array, key: jax.Array) -> jax.Array:
    """Mirror each f32[B,H,W,3] left to right with probability 1/2."""
    chosen = jax.random.bernoulli(key, 0.5, (image.shape[0], 1, 1, 1))
    return jnp.where(chosen, image[:, :, ::-1], image)


def shift(image: jax.Array, key: jax.Array, fraction: float) -> jax.Array:
    """Translate each f32[B,H,W,3] by whole pixels, up to ±`fraction` of the side; borders are repeated."""
    batch, height, width, _ = image.shape
    limit = jnp.array([fraction * height, fraction * width])
    offset = jnp.round(jax.random.uniform(key, (batch, 2), minval=-1, maxval=1) * limit).astype(int)

    def move(pixels, by):
        rows = jnp.clip(jnp.arange(height) - by[0], 0, height - 1)
        columns = jnp.clip(jnp.arange(width) - by[1], 0, width - 1)
        return pixels[rows][:, columns]

    return jax.vmap(move)(image, offset)


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
