"""Losses with values per training image, and losses that compare images, in the training step and the training loop."""

import copy
import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.bench import Bench, drawn_batch
from helpers.runs import recipe

from mlmoe_jax.config import default_config
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.models.outputs import Prediction
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.runs.assemble import Parts
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.sharding import make_mesh
from mlmoe_jax.training.loop import train

B, K, N = 8, 3, 20
CODES = np.where(np.random.default_rng(1).random((N, K)) < 0.3, 1, -1).astype(np.int8)
ROWS = np.array([3, 5, 7, 9, 11, 13, 15, 17], np.int32)


class Line(nnx.Module):
    def __init__(self):
        self.head = nnx.Linear(4 * 4 * 3, K, rngs=nnx.Rngs(0))

    def __call__(self, image, *, labels=None, rngs=None):
        return Prediction(self.head(image.reshape(len(image), -1)))


def bench_of(kind, *, accumulate=1):
    config = default_config()
    config.loss.update({"kind": kind, "scale": 1.0, "expected_positives": 1.0, "large_loss_rate": 0.15})
    config.optim.update({"schedule": "constant", "name": "sgd", "learning_rate": 0.1, "b1": 0.0, "weight_decay": 0.1})
    config.train.batch_size, config.train.accumulate, config.ema.decay = B, accumulate, 0.9
    definition, params, stats = ModelDef.split(Line())
    parts, preprocess = Parts(definition, params, {}, stats, frozenset()), Preprocess(4, (0.5,) * 3, (0.25,) * 3)
    return Bench(config, parts, preprocess, make_mesh(config.mesh), CODES)


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

    slope = jax.grad(loss)(before.trainable[path])
    np.testing.assert_allclose(estimates, before.trainable[path] - 10 * 0.1 * slope, rtol=1e-5, atol=1e-7)


def test_corrections_are_noted_for_the_images_of_the_batch():
    bench = bench_of("ll_cp")
    state, _ = bench.run(batch_of(), first=3)
    rows = np.flatnonzero(state.stats["loss/corrected"].any(axis=1))
    assert state.stats["loss/corrected"].sum() == 3, "4 = ⌈24 · 0.15⌉ count as present in the step"
    assert set(rows) <= set(ROWS.tolist())
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


# ------------------------------------------------------------------------------------------------------ training loop
@pytest.fixture
def config(run):
    few = {"data__known_positives": "one", "loss__expected_positives": 2.0, "loss__large_loss_rate": 0.05}
    return recipe("probe", train__batch_size=8, **few)


def arrays(folder: RunFolder, step: int) -> dict:
    """The sha256 of every array in a checkpoint."""
    return json.loads((folder / "checkpoints" / str(step) / "digests" / "metadata").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ll_cp", "role"])
def test_a_resumed_training_equals_the_uninterrupted_one(config, tmp_path, kind, refusal):
    """The second folder loses the checkpoints after the first."""
    config.loss.kind, config.checkpoint.keep = kind, 9
    first, second = RunFolder(tmp_path / "first"), RunFolder(tmp_path / "second")
    results = train(config, first)
    shutil.copytree(first.path, second.path)
    steps = sorted(int(path.name) for path in (second / "checkpoints").iterdir() if path.name.isdecimal())
    assert len(steps) > 1
    for step in steps[1:]:
        shutil.rmtree(second / "checkpoints" / str(step))
    assert train(config, second) == results
    assert arrays(first, steps[-1]) == arrays(second, steps[-1])
    assert any("loss/" in name for name in arrays(first, steps[-1])["state"])


def test_mistakes_are_one_sentence(config, tmp_path, refusal):
    def refused(**changes):
        wrong = copy.deepcopy(config)
        wrong.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
        sentence = refusal(train, wrong, RunFolder(tmp_path / "run"))
        assert not (tmp_path / "run").exists()
        return sentence

    assert "which loss.kind=bce leaves out: set loss.unknown=negative" in refused(loss__kind="bce")
    assert "data.known_positives is 'two'" in refused(data__known_positives="two")
    assert "needs loss.expected_positives" in refused(loss__kind="epr", loss__expected_positives=0.0)
    assert "learns from unknown labels" in refused(loss__kind="ll_r", loss__unknown="ignore")
    for kind in ("ll_r", "role"):
        assert "needs the labels of single images" in refused(loss__kind=kind, augment__mix="mixup")
    assert "makes difficult labels unknown" in refused(loss__kind="hill", data__difficult_train="ignore")
    everything = "of the training labels, of which 0.0% are unknown"
    assert everything in refused(loss__kind="ll_r", data__known_positives="all")
    assert "of the training labels, of which" in refused(loss__kind="ll_ct", loss__large_loss_rate=0.9, train__epochs=3)
