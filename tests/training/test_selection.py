import json
import math

import pytest

from mlmoe_jax.config import default_config
from mlmoe_jax.training.selection import Selection, selection_split

START = {"w": "initial"}


def consider(selection, step, *, raw, ema=None):
    """Call `selection.consider` with values that are named after their step and kind."""
    candidates = {"raw": (raw, {"w": f"raw {step}"})}
    if ema is not None:
        candidates["ema"] = (ema, {"w": f"ema {step}"})
    selection.consider(step, "val", candidates)


def test_the_best_of_all_rounds_and_kinds_is_selected():
    selection = Selection(START)
    consider(selection, 10, raw=0.5, ema=0.3)
    assert (selection.values["w"], selection.step, selection.kind, selection.split) == ("raw 10", 10, "raw", "val")
    consider(selection, 20, raw=0.4, ema=0.6)
    assert (selection.values["w"], selection.step, selection.kind) == ("ema 20", 20, "ema")
    consider(selection, 30, raw=0.55, ema=0.59)
    assert (selection.values["w"], selection.step, selection.kind) == ("ema 20", 20, "ema")
    assert selection.best == {"raw": 0.55, "ema": 0.6}


def test_of_equal_values_the_earlier_are_kept():
    selection = Selection(START)
    consider(selection, 1, raw=0.5, ema=0.5)
    assert selection.values["w"] == "raw 1"
    consider(selection, 2, raw=0.5, ema=0.5)
    assert selection.values["w"] == "raw 1"
    assert selection.rounds_without_gain == 1


def test_a_gain_of_either_kind_resets_the_count():
    selection = Selection(START)
    counts = []
    rounds = [(0.5, 0.2), (0.4, 0.3), (0.4, 0.3), (0.3, 0.3), (0.51, 0.1), (0.51, 0.3), (0.1, 0.31)]
    for step, (raw, ema) in enumerate(rounds):
        consider(selection, step, raw=raw, ema=ema)
        counts.append(selection.rounds_without_gain)
    assert counts == [0, 0, 1, 2, 0, 1, 0]
    assert selection.values["w"] == "raw 4", (
        "a gain of the averages below the best raw mAP does not change the selection"
    )


def test_a_first_mean_ap_of_0_is_selected_and_nan_is_not():
    selection = Selection(START)
    consider(selection, 1, raw=math.nan, ema=math.nan)
    assert selection.values is START
    assert selection.rounds_without_gain == 1
    consider(selection, 2, raw=0.0)
    assert selection.values["w"] == "raw 2"


def test_keep_selects_values_regardless_of_their_score():
    selection = Selection(START)
    consider(selection, 1, raw=0.9)
    selection.keep(2, "ema", "", {"w": "last"})
    assert (selection.values["w"], selection.step, selection.kind, selection.split) == ("last", 2, "ema", "")


def test_notes_restore_all_fields_except_the_values():
    selection = Selection(START, finished=True)
    consider(selection, 1, raw=0.1, ema=0.25)
    consider(selection, 2, raw=0.05, ema=0.2)
    notes = json.loads(json.dumps(selection.notes()))
    assert "values" not in notes
    assert Selection.from_notes(selection.values, notes) == selection
    assert Selection.from_notes(selection.values, {**notes, "skipped": [3]}) == selection, "further keys are ignored"
    uninterrupted, resumed = selection, Selection.from_notes(selection.values, notes)
    for again in (uninterrupted, resumed):
        consider(again, 3, raw=0.2, ema=0.1)
    assert resumed == uninterrupted
    assert resumed.rounds_without_gain == 0


def test_notes_do_not_change_with_later_rounds():
    """A checkpoint is written while training continues."""
    selection = Selection(START)
    consider(selection, 1, raw=0.1)
    notes = selection.notes()
    consider(selection, 2, raw=0.2)
    assert notes == {
        "step": 1,
        "kind": "raw",
        "split": "val",
        "best": {"raw": 0.1},
        "rounds_without_gain": 0,
        "finished": False,
    }


def test_the_text_names_the_selected_values_and_the_reason():
    selection = Selection(START)
    consider(selection, 120, raw=0.5, ema=0.61239)
    assert str(selection) == "ema weights of step 120 (best mAP on val, 61.24 %)"
    selection.keep(200, "raw", "", START)
    assert str(selection) == "raw weights of step 200 (the last)"


@pytest.mark.parametrize(("select_on", "split"), [("val", "dev"), ("none", "dev"), ("test", "first")])
def test_the_split_for_selection(select_on, split):
    config = default_config()
    config.data.val_split, config.data.test_splits, config.eval.select_on = "dev", ("first", "second"), select_on
    assert selection_split(config) == split
