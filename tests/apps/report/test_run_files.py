"""The files of a run folder: damaged ones, and those of a later evaluation."""

import os

import numpy as np
import pytest
from helpers.made_run import IMAGES, data_block, make_run, section

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.report import results, training
from mlmoe_jax.apps.report.page import REPORT, write_report
from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.apps.tools.compare import ComparedRun
from mlmoe_jax.runs.folder import RunFolder


@pytest.fixture
def copied(run, tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.adopt(run)
    return folder


DAMAGE = {
    "results.json": b"{",
    "cost.json": b"\xff",
    "per_class.csv": "split,label,AP\nval,cat,à\n".encode(),
    "samples/index.json": b"[]",
    "samples/explained.npz": b"PK",
    "scores.npz": b"",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_one_sentence(name, copied, refusal):
    copied.write_bytes(name, DAMAGE[name])
    assert refusal(write_report, copied).startswith(f"{copied / name} is damaged: ")
    assert not (copied / REPORT).exists()


def test_a_damaged_log_is_only_a_warning(copied, caplog):
    copied.write_bytes("starts.json", b"[")
    write_report(copied)
    assert f"{copied / 'starts.json'} is damaged: " in caplog.text
    assert "Starts of the training" not in (copied / REPORT).read_text()


def test_files_that_do_not_fit_each_other_are_one_sentence(copied, refusal):
    index = copied.read_json("samples/index.json")
    for wrong in ({}, {**index, "grid": None}):
        copied.write_json("samples/index.json", wrong)
        assert refusal(write_report, copied).startswith(f"a file in {copied} is damaged: ")


def test_unreadable_images_are_left_out(copied):
    arrays = copied.read_npz("scores.npz")
    arrays["scores"][np.flatnonzero(arrays["split"] == "test")[5]] = np.nan
    copied.write_npz("scores.npz", **arrays)
    assert len(RunFiles(copied).scored) == IMAGES - 1


def test_a_config_without_a_data_set_is_damaged_and_nothing_is_made(copied, refusal, tmp_path, monkeypatch):
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    copied.write_text("config.json", "{}")
    assert refusal(write_report, copied) == f"{copied / 'config.json'} is damaged: it has no 'data.name'"
    assert not (tmp_path / "cache").exists()
    assert not (copied / REPORT).exists()


def test_runs_with_equal_names_are_told_apart(run, copied, no_bundle):
    page = write_report(copied, against=run).read_text()
    assert f"Run report</p>\n<h1>{copied}</h1>" in page
    assert f"minus {run}, on the" in section(page, "differences")


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
    assert "CF1@0.25" in training.intervals(files, most=2)[1]
    settings, codes = ComparedRun.of(folder).settings["test"], main.scores.codes
    assert (settings.data.difficult_eval, settings.eval.threshold) == ("ignore", 0.25)
    assert f"all {int(((codes == 0) | (codes == 1)).sum()):,} scores pooled" in repr(results.score_curves(files))


def test_a_report_says_which_results_it_shows(tmp_path, no_bundle):
    folder = make_run(tmp_path / "run", samples=0)
    ours = folder.read_json("results.json")
    folder.write_json("eval/results.json", {"test": ours["test"]})
    assert "another evaluation" not in write_report(folder).read_text(), "both are the same"
    os.utime(folder / "results.json", (1e9, 1e9))
    later = {"test": ours["test"] | {"mAP": 0.123}, "test_shift": {"mAP": 0.1, "mAP_fall_from_test": 0.023}}
    folder.write_json("eval/results.json", later)
    page = write_report(folder).read_text()
    shown = "test: results of the training; eval/ has another evaluation, which is not shown."
    assert shown in section(page, "metrics")
    headings = [name for name, _ in data_block(page, "metrics-ranking")["columns"]]
    assert headings == ["metric", "val (training)", "test (training)", "test_shift (eval/)"]
    assert "mAP_fall_from_test" not in page, "the mAP of test is that of the training"
    assert "2001-09-09 01:46 UTC" in page, "when the results that are shown were written"
    folder.write_json("eval/results.json", later | {"test": ours["test"]})
    assert "mAP_fall_from_test" in write_report(folder).read_text()
