"""The files of a run folder: those that may be damaged, and those of a later evaluation."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.made_run import IMAGES, data_block, make_run, section

from mlmoe_jax.apps.report import result_sections
from mlmoe_jax.apps.report.page import REPORT, write_report
from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.apps.tools.compare import ComparedRun
from mlmoe_jax.evaluation.results import read_split_results, write_split_results
from mlmoe_jax.runs.folder import RunFolder


@pytest.fixture
def copied(run, tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.adopt(run)
    return folder


def test_a_damaged_log_is_only_a_warning(copied, caplog, no_bundle):
    copied.write_bytes("starts.json", b"[")
    write_report(copied)
    assert f"{copied / 'starts.json'} is damaged: " in caplog.text
    assert data_block((copied / REPORT).read_text(), "starts")["rows"] == []


def test_unreadable_images_are_left_out(copied):
    arrays = copied.read_npz("scores/test.npz")
    arrays["scores"][5] = np.nan
    copied.write_npz("scores/test.npz", **arrays)
    assert len(RunFiles(copied).scored) == IMAGES - 1


def test_runs_with_equal_names_are_told_apart(run, copied, no_bundle):
    page = write_report(copied, against=run).read_text()
    assert f"Run report</p>\n<h1>{copied}</h1>" in page
    assert f"minus {run}, on the" in section(page, "differences")


# -------------------------------------------------------------------------------------------------- a later evaluation
def test_results_are_read_with_their_settings(tmp_path):
    folder = make_run(tmp_path / "run", samples=0)
    results = read_split_results(folder)
    settings = replace(results["test"].settings, difficult="ignore", threshold=0.25)
    metrics = results["test"].metrics | {"CF1@0.25": 0.5}
    later = {"test": replace(results["test"], metrics=metrics, settings=settings)}
    write_split_results(folder, later, keep_others=True)
    files = RunFiles(folder)
    assert "CF1@0.25" in repr(result_sections.metrics(files))
    run, codes = ComparedRun.of(folder), files.raw.codes
    assert (run.settings["test"], run.settings["val"]) == (settings, results["val"].settings)
    assert f"all {int(((codes == 0) | (codes == 1)).sum()):,} scores pooled" in repr(
        result_sections.score_curves(files)
    )
