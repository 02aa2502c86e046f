"""Data sets, scores of runs, and trainings that the tools refuse."""

import contextlib
import importlib.util
from dataclasses import replace

import numpy as np
import pytest
from helpers.packing import config_of
from helpers.refusals import Refusal, each
from helpers.scored_run import drawn_split, write_run
from helpers.tables import CLASSES, split_of, write

from mlmoe_jax.apps.tools.check import check_data
from mlmoe_jax.apps.tools.compare import compare_folders
from mlmoe_jax.apps.tools.fit_thresholds import calibrate_run, fit_run
from mlmoe_jax.apps.tools.preflight.compile_check import check_steps, tpu_devices
from mlmoe_jax.apps.tools.prune import prune
from mlmoe_jax.config import load_config, to_json
from mlmoe_jax.data.images import ImageFiles
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.split_checks import check_splits, require_readable, require_same_images
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime import distributed

DATA = config_of().data
VAL, TEST = drawn_split("val"), drawn_split("test", codes=4)


@contextlib.contextmanager
def patched(target, name, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, value)
        yield


# ------------------------------------------------------------------------------------------------- splits of a data set
def of_splits(name, train, *rest):
    """Splits before a training, and what is said of them."""
    others = [one for one in rest if isinstance(one, Split)]
    return Refusal(name, None, lambda at: check_splits(train, others), *rest[len(others) :])


def mostly_unreadable(at):
    """A split of 100 images, of which the first 60 cannot be read."""
    names = [f"{row}.png" for row in range(100)]
    write(at, "train.csv", "", names[60:])
    for name in names[:60]:
        (at / name).write_text("not an image")
    return Split("train", CLASSES, np.ones((100, len(CLASSES)), np.int8), names, ImageFiles(at, names))


def require_half(split):
    """Require that most of the images can be read, first of those of which most can be read."""
    require_readable([split.take(np.arange(50, 100), "readable"), split], DATA)


def mostly_missing(at):
    split = mostly_unreadable(at)
    for name in split.ids[:60]:
        (at / name).unlink()
    return split.without_missing()


def elsewhere(split):
    """Another process has found this split."""

    @contextlib.contextmanager
    def make(at):
        seen = []
        with patched(distributed, "gather", lambda facts: seen.append(facts) or seen):
            require_same_images("csv", [split])
            yield

    return make


def write_table(at, **keys):
    """A config of a table whose test split has no labels."""
    write(at, "train.csv", "image,labels\na.png,x\n")
    write(at, "test.csv", "image,labels\nb.png,\n")
    return config_of(at, "csv", val_split="", test_splits=("test",), keep_empty=True)


IMAGES = split_of("123")
OF_DATA = [
    of_splits(
        "images in training and validation",
        IMAGES,
        split_of("931", name="val"),
        "split val shares 2 of its 3 images with split train, such as 1; correct the lists or name other splits",
    ),
    of_splits(
        "an image in validation and test",
        IMAGES,
        split_of("9", name="val"),
        split_of("89", name="test"),
        "split test shares 1 of its 2 images with split val, such as 9;",
    ),
    of_splits(
        "groups in training and test",
        split_of("abcd", groups=["p", "q", "", "p"]),
        split_of("efgh", name="val", groups=["r", "s", "", "t"]),
        split_of("ijkl", name="test", groups=["x", "q", "p", ""]),
        "split test shares 2 of its 3 groups with split train (q, p); move the images of a group into one split, or "
        "clear data.group_column",
    ),
    of_splits("a split without images", split_of([]), "split train has no image with a positive label"),
    of_splits(
        "a split without positive labels",
        IMAGES,
        split_of("9", [0, -1, 2, 0], name="val"),
        "split val has no image with a positive label, so nothing can be learned from it or measured on it",
    ),
    Refusal(
        "images that are mostly unreadable",
        mostly_unreadable,
        require_half,
        "10 of 16 images of split train that were tried cannot be read, the first because cannot read {at}/0.png as an",
    ),
    Refusal(
        "images that are mostly missing",
        mostly_missing,
        lambda split: require_readable([split], DATA),
        "60 of the 100 images of split train have no file, the first is {at}/0.png; correct data.root, data.images or",
    ),
    *(
        Refusal(
            f"another process finds {what}",
            elsewhere(split),
            lambda at: require_same_images("csv", [split_of("12")]),
            "the processes find different images or labels of split train of csv; give all hosts the same files",
        )
        for what, split in {
            "other images": split_of("13"),
            "other labels": split_of("12", [0, 1, 0, 0]),
        }.items()
    ),
    Refusal("a check of a split without labels", write_table, check_data, "split test has no image with a positive"),
]


# -------------------------------------------------------------------------------------------------------- stored scores
def of_scores(name, call, tables, *says, **keys):
    """A run with these scores."""
    return Refusal(name, lambda at: write_run(at / "run", *tables, **keys), call, *says)


def fit(**keys):
    return lambda folder: fit_run(folder, [(f"thresholds.{key}", value) for key, value in keys.items()])


def setting(key, fit=fit_run):
    return lambda folder: fit(folder, [(key, "1")])


def while_training(folder):
    with folder.writing():
        calibrate_run(folder)


def compared(name, tables, *says, call=compare_folders, names="abc"):
    """A run beside another one with these scores."""

    def write_both(at):
        first = write_run(at / "a", VAL, TEST, data__test_splits=("test",))
        return [first, write_run(at / "b", *tables, names=names)]

    return Refusal(name, write_both, lambda runs: call(*runs), *says)


SCORES, NO_VAL = (VAL, TEST), {"data__val_split": "", "eval__select_on": "test"}
WRONG, RIGHT = (np.where(VAL.codes == 1, *scores) for scores in ((0.25, 0.75), (0.75, 0.25)))
OTHER_CODES = TEST.codes.copy()
OTHER_CODES[[3, 8], 1] = 1 - np.abs(OTHER_CODES[[3, 8], 1])
OF_SCORES = [
    of_scores("thresholds of no run", lambda run: fit_run(run.below("none")), (), "there is no run folder"),
    of_scores("thresholds without scores", fit_run, (), "has no results.json"),
    of_scores("thresholds of a test split", fit(split="test"), SCORES, "test, one of data.test_splits"),
    of_scores("thresholds of no split", fit(split="vla"), SCORES, "has scores of val, test, not of vla"),
    of_scores("another key", setting("data.exif"), SCORES, "data.exif cannot be set here; only thresholds.split, "),
    of_scores("another goal", fit(goal="recall"), SCORES, "thresholds.goal is 'recall'"),
    of_scores("nothing to fit on", fit_run, [TEST], "no validation split to fit on", **NO_VAL),
    of_scores(
        "no positive label",
        fit_run,
        [replace(VAL, codes=np.zeros_like(VAL.codes))],
        "no label has a positive among the 40 images of val",
    ),
    of_scores(
        "no image with scores",
        fit_run,
        [replace(VAL, scores=np.full(VAL.scores.shape, np.nan))],
        "no label has a positive among the 0",
    ),
    of_scores(
        "a precision that is not reached",
        fit(goal="precision"),
        [replace(VAL, scores=WRONG)],
        "a precision of 0.9 is not reached on val",
    ),
    of_scores(
        "a bound that needs more images",
        fit(miss_rate="0.01"),
        SCORES,
        "a miss rate of 0.01 needs 99 images with a label, and val has ",
    ),
    *(
        of_scores(f"calibration with {key}", setting(key, calibrate_run), SCORES, f"--config.{key} cannot be set here")
        for key in ("eval.threshold", "thresholds.goal", "calibration.use")
    ),
    of_scores("calibration in a training", while_training, SCORES, "its end replaces the thresholds"),
    of_scores(
        "calibration on few images", calibrate_run, [VAL.take(np.arange(20))], "too small to calibrate on: 20 im"
    ),
    compared("no scores to compare", [], "has no results.json; run mlmoe eval"),
    compared("no split in common", [drawn_split("holdout", 5)], "has scores of val, test and"),
    compared("another label", [TEST], "the runs have different labels, such as c;", names="abd"),
    compared(
        "more labels", [drawn_split("test", labels=4)], "the runs have different labels, such as d;", names="abcd"
    ),
    compared("fewer labels", [TEST.with_labels(np.array([0, 1]))], "the runs have different labels", names="ab"),
    compared(
        "no image in common",
        [replace(TEST, ids=np.char.add("other/", TEST.ids))],
        "no image of test has scores in both",
    ),
    compared(
        "no scores in common",
        [replace(TEST, scores=np.full(TEST.scores.shape, np.nan))],
        "no image of test has scores in both",
    ),
    compared(
        "other labels of images",
        [replace(TEST, codes=OTHER_CODES)],
        "2 of 40 images of test have other labels",
        "such as test/3.jpg at label b",
    ),
    compared("the same run", SCORES, "give the folders of two runs", call=lambda a, b: compare_folders(a, a)),
    compared(
        "a split that is not there",
        SCORES,
        "not of tset; run mlmoe eval",
        call=lambda a, b: compare_folders(a, b, split="tset"),
    ),
    compared(
        "no folder for the comparison",
        SCORES,
        "cannot write",
        call=lambda a, b: compare_folders(a, b, output=str(a / "none" / "c.csv")),
    ),
]


# ------------------------------------------------------------------------------------------------------------ trainings
def of_pruning(name, *says, **keys):
    overrides = [(key.replace("__", "."), value) for key, value in keys.items()]
    return Refusal(name, None, lambda at: prune(load_config(E2VPT, overrides), RunFolder(at / "new")), *says)


def write_other_run(at):
    (at / "config.json").write_text("{}")
    return RunFolder(at)


def write_search(at):
    """A pruning whose first training has another seed."""
    search = RunFolder(at / "prune/search")
    config = load_config(E2VPT, [("seed", "5"), ("model.prompts.pruning", "learned")])
    search.write_text("config.json", to_json(config))
    (search / "checkpoints").mkdir()
    return RunFolder(at)


def prune_in(folder):
    return prune(load_config(E2VPT, []), folder)


E2VPT = "e2vpt:dataset=digits"
OF_TRAININGS = [
    of_pruning("no level can be chosen", "set eval.select_on to val or test", eval__select_on="none"),
    of_pruning("a level chosen by no metric", "eval.select_metric", eval__select_metric="Brier_pooled"),
    of_pruning("a level without prompts", "prune.token_levels", prune__token_levels="(1.0,)"),
    Refusal(
        "a run of another mode",
        write_other_run,
        lambda folder: prune(load_config("e2vpt:dataset=voc2007,root=none", []), folder),  # no data to train on
        "holds a run of another mode, which pruning would repl",
    ),
    Refusal("a pruning with another config", write_search, prune_in, "seed was 5 and is 0"),
    Refusal(
        "a batch for an unknown memory",
        None,
        lambda at: check_steps(load_config("mlvpt_digits", []), find_batch=True),
        "not reported by a cpu device",
    ),
    Refusal(
        "a topology without libtpu",
        lambda at: patched(importlib.util, "find_spec", lambda name: None),
        lambda at: tpu_devices("v5e:4x4"),
        'pip install "jax[tpu]"',
    ),
]


@each([*OF_DATA, *OF_SCORES, *OF_TRAININGS])
def test_refusals(case, tmp_path):
    case.check(tmp_path)
