"""`python -m benchmarks.calibration`: its halves and its figures, on drawn scores instead of a probe's."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.scored_run import drawn_split
from scipy.special import expit

from benchmarks import calibration


@pytest.fixture
def scored():
    """400 images whose logits are three times too large."""
    draw = np.random.default_rng(0)
    logits = draw.normal(-0.5, 1.5, (400, 3))
    codes = (draw.random(logits.shape) < expit(logits)).astype(np.int8)
    return replace(drawn_split("val", 400), scores=expit(3 * logits), codes=codes)


def test_halves_have_no_image_in_common(scored):
    pairs = list(calibration.halves(scored, 3))
    for one, other in pairs:
        assert sorted([*one.ids, *other.ids]) == sorted(scored.ids)
        assert len(one) == len(other) == 200
    assert set(pairs[0][0].ids) != set(pairs[1][0].ids)


def test_corrected_scores_are_near_the_limit(scored):
    errors = {method: values["ECE_macro"] for method, values in calibration.calibration_errors(scored, 2).items()}
    assert errors["raw"] > 2 * errors["limit"] > 0
    for method in calibration.METHODS:
        assert errors[method] == pytest.approx(errors["limit"], rel=0.5)


def test_misses_are_bounded_on_the_other_half(scored):
    rows = list(calibration.misses(scored, 10))
    assert [row[:2] for row in rows] == [(per, rate) for per in ("global", "class") for rate in calibration.MISS_RATES]
    for per, miss_rate, by_image, by_label, predicted in rows:
        assert (by_image if per == "global" else by_label) == pytest.approx(miss_rate, abs=0.03)
        assert 0 < predicted < 3
