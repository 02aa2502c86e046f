import json

import numpy as np
import pytest
from helpers.runs import changed

from mlmoe_jax.config import default_config
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.evaluation.measure import measure
from mlmoe_jax.evaluation.metrics.metric_groups import selectable_metrics
from mlmoe_jax.evaluation.metrics.published import EVALUATORS
from mlmoe_jax.evaluation.metrics.reliability import CALIBRATION_METRICS
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.training.selection import Selection, require_metric, selection_split

START = {"w": "initial"}


def consider(selection, step, *, raw, ema=None, patience=0):
    """Call `selection.consider` with values that are named after their step and kind."""
    candidates = {"raw": (raw, {"w": f"raw {step}"})}
    if ema is not None:
        candidates["ema"] = (ema, {"w": f"ema {step}"})
    selection.consider(step, "val", candidates, patience=patience)


def test_notes_restore_all_fields_except_the_values():
    selection = Selection(START, "mAP_envelope")
    consider(selection, 1, raw=0.1, ema=0.25)
    consider(selection, 3, raw=0.05, ema=0.2, patience=1)
    assert selection.finished
    notes = json.loads(json.dumps(selection.notes()))
    assert "values" not in notes
    assert Selection.from_notes(selection.values, notes) == selection
    assert Selection.from_notes(selection.values, {**notes, "skipped": [3]}) == selection, "further keys are ignored"
    uninterrupted, resumed = selection, Selection.from_notes(selection.values, notes)
    for again in (uninterrupted, resumed):
        consider(again, 4, raw=0.2, ema=0.1, patience=1)
    assert resumed == uninterrupted
    assert not resumed.finished


def test_notes_do_not_change_with_later_rounds():
    """A checkpoint is written while training continues."""
    selection = Selection(START)
    consider(selection, 1, raw=0.1)
    notes = selection.notes()
    consider(selection, 2, raw=0.2)
    assert (notes["step"], notes["best"], notes["best_step"]) == (1, {"raw": 0.1}, {"raw": 1})


@pytest.mark.parametrize(("select_on", "split"), [("val", "dev"), ("none", "dev"), ("test", "first")])
def test_the_split_for_selection(select_on, split):
    config = default_config()
    config.data.val_split, config.data.test_splits, config.eval.select_on = "dev", ("first", "second"), select_on
    assert selection_split(config) == split


@pytest.mark.parametrize("preset", ["none", *EVALUATORS])
def test_every_metric_that_training_computes_can_select_unless_lower_is_better(preset):
    config = changed(default_config(), {"metrics__preset": preset, "eval__threshold": 0.3})
    scored = SplitScores("", np.array(["a", "b"]), np.array([[0.0], [1.0]]), np.array([[0], [1]], np.int8))
    measured = measure(scored, synthetic_label_space(1, 1), config)
    assert set(selectable_metrics(config)) == set(measured) - set(CALIBRATION_METRICS.meanings)
    for config.eval.select_metric in ("mAP@3", "CF1@0.3"):
        require_metric(config)
