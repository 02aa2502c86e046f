"""The label space that a training takes: of its data, or of the run that it goes on with."""

import numpy as np
import pytest

from mlmoe_jax.config import load_config
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.data.split import Split
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.training import loop as training
from mlmoe_jax.training import setup

LABELS = np.array([[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 0]], np.int8)


@pytest.fixture
def split():
    return Split("train", synthetic_label_space(4, 2).names, LABELS, ["a", "b", "c"], [None] * 3)


def test_a_run_that_goes_on_keeps_the_labels_it_was_trained_with(split, tmp_path, monkeypatch, refusal):
    config, folder = load_config("mlvpt_digits", []), RunFolder(tmp_path)
    config.model.prompts.num_groups = 2
    fresh = setup._label_space(config, folder, split)
    assert fresh.positives.tolist() == [2, 2, 1, 1]
    stored = synthetic_label_space(4, 2)
    monkeypatch.setattr(training, "has_checkpoint", lambda _: True)
    monkeypatch.setattr(training, "read_run", lambda _: (config, stored))
    assert setup._label_space(config, folder, split) is stored
    others = Split("train", ("a", "b", "c", "d"), LABELS, split.ids, split.images)
    assert "other labels than the data has now" in refusal(setup._label_space, config, folder, others)
