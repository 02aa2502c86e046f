"""`python -m benchmarks.measure`: its command line, its tables, and what its smaller measurements compute."""

import importlib
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from helpers import tiny
from helpers.paths import REPOSITORY
from helpers.scored_run import drawn_split
from scipy.special import expit
from scipy.stats import ttest_rel

from benchmarks import report
from benchmarks.measure import (
    calibration,
    exported,
    label_selection,
    photographs,
    planted_flips,
    variants,
)
from benchmarks.measure.__main__ import NAMES, main
from benchmarks.measure.options import parse


# ------------------------------------------------------------------------------------------------------ command line
@dataclass(frozen=True)
class Options:
    root: Path
    kind: Literal["a", "b"] = "a"
    again: bool = False
    names: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    least_rate: float = 0.5


def test_options_are_read_by_their_types():
    words = ["--root=x", "--kind=b", "--again", "--names", "one, two", "three", "--seeds=3,4", "--least-rate=1e-2"]
    assert parse(Options, words, "", "") == Options(Path("x"), "b", True, ("one, two", "three"), (3, 4), 0.01)
    assert parse(Options, ["--root=x"], "", "") == Options(Path("x"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("calibration", "--root"),
        ("serving --address=http://a --folder=b --clients=1,x", "--clients"),
        ("variants --compare=rates", "--compare"),
        ("photographs --root=/data --methods HSQ Q3L", "--methods: 'Q3L' is none of linear probe; Q2L"),
        ("label_selection --root=/data --functions nearest", "--functions: 'nearest' is none of random; "),
        ("variants --compare=mixing --variants MixUp DB", "--variants: 'DB' is none of none; MixUp"),
        ("photographs --root=/data --methods HSQ --rates-of={}/frozen.json", "/frozen.json has no 'HSQ'"),
        ("speed", "there is no speed; the names are\ndigits_methods "),
    ],
)
def test_a_wrong_command_is_refused(words, says, tmp_path, monkeypatch, capsys):
    (tmp_path / "frozen.json").write_text('{"linear probe": {"rate": 0.01}}')
    monkeypatch.setattr(photographs, "frequent", lambda root: np.arange(2))
    monkeypatch.setattr("benchmarks.measure.__main__.use_large_pages", lambda: None)
    try:
        code = main(words.format(tmp_path).split())
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert says in capsys.readouterr().err


def test_names_are_listed_without_importing_what_they_measure():
    program = "import sys; from benchmarks.measure.__main__ import main; main([]); sys.exit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    listed = dict(line.split("  ", 1) for line in done.stdout.splitlines()[-len(NAMES) :])
    assert [*listed] == [*NAMES]
    assert all(len(text.strip()) > 20 for text in listed.values())


@pytest.mark.parametrize("name", NAMES)
def test_every_option_of_a_measurement_is_explained(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    about, _, flags = capsys.readouterr().out.partition("\noptions:\n")
    for one in fields(importlib.import_module(f"benchmarks.measure.{name}").Options):
        flag = f"--{one.name.replace('_', '-')}"
        assert flag in flags
        assert flag in about.partition("\n\n")[2] or one.name.upper() in about


# ------------------------------------------------------------------------------------------------------------ report
def test_an_interval_is_that_of_the_paired_t_test():
    first, second = np.array([91.0, 92.5, 90.1]), np.array([93.2, 93.0, 92.4])
    interval = ttest_rel(second, first).confidence_interval(0.95)
    mean, half = report.t_interval(second - first)
    assert (mean - half, mean + half) == pytest.approx((interval.low, interval.high))


def test_a_table_replaces_what_is_between_its_marks(tmp_path):
    (tmp_path / "a.md").write_text("above\n<!-- a -->\nold\n<!-- b -->\nbelow\n")
    report.write_between(tmp_path / "a.md", ("<!-- a -->", "<!-- b -->"), "new")
    assert (tmp_path / "a.md").read_text() == "above\n<!-- a -->\n\nnew\n\n<!-- b -->\nbelow\n"
    with pytest.raises(SystemExit, match=r"a\.md has no lines '<!-- c -->' and '<!-- b -->'"):
        report.write_between(tmp_path / "a.md", ("<!-- c -->", "<!-- b -->"), "new")


def of_photographs(rate: float, epochs: int, seconds: list[float], resampled: list[float], values: list[float]) -> dict:
    return {
        "rate": rate,
        "epochs": epochs,
        "cpu_seconds": seconds,
        "resampled_mAP": resampled,
        **{name: values for name in (*photographs.METRICS, *photographs.GAPS)},
    }


def of_flips(mean_precision: float) -> dict:
    numbers = {"wrong": 4, "suggestions": 2, "right": 1, "exchanged": 1, "missing": 0, "superfluous": 0}
    every = {"all exchanged": 2, "all missing": 1, "all superfluous": 1, "mAP": mean_precision}
    return {"planted": 0.1, "original": 0.9, **dict.fromkeys(planted_flips.RULES, numbers | every)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            photographs.table(
                {
                    "probe": of_photographs(0.01, 10, [5.0, 7.0], [0.5, 0.6], [0.5, 0.6]),
                    "HSQ": of_photographs(3e-4, 20, [50.0], [0.4, 0.5], [0.45]),
                }
            ),
            [
                "| head | rate | epochs | mAP | − probe | CF1 | OF1 | FPR gap | AUC gap | CPU s |",
                f"| probe | 0.01 | 10 | 55.00 ± 7.07 |  | {'55.00 ± 7.07 | ' * 4}6 |",
                f"| HSQ | 0.0003 | 20 | 45.00 | -10.00 [-10.00, -10.00] | {'45.00 | ' * 4}50 |",
            ],
        ),
        (
            variants.table(
                {
                    "BCE": {"rate": 0.01, "mAP": [0.5, 0.6], "resampled_mAP": [0.5, 0.6], "cpu_seconds": [5.0]},
                    "ROLE": {"rate": 0.001, "mAP": [0.6, 0.7], "resampled_mAP": [0.6, 0.7], "cpu_seconds": [7.0]},
                },
                ("BCE", "ASL"),
            ),
            [
                "| variant | rate | mAP | − BCE | CPU s |",
                "| BCE | 0.01 | 55.00 ± 7.07 |  | 5 |",
                "| ROLE | 0.001 | 65.00 ± 7.07 | +10.00 [+10.00, +10.00] | 7 |",
            ],
        ),
        (
            planted_flips.table({"60": [of_flips(0.5), of_flips(0.7)]}),
            [
                f"| {' | '.join(planted_flips.COLUMNS)} |",
                *(
                    f"| 60 | {rule} | 4.0 | 2.0 | 50 % | 25 % | 50 % | 0 % | 0 % | 4.0 "
                    "| 10.00 ± 0.00 | 60.00 ± 14.14 | 90.00 ± 0.00 |"
                    for rule in planted_flips.RULES
                ),
            ],
        ),
        (
            exported.table(
                {
                    "float32": {"bytes": 4e6, "mAP": 0.75, "1": 0.5, "8": 2.0},
                    "int8": {"bytes": 1e6, "mAP": 0.74, "1": 0.25, "8": 0.5},
                },
                [1, 8],
            ),
            [
                "| program | MB | ratio | mAP | − first "
                "| images/s, batches of 1 | ratio | images/s, batches of 8 | ratio |",
                "| float32 | 4.0 | 1.00 | 75.00 | +0.00 | 2.0 | 1.00 | 4.0 | 1.00 |",
                "| int8 | 1.0 | 0.25 | 74.00 | -1.00 | 4.0 | 2.00 | 16.0 | 4.00 |",
            ],
        ),
        (
            label_selection.table(
                {
                    "random": {"0": [0.2, 0.4], "1": [0.2, 0.6]},
                    "worse": {"0": [0.1, 0.2]},
                    "better": {"0": [0.3, 0.7]},
                },
                150,
            ),
            [
                "| function | labels | of 150 | each seed | mAP at half |",
                "| better | 125 | 83 % | 125 | 70.00 |",
                "| random | 150 | 100 % | nan, 138 | 50.00 |",
                "| worse | nan | nan % | nan | 20.00 |",
            ],
        ),
    ],
    ids=["photographs", "variants", "planted_flips", "exported", "label_selection"],
)
def test_a_table_has_the_numbers_of_its_results(text, expected):
    heading, _, *rows = text.splitlines()
    assert [heading, *rows] == expected


# ------------------------------------------------------------------------------------------------------- calibration
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
    for per, miss_rate, by_half in rows:
        by_image, by_label, predicted = by_half.mean(axis=0)
        assert (by_image if per == "global" else by_label) == pytest.approx(miss_rate, abs=0.03)
        assert 0 < predicted < 3


def test_the_standard_error_is_that_of_the_mean_over_halves():
    assert calibration.with_standard_error(np.array([0.1, 0.2, 0.3, 0.4])) == "25.00 ± 6.45"


# ----------------------------------------------------------------------------------------------------- planted flips
def test_each_kind_of_wrong_label_is_planted_and_only_in_known_labels():
    codes = (np.random.default_rng(1).random((200, 10)) < 0.3).astype(np.int8)
    codes[:, 0], codes[:20, 1:3] = 2, -1
    wrong, kinds = planted_flips.planted(codes, 0.1, np.random.default_rng(3))
    again, _ = planted_flips.planted(codes, 0.1, np.random.default_rng(3))
    np.testing.assert_array_equal(wrong, again)
    np.testing.assert_array_equal(wrong != codes, kinds >= 0)
    assert set(codes[kinds >= 0]) == {0, 1}
    for kind, changes in enumerate(([0, 1], [1], [0])):  # the codes that an image had
        rows = np.flatnonzero((kinds == kind).any(axis=1))
        assert len(rows) == 20
        assert all(sorted(codes[row][kinds[row] >= 0]) == changes for row in rows)


def test_right_suggestions_on_a_case_by_hand():
    """Label 1 has a lower limit than a half, so only the first of two improbable ones is superfluous."""
    codes = np.array([[1, 1], [0, 0]] * 6, np.int8)
    scores = np.where(codes == 1, [0.9, 0.4], 0.1)
    scores[1], scores[0] = [0.95, 0.1], [0.9, 0.05]
    audit = planted_flips.audited(codes, scores)
    kinds = np.full(codes.shape, -1)
    kinds[1, 0], kinds[0, 1], kinds[2, 0] = 1, 2, 0
    assert planted_flips.counts(planted_flips.suggested(audit), kinds) == {
        **{"wrong": 3, "suggestions": 2, "right": 2},
        **{"exchanged": 0, "missing": 1, "superfluous": 1},
        **{"all exchanged": 1, "all missing": 1, "all superfluous": 1},
    }
    assert planted_flips.counts(planted_flips.less_probable(audit), kinds)["suggestions"] == 7


def test_a_set_is_measured_with_planted_accepted_and_original_labels():
    draw = np.random.default_rng(0)
    codes = (draw.random((150, 3)) < 0.4).astype(np.int8)
    features = (4 * codes @ draw.normal(size=(3, 8)) + draw.normal(size=(150, 8))).astype(np.float32)
    images = label_selection.Images(features, codes)
    result = planted_flips.run(images.take(np.arange(100)), images.take(np.arange(100, 150)), np.arange(3), 100, 0.1, 0)
    limits = result["limits"]
    assert limits["wrong"] == 40
    assert result["right"]["right"] == result["right"]["suggestions"] == limits["right"]
    assert limits["right"] > 0.8 * limits["suggestions"] > 10
    assert result["planted"] < limits["mAP"] <= result["original"] + 0.01


# ---------------------------------------------------------------------------------------------------------- exported
def test_a_split_is_read_as_in_evaluation(run):
    images, label, mask = exported.read_split(run("published").folder, "val")
    assert (images.shape, images.dtype) == ((tiny.FEW["val"], 8, 8, 3), np.uint8)
    assert label.shape == mask.shape == (tiny.FEW["val"], 10)
    assert 0 < label.mean() < 1


def test_the_shortest_of_the_times_counts(monkeypatch):
    seconds = iter([1, 0, 5, 1, 2, 4])  # a takes 5 and then 2 seconds, b 1 and then 4; the first calls do not count
    monkeypatch.setattr(exported.timeit, "timeit", lambda call, number: next(seconds))
    programs = dict.fromkeys("ab", lambda images: images)
    assert exported.times(programs, np.zeros((1, 2, 2, 3), np.uint8), 2) == {"a": 2, "b": 1}
