"""When the authors' training code stops and what it keeps, on made sequences of results per epoch.

The rule is written out here once more, over whole histories, from the definition: stop after the first epoch at which
epoch − max(best epoch of all, best epoch of the raw weights) > patience and the averaged weights are below their best.
"""

import math

import numpy as np
import pytest

from mlmoe_jax.training.selection import Selection

NAN = math.nan


def authors_rule(raw, ema, patience):
    """Return (epoch after which training stops or None, kept epoch, kept kind); epochs count from 0."""
    for epoch in range(len(raw)):
        of_raw, of_ema = raw[: epoch + 1], ema[: epoch + 1]
        of_all = [max(pair) for pair in zip(of_raw, of_ema, strict=True)]
        best_epoch, best_raw_epoch = of_all.index(max(of_all)), of_raw.index(max(of_raw))
        kept = best_epoch, "ema" if of_ema[best_epoch] > of_raw[best_epoch] else "raw"
        if epoch - max(best_epoch, best_raw_epoch) > patience and of_ema[-1] < max(of_ema):
            return epoch, *kept
    return None, *kept


def ours(raw, ema, patience, *, steps_per_epoch=7, every=1):
    """Return the same from `Selection`, which counts steps; every: the epochs between two evaluations."""
    selection = Selection({"w": "initial"})
    stopped = None
    for epoch in range(0, len(raw), every):
        candidates = {"raw": (raw[epoch], {"w": (epoch, "raw")})}
        if ema is not None:
            candidates["ema"] = (ema[epoch], {"w": (epoch, "ema")})
        step = (epoch + 1) * steps_per_epoch
        selection.consider(step, "test", candidates, patience=patience * steps_per_epoch)
        if selection.finished:
            stopped = epoch
            break
    kept_epoch, kind = selection.values["w"] if selection.split else (None, None)
    if selection.split:
        assert (selection.step, selection.kind) == ((kept_epoch + 1) * steps_per_epoch, kind)
    return stopped, kept_epoch, kind


# name -> results of the raw weights, of the averages, patience, and by hand: the last epoch, the kept epoch and kind
TRACES = {
    "the averages win and then fall": ([5, 6, 5, 5, 5, 5], [1, 2, 8, 7, 6, 5], 2, (5, 2, "ema")),
    "the averages never best but rising: no stop": ([9, 8, 7, 6, 5], [1, 2, 3, 4, 5], 1, (None, 0, "raw")),
    "averages equal to their best are not below it": ([9, 8, 8, 8, 8], [4, 4, 4, 4, 3], 1, (4, 0, "raw")),
    "of equal kinds and epochs the first raw weights": ([3, 4, 4], [1, 4, 4], 6, (None, 1, "raw")),
    "patience of ML-VPT": ([9] + [8] * 7, [5] + [4] * 7, 6, (7, 0, "raw")),
    "patience of Query2Label": ([9] + [8] * 9, [5] + [4] * 9, 8, (9, 0, "raw")),
}


@pytest.mark.parametrize("name", TRACES)
def test_the_traces_worked_out_by_hand(name):
    raw, ema, patience, expected = TRACES[name]
    assert authors_rule(raw, ema, patience) == expected, "the transcription itself"
    assert ours(raw, ema, patience) == expected


def test_random_sequences_with_many_ties_stop_where_the_rule_says():
    draw = np.random.default_rng(0)
    stops = 0
    for _ in range(500):
        raw, ema = draw.integers(1, 8, (2, draw.integers(1, 16))).tolist()
        patience = int(draw.integers(1, 9))
        expected = authors_rule(raw, ema, patience)
        assert ours(raw, ema, patience) == expected, (raw, ema, patience)
        stops += expected[0] is not None
    assert 50 < stops < 450, "both outcomes occur often"


def test_patience_counts_epochs_however_often_they_are_evaluated():
    raw, ema = [9] + [1] * 9, [5] + [1] * 9
    assert ours(raw, ema, 0) == (None, 0, "raw")
    assert ours(raw, ema, 4) == (5, 0, "raw")
    assert ours(raw, ema, 4, every=2) == (6, 0, "raw")
    assert ours(raw, ema, 4, every=3) == (6, 0, "raw")


@pytest.mark.parametrize(
    ("raw", "ema", "expected"),
    [
        ([NAN] * 9, [NAN] * 9, (None, None, None)),  # nothing was ever best
        ([5, 6, 5, 5, 5], None, (4, 1, "raw")),  # without averages, the raw weights alone decide
        ([NAN, 2, 1, 1, 1], [NAN, 1, 0, 0, 0], (4, 1, "raw")),
        ([5, NAN, NAN, NAN], [4, NAN, NAN, NAN], (None, 0, "raw")),  # undefined averages are not below their best
        ([5, NAN, NAN, NAN], [4, 3, 3, 3], (3, 0, "raw")),
        ([NAN, NAN, NAN, NAN], [4, 3, 3, 3], (3, 0, "ema")),
        ([1, NAN, 1, 1], [1, 2, NAN, 1], (None, 1, "ema")),
    ],
)
def test_undefined_results_are_never_best(raw, ema, expected):
    assert ours(raw, ema, 2) == expected
