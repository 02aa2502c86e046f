"""Losses with values per training image, and losses that compare images, in the training step and the training loop."""

import jax
import numpy as np
import pytest
from helpers.bench import Bench, Line, drawn_batch

from mlmoe_jax.config import default_config

B, K, N = 8, 3, 20
CODES = np.where(np.random.default_rng(1).random((N, K)) < 0.3, 1, -1).astype(np.int8)
ROWS = np.array([3, 5, 7, 9, 11, 13, 15, 17], np.int32)


def bench_of(kind, *, accumulate=1):
    config = default_config()
    config.loss.update({"kind": kind, "scale": 1.0, "expected_positives": 1.0, "large_loss_rate": 0.15})
    config.optim.update({"schedule": "constant", "name": "sgd", "learning_rate": 0.1, "b1": 0.0, "weight_decay": 0.1})
    config.train.batch_size, config.train.accumulate, config.ema.decay = B, accumulate, 0.9
    return Bench(config, Line(K), CODES, side=4)


def batch_of():
    batch = drawn_batch(B, 4, K) | {"id": ROWS, "label": (CODES[ROWS] == 1).astype(np.float32)}
    batch["label_mask"] = batch["label"].copy()
    return batch


def test_estimates_are_updated_by_the_optimizer_for_the_images_of_the_batch():
    """With SGD, at ten times the rate and without decay; the moving averages and the model do not have them."""
    bench = bench_of("role")
    before = jax.device_get(bench.start())
    state, _ = bench.run(batch_of())
    estimates, path = state.trainable["loss/estimates"], "loss/estimates"
    moved = np.flatnonzero(np.any(estimates != before.trainable[path], axis=1))
    np.testing.assert_array_equal(moved, ROWS)
    assert path not in {**state.raw(), **state.ema}
    objective = bench.steps.objective

    def loss(table):
        prediction = bench.parts.definition.merge(bench.parts.trainable)(bench.steps.preprocess(batch_of()["image"]))
        return objective(prediction, batch_of(), values={path: table})[0]

    slope = jax.jit(jax.grad(loss))(before.trainable[path])
    np.testing.assert_allclose(estimates, before.trainable[path] - 10 * 0.1 * slope, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_corrections_are_noted_for_the_images_of_all_parts_of_the_batch(accumulate):
    state, _ = bench_of("ll_cp", accumulate=accumulate).run(batch_of(), first=3)
    corrected = np.asarray(state.stats["loss/corrected"])
    if accumulate == 1:
        assert corrected.sum() == 3, "4 = ⌈24 · 0.15⌉ count as present in the step"
    places = [ROWS.tolist().index(row) for row in np.flatnonzero(corrected.any(axis=1))]
    assert {place % 2 for place in places} == {0, 1}, "the parts are every other image"
    assert "loss/corrected" not in {**state.raw(), **state.ema, **state.trainable}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ll_r", "epr"])
def test_images_are_compared_within_the_parts_of_a_batch(kind):
    """The loss of two parts of equal size is the mean of their losses, which differs from the loss of the batch."""
    batch = batch_of()
    batch["image"][::2], batch["image"][1::2] = 255, 127  # the logits of the first part are large

    def loss(places, accumulate=1):
        images = {name: values[places] for name, values in batch.items()}
        return float(bench_of(kind, accumulate=accumulate).run(images, first=2)[1][0]["loss"])

    whole, parted = (loss(slice(None), accumulate) for accumulate in (1, 2))
    assert parted == pytest.approx(np.mean([loss(slice(part, None, 2)) for part in (0, 1)]), rel=1e-6)
    assert abs(parted - whole) > 1e-3 * whole
