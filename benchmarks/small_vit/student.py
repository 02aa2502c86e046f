"""The student, and what it learns from the teacher."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.small_vit.teacher import Targets
from mlmoe_jax.models.backbones.entry import IMAGENET_MEAN, IMAGENET_STD
from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.params import ModelDef, Params

SHAPE = ViTShape(width=192, depth=12, heads=3, patch=16, native=160)
GRID = SHAPE.native // SHAPE.patch
KEPT = 0.5  # the share of the patches that is kept while patches are dropped
JITTER = 0.4  # brightness, contrast and color
CLASS_WEIGHT = 1.0  # of the cross-entropy, beside two mean squared errors of features with variance 1
PATCH_SCALE = 0.5  # the standard deviation of a patch's embedding at the start, about that of its position


class Student(nnx.Module):
    """The ViT with a linear layer for its patches, and two for its class token."""

    def __init__(self, components: int, classes: int, rngs: nnx.Rngs):
        self.vit = ViT(SHAPE, rngs=rngs)
        zeros = nnx.initializers.zeros
        self.dense, self.pooled, self.classes = (
            nnx.Linear(SHAPE.width, out, kernel_init=zeros, rngs=rngs) for out in (components, components, classes)
        )

    def tokens(self, image: jax.Array, kept: jax.Array | None) -> jax.Array:
        """Return f32[B,1+n,D], the class token and the patches in i32[B,n] `kept`; all if it is None."""
        tokens, _ = self.vit.embed(image)
        if kept is not None:
            patches = jnp.take_along_axis(tokens[:, 1:], kept[..., None], axis=1)
            tokens = jnp.concatenate([tokens[:, :1], patches], axis=1)
        for block in self.vit.blocks:
            tokens = block(tokens)
        return self.vit.norm(tokens)


def whiten(student: Student, image: np.ndarray) -> None:
    """Start the patch embedding with the principal components of the patches of u8[n,S,S,3], at equal variances.

    Neighboring pixels are nearly equal: with random kernels, differences between them are learned late.
    """
    patch = SHAPE.patch
    pieces = np.asarray(normalized(image.astype(np.float32))).reshape(len(image), GRID, patch, GRID, patch, 3)
    rows = pieces.swapaxes(2, 3).reshape(-1, 3 * patch**2)
    variances, vectors = np.linalg.eigh(np.cov(rows.T))
    kernel = PATCH_SCALE * vectors[:, -SHAPE.width :] / np.sqrt(variances[-SHAPE.width :] + 1e-3)
    student.vit.patch_embed.kernel[...] = jnp.asarray(kernel, jnp.float32)
    student.vit.patch_embed.bias[...] = jnp.asarray(-rows.mean(axis=0) @ kernel, jnp.float32)


def jittered(image: jax.Array, key: jax.Array) -> jax.Array:
    """Change the brightness, the contrast and the color of f32[B,S,S,3], 0…255."""
    factors = jax.random.uniform(key, (3, len(image), 1, 1, 1), minval=1 - JITTER, maxval=1 + JITTER)
    image = image * factors[0]
    for factor, axes in ((factors[1], (1, 2, 3)), (factors[2], 3)):
        middle = image.mean(axis=axes, keepdims=True)
        image = middle + factor * (image - middle)
    return jnp.clip(image, 0, 255)


def normalized(image: jax.Array) -> jax.Array:
    """Return the input of the ViT from pixel values in 0…255."""
    return (image / 255 - jnp.asarray(IMAGENET_MEAN)) / jnp.asarray(IMAGENET_STD)


def make_loss(definition: ModelDef, targets: Targets):
    """Return loss(params, image u8[B,S,S,3], goal f32[B,N,K], key, dropping=) -> f32[] and its three parts."""
    kernel = jnp.asarray(targets.basis @ targets.kernel)
    bias = jnp.asarray(targets.mean @ targets.kernel + targets.bias)

    def loss(params: Params, image: jax.Array, goal: jax.Array, key: jax.Array, *, dropping: bool):
        colors, places = jax.random.split(key)
        kept = None
        pooled = goal.mean(axis=1)
        probabilities = jax.nn.softmax(pooled @ kernel + bias)
        if dropping:
            order = jnp.argsort(jax.random.uniform(places, goal.shape[:2]), axis=1)
            kept = order[:, : round(KEPT * GRID**2)]
            goal = jnp.take_along_axis(goal, kept[..., None], axis=1)
        student = definition.merge(params)
        tokens = student.tokens(normalized(jittered(image.astype(jnp.float32), colors)), kept)
        cls, patches = tokens[:, 0], tokens[:, 1:]
        parts = {
            "dense": jnp.mean((student.dense(patches) - goal) ** 2),
            "pooled": jnp.mean((student.pooled(cls) - pooled / targets.spread) ** 2),
            "classes": optax.losses.softmax_cross_entropy(student.classes(cls), probabilities).mean(),
        }
        return parts["dense"] + parts["pooled"] + CLASS_WEIGHT * parts["classes"], parts

    return loss
