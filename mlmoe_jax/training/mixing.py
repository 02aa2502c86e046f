"""MixUp, CutMix and SpliceMix for multi-label classification, as part of the compiled training step.

MixUp and CutMix mix each image of a global batch with the image before it, its partner. The random numbers depend only
on the seed and the step. So the batches do not depend on the number of processes, and a resumed run repeats them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Key
from ml_collections import ConfigDict

from mlmoe_jax.data.prepare import Batch
from mlmoe_jax.models.mosaics import CELLS, make_mosaics

Mixing = Callable[[Batch, jax.Array], Batch]  # (global batch, key) -> mixed batch
NOT_MIXED = ("id", "mask", "label", "label_mask")  # all other arrays of a batch are inputs


def make_mixing(augment: ConfigDict) -> Mixing | None:
    """Return the function (batch, key) -> mixed batch for the section `augment` of a config; None for `mix=none`."""
    kind, alpha = augment.mix, augment.mix_alpha
    if kind == "none":
        return None
    if kind == "splicemix":
        return lambda batch, key: splicemix(batch, key, consistent=augment.splice_consistency)

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
    """Mix each image and its targets with its partner: λ·x + (1 − λ)·x' (MixUp, sec. 2).

    x is the image (or its targets), x' is the partner's, and λ is the share of the image. Inputs are images
    u8[b,h,w,3], whose mixtures are rounded, or features f32[b,...]. A label of the mixed image is known if it is known
    for both images, or if λ = 1 and it is known for the image.
    """
    inputs = {
        name: _interpolated(values, jnp.roll(values, 1, axis=0), share)
        for name, values in batch.items()
        if name not in NOT_MIXED
    }
    return {**batch, **inputs, **_targets(batch, share)}


def cutmix(batch: Batch, share: Float[Array, " b"], key: Key[Array, ""]) -> Batch:
    """Replace a rectangle of each image by the same rectangle of its partner (CutMix, eq. 1–2).

    Targets are averaged with weight λ for the image and 1 − λ for its partner, where λ is the `share` of the image. The
    rectangle is √(1 − λ) times as high and as wide as the image. Its center is uniform, drawn from `key`. The rectangle
    is clipped at the borders of the image. For the targets, λ is then recomputed as the fraction of the area that is
    not replaced, as in the authors' code.
    """
    image = batch["image"]
    down, across = (
        _covered(part, size, share) for part, size in zip(jax.random.split(key), image.shape[1:3], strict=True)
    )
    inside = down[:, :, None] & across[:, None, :]
    mixed = jnp.where(inside[..., None], jnp.roll(image, 1, axis=0), image)
    return {**batch, "image": mixed, **_targets(batch, 1 - jnp.mean(inside, axis=(1, 2)))}


def splicemix(batch: Batch, key: Key[Array, ""], *, consistent: bool = False) -> Batch:
    """Append mosaics of four random images to the batch, one mosaic per four images of the batch (SpliceMix).

    A mosaic has the labels of all its images. A label is known if one image is known to have it, or if it is known for
    all images. A mosaic with an image that could not be read has no loss. With `consistent`, the result has the key
    CELLS of `models.mosaics`, for the consistency loss.
    """
    size = len(batch["id"])
    cells = jax.random.permutation(key, size)[: size // 4 * 4].reshape(-1, 4)
    label, known = batch["label"][cells].max(axis=1), batch["label_mask"][cells] != 0
    known = known.all(axis=1) | (known & (batch["label"][cells] == 1)).any(axis=1)
    mosaics = {
        "image": _rounded(make_mosaics(batch["image"], cells), batch["image"].dtype),
        "label": label,
        "label_mask": known.astype(batch["label_mask"].dtype),
        "mask": batch["mask"][cells].min(axis=1),
        "id": batch["id"][cells[:, 0]],
    }
    joined = {name: jnp.concatenate([batch[name], values]) for name, values in mosaics.items()}
    return {**joined, CELLS: cells} if consistent else joined


def _covered(key: jax.Array, size: int, share: jax.Array) -> Bool[Array, "b size"]:
    """Return which of the `size` rows (or columns) of each image are inside its rectangle, see `cutmix`.

    The height (or width) of the rectangle is √(1 − share) · size, and its center is drawn from `key`.
    """
    center = jax.random.randint(key, share.shape, 0, size)[:, None]
    half = (size * jnp.sqrt(1 - share)).astype(jnp.int32)[:, None] // 2
    index = jnp.arange(size)
    return (index >= center - half) & (index < center + half)


def _targets(batch: Batch, share: jax.Array) -> Batch:
    """Return the mixed `label` and its `label_mask`. `share` f32[b] is λ of each image."""
    known, partner = (mask != 0 for mask in (batch["label_mask"], jnp.roll(batch["label_mask"], 1, axis=0)))
    valid = known & (partner | (share == 1)[:, None])
    label = _interpolated(batch["label"], jnp.roll(batch["label"], 1, axis=0), share)
    return {"label": label, "label_mask": valid.astype(batch["label_mask"].dtype)}


def _interpolated(own: jax.Array, other: jax.Array, share: jax.Array) -> jax.Array:
    share = share.reshape(-1, *[1] * (own.ndim - 1))
    return _rounded(share * own + (1 - share) * other, own.dtype)


def _rounded(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return (jnp.round(values) if jnp.issubdtype(dtype, jnp.integer) else values).astype(dtype)
