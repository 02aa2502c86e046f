"""A run as one function of its weights and of images, with preprocessing and probabilities inside."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax import export

from mlmoe_jax.models.apply import apply, make_eval_step, probabilities
from mlmoe_jax.models.params import Params
from mlmoe_jax.runs.restore import Run
from mlmoe_jax.runtime.sharding import unpadded

Program = Callable[[Params, jax.Array], jax.Array]


def program_of(run: Run) -> Program:
    """Return the function (weights, images u8[B,H,W,3]) -> probabilities f32[B,K] for the values of `weights_of`."""

    def label(weights: Params, image: jax.Array) -> jax.Array:
        prediction, _ = apply(run.definition, weights, {"image": image}, run.preprocess, None)
        return jax.nn.sigmoid(prediction.logits.astype(np.float32))

    return label


def weights_of(run: Run, *, frozen: frozenset[str] | None = None) -> dict[str, np.ndarray]:
    """Return the values of a run by parameter path, in float32, which represents all types that a run has exactly.

    frozen: the paths of the frozen values to include; None = all of them.
    """
    chosen = {path: value for path, value in run.frozen.items() if frozen is None or path in frozen}
    values = jax.device_get(unpadded({**run.values, **chosen}, run.label_axes))
    return {path: np.ascontiguousarray(values[path], np.float32) for path in sorted(values)}


def image_shape(run: Run) -> jax.ShapeDtypeStruct:
    """Return the shape u8[B,H,W,3] of the images, with a symbolic B."""
    size = run.preprocess.image_size
    (batch,) = export.symbolic_shape("B")
    return jax.ShapeDtypeStruct((batch, size, size, 3), np.uint8)


def largest_difference(run: Run, label: Callable[[np.ndarray], np.ndarray]) -> float:
    """Return by how much the probabilities of `label` differ at most from those of the run, on random images."""
    size, images = run.preprocess.image_size, 2 * run.mesh.size
    pixels = np.random.default_rng(0).integers(0, 256, (images, size, size, 3)).astype(np.uint8)
    batch = {"image": pixels, "id": np.arange(images, dtype=np.int32), "mask": np.ones(images, np.float32)}
    step = make_eval_step(run.definition, run.preprocess, run.mesh, run.label_axes)
    expected = probabilities(jax.device_get(step(run.values, run.frozen, batch)["logits"]))
    return float(np.abs(label(pixels) - expected).max())
