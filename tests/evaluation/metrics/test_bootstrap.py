import numpy as np
import pytest
from helpers.metric_cases import hard_case

from mlmoe_jax.evaluation.metrics import bootstrap, multilabel
from mlmoe_jax.evaluation.metrics.bootstrap import WeightedMetrics, draw, percentile_interval


def rare_case():
    """A hard case, also with a class with two positives, one without predictions, and an image without known labels."""
    scores, labels, mask = hard_case(images=30, classes=6)
    labels[:, 1] = np.arange(30) < 2
    mask[:2, 1], mask[5] = 1, 0
    scores[:, 4] -= 9
    return scores, labels > 0, mask > 0


def test_weighted_metrics_are_those_of_the_resampled_images():
    """Compare with the metrics of each resample as a split of its own, with repeated images."""
    scores, labels, mask = rare_case()
    measure, resamples = WeightedMetrics(scores, labels, mask, 0.5), bootstrap.RESAMPLES_AT_ONCE + 14
    found = [measure(weights) for weights in draw(len(scores), resamples, seed=3)]
    assert [len(values["mAP"]) for values, _ in found] == [bootstrap.RESAMPLES_AT_ONCE, 14]
    values = {name: np.concatenate([part[name] for part, _ in found]) for name in found[0][0]}
    ap = np.concatenate([part for _, part in found])
    assert ap.shape == (resamples, labels.shape[1])
    generator = np.random.default_rng(3)
    for at in range(resamples):
        rows = generator.integers(len(scores), size=len(scores))
        s, y, m = scores[rows], labels[rows], mask[rows]
        of_labels = multilabel.average_precision(s, y, mask=m)
        np.testing.assert_allclose(ap[at], of_labels, rtol=1e-12)
        expected = {
            "mAP": multilabel.mean_average_precision(of_labels),
            "mAP_envelope": multilabel.mean_average_precision(
                multilabel.average_precision(s, y, mask=m, interpolation="envelope")
            ),
            "precision@1": (multilabel.top_k(np.where(m, s, -99), 1) & y & m).any(axis=1).sum() / m.any(axis=1).sum(),
        }
        expected |= {f"{k}@0.5": v for k, v in multilabel.precision_recall_f1(s >= 0.5, y, mask=m).items()}
        assert {name: value[at] for name, value in values.items()} == pytest.approx(expected, rel=1e-6, nan_ok=True)
    assert np.isnan(ap[:, 2]).all()
    assert np.isnan(ap[:, 1]).any(), "a resample lacks positives of the rare class, otherwise the case is too easy"


def test_resamples_are_seeded_and_have_the_size_of_the_split():
    first, again, other = (np.concatenate(list(draw(20, 60, seed)), axis=1) for seed in (1, 1, 2))
    assert first.shape == (20, 60)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    np.testing.assert_array_equal(first.sum(axis=0), 20)
    np.testing.assert_array_equal(next(draw(1, 2, 0)), [[1, 1]])


def test_percentile_intervals():
    values = np.stack([np.arange(1001.0), np.full(1001, np.nan), np.where(np.arange(1001) < 500, np.nan, 1.0)], axis=1)
    low, high = percentile_interval(values)
    np.testing.assert_allclose(low, [25, np.nan, 1])
    np.testing.assert_allclose(high, [975, np.nan, 1])
    np.testing.assert_allclose(percentile_interval(values[:, 0], 0.5), (250, 750))
