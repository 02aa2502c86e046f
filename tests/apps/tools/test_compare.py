import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.commands import csv_rows
from helpers.scored_run import drawn_split, write_run

from mlmoe_jax.apps.tools import compare as module
from mlmoe_jax.apps.tools.compare import (
    MetricChange,
    ScoreChange,
    changed_images,
    compare_folders,
)
from mlmoe_jax.data.label_tree import LabelTree
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.evaluation.metrics import multilabel
from mlmoe_jax.evaluation.metrics.bootstrap import draw
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.evaluation.stored_run import StoredRun


def noisier(table: SplitScores, by: float = 0.3, seed: int = 9) -> SplitScores:
    noise = np.random.default_rng(seed).normal(0, by, table.scores.shape)
    return replace(table, scores=np.clip(table.scores + noise, 0, 1).round(2))


def compare_runs(a, b, **options):
    return module.compare_runs(StoredRun(a), StoredRun(b), **options)


@pytest.fixture
def two(tmp_path):
    """Two runs on `test` and `val`; the second is noisier, and has its images and labels in another order."""
    test, val = drawn_split("test", 40, codes=4), drawn_split("val", 12, seed=1)
    a = write_run(tmp_path / "a", val, test, data__test_splits=("test",), data__difficult_eval="ignore")
    order = np.random.default_rng(5).permutation(40)
    turned = [noisier(table).with_labels(np.array([2, 0, 1])) for table in (test.take(order), val)]
    return a, write_run(tmp_path / "b", *turned, names="cab", data__difficult_eval="ignore")


def test_scores_that_agree_with_the_tree_are_compared(two):
    a, b = two
    before, buffer = compare_runs(a, b, resamples=20), io.BytesIO()
    replace(synthetic_label_space(3, 1), names=tuple("abc"), tree=LabelTree(((0, 1),))).save(buffer)
    a.write_bytes("label_space.npz", buffer.getvalue())
    after = compare_runs(a, b, resamples=20)
    table = StoredRun(a).measured_split("test")
    assert (table.scores[:, 0] <= table.scores[:, 1]).all()
    assert after.ap["b"].a != before.ap["b"].a
    assert (after.ap["a"].a, after.ap["b"].b) == (before.ap["a"].a, before.ap["b"].b)


def test_two_runs_are_matched_by_image_and_label(two):
    a, b = two
    found = compare_runs(a, b, resamples=60)
    assert found.counts == {"images": 40, "only_a": 0, "only_b": 0, "unread": 0}
    one = drawn_split("test", 40, codes=4)
    order = np.random.default_rng(5).permutation(40)
    noise = noisier(one.take(order)).scores[np.argsort(order)]
    entries = one.entries("ignore")
    label, mask = entries.positive, entries.valid
    plain = [multilabel.average_precision(scores, label, mask=mask) for scores in (one.scores, noise)]
    assert list(found.ap) == ["a", "b", "c"]
    np.testing.assert_allclose([[c.a, c.b] for c in found.ap.values()], np.transpose(plain))
    assert list(found.positives.values()) == (label & mask).sum(axis=0).tolist()
    f1 = [multilabel.precision_recall_f1(scores >= 0.5, label, mask=mask)["CF1"] for scores in (one.scores, noise)]
    change = found.metrics["CF1@0.5"]
    assert [change.a, change.b] == pytest.approx(f1)
    # the interval of mAP from explicit resamples
    differences = []
    for weights in draw(40, 60, seed=0):
        for column in weights.T.astype(int):
            rows = np.repeat(np.arange(40), column)
            was, now = (
                np.nanmean(multilabel.average_precision(scores[rows], label[rows], mask=mask[rows]))
                for scores in (one.scores, noise)
            )
            differences.append(now - was)
    change = found.metrics["mAP"]
    np.testing.assert_allclose([change.low, change.high], np.percentile(differences, [2.5, 97.5]))
    assert change.difference == pytest.approx(np.mean(plain[1]) - np.mean(plain[0]))
    assert change.low < change.difference < change.high


def test_only_images_with_scores_in_both_count(tmp_path):
    """An image that is in a split twice counts once."""
    table = drawn_split("test", 20)
    first, second = table.take(np.arange(17)), noisier(table.take(np.array([*range(4, 20), 19])))
    first.scores[5] = np.nan
    second.scores[10] = np.nan
    runs = write_run(tmp_path / "a", first), write_run(tmp_path / "b", second)
    found = compare_runs(*runs, resamples=10)
    assert list(found.counts.values()) == [11, 4, 3, 2]
    both = [row for row in range(4, 17) if row not in (5, 14)]
    ap = multilabel.average_precision(first.scores[both], first.codes[both] == 1)
    assert found.metrics["mAP"].a == pytest.approx(np.nanmean(ap))
    counted = "11 images in both runs (4 only in a, 3 only in b, 2 without scores)"
    assert counted in compare_folders(*runs).text()


def test_a_clear_difference_and_a_move_towards_the_truth():
    for low, high, clear in ((0.1, 0.2, True), (-0.2, -0.1, True), (-0.1, 0.1, False), (math.nan, math.nan, False)):
        assert MetricChange(0.5, 0.6, 0.1, low, high).clear is clear
    assert str(ScoreChange("a", True, 0.25, 0.75)) == "+ a 25 → 75 %"
    assert str(ScoreChange("a", False, 0.75, 0.25)) == "+ a 75 → 25 %"


def test_images_that_changed_most_by_hand(monkeypatch):
    codes = np.array([[1, 0, 0, -1], [0, 1, 1, 0], [1, 0, 0, 0], [-1, -1, -1, -1]], np.int8)
    was = np.array([[0.2, 0.1, 0.5, 0.0], [0.5, 0.5, 0.5, 0.5], [0.5] * 4, [0.0] * 4])
    now = np.array([[0.8, 0.1, 0.8, 1.0], [0.5, 0.5, 0.5, 0.6], [0.5] * 4, [1.0] * 4])
    ids = np.array(["w", "x", "y", "z"])
    one, other = (SplitScores("test", ids, scores, codes) for scores in (was, now))
    first, second = changed_images(one, other, one.entries("negative"), ("a", "b", "c", "d"))
    assert (first.id, first.labels) == ("w", ("a",))
    assert first.change == pytest.approx((0.6 + 0.3) / 3), "the unknown label is ignored"
    assert first.moves == (ScoreChange("a", True, 0.2, 0.8), ScoreChange("c", False, 0.5, 0.8))
    assert (second.id, second.labels, second.moves) == ("x", ("b", "c"), (ScoreChange("d", False, 0.5, 0.6),))
    assert changed_images(one, one, one.entries("negative"), "abcd") == ()
    monkeypatch.setattr(module, "CHANGED_IMAGES", 1)
    assert changed_images(one, other, one.entries("negative"), "abcd") == (first,)


# -------------------------------------------------------------------------------------------------- the command line
def test_text_json_and_file_of_a_comparison(two, tmp_path):
    a, b = two
    found = compare_runs(a, b)
    outcome = compare_folders(a, b, output=str(tmp_path / "c.csv"))
    assert outcome.exit_code == 0
    out = outcome.text()
    assert out.startswith("test: 40 images in both runs"), "a reported split"
    change = found.metrics["mAP"]
    row = next(line.split() for line in out.splitlines() if line.startswith("mAP "))
    numbers = (change.a, change.b, change.difference, change.low, change.high)
    assert [*map(float, row[1:6]), row[6:]] == [*(pytest.approx(100 * x, abs=0.0051) for x in numbers), ["*"]]
    (written,) = json.loads(outcome.json()).values()
    assert written["ap"]["a"]["difference"] == found.ap["a"].difference
    assert [image["id"] for image in written["changed"]] == [image.id for image in found.changed]
    rows = {row["metric"]: row for row in csv_rows(tmp_path / "c.csv")}
    assert len(rows) == 13 + 3
    assert float(rows["AP of b"]["low"]) == found.ap["b"].low
