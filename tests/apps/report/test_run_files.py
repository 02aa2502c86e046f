"""Files of a run folder that parse, but whose values do not fit: each is one sentence that names the file."""

import os

import numpy as np
import pytest
from helpers.made_run import IMAGES, data_block, make_run, section

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.report import scores, training
from mlmoe_jax.apps.report.page import REPORT, write_report
from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.apps.tools.compare import ComparedRun
from mlmoe_jax.runs.folder import RunFolder


def replaced(folder, file, **arrays):
    folder.write_npz(file, **(folder.read_npz(file) | {name.replace("__", "/"): of for name, of in arrays.items()}))


def with_keys(folder, name, **keys):
    folder.write_json(name, folder.read_json(name) | keys)


DAMAGE = {
    "results.json": lambda folder: folder.write_text("results.json", "{"),
    "backbone.json": lambda folder: with_keys(folder, "backbone.json", frozen_parameters=[]),
    "cost.json": lambda folder: with_keys(folder, "cost.json", macs={"layers": "many"}),
    "per_class.csv": lambda folder: folder.write_csv("per_class.csv", ["split", "label", "AP"], [["val", "cat", "à"]]),
    "samples/index.json": lambda folder: with_keys(folder, "samples/index.json", grid=[2]),
    "samples/explained.npz": lambda folder: replaced(
        folder, "samples/explained.npz", gates__co=np.zeros((2, 1), np.float16)
    ),
    "gates.npz": lambda folder: replaced(folder, "gates.npz", shared__experts=np.zeros((3, 3), np.float32)),
    "scores.npz": lambda folder: folder.write_npz("scores.npz", ids=np.array(5), scores=1, labels=1, split=1),
    "starts.json": lambda folder: folder.write_json(
        "starts.json", [start | {"time": "yesterday"} for start in folder.read_json("starts.json", list)]
    ),
    "label_space.npz": lambda folder: folder.write_npz("label_space.npz", names=np.array(["a"]), counts=np.eye(2)),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture
def copied(made, tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.adopt(made)
    return folder


@pytest.mark.parametrize("name", DAMAGE)
def test_values_that_do_not_fit_are_one_sentence(name, copied, refusal):
    DAMAGE[name](copied)
    assert refusal(write_report, copied).startswith(f"{copied / name} is damaged: ")
    assert not (copied / REPORT).exists()


@pytest.mark.parametrize(
    ("name", "shape"), [("gates__co", (3, 4, 2)), ("attention__labels", (3, 4, 6)), ("attention__prompts", (3, 0, 6))]
)
def test_arrays_of_samples_that_do_not_fit(name, shape, copied, refusal):
    replaced(copied, "samples/explained.npz", **{name: np.zeros(shape, np.float16)})
    assert refusal(write_report, copied).startswith(f"{copied}/samples/explained.npz is damaged: ")


@pytest.mark.parametrize("groups", [[["co", [], 1]] * 2, [["co", 1]] * 2, 5])
def test_prompt_groups_that_are_none(groups, copied, refusal):
    with_keys(copied, "samples/index.json", prompt_groups=groups)
    assert "is damaged: " in refusal(write_report, copied)


def test_a_label_space_of_other_labels(copied, refusal):
    copied.write_text("labels.txt", "a\nb\n")
    sentence = refusal(lambda: RunFiles(copied).label_space)
    assert sentence.endswith("label_space.npz is damaged: it has 5 labels, but labels.txt has 2")


def test_unreadable_images_are_left_out(copied):
    arrays = copied.read_npz("scores.npz")
    arrays["scores"][np.flatnonzero(arrays["split"] == "test")[5]] = np.nan
    copied.write_npz("scores.npz", **arrays)
    assert len(RunFiles(copied).scored) == IMAGES - 1


def test_runs_with_equal_names_are_told_apart(tmp_path):
    paths = [tmp_path / "x" / "coco", tmp_path / "y" / "coco", tmp_path / "voc"]
    for path in paths:
        RunFolder(path).write_text("config.json", "{}")
    one, other, third = (RunFiles(RunFolder(path)) for path in paths)
    assert one.name == "coco"
    one.name_apart(other)
    assert (one.name, other.name) == ("x/coco", "y/coco")
    one.name_apart(third)
    assert (one.name, third.name) == ("coco", "voc")


# -------------------------------------------------------------------------------------------------- a later evaluation
def test_results_of_an_evaluation_are_read_with_its_config(tmp_path):
    folder = make_run(tmp_path / "run", samples=0)
    for name in ("results.json", "scores.npz", "per_class.csv"):
        folder.write_bytes(f"eval/{name}", folder.read_bytes(name))
        (folder / name).unlink()
    config = RunFiles(folder).config
    config.data.difficult_eval, config.eval.threshold = "ignore", 0.25
    folder.write_text("eval/config.json", configuration.to_json(config))
    files = RunFiles(folder)
    main = files.main_split
    assert (main.prefix, main.scores.prefix) == ("eval/", "eval/")
    main.metrics["CF1@0.25"] = 0.5
    assert "CF1@0.25" in training.intervals(files, most=2).ends
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
    shown = "test: results of the training; eval/ has another evaluation of it, which is not shown."
    assert shown in section(page, "metrics")
    headings = [name for name, _ in data_block(page, "metrics-0")["columns"]]
    assert headings == ["metric", "val (training)", "test (training)", "test_shift (eval/)"]
    assert "mAP_fall_from_test" not in page, "the mAP of test is that of the training"
    assert "2001-09-09 01:46 UTC" in page, "when the results that are shown were written"
    folder.write_json("eval/results.json", later | {"test": ours["test"]})
    assert "mAP_fall_from_test" in write_report(folder).read_text()
