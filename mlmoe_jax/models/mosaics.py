"""Mosaics of two by two training images, and the consistency of their cells with the images (SpliceMix).

The formulas follow the authors' code for the grid 2x2. Their code draws a grid of 1 × 2, 2 × 2 or 2 × 3 images per
batch, and blanks some images in 30 % of the batches. On VOC, its targets of the consistency have gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Real

from mlmoe_jax.data.prepare import Batch
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.losses import binary_cross_entropy
from mlmoe_jax.models.outputs import Features, Prediction

if TYPE_CHECKING:
    from mlmoe_jax.models.build import Classifier

CELLS = "cells"  # i32[n,4] in a batch: the images in the cells of its last n images, in the order of rows


def resize_aligned(image: Real[Array, "b h w c"], rows: int, columns: int) -> Float[Array, "b rows columns c"]:
    """Resize images by linear interpolation. Their corner pixels stay corner pixels, and nothing is averaged."""

    def weights(size: int, target: int) -> Array:
        return jnp.maximum(1 - jnp.abs(jnp.linspace(0, size - 1, target)[:, None] - jnp.arange(size)), 0)

    height, width = image.shape[1:3]
    return jnp.einsum("bhwc,rh,sw->brsc", image, weights(height, rows), weights(width, columns))


def make_mosaics(image: Real[Array, "b h w c"], cells: Array) -> Float[Array, "n h w c"]:
    """Return one mosaic per row of `cells` i32[n,4], the indices of its images, row by row."""
    height, width = image.shape[1:3]
    small = resize_aligned(image, height // 2, width // 2)[cells]
    joined = jnp.concatenate([jnp.concatenate([small[:, i], small[:, i + 1]], axis=2) for i in (0, 2)], axis=1)
    return resize_aligned(joined, height, width)


def classify_mosaics(model: Classifier, image: Array, batch: Batch, *, rngs: nnx.Rngs) -> Prediction:
    """Classify `image` f32[B,H,W,3], and add the penalty `consistency`. `batch` has the key CELLS."""
    features = model.encode(image, rngs=rngs)
    prediction = model.classify(features, rngs=rngs)
    penalty = cell_consistency(model, features, prediction, batch, rngs=rngs)
    return replace(prediction, penalties={**prediction.penalties, "consistency": penalty})


def split_cells(features: Features, count: int) -> Features:
    """Return the features of the 4n cells of the last n = `count` images. Each cell is a quarter of a feature map.

    Raises UserError if there are features besides the feature map, or if the map is smaller than 2 × 2.
    """
    others = (features.cls, features.mean, features.prompts, features.quarters)
    if min(features.grid) < 2 or any(x is not None for x in others):
        raise UserError(
            "augment.splice_consistency needs a head that reads only the feature map, of two by two cells or more: set "
            "it to false, or model.head.kind=linear and pool=max"
        )
    rows, columns = (side // 2 for side in features.grid)
    width = features.patches.shape[2]
    maps = resize_aligned(features.patches[-count:].reshape(count, *features.grid, width), 2 * rows, 2 * columns)
    maps = maps.reshape(count, 2, rows, 2, columns, width).swapaxes(2, 3)
    return Features(None, None, maps.reshape(4 * count, rows * columns, width), (rows, columns))


def cell_consistency(
    model: Classifier, features: Features, prediction: Prediction, batch: Batch, **options: Any
) -> Float[Array, " b"]:
    """Return a penalty per image, which is 0 except for mosaics. Its mean over the batch is the consistency loss.

    The loss of a mosaic is the mean binary cross-entropy of the logits of its cells, which are computed from quarters
    of its feature map. The targets are the probabilities of the images in the cells, without gradient. `options` are
    arguments of `Classifier.classify`.
    """
    cells, count = batch[CELLS], len(batch[CELLS])
    logits = model.classify(split_cells(features, count), **options).logits
    targets = jax.lax.stop_gradient(jax.nn.sigmoid(prediction.logits[cells.reshape(-1)]))
    loss = binary_cross_entropy(logits, targets).reshape(count, -1).mean(axis=1)
    valid = batch["mask"] != 0
    share = valid.sum() / jnp.maximum(valid[-count:].sum(), 1)  # the mean is over all images
    return jnp.concatenate([jnp.zeros(len(valid) - count), share * loss])
