"""Logits, loss and gradients of ML-VPT on the device of this process, and how far they are from a reference.

There are two references. The authors' PyTorch code computed the arrays in tests/parity for a tiny model, on a CPU in
float32. For a model of full size, this package computes them on the CPU, in another process and in float32, because the
weights and the gradients of such a model are too large to be stored. Differences are relative to the largest entry
of an array.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from measured_model import config_of, random_batch

from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.models.apply import PlacedModel, apply_model
from mlmoe_jax.models.layers import softmax_attention
from mlmoe_jax.models.macs import count_macs
from mlmoe_jax.runs.assemble import Parts, abstract_parts, preprocess_for
from mlmoe_jax.training.objective import Objective, training_labels

TESTS = Path(__file__).parents[2] / "tests"


def authors_differences(dtype: str, precision: str) -> dict[str, float]:
    """Return the differences of logits, loss and gradients from the authors' code, for a tiny model."""
    sys.path.insert(0, str(TESTS))
    from helpers.golden import TERMS, Golden

    golden = Golden(None if dtype == "float32" else jnp.dtype(dtype), precision)
    prediction = jax.jit(lambda image: golden.model(image))(golden.image)
    loss, _, gradient = golden.loss_and_gradient()
    logits = {"logits": prediction.logits, **{name: prediction.terms[name] for name in TERMS}}
    expected = golden.reference_gradient()
    ours = {"loss": loss, **logits, **{path: gradient[path].reshape(array.shape) for path, array in expected.items()}}
    theirs = {name: golden.arrays[name] for name in ("loss", "logit", *TERMS.values())}
    return _differences(ours, dict(zip(ours, (*theirs.values(), *expected.values()), strict=True)))


def write_results(case: dict[str, Any], file: str) -> dict[str, Any]:
    """Write the results of a case to a file."""
    np.savez(file, **_results(case))
    return {}


def stored_differences(case: dict[str, Any], file: str) -> dict[str, float]:
    """Return the differences of logits, loss and gradients from the results in a file."""
    with np.load(file) as stored:
        return _differences(_results(case), dict(stored))


def step_macs(case: dict[str, Any]) -> dict[str, float]:
    """Return the multiply-adds per image of a forward and a backward pass, where no value is computed twice."""
    function, arguments = _differentiated(case, lambda shapes: shapes)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: Any) -> jax.Array:
        return softmax_attention._attend_forward(query, key, value, mask)[0]

    # On an NVIDIA GPU, attention is a call of cuDNN, whose matmuls cannot be counted.
    with jax.default_device("cpu"), mock.patch.object(softmax_attention, "_attend", attend):
        traced = jax.make_jaxpr(function)(*arguments)
    return {"macs": count_macs(traced.jaxpr) / case["batch"]}


def _results(case: dict[str, Any]) -> dict[str, np.ndarray]:
    function, arguments = _differentiated(case, drawn_values)
    with jax.default_matmul_precision(case.get("precision", "default")):  # some backward passes are traced late
        (loss, logits), gradient = jax.jit(function)(*arguments)
    results = {"loss": loss, "logits": logits, **gradient}
    return {name: np.asarray(value, np.float32) for name, value in results.items()}


def _differentiated(case: dict[str, Any], fill: Callable[[Parts], Parts]) -> tuple[Callable, tuple]:
    """Return a function ((loss, logits), gradient) of a case without dropout, and its arguments."""
    config = config_of(case)
    config.model.matmul_precision = case.get("precision", "default")
    parts = fill(abstract_parts(config, synthetic_label_space(case["labels"], config.model.prompts.num_groups)))
    objective = Objective(config.loss, training_labels(config, np.zeros((1, case["labels"]), np.int8)))
    preprocess = preprocess_for(config)
    placed = PlacedModel(definition=parts.definition, preprocess=preprocess, mesh=None)

    def loss_of(trainable: Any, others: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        prediction, _ = apply_model(placed, {**trainable, **others}, batch)
        return objective(prediction, batch)[0], prediction.logits

    batch = random_batch(case["batch"], preprocess.image_size, case["labels"])
    return jax.value_and_grad(loss_of, has_aux=True), (parts.trainable, {**parts.frozen, **parts.stats}, batch)


def drawn_values(shapes: Any) -> Any:
    """Return values for a tree of shapes with which every layer matters: matrices keep the variance of their input."""

    def draw(path: tuple, shape: jax.ShapeDtypeStruct) -> jax.Array:
        name, random = jax.tree_util.keystr(path), np.random.default_rng(len(jax.tree_util.keystr(path)))
        values = random.standard_normal(shape.shape, np.float32)
        if name.endswith("kernel']"):
            values /= np.sqrt(np.prod(shape.shape[:-1] if len(shape.shape) == 4 else shape.shape[-2:-1]))
        else:
            values *= 0.1
        if name.endswith(("scale']", "gamma']", "var']")):
            values = 1 + np.abs(values)
        return jnp.asarray(values, shape.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def _differences(ours: dict[str, Any], theirs: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the largest relative difference of the loss, the logits and the gradients."""
    largest = {"loss": 0.0, "logits": 0.0, "gradients": 0.0}
    for name, expected in theirs.items():
        gap, size = np.abs(np.asarray(ours[name], np.float32) - expected).max(), np.abs(expected).max()
        kind = "gradients" if "/" in name else "loss" if name == "loss" else "logits"
        relative = float(gap / size) if size else float(gap)
        largest[kind] = max(largest[kind], relative) if np.isfinite(relative) else float("inf")
    return largest


FUNCTIONS = (authors_differences, write_results, stored_differences, step_macs)
