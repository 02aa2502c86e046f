"""MixUp and CutMix for several labels, inside the training step.

Each image of a global batch is mixed with the image before it. The random numbers depend on the seed and the step only,
so that any number of processes makes the same batches and a resumed run repeats them. The host has no work with it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Key
from ml_collections import ConfigDict

from mlmoe_jax.data.prepare import Batch

Mixing = Callable[[Batch, jax.Array], Batch]  # (global batch, key) -> mixed batch
NOT_MIXED = ("id", "mask", "label", "label_mask")  # all other arrays of a batch are inputs


def make_mixing(augment: ConfigDict) -> Mixing | None:
    """Return the mixing of `config.augment`; None for `mix=none`."""
    kind, alpha = augment.mix, augment.mix_alpha
    if kind == "none":
        return None

    def mixing(batch: Batch, key: jax.Array) -> Batch:
        share_key, choice_key, center_key = jax.random.split(key, 3)
        # An image is not mixed with an image that could not be read.
        partner = jnp.roll(batch["mask"], 1) != 0
        share = jnp.where(partner, jax.random.beta(share_key, alpha, alpha, partner.shape), 1.0)
        if kind == "mixup":
            return mixup(batch, share)
        if kind == "cutmix":
            return cutmix(batch, share, center_key)
        choose_mixup = jax.random.bernoulli(choice_key)
        return jax.lax.cond(choose_mixup, mixup, lambda b, s: cutmix(b, s, center_key), batch, share)

    return mixing


def mixup(batch: Batch, share: Float[Array, " b"]) -> Batch:
    """Return λ·x + (1 − λ)·x' for the inputs and targets of each image and its partner (MixUp, sec. 2).

    Integer inputs are rounded. A label is known if it is known for both images, or for the image itself if λ = 1.

    Args:
      batch: images u8[b,h,w,3] or features f32[b,...], with labels and masks.
      share: λ of each image.
    """
    inputs = {
        name: _interpolated(values, jnp.roll(values, 1, axis=0), share)
        for name, values in batch.items()
        if name not in NOT_MIXED
    }
    return {**batch, **inputs, **_targets(batch, share)}


def cutmix(batch: Batch, share: Float[Array, " b"], key: Key[Array, ""]) -> Batch:
    """Replace a rectangle of each image by its partner's; targets are weighted by area (CutMix, eq. 1–2).

    The sides of the rectangle are √(1 − λ) of the sides of the image and its center is uniform. It is clipped at the
    borders, after which λ is the remaining share of the area, as in the authors' code.

    Args:
      batch: images [b,h,w,3], with labels and masks.
      share: λ of each image before the rectangle is clipped.
      key: for the centers.
    """
    image = batch["image"]
    down, across = (
        _covered(part, size, share) for part, size in zip(jax.random.split(key), image.shape[1:3], strict=True)
    )
    inside = down[:, :, None] & across[:, None, :]
    mixed = jnp.where(inside[..., None], jnp.roll(image, 1, axis=0), image)
    return {**batch, "image": mixed, **_targets(batch, 1 - jnp.mean(inside, axis=(1, 2)))}


def _covered(key: jax.Array, size: int, share: jax.Array) -> Bool[Array, "b size"]:
    """Return which of `size` rows or columns are inside the rectangle of each image."""
    center = jax.random.randint(key, share.shape, 0, size)[:, None]
    half = (size * jnp.sqrt(1 - share)).astype(jnp.int32)[:, None] // 2
    index = jnp.arange(size)
    return (index >= center - half) & (index < center + half)


def _targets(batch: Batch, share: jax.Array) -> Batch:
    """Return the mixed targets and their mask. `share` is λ of each image."""
    known, partner = (mask != 0 for mask in (batch["label_mask"], jnp.roll(batch["label_mask"], 1, axis=0)))
    valid = known & (partner | (share == 1)[:, None])
    label = _interpolated(batch["label"], jnp.roll(batch["label"], 1, axis=0), share)
    return {"label": label, "label_mask": valid.astype(batch["label_mask"].dtype)}


def _interpolated(own: jax.Array, other: jax.Array, share: jax.Array) -> jax.Array:
    share = share.reshape(-1, *[1] * (own.ndim - 1))
    mixed = share * own + (1 - share) * other
    return jnp.round(mixed).astype(own.dtype) if jnp.issubdtype(own.dtype, jnp.integer) else mixed.astype(own.dtype)
