"""What an evaluation refuses: runs without scores, damaged files, small splits, and metrics of impossible arguments."""

import inspect
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from helpers.metric_cases import evaluate_scores
from helpers.refusals import CUT, Refusal, damaged, each, replacing
from helpers.scored_run import drawn_split, stored_scores, write_results, write_run

from mlmoe_jax.config import default_config
from mlmoe_jax.data.images import ArrayImages
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.data.split import Split
from mlmoe_jax.evaluation.decisions.calibration_fit import fit_calibration
from mlmoe_jax.evaluation.evaluate import evaluate_opened, score_split
from mlmoe_jax.evaluation.metrics import multilabel, ranking
from mlmoe_jax.evaluation.metrics.reliability import reliability
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.runs.decisions import read_thresholds
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.sharding import make_mesh


def scored(at: Path) -> RunFolder:
    """A run with scores of one split, and its metrics."""
    folder = write_run(at / "run")
    write_results(folder, {"val": {"mAP": 0.5}}, drawn_split("val", 4))
    return folder


def shared(at: Path) -> RunFolder:
    """A run whose scores were left out."""
    folder = write_run(at / "run")
    write_results(folder, {"val": {"mAP": 0.5}})
    return folder


def without_splits(_):
    config = default_config()
    config.data.test_splits = ()
    evaluate_opened(RunFolder("run"), SimpleNamespace(config=config))


def diverged(_):
    """Score six images with a model that returns NaN."""
    config, names = default_config(), ("a", "b", "c")
    config.data.image_size, config.eval.batch_size = 8, 4
    images = ArrayImages(np.zeros((6, 8, 8, 3), np.uint8))
    split = Split("val", names, np.zeros((6, 3), np.int8), list("uvwxyz"), images)
    step = lambda values, frozen, batch: {"logits": np.full((4, 3), np.nan), "id": batch["id"], "mask": batch["mask"]}  # noqa: E731
    score_split(step, {"x": {}}, {}, split, config, make_mesh(config.mesh))


def with_labels(at: Path, names: str) -> RunFolder:
    """Return a run folder on the labels a and b, with another labels.txt."""
    folder = write_run(at / "run", names=names)
    space = replace(synthetic_label_space(2, 1), names=("a", "b"))
    space.save(at / "run" / "label_space.npz")
    return folder


def of_calibration(name: str, table: SplitScores, says: str) -> Refusal:
    return Refusal(name, None, lambda _: fit_calibration(table, "abc", default_config()), says)


def read_metrics(folder: RunFolder) -> dict:
    return StoredRun(folder).metrics


VAL, NEVER = drawn_split("val", 60), np.zeros((60, 3), np.int8)
REFUSALS = [
    *(
        Refusal(f"{name}, {read.__name__}", make, read, says)
        for name, make, says in (
            ("no run", lambda at: RunFolder(at / "none"), "there is no run folder"),
            ("no results", lambda at: write_run(at / "run"), "has no results.json; run mlmoe eval --workdir={at}/run"),
        )
        for read in (stored_scores, read_metrics)
    ),
    Refusal("no scores", shared, stored_scores, "has results, but no scores of images"),
    Refusal("no labels", RunFolder, lambda folder: StoredRun(folder).labels, "no labels.txt"),
    *(
        Refusal(
            f"labels.txt with {names}",
            lambda at, names=names: with_labels(at, names),
            lambda folder: StoredRun(folder).labels,
            "labels.txt has other labels than label_space.npz; copy the run folder again",
        )
        for names in (".", "ba")
    ),
    Refusal("no thresholds", RunFolder, read_thresholds, "no thresholds.json"),
    Refusal(
        "another split",
        scored,
        lambda folder: StoredRun(folder).split("vla"),
        "has scores of val, not of vla; run mlmoe eval",
        "--config.data.test_splits=vla",
    ),
    Refusal("no splits", None, without_splits, "data.test_splits is empty; name the splits to evaluate"),
    Refusal("a diverged model", None, diverged, "the scores of 6 images of val are not finite: the model has diverged"),
    of_calibration("49 images", VAL.take(np.arange(49)), "val is too small to calibrate on: 49 images"),
    of_calibration("no positives", replace(VAL, codes=NEVER), "and 0 present labels, of at least 50 and 10"),
    of_calibration("one group", replace(VAL, groups=np.full(60, "p")), "to calibrate on: 60 images of one group"),
]


def npz(**arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def of_file(name: str, file: str, how, read, says: str = "is damaged") -> Refusal:
    return damaged(f"{file}: {name}", scored, f"run/{file}", how, read, f"{{at}}/run/{file}", says)


def of_thresholds(name: str, text: str, says: str = "is damaged") -> Refusal:
    def make(at: Path) -> RunFolder:
        (at / "thresholds.json").write_text(text)
        return RunFolder(at)

    return Refusal(f"thresholds.json: {name}", make, read_thresholds, "{at}/thresholds.json", says)


IDS, OBJECTS = VAL.ids[:4], VAL.ids[:4].astype(object)
FLAT = '{"thresholds": {"a": 0.5}, "calibration": {"split": "val", "labels": {"a": {"scale": 0.0, "offset": 0.0}}}}'
DAMAGE = [
    of_file("cut", "scores/val.npz", CUT, stored_scores),
    of_file("no scores", "scores/val.npz", npz(ids=IDS), stored_scores),
    of_file("objects", "scores/val.npz", npz(ids=OBJECTS, scores=VAL.scores, labels=VAL.codes), stored_scores),
    of_file(
        "one label code", "scores/val.npz", npz(ids=VAL.ids, scores=VAL.scores, labels=VAL.codes[0, 0]), stored_scores
    ),
    of_file("too few names", "scores/val.npz", npz(ids=IDS[:1], scores=VAL.scores, labels=VAL.codes), stored_scores),
    of_file("a list", "results.json", "[]", read_metrics),
    of_file("a number per split", "results.json", '{"val": 0.5}', read_metrics),
    of_file("metrics alone", "results.json", '{"val": {"metrics": {"mAP": 0.5}}}', read_metrics),
    of_file("a word as metric", "results.json", replacing('"mAP": 0.5', '"mAP": "high"'), read_metrics),
    of_file("a very large metric", "results.json", replacing('"mAP": 0.5', f'"mAP": 1{"0" * 400}'), read_metrics),
    of_file("a list of files", "results.json", replacing('"scores/val.npz"', '["list"]'), read_metrics),
    of_thresholds("a list", "[0.5]"),
    of_thresholds("a word", '{"thresholds": "high"}'),
    of_thresholds("a list per label", '{"thresholds": {"a": [1]}, "split": "val"}'),
    of_thresholds("a very large one", f'{{"thresholds": {{"a": 1{"0" * 400}}}}}'),
    of_thresholds("NaN", '{"thresholds": {"a": NaN}}', "nan is no threshold"),
    of_thresholds("a calibration that does not increase", FLAT),
]

EYE, BEYOND = np.eye(2), np.full((2, 2), np.nan)
ARGUMENTS = [
    Refusal(name, None, call, says, error=KeyError if says == "none" else ValueError)
    for name, call, says in (
        ("k = 0", lambda _: multilabel.top_k(EYE, 0), "at least 1"),
        ("NaN", lambda _: multilabel.average_precision(BEYOND, EYE), "NaN"),
        ("AP", lambda _: multilabel.average_precision(EYE, EYE, interpolation="voc"), "interpolation"),
        ("micro AP", lambda _: multilabel.micro_average_precision(EYE, EYE, interpolation="voc"), "interpolation"),
        ("logits", lambda _: evaluate_scores(2 * EYE, EYE, None, {}), "probabilities"),
        ("empty", lambda _: multilabel.precision_recall_f1(EYE, EYE, empty="none"), "none"),
        ("1.01", lambda _: reliability(EYE + 0.01, EYE), "probabilities"),
        ("-0.01", lambda _: reliability(EYE - 0.01, EYE), "probabilities"),
        ("NaN as probability", lambda _: reliability(BEYOND, EYE), "NaN"),
    )
]
# Without the check of the tests, such an array would be broadcast.
SHAPES = [
    Refusal(
        f"{function.__name__} of {shape}",
        None,
        lambda _, function=function, shape=shape: inspect.unwrap(function)(np.ones(shape), np.ones((2, 3)), None),
        "must be [B,K]",
        error=ValueError,
    )
    for function in (multilabel._counts, ranking.check_inputs)
    for shape in ((1, 3), (2, 1), (3,))
]


@each(REFUSALS + ARGUMENTS + SHAPES)
def test_refusals(case, tmp_path):
    case.check(tmp_path)


@each(DAMAGE)
def test_damage(case, tmp_path):
    case.check(tmp_path)
