"""Steps whose loss or gradient is not finite: the message, the search for the first such value, and skipping."""

import jax
import numpy as np
import pytest
from helpers import tiny
from helpers.bench import Bench, drawn_batch

from mlmoe_jax.config.defaults import default_config
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.metric_log import TIMING
from mlmoe_jax.runtime.sharding import make_mesh
from mlmoe_jax.training import loop, nonfinite
from mlmoe_jax.training.loop import train


@pytest.fixture(scope="module")
def config():
    """A linear probe on few scenes of digits: two epochs of three steps, with a checkpoint after each epoch."""
    with pytest.MonkeyPatch.context() as patch:
        tiny.use_scenes(patch, train=60, val=40, test=40, test_shift=40)
        tiny.use_vit(patch, patch=32)
        small = default_config()
        small.model.backbone.weights, small.data.test_splits = "none", ("test",)
        small.train.epochs, small.train.batch_size, small.train.log_every = 2, 20, 1
        small.eval.batch_size, small.ema.decay, small.log.tensorboard = 40, 0.9, False
        yield small


@pytest.fixture
def poisoned(monkeypatch):
    """A function that lets the batches of some steps have labels that are NaN, and so a loss that is."""

    def poison(*steps: int):
        def batches(*args, first_step=0, **options):
            for step, batch in enumerate(make(*args, first_step=first_step, **options), start=first_step + 1):
                yield {**batch, "label": batch["label"] * np.float32(np.nan)} if step in steps else batch

        monkeypatch.setattr(loop, "training_batches", batches)

    make = loop.training_batches
    return poison


def changed(config, **values):
    """Return a copy of a config with other values in its section `train`."""
    other = config.copy_and_resolve_references()
    other.train.update(values)
    return other


def test_the_message_names_step_rate_images_and_the_checkpoint_that_is_kept(config, poisoned, tmp_path, refusal):
    poisoned(5)
    sentence = refusal(train, config, RunFolder(tmp_path))
    assert sentence.startswith("the loss is nan at step 5 (learning rate ")
    assert "images train/" in sentence
    assert " and 12 more)" in sentence
    assert "the checkpoint of step 3 is kept; lower" in sentence
    assert [row["step"] for row in RunFolder(tmp_path).rows()] == [1, 2, 3, 4]


def test_the_first_such_step_is_named_also_if_it_was_not_logged(config, poisoned, tmp_path, refusal):
    poisoned(2)
    sentence = refusal(train, changed(config, log_every=100), RunFolder(tmp_path))
    assert sentence.startswith("the loss is nan at step 2 ")
    assert "no checkpoint was written before it" in sentence


def test_a_second_pass_names_the_first_value(config, poisoned, tmp_path, refusal):
    poisoned(2)
    sentence = refusal(train, changed(config, find_nonfinite=True), RunFolder(tmp_path / "a"))
    assert sentence.startswith("the loss is nan at step 2 ")
    assert "; the first value that is not finite is loss['loss']; " in sentence


@pytest.mark.parametrize("place", ["frozen", "trainable", "output"])
def test_values_are_checked_in_the_order_of_computation(tiny_vit, drawn_parts, place):
    small = default_config()
    small.model.backbone.weights = "none"
    bench = Bench(
        small,
        drawn_parts(small, synthetic_label_space(4, 2)),
        Preprocess(64, (0.5,) * 3, (0.25,) * 3),
        make_mesh(small.mesh),
        4,
    )
    state, batch = bench.start(), drawn_batch(4, 64, 4)
    tree = {"frozen": state.frozen, "trainable": state.trainable}.get(place, {})
    if path := next(iter(sorted(tree)), ""):
        state = state.replace(**{place: tree | {path: tree[path].at[..., 0].set(np.nan)}})
    else:  # too large for the forward pass, but finite
        state = state.replace(trainable=jax.tree.map(lambda x: x + 3e38, state.trainable))
    found = next(nonfinite.not_finite(bench.steps.train_step.tensors(state, bench.shard(batch))))
    assert found.startswith(f"{place}['{path}']" if path else "output.")


def test_a_few_such_steps_can_be_skipped_and_resumed(config, poisoned, tmp_path):
    poisoned(2, 5)
    skipping = changed(config, skip_nonfinite=2)
    whole = train(skipping, RunFolder(tmp_path / "whole"))
    rows = RunFolder(tmp_path / "whole").rows()
    assert [row["skipped_steps"] for row in rows] == [0, 1, 1, 1, 2, 2]
    assert [row["loss"] is None for row in rows] == [False, True, False, False, True, False]
    assert rows[1]["learning_rate"] == rows[0]["learning_rate"], "that of the last update"
    half = RunFolder(tmp_path / "half")
    with pytest.raises(UserError, match=r"at step 5 .*2 steps are, and train.skip_nonfinite=1 allows fewer"):
        train(changed(config, skip_nonfinite=1), half)
    assert train(skipping, half) == whole, "resumed from step 3, with a higher limit"
    for one, other in zip(RunFolder(tmp_path / "whole").rows(), half.rows(), strict=True):
        assert {k: v for k, v in one.items() if k not in TIMING} == {k: v for k, v in other.items() if k not in TIMING}
