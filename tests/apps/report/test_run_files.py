"""Files of a run folder that parse, but whose values do not fit: each is one sentence that names the file."""

import os

import numpy as np
import pytest
from helpers.made_run import make_run, section

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.report import results, scores, training
from mlmoe_jax.apps.report.page import write_report
from mlmoe_jax.apps.report.resampling import resample
from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.apps.tools.compare import ComparedRun
from mlmoe_jax.errors import UserError


def replaced(folder, name, value):
    """Replace one array of samples/explained.npz."""
    folder.write_npz("samples/explained.npz", **(folder.read_npz("samples/explained.npz") | {name: value}))


def with_keys(folder, name, **keys):
    folder.write_json(name, folder.read_json(name) | keys)


DAMAGE = {
    "backbone.json": lambda folder: with_keys(folder, "backbone.json", frozen_parameters=[]),
    "cost.json": lambda folder: with_keys(folder, "cost.json", macs={"layers": "many"}),
    "per_class.csv": lambda folder: folder.write_csv("per_class.csv", ["split", "label", "AP"], [["val", "cat", "à"]]),
    "samples/index.json": lambda folder: with_keys(folder, "samples/index.json", grid=[2, "3"]),
    "samples/explained.npz": lambda folder: replaced(folder, "gates/co", np.zeros((2, 1), np.float16)),
    "scores.npz": lambda folder: folder.write_npz("scores.npz", ids=np.array(5), scores=1, labels=1, split=1),
    "starts.json": lambda folder: folder.write_json(
        "starts.json", [start | {"time": "yesterday"} for start in folder.read_json("starts.json", list)]
    ),
    "label_space.npz": lambda folder: folder.write_npz("label_space.npz", names=np.array(["a"]), counts=np.eye(2)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_values_that_do_not_fit_are_one_sentence(name, tmp_path, refusal):
    folder = make_run(tmp_path / "run")
    DAMAGE[name](folder)
    assert refusal(write_report, folder).startswith(f"{folder / name} is damaged: ")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("gates/co", (3, 4, 2)),
        ("gates/co", (2, 5, 2)),
        ("attention/labels", (3, 4, 6)),
        ("attention/prompts", (3, 2, 5)),
        ("attention/prompts", (3, 0, 6)),
    ],
)
def test_arrays_of_samples_fit_images_labels_and_tokens(name, shape, tmp_path, refusal):
    folder = make_run(tmp_path / "run")
    replaced(folder, name, np.zeros(shape, np.float16))
    assert refusal(write_report, folder).startswith(f"{folder}/samples/explained.npz is damaged: ")


@pytest.mark.parametrize("groups", [[["co", [], 1]], [["co", 1]], [[1, 1, 1]], [3], 5])
def test_prompt_groups_have_a_side_a_group_and_an_expert(groups, tmp_path, refusal):
    folder = make_run(tmp_path / "run")
    with_keys(folder, "samples/index.json", prompt_groups=groups)
    assert refusal(write_report, folder).startswith(f"{folder}/samples/index.json is damaged: ")


def test_runs_with_equal_names_are_told_apart(tmp_path):
    one, other = (RunFiles(make_run(tmp_path / name / "coco")) for name in ("x", "y"))
    assert one.name == "coco"
    one.name_apart(other)
    assert (one.name, other.name) == ("x/coco", "y/coco")
    third = RunFiles(make_run(tmp_path / "voc"))
    one.name_apart(third)
    assert (one.name, third.name) == ("coco", "voc")


# -------------------------------------------------------------------------------------------------- a later evaluation
def evaluated_later(folder, *, difficult="ignore", threshold=0.25):
    """Move the files of the training to eval/, as an evaluation with other settings would have written them."""
    for name in ("results.json", "scores.npz", "per_class.csv"):
        folder.write_bytes(f"eval/{name}", folder.read_bytes(name))
        (folder / name).unlink()
    config = RunFiles(folder).config
    config.data.difficult_eval, config.eval.threshold = difficult, threshold
    folder.write_text("eval/config.json", configuration.to_json(config))


def test_results_of_an_evaluation_are_read_with_its_config(tmp_path):
    folder = make_run(tmp_path / "run", samples=0)
    old = RunFiles(folder)
    assert old.settings("eval/").eval.threshold == old.config.eval.threshold == 0.5, "evaluations without a config"
    evaluated_later(folder)
    files = RunFiles(folder)
    main = files.main_split
    assert (main.prefix, main.scores.prefix) == ("eval/", "eval/")
    assert "CF1@0.25" in resample(files, most=2).metrics
    settings, codes = ComparedRun.of(folder).settings["test"], main.scores.codes
    assert (settings.data.difficult_eval, settings.eval.threshold) == ("ignore", 0.25)
    assert f"all {int(((codes == 0) | (codes == 1)).sum()):,} scores pooled" in repr(scores.curves(files))


def test_a_report_says_which_results_it_shows(tmp_path, no_bundle):
    folder = make_run(tmp_path / "run", samples=0)
    ours = folder.read_json("results.json")
    folder.write_json("eval/results.json", {"test": ours["test"]})
    assert "another evaluation" not in write_report(folder).read_text(), "both are the same"
    os.utime(folder / "results.json", (1e9, 1e9))
    later = {"test": ours["test"] | {"mAP": 0.123}, "test_shift": {"mAP": 0.1, "mAP_fall_from_test": 0.023}}
    folder.write_json("eval/results.json", later)
    page = write_report(folder).read_text()
    shown = section(page, "metrics")
    assert "test: results of the training; eval/ has another evaluation of it, which is not shown." in shown
    assert "metric val (training) test (training) test_shift (eval/)" in shown
    assert "mAP_fall_from_test" not in shown, "the mAP of test is that of the training"
    assert "12.30" not in shown
    assert "2001-09-09 01:46 UTC" in section(page, "summary"), "when the results that are shown were written"
    folder.write_json("eval/results.json", later | {"test": ours["test"]})
    assert "mAP_fall_from_test" in section(write_report(folder).read_text(), "metrics")


def test_a_label_space_of_other_labels_is_one_sentence(tmp_path, refusal):
    folder = make_run(tmp_path / "run")
    folder.write_text("labels.txt", "a\nb\n")
    (folder / "thresholds.json").unlink()
    with pytest.raises(UserError, match=r"label_space\.npz is damaged: it has 5 labels, but labels\.txt has 2"):
        _ = RunFiles(folder).label_space


@pytest.mark.parametrize("row", [{"step": 80}, {"step": 80, "epoch": None}])
def test_a_last_row_without_an_epoch(row, tmp_path):
    folder = make_run(tmp_path / "run", samples=0)
    folder.append_row(row)
    assert "80 steps" in repr(training.header(RunFiles(folder)))


def test_sentences_about_thresholds(tmp_path):
    folder = make_run(tmp_path / "run", samples=0)
    assert "median 0.25" in repr(results.thresholds(RunFiles(folder))), "of 0.1, 0.2, 0.3 and 0.4"
    folder.write_json("thresholds.json", dict.fromkeys(RunFiles(folder).names))
    assert "No label is ever predicted." in repr(results.thresholds(RunFiles(folder)))
