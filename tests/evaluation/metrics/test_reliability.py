import math

import numpy as np
import pytest
from sklearn.metrics import brier_score_loss

from mlmoe_jax.evaluation.metrics import reliability


def case(seed=0, images=80, classes=5):
    """Scores with many on the edge of a bin, a fifth of the entries masked, one class masked completely."""
    random = np.random.default_rng(seed)
    scores = random.integers(0, 41, (images, classes)) / 40
    labels = (random.random((images, classes)) < scores**2).astype(np.int8)
    mask = (random.random((images, classes)) < 0.8).astype(np.float32)
    mask[:, 3] = 0
    return scores, labels, mask


def by_loops(scores, labels, mask, bins):
    """Return count, sum of scores and positives per bin of one class, and its calibration error, by a loop."""
    table = [[0, 0.0, 0] for _ in range(bins)]
    for s, y, m in zip(scores, labels, mask, strict=True):
        if m:
            cell = table[min(math.floor(s * bins), bins - 1)]
            cell[0], cell[1], cell[2] = cell[0] + 1, cell[1] + s, cell[2] + int(y)
    total = sum(n for n, _, _ in table)
    if not total:
        return table, math.nan
    return table, sum(n / total * abs(y / n - s / n) for n, s, y in table if n)


@pytest.mark.parametrize("bins", [1, 8, 15])
def test_bins_and_errors_equal_a_loop_over_entries(bins):
    scores, labels, mask = case()
    binned = reliability.reliability(scores, labels, mask=mask, bins=bins)
    for k in range(scores.shape[1]):
        table, error = by_loops(scores[:, k], labels[:, k], mask[:, k], bins)
        assert binned.count[k].tolist() == [n for n, _, _ in table]
        assert binned.positive[k].tolist() == [y for _, _, y in table]
        means = [s / n if n else math.nan for n, s, _ in table]
        assert binned.mean_score[k].tolist() == pytest.approx(means, nan_ok=True)
        fractions = [y / n if n else math.nan for n, _, y in table]
        assert binned.fraction_positive[k].tolist() == pytest.approx(fractions, nan_ok=True)
        assert binned.expected_calibration_error[k] == pytest.approx(error, nan_ok=True)
    _, error = by_loops(*(x.ravel() for x in (scores, labels, mask)), bins)
    assert binned.pooled().expected_calibration_error.tolist() == pytest.approx([error])
    assert binned.pooled().count.shape == (1, bins)


def test_brier_is_that_of_sklearn():
    scores, labels, mask = case()
    binned = reliability.reliability(scores, labels, mask=mask)
    for k in (0, 1, 2, 4):
        known = mask[:, k] > 0
        assert binned.brier[k] == pytest.approx(brier_score_loss(labels[known, k], scores[known, k]))
    assert math.isnan(binned.brier[3])
    assert binned.pooled().brier[0] == pytest.approx(brier_score_loss(labels[mask > 0], scores[mask > 0]))
