from fractions import Fraction

import numpy as np
import pytest
from helpers.metric_cases import hard_case, probable
from helpers.paths import PARITY
from helpers.scored_run import write_results

from mlmoe_jax.evaluation.metrics import threshold_search
from mlmoe_jax.runs.decisions import Thresholds, read_thresholds, write_fixed, write_thresholds
from mlmoe_jax.runs.folder import RunFolder


def test_a_class_without_any_prediction():
    scores, frequency = np.array([[0.9, 0.1], [0.5, 0.2]]), [0.4, 0.5]
    np.testing.assert_array_equal(threshold_search.prior_matched(scores, frequency), [np.inf, 0.2])
    np.testing.assert_array_equal(threshold_search.prior_matched(scores, frequency, when_zero="all"), [0.5, 0.2])


@pytest.mark.parametrize("when_zero", ["none", "all"])
def test_unknown_labels_do_not_count_as_images(when_zero):
    """The cut of each class equals that of its known images alone."""
    draw = np.random.default_rng(0)
    scores, mask = draw.random((30, 6)).round(1), draw.random((30, 6)) < 0.7
    mask[:, 5] = False
    scores[~mask] = np.nan
    frequency = np.array([0.0, 0.01, 0.3, 0.5, 1.0, 0.5])
    cuts = threshold_search.prior_matched(scores, frequency, mask=mask, when_zero=when_zero)
    for k in range(5):
        alone = threshold_search.prior_matched(
            scores[mask[:, k], k][:, None], frequency[k : k + 1], when_zero=when_zero
        )
        assert cuts[k] == alone[0]
    assert cuts[5] == np.inf


# ----------------------------------------------------------------------------------------------------------- fitting
def many_ties(seed, images=40):
    """A hard case with few different scores, those that are masked NaN."""
    scores, labels, mask = hard_case(seed, images, classes=8)
    mask = mask > 0
    return np.where(mask, probable(scores.round()), np.nan), labels > 0, mask


def brute_force(scores, positive, goal, precision):
    """Return the best cut among the scores f[n], by exact fractions, and its midpoint to the next lower score."""
    best, chosen = None, None
    levels = np.unique(scores)
    for at, cut in enumerate(levels):
        hits, claimed = int(positive[scores >= cut].sum()), int((scores >= cut).sum())
        f1 = Fraction(2 * hits, claimed + int(positive.sum()))
        if goal == "f1" and (best is None or f1 >= best):
            best, chosen = f1, at
        if goal == "precision" and chosen is None and Fraction(hits, claimed) >= precision:
            chosen = at
    if chosen is None:
        return None, np.inf
    lower = levels[chosen - 1] if chosen else 0.0
    return levels[chosen], (lower + levels[chosen]) / 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("goal", "precision"), [("f1", 0.9), ("precision", 0.5), ("precision", 0.75), ("precision", 1)]
)
def test_fitted_thresholds_are_the_best_of_all_cuts(seed, goal, precision):
    scores, labels, mask = many_ties(seed)
    cuts = threshold_search.best_thresholds(scores, labels, mask=mask, goal=goal, precision=precision)
    assert np.isnan(cuts[2])
    for k in (k for k in range(8) if k != 2):
        s, y = scores[mask[:, k], k], labels[mask[:, k], k]
        cut, middle = brute_force(s, y, goal, Fraction(precision))
        assert cuts[k] == pytest.approx(middle, abs=1e-15)
        np.testing.assert_array_equal(s >= cuts[k], np.zeros(len(s), bool) if cut is None else s >= cut)
    together = threshold_search.best_thresholds(scores, labels, mask=mask, goal=goal, precision=precision, per="global")
    assert together.shape == (8,)
    _, middle = brute_force(scores[mask], labels[mask], goal, Fraction(precision))
    np.testing.assert_allclose(together, middle, rtol=0, atol=1e-15)


def test_a_threshold_between_neighboring_floats_is_the_larger_score():
    for upper, lower in ((np.nextafter(0.5, 1), 0.5), (0.5, np.nextafter(0.5, 0))):  # the midpoint is rounded to either
        assert threshold_search.best_thresholds([[upper], [lower]], [[1], [0]]) == [upper]
    assert threshold_search.best_thresholds([[0.0]], [[1]]) == [0.0], "one image, one class, the lowest possible score"
    assert threshold_search.best_thresholds([[0.3]], [[1]]) == [0.15]
    assert np.isnan(threshold_search.best_thresholds([[0.3]], [[1]], mask=[[0]]))
    assert np.isnan(threshold_search.best_thresholds(np.zeros((0, 2)), np.zeros((0, 2)))).all()


# --------------------------------------------------------------------------------------------------- bounded misses
def test_bounded_misses_equal_mapie():
    """tools/parity/risk_control.py"""
    stored = np.load(PARITY / "risk_control.npz")
    for miss_rate, expected in zip(stored["miss_rates"], stored["thresholds"], strict=True):
        goal = {"goal": "miss_rate", "per": "global", "miss_rate": miss_rate}
        found = threshold_search.best_thresholds(stored["scores"], stored["labels"], **goal)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("per", ["class", "global"])
@pytest.mark.parametrize("seed", range(3))
def test_bounded_misses_are_the_highest_threshold_within_the_bound(per, seed):
    scores, labels, mask = many_ties(seed, images=60)
    found = threshold_search.best_thresholds(scores, labels, mask=mask, goal="miss_rate", miss_rate=0.2, per=per)
    present = labels & mask
    for columns, threshold in [(slice(None), found[0])] if per == "global" else [([k], found[k]) for k in range(8)]:
        rows = present[:, columns][present[:, columns].any(axis=1)]
        values = scores[:, columns][present[:, columns].any(axis=1)]
        if not len(rows):
            assert np.isnan(threshold)
            continue
        bound = {
            t: (((values < t) & rows).sum(1) / rows.sum(1)).sum() + 1 <= 0.2 * (len(rows) + 1) + 1e-9
            for t in scores[present]
        }
        assert threshold == max([t for t, within in bound.items() if within], default=0)


def test_a_bound_of_the_misses_needs_images():
    assert [threshold_search.least_to_bound(rate) for rate in (0.05, 0.1, 0.3, 1)] == [19, 9, 3, 0]
    scores, present = np.full((9, 1), 0.7), np.ones((9, 1), bool)
    assert threshold_search.bounded_misses(scores, present, 0.1) == 0.7
    assert threshold_search.bounded_misses(scores[1:], present[1:], 0.1) == 0
    assert threshold_search.bounded_misses(scores, present, 1) == np.inf


# ---------------------------------------------------------------------------------------------------------- the file
FITTED = Thresholds({"a": 0.25, "b": np.inf}, {"split": "val", "goal": "f1"})


def test_thresholds_are_written_and_read_back(tmp_path):
    folder = RunFolder(tmp_path)
    calibrated = Thresholds({"a": 0.5}, {}, {"split": "val", "labels": {"a": {"scale": 2.0, "offset": 0.5}}})
    for kept in (FITTED, Thresholds({"a": 0.5, "thresholds": 1.0}), calibrated):
        write_thresholds(folder, kept)
        assert read_thresholds(folder) == kept
    folder.write_json("thresholds.json", {"thresholds": {"a": 1, "b": None}})
    assert read_thresholds(folder) == Thresholds({"a": 1.0, "b": np.inf})


def test_fitted_thresholds_are_kept_when_training_is_rerun(tmp_path):
    folder = RunFolder(tmp_path)
    fixed = Thresholds({"a": 0.5, "b": 0.5})
    for results, expected in ((False, fixed), (True, FITTED)):
        write_thresholds(folder, FITTED)
        if results:
            write_results(folder, {"test": {}})
        write_fixed(folder, "ab", 0.5)
        assert read_thresholds(folder) == expected
