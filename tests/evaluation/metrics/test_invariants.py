"""Properties of all metrics: what they depend on, and what they do not depend on."""

import numpy as np
import pytest
from helpers.metric_cases import hard_case, probable

from mlmoe_jax.evaluation.metrics import groups, multilabel, ranking
from mlmoe_jax.evaluation.metrics.ranking import INTERPOLATIONS as KINDS


def everything(scores, labels, mask):
    """Every figure that only looks at the order of scores, at the classes an image returns, or at neither."""
    of_class = multilabel.per_class(scores, labels, mask=mask)
    micro = [multilabel.micro_average_precision(scores, labels, mask=mask, interpolation=kind) for kind in KINDS]
    predicted = multilabel.top_k(scores, 3, mask=mask)
    figures = multilabel.precision_recall_f1(predicted, labels, mask=mask)
    at_k = multilabel.map_at_k(scores, labels, 2, mask=mask)
    return np.concatenate([*of_class.values(), micro, list(figures.values()), [at_k]])


@pytest.mark.parametrize("seed", range(3))
def test_order_of_images_does_not_matter(seed):
    case = hard_case(seed)
    order = np.random.default_rng(seed).permutation(len(case[0]))
    np.testing.assert_allclose(everything(*(x[order] for x in case)), everything(*case), rtol=1e-13)


def test_only_the_order_of_scores_matters():
    scores, labels, mask = hard_case()
    np.testing.assert_array_equal(
        everything(np.exp(scores.astype(np.float64)) - 3, labels, mask), everything(scores, labels, mask)
    )


@pytest.mark.parametrize("anything", [-99.0, 99.0, np.inf, -np.inf, np.nan])
def test_masked_entries_may_hold_anything(anything):
    scores, labels, mask = hard_case()
    spoilt = np.where(mask > 0, scores, anything), np.where(mask > 0, labels, 1 - labels)
    for kind in KINDS:
        expected = multilabel.average_precision(scores, labels, mask=mask, interpolation=kind)
        np.testing.assert_array_equal(
            multilabel.average_precision(*spoilt, mask=mask, interpolation=kind), expected, err_msg=kind
        )
    np.testing.assert_array_equal(everything(*spoilt, mask), everything(scores, labels, mask))
    cuts, scores = {"0.5": 0.5}, probable(scores)
    spoilt = np.where(mask > 0, scores, anything), spoilt[1]
    assert groups.evaluate_scores(*spoilt, mask, cuts) == groups.evaluate_scores(scores, labels, mask, cuts)


@pytest.mark.parametrize("entries", [1, 20, 130])
def test_blocks_change_nothing(monkeypatch, entries):
    """A split is worked on in blocks of rows, far larger than any of these tests."""
    scores, labels, mask = hard_case()
    scores = probable(scores)
    expected = everything(scores, labels, mask), groups.evaluate_scores(scores, labels, mask, {"0.5": 0.5})
    monkeypatch.setattr(ranking, "_ENTRIES", entries)
    np.testing.assert_array_equal(everything(scores, labels, mask), expected[0])
    assert groups.evaluate_scores(scores, labels, mask, {"0.5": 0.5}) == pytest.approx(expected[1], abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_type_of_scores_does_not_matter(dtype):
    scores, labels, mask = hard_case()
    scores = scores.astype(np.float16)
    expected = everything(scores.astype(np.float64), labels, mask)
    np.testing.assert_array_equal(everything(scores.astype(dtype), labels > 0, mask > 0), expected)
    np.testing.assert_array_equal(everything(np.asfortranarray(scores.astype(dtype)), labels, mask), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_by_masked_images_changes_nothing(kind):
    scores, labels, mask = hard_case()
    scores[3] = -np.inf  # ties with whatever the padding is ranked as
    padded = [np.concatenate([x, np.full((7, x.shape[1]), fill)]) for x, fill in ((scores, 9), (labels, 1), (mask, 0))]
    np.testing.assert_array_equal(
        multilabel.average_precision(*padded[:2], mask=padded[2], interpolation=kind),
        multilabel.average_precision(scores, labels, mask=mask, interpolation=kind),
    )


@pytest.mark.parametrize("seed", range(5))
def test_envelope_is_never_below_plain(seed):
    scores, labels, mask = hard_case(seed)
    plain, envelope = (
        multilabel.average_precision(scores, labels, mask=mask, interpolation=kind) for kind in ("none", "envelope")
    )
    assert np.all(envelope >= plain, where=~np.isnan(plain))
    assert np.any(envelope > plain + 1e-3)
