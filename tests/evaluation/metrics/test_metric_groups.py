import math
import statistics

import numpy as np
import pytest
from helpers.metric_cases import evaluate_scores, hard_case, probable

from mlmoe_jax.evaluation.metrics import multilabel, reliability, threshold_search


def test_the_sample_deviation_is_that_of_the_standard_library():
    assert multilabel.sample_deviation([0.1, 0.4, 0.2]) == pytest.approx(statistics.stdev([0.1, 0.4, 0.2]))
    assert math.isnan(multilabel.sample_deviation([0.1]))


def test_evaluate_scores_names_every_figure():
    scores, labels, mask = hard_case()
    scores = probable(scores)
    cuts = {"0.5": 0.5, "prior_matched_transductive": threshold_search.prior_matched(scores, labels.mean(axis=0))}
    report = evaluate_scores(scores, labels, mask, cuts)
    parts = ("CP", "CR", "CF1", "CF1_mean", "OP", "OR", "OF1", "precision_macro", "recall_macro", "F1_macro")
    ranked = ("mAP", "mAP_envelope", "mAP_11point", "mAP_weighted", "mAP_micro", "AUC_macro", "precision@1", "mAP@3")
    at = ("0.5", "prior_matched_transductive", "top3", "top3_min0.5")
    calibrated = ("ECE_pooled", "ECE_macro", "Brier_pooled")
    assert list(report) == [*ranked, *(f"{part}@{name}" for name in at for part in parts), *calibrated]
    assert all(type(value) is float for value in report.values())
    of_class = multilabel.per_class(scores, labels, mask=mask)
    binned = reliability.reliability(scores, labels, mask=mask)
    expected = {
        "mAP": np.nanmean(of_class["AP"]),
        "mAP_envelope": np.nanmean(of_class["AP_envelope"]),
        "mAP_11point": np.nanmean(of_class["AP_11point"]),
        "mAP_weighted": multilabel.mean_average_precision(of_class["AP"], weights=of_class["positives"]),
        "mAP_micro": multilabel.micro_average_precision(scores, labels, mask=mask),
        "AUC_macro": np.nanmean(of_class["AUC"]),
        "mAP@3": multilabel.map_at_k(scores, labels, 3, mask=mask),
        "ECE_pooled": binned.pooled().expected_calibration_error[0],
        "ECE_macro": binned.expected_calibration_error.mean(),
        "Brier_pooled": ((scores - labels) ** 2)[mask > 0].mean(),
    }
    assert {name: report[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    predicted = {name: scores >= cut for name, cut in cuts.items()}
    predicted |= {"top3": multilabel.top_k(scores, 3, mask=mask)}
    predicted |= {"top3_min0.5": multilabel.top_k(scores, 3, mask=mask, minimum=0.5)}
    for name, entries in predicted.items():
        figures = multilabel.precision_recall_f1(entries, labels, mask=mask)
        assert {part: report[f"{part}@{name}"] for part in parts} == figures


def test_evaluate_scores_names_its_options():
    scores, labels, _ = hard_case()
    report = evaluate_scores(probable(scores), labels, None, {}, k=2)
    assert {name.partition("@")[2] for name in report} == {"", "1", "2", "top2", "top2_min0.5"}
