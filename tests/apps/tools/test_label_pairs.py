"""Named pairs of labels against counts by hand, and against independent formulas."""

import csv
import io
import json
import math

import numpy as np
import pytest
from helpers.scored_run import drawn_split, write_run

from mlmoe_jax.apps.tools.compare import ComparedRun, match_images
from mlmoe_jax.apps.tools.compare_output import compare_folders
from mlmoe_jax.apps.tools.compare_pairs import format_pairs, pairs_of_run, pairs_of_runs
from mlmoe_jax.apps.tools.label_pairs import (
    PAPER_PAIRS,
    Cuts,
    Rate,
    choose_pairs,
    differing_images,
    pair_in_training,
    pair_rates,
    paired_interval,
    parse_pairs,
    prediction_cuts,
)
from mlmoe_jax.data.labels.grouping import cooccurrence
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.runs.thresholds import Thresholds, write_thresholds

NAMES = ("cat", "dog", "a, b", "x:y", "frisbee")


def space_of(codes: np.ndarray, names) -> LabelSpace:
    zeros = np.zeros(len(names), np.int32)
    return LabelSpace(tuple(names), *cooccurrence(codes), len(codes), zeros, zeros)


def write_space(folder, space: LabelSpace) -> None:
    buffer = io.BytesIO()
    space.save(buffer)
    folder.write_bytes("label_space.npz", buffer.getvalue())


# ---------------------------------------------------------------------------------------------------------- the pairs
def test_pairs_are_read_by_name():
    assert parse_pairs("frisbee:dog,cat:dog, frisbee:dog", NAMES) == [("frisbee", "dog"), ("cat", "dog")]
    assert parse_pairs('"a, b:cat",x:y:dog,dog:x:y', NAMES) == [("a, b", "cat"), ("x:y", "dog"), ("dog", "x:y")]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("frisbee:dgo", "'dgo' is none of the 5 labels; did you mean 'dog'?"),
        ("frisbee", "has 'frisbee', which is not a pair of two labels"),
        ("dog:dog", "has 'dog:dog', which is not a pair"),
        (",", "has '', which is not a pair"),
        (" ", "has '', which is not a pair"),
    ],
)
def test_pairs_that_are_refused(refusal, text, part):
    assert part in refusal(parse_pairs, text, NAMES)


def test_the_pairs_of_the_paper_are_the_default_and_none_is_excluded():
    labels = sorted({name for pair in PAPER_PAIRS for name in pair} | {"zebra"})
    assert choose_pairs(labels, None, support=20) == list(PAPER_PAIRS)
    assert ("cow", "person") in PAPER_PAIRS, "p(person | cow) is below p(person)"
    assert choose_pairs([name for name in labels if name != "cow"], None, support=20) == []


def test_other_labels_have_the_pairs_with_the_largest_conditional_probability():
    codes = (np.random.default_rng(0).random((200, 6)) < 0.3).astype(np.int8)
    codes[:, 1] |= codes[:, 0]  # p(1 | 0) = 1
    found = choose_pairs("abcdef", space_of(codes, "abcdef"), support=5)
    given = {}
    for a, b in np.ndindex(6, 6):
        both, of_a = (codes[:, a] & codes[:, b]).sum(), codes[:, a].sum()
        if a != b and both >= 5 and both / of_a > codes[:, b].mean():
            given["abcdef"[a], "abcdef"[b]] = both / of_a
    assert found == sorted(given, key=lambda pair: -given[pair])[:5]
    assert found[0] == ("a", "b")


def test_statistics_of_a_pair_in_training():
    space = space_of(np.array([[1, 1], [1, 0], [1, 0], [0, 1], [0, 0]], np.int8), "ab")
    pair = pair_in_training(("a", "b"), ["b", "a"], space)
    assert (pair.a, pair.b, pair.p_b_given_a, pair.p_b, pair.support) == (1, 0, pytest.approx(1 / 3), 2 / 5, 1)
    unknown = pair_in_training(("a", "b"), ["b", "a"], None)
    assert math.isnan(unknown.p_b_given_a)


# ---------------------------------------------------------------------------------------------------------- intervals
@pytest.mark.parametrize(("images", "predicted"), [(1, 0), (9, 9), (40, 7), (2000, 13)])
def test_the_interval_of_a_rate_is_wilsons(images, predicted):
    z, p = 1.959963984540054, predicted / images
    middle = (p + z**2 / (2 * images)) / (1 + z**2 / images)
    reach = z / (1 + z**2 / images) * math.sqrt(p * (1 - p) / images + z**2 / (4 * images**2))
    assert Rate(images, predicted).interval == pytest.approx((middle - reach, middle + reach), abs=1e-12)
    assert Rate(images, predicted).share == p


def test_a_rate_without_images_is_undefined():
    assert math.isnan(Rate(0, 0).share)
    assert all(map(math.isnan, Rate(0, 0).interval + paired_interval(0, 0, 0)))


def test_the_paired_interval_covers_the_difference():
    first, second = (3 + 1) / 42, (11 + 1) / 42
    reach = 1.959963984540054 * math.sqrt((first + second - (second - first) ** 2) / 42)
    assert paired_interval(3, 11, 40) == pytest.approx((second - first - reach, second - first + reach))
    low, high = paired_interval(0, 0, 5)
    assert -1 <= low < -0.2 < 0.2 < high <= 1, "five equal predictions say little"
    draw, inside = np.random.default_rng(0), 0
    for _ in range(400):
        lost, gained, _ = draw.multinomial(30, [0.1, 0.2, 0.7])
        low, high = paired_interval(int(lost), int(gained), 30)
        inside += low <= 0.1 <= high
    assert inside / 400 > 0.92


# -------------------------------------------------------------------------------------------------------------- rates
def loop(split: SplitScores, a: int, b: int, cut: float):
    """The images of each cell and those with b predicted, image by image; unknown labels are left out."""
    found = {}
    for scores, codes in zip(split.scores, split.codes, strict=True):
        if -1 in (codes[a], codes[b]) or 2 in (codes[a], codes[b]):
            continue
        kind = f"{'found' if codes[b] == 1 else 'false'}_{'with' if codes[a] == 1 else 'without'}_a"
        images, predicted = found.get(kind, (0, 0))
        found[kind] = images + 1, predicted + (scores[b] >= cut)
    return found


def test_rates_equal_a_plain_loop():
    split = drawn_split("test", 120, labels=4, codes=4)
    label, mask = split.targets("ignore")
    cuts = Cuts(np.array([0.5, 0.5, 0.41, 0.5]), "")
    pair = pair_in_training(("d", "c"), "abcd", None)
    rates = pair_rates(split.scores, label, mask, pair, cuts)
    assert {kind: (rate.images, rate.predicted) for kind, rate in rates.items()} == loop(split, 3, 2, 0.41)


def test_differing_images_by_hand():
    codes = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 1], [1, -1, 0], [1, 0, 0], [1, 0, 1]], np.int8)
    was = np.array([[0.9, 0.6, 0.1], [0.9, 0.2, 0.1], [0.9, 0.6, 0.9], [0.9, 0.6, 0], [0.9, 0.4, 0.1], [0.9, 0.7, 0.2]])
    now = np.array(
        [[0.9, 0.4, 0.9], [0.1, 0.8, 0.1], [0.9, 0.2, 0.9], [0.9, 0.2, 0], [0.9, 0.3, 0.1], [0.9, 0.05, 0.3]]
    )
    one, other = (SplitScores("t", np.array(list("uvwxyz")), scores, codes) for scores in (was, now))
    cuts = (Cuts(np.full(3, 0.5), ""),) * 2
    found = differing_images(one, other, *one.targets("ignore"), pair_in_training(("a", "b"), "abc", None), cuts)
    # w has no a, x an unknown b, y no change; u also differs in c; a itself may differ, as in v
    assert [(i.id, i.present, i.gained, i.others, i.better) for i in found] == [
        ("z", False, False, 0, True),
        ("v", True, True, 0, True),
        ("u", False, False, 1, True),
    ]
    assert [(i.id, i.first, i.second) for i in found if i.id == "u"] == [("u", 0.6, 0.4)]


def test_thresholds_of_a_run():
    def cuts(found):
        values, origin = prediction_cuts(found, 0.5, "test", ["b", "a"])
        return values.tolist(), origin

    fitted = {"split": "val", "goal": "f1"}
    assert cuts(None) == ([0.5, 0.5], "0.5 for every label")
    assert cuts(Thresholds({"a": 0.3, "b": 0.3})) == ([0.3, 0.3], "0.3 for every label")
    assert cuts(Thresholds({"a": 0.3, "b": 0.4})) == ([0.4, 0.3], "those of thresholds.json, from 0.3 to 0.4")
    assert cuts(Thresholds({"a": 0.3, "b": 0.4}, fitted)) == ([0.4, 0.3], "those of thresholds.json, fitted on val")
    own = cuts(Thresholds({"a": 0.3, "b": 0.4}, {"split": "test"}))
    assert own == ([0.5, 0.5], "0.5 for every label, as those of thresholds.json were fitted on test itself")


# --------------------------------------------------------------------------------------------------------- in a folder
@pytest.fixture
def two(tmp_path):
    """Two runs with the same images, thresholds and statistics; the second has its images in another order."""
    test = drawn_split("test", 90, labels=3, codes=4)
    order = np.random.default_rng(5).permutation(90)
    noise = np.random.default_rng(6).normal(0, 0.3, test.scores.shape)
    noisy = SplitScores("test", test.ids, np.clip(test.scores + noise, 0, 1), test.codes)
    keys = {"data__test_splits": ("test",), "data__difficult_eval": "ignore", "metrics__pair_support": 1}
    runs = write_run(tmp_path / "a", test, **keys), write_run(tmp_path / "b", noisy.take(order), **keys)
    for folder, cut in zip(runs, (0.5, 0.6), strict=True):
        write_space(folder, space_of((test.codes == 1).astype(np.int8), "abc"))
        write_thresholds(folder, Thresholds(dict.fromkeys("abc", cut)))
    return (*runs, test, noisy)


def test_one_run_and_two_runs_agree_with_the_loop(two):
    a, b, test, noisy = two
    first, second = ComparedRun.of(a), ComparedRun.of(b)
    found = pairs_of_runs(first, second, match_images(first, second, "test"), pairs="a:b,c:a")
    assert found.thresholds == ("0.5 for every label", "0.6 for every label")
    for pair, columns in zip(found.pairs, ((0, 1), (2, 0)), strict=True):
        for rates, split, cut in ((pair.rates[0], test, 0.5), (pair.rates[1], noisy, 0.6)):
            counted = {kind: (rate.images, rate.predicted) for kind, rate in rates.items()}
            assert counted == loop(split, *columns, cut)
        counts = pair.rates[1]["false_with_a"]
        change = pair.changes["false_with_a"]
        assert change.b == counts.predicted / counts.images
        gained = [i for i in pair.differing if i.gained and not i.present]
        lost = [i for i in pair.differing if not i.gained and not i.present]
        assert change.difference == pytest.approx((len(gained) - len(lost)) / counts.images)
        assert (change.low, change.high) == paired_interval(len(lost), len(gained), counts.images)
    alone = pairs_of_run(first, "test", pairs="a:b")
    assert alone.pairs[0].rates == (found.pairs[0].rates[0],)
    assert (alone.pairs[0].changes, alone.pairs[0].differing) == ({}, ())
    assert pairs_of_run(first, "test").pairs, "pairs from the training labels"


def test_pairs_in_the_output_of_a_comparison(two, tmp_path, capsys, refusal):
    a, b, *_ = two
    compare_folders(a, b, output=str(tmp_path / "c.csv"), resamples=5, pairs="a:b", as_json=True)
    [pair] = json.loads(capsys.readouterr().out)["test"]["label_pairs"]["pairs"]
    first, second = ComparedRun.of(a), ComparedRun.of(b)
    found = pairs_of_runs(first, second, match_images(first, second, "test"), pairs="a:b")
    [measured] = found.pairs
    rate, change = measured.rates[1]["found_with_a"], measured.changes["found_with_a"]
    written = pair["rates"]["found_with_a"]
    assert (pair["pair"], written["images"], written["b"]["predicted"]) == ("a:b", rate.images, rate.predicted)
    assert [written["b"]["low"], written["b"]["high"]] == list(rate.interval)
    assert [written["low"], written["high"]] == [change.low, change.high]
    assert pair["p_b_given_a"] == measured.training.p_b_given_a
    assert [image["id"] for image in pair["differing"]] == [image.id for image in measured.differing]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "c.csv").read_text())))
    of_rate = next(row for row in rows if row["kind"] == "pair found_with_a")
    assert [float(of_rate[name]) for name in ("b", "b_low", "b_high", "low")] == [
        rate.share,
        *rate.interval,
        change.low,
    ]
    images = [row["name"] for row in rows if row["kind"] == "pair image a:b"]
    assert images == [image.id for image in measured.differing]
    compare_folders(a, b, resamples=5, pairs="a:b")
    text = capsys.readouterr().out
    assert format_pairs(found) in text
    assert "thresholds of b: 0.6 for every label" in text
    assert "'d' is none of the 3 labels" in refusal(compare_folders, a, b, resamples=5, pairs="a:d")
