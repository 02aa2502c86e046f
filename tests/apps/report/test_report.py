"""The report page: safety, missing and damaged files, and the contents of its sections."""

import base64
import hashlib
import html
import re
import shlex
import sys
import types
from dataclasses import replace

import numpy as np
from helpers.made_run import IMAGES, NAMES, data_block, make_run, section
from helpers.scored_run import stored_metrics

from mlmoe_jax.apps.cli.flags import parse_flags
from mlmoe_jax.apps.report import page, result_sections, run_files, training
from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.apps.tools.compare import compare_runs
from mlmoe_jax.apps.tools.fit_thresholds import fitted_lines
from mlmoe_jax.evaluation.decisions.threshold_fit import fit_thresholds
from mlmoe_jax.evaluation.metrics.standard import PREDICTION_METRICS
from mlmoe_jax.evaluation.results import write_split_results
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.runs.decisions import write_thresholds
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.training.selection import Selection


def rows_of(text: str, table: str) -> dict:
    """The rows of a table by their first cell, or by the name of a term."""
    rows = data_block(text, table)["rows"]
    return {(row[0][0] if isinstance(row[0], list) else row[0]): row for row in rows}


# ------------------------------------------------------------------------------------------------------ safe and whole
def test_the_page_has_no_external_address_and_only_its_own_scripts(text):
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert re.findall(r"(?:https?:)?//[\w.]+", markup) == []
    assert re.findall(r"url\(|@import", markup) == []
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; img-src data:")
    scripts = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(scripts) == 2
    assert all(f"'sha256-{digest}'" in html.unescape(policy) for digest in hashes)


def test_names_that_contain_markup_stay_text(text):
    assert "window.hurt" in text
    assert "<script>window" not in text
    assert "<img src=x" not in text
    assert list(rows_of(text, "label-table")) == list(NAMES)
    assert "<b>run" not in page.render_page("<b>run</b>", "Run report", [], images={}), "a name of a folder"
    assert page._inline('a = "</script><!-- b";') == 'a = "<\\/script><\\!-- b";'
    names = re.findall(r'\bid="([^"]+)"', text)
    assert sorted(names) == sorted(set(names))


# ---------------------------------------------------------------------------------------------------- missing, damaged
def test_missing_files_are_explained_in_one_line(tmp_path, run, no_bundle):
    folder = RunFolder(tmp_path / "empty")
    folder.write_text("config.json", run.read_text("config.json"))
    parts = {kind.name: kind.describe(RunFiles(folder)) for kind in page.SECTION_KINDS}
    text = page.write_report(folder).read_text()
    visible, _, last = text.partition('<details id="absent">')
    assert re.findall(r'<section id="(\w+)"', visible) == ["summary", "config"]
    absent = ", ".join(kind.title for kind in page.SECTION_KINDS if parts[kind.name].missing)
    assert re.search(r"<summary>(.*)</summary>", last)[1] == f"Not on this page: {absent}"
    assert 'href="#differences"' not in text
    assert "metrics.jsonl is written from the first logged step on" in section(text, "curves")
    commands = {name: part.command for name, part in parts.items() if part.command}
    assert {"metrics", "labels", "differences", "gates", "attention", "scores", "mistakes"} <= commands.keys()
    for part in parts.values():
        assert "\n" not in part.missing
        assert not part.missing or part.missing.endswith(":" if part.command else ".")
    for name, command in commands.items():
        program, *arguments = shlex.split(command)
        assert program == "mlmoe"
        assert parse_flags(arguments)[0].workdir == str(folder)
        assert command in section(text, name)


def test_the_output_can_be_another_folder_or_a_link(run, tmp_path, no_bundle):
    (tmp_path / "link.html").symlink_to("page.html")
    for name in ("pages/a.html", "link.html"):
        assert page.write_report(run, output=tmp_path / name).read_text().startswith("<!doctype html>")
    assert (tmp_path / "link.html").is_symlink()


# ------------------------------------------------------------------------------------------------------------- sections
def test_summary(text, run):
    found, facts = section(text, "summary"), rows_of(text, "facts")
    assert facts["labels"][1] == "5 labels, 40 training images"
    low, high = (f"{100 * end:.1f}" for end in training.intervals(RunFiles(run), resamples=20)["mAP"])
    assert f"mAP, % {100 * stored_metrics(run)['test']['mAP']:.2f} on test, {low} to {high}" in found
    assert "over resamples of the images" in found
    assert "CF1@0.5, % " in found


def test_rough_metrics_say_why(tmp_path, monkeypatch):
    chosen = Selection({}, "mAP_envelope", best={"raw": 0.7})
    chosen.keep(80, "raw", "val", {})
    monkeypatch.setattr(run_files, "newest_notes", lambda folder: chosen.notes())
    assert training.why_rough(RunFiles(make_run(tmp_path / "a", samples=0))) == "", "test is another split"
    folder = make_run(tmp_path / "b", samples=0, data__test_splits=("val",), data__val_split="val")
    sentence = "The metrics on val are rough: its images selected the weights."
    assert training.why_rough(RunFiles(folder)) == sentence
    header = repr(training.header(RunFiles(folder)))
    assert sentence in header
    assert "raw weights of step 80 (best mAP_envelope on val, 70.00 %)" in header


def test_curves_of_another_metric(tmp_path):
    folder = make_run(tmp_path / "a", samples=0, eval__select_metric="mAP_envelope")
    folder.append_row({"step": 80, "epoch": None, "test/raw/mAP_envelope": 0.7})
    files = RunFiles(folder)
    assert "80 steps" in repr(training.header(files)), "a last row without an epoch"
    assert "mAP and mAP_envelope during training" in repr(training.training_curves(files))


def test_the_loss_and_its_terms_have_axes_of_their_own(text):
    for chart, series in (("curve-loss", {"loss"}), ("curve-terms", {"loss/co"})):
        assert {row["series"] for row in data_block(text, chart)["datasets"]["rows"]} == series


def test_long_curves_are_averaged():
    rows = [{"step": step, "loss": float(step)} for step in range(1, 1001)]
    points = training.thin_curve(rows, "loss")
    assert len(points) == training.MOST_POINTS
    assert points[0] == {"step": 2, "value": 1.5, "series": "loss"}
    assert training.thin_curve([*rows[:2], {"step": 3}], "loss")[-1]["step"] == 2


def test_metrics_are_shown_with_their_definitions(text, run):
    stored = stored_metrics(run)
    for table, names in (("metrics-ranking", ("mAP", "AUC_macro")), ("metrics-calibration", ("ECE_pooled",))):
        for name in names:
            assert rows_of(text, table)[name][1:] == [stored["val"][name], stored["test"][name]]
    for at in ("0.5", "top3"):
        table = rows_of(text, f"metrics-at-{at}")
        for name in ("CP", "CR", "CF1", "precision_macro"):
            name, meaning = f"{name}@{at}", PREDICTION_METRICS[name]
            assert table[name] == [[name, meaning], stored["val"][name], stored["test"][name]]
    assert "the 3 highest labels of each image are predicted" in text
    shown = re.findall(r'\[\["([^"]+)", "', text)
    assert set(stored["test"]) <= set(shown), "all metrics have a meaning"


def test_differences_are_those_of_the_comparison(text, run, other):
    comparison = compare_runs(StoredRun(other), StoredRun(run), resamples=20)
    rows = rows_of(text, "difference-table")
    assert set(rows) == set(NAMES)
    for name, change in comparison.ap.items():
        np.testing.assert_allclose(rows[name][1:], [change.b, change.a, change.difference, change.low, change.high])
    shown, change = rows_of(text, "metric-differences")["mAP"], comparison.metrics["mAP"]
    np.testing.assert_allclose(shown[1:6], [change.b, change.a, change.difference, change.low, change.high])
    drawn = [row["label"] for row in data_block(text, "ap-differences")["datasets"]["rows"]]
    assert drawn == sorted(NAMES, key=lambda name: -comparison.ap[name].difference)


def test_thresholds_and_their_origin(text, tmp_path):
    found = section(text, "thresholds")
    assert "The thresholds of the table of labels were fitted on val. A dash: the label is never predicted." in found
    assert [row[-1] for row in data_block(text, "label-table")["rows"]] == [0.1, 0.2, 0.3, 0.4, None]
    folder = make_run(tmp_path / "run", samples=0)
    folder.write_json("thresholds.json", {"thresholds": dict.fromkeys(NAMES)})
    _, note = result_sections.thresholds(RunFiles(folder))
    assert "are fixed; mlmoe thresholds fits them" in note.text


def test_fitted_thresholds_are_told_in_words(tmp_path, no_bundle):
    folder = make_run(tmp_path / "run", samples=0)
    fitted = fit_thresholds(StoredRun(folder).split("val"), NAMES, RunFiles(folder).config)
    fitted.source["before"]["CP"] = float("nan")  # no label was predicted
    write_thresholds(folder, fitted)
    text = page.write_report(folder).read_text()
    found, rows = section(text, "thresholds"), rows_of(text, "threshold-metrics")
    assert "Fitted on val: best F1, one per label, on 40 images: " in found
    assert "{" not in found
    assert rows["CP"] == ["CP", None, fitted.source["after"]["CP"]]
    assert "nan" not in fitted_lines(fitted)[0]


def test_cost_is_read_from_the_file_or_counted_on_request(text, run, tmp_path, monkeypatch, no_bundle):
    rows = rows_of(text, "cost-table")
    assert rows["parameters, trainable"][1] == "1,022,230"
    assert rows["GMACs, layers"][1] == "24.51"
    folder, counted = RunFolder(tmp_path / "run"), run.read_json("cost.json")
    folder.write_text("config.json", run.read_text("config.json"))
    counter = types.SimpleNamespace(count_cost=lambda config: counted | {"name": config.data.name})
    monkeypatch.setitem(sys.modules, "mlmoe_jax.apps.tools.preflight.cost", counter)  # which is tested elsewhere
    assert "24.51" in page.write_report(folder, cost=True).read_text()
    assert folder.read_json("cost.json")["name"] == "digits"


def test_config_and_versions(text):
    assert "0 keys with another value." in text
    assert rows_of(text, "same-keys")["data.test_splits"] == ["data.test_splits", "('test',)"]
    second = ["2026-01-02T03:04:05+00:00", 20, "16 × TPU v5e", 4, "python 3.11.7, jax 0.8.0"]
    assert data_block(text, "starts")["rows"][1] == second


def test_the_table_of_cooccurrence(text):
    assert data_block(text, "cooccurrence-table") == {
        "columns": ["split", "a", "b", ["gap", "number"]],
        "rows": [["test", "cat", "dog", 0.25], ["test", "dog", "cat", None]],
    }


# --------------------------------------------------------------------------------------------- other files of a run
def test_a_damaged_log_is_only_a_warning(copied, caplog, no_bundle):
    copied.write_bytes("starts.json", b"[")
    page.write_report(copied)
    assert f"{copied / 'starts.json'} is damaged: " in caplog.text
    assert data_block((copied / page.REPORT).read_text(), "starts")["rows"] == []


def test_unreadable_images_are_left_out(copied):
    arrays = copied.read_npz("scores/test.npz")
    arrays["scores"][5] = np.nan
    copied.write_npz("scores/test.npz", **arrays)
    assert len(RunFiles(copied).scored) == IMAGES - 1


def test_runs_with_equal_names_are_told_apart(run, copied, no_bundle):
    text = page.write_report(copied, against=run).read_text()
    assert f"Run report</p>\n<h1>{copied}</h1>" in text
    assert f"minus {run}, on the" in section(text, "differences")


# -------------------------------------------------------------------------------------------------- a later evaluation
def test_results_are_read_with_their_settings(tmp_path):
    folder = make_run(tmp_path / "run", samples=0)
    results = StoredRun(folder).results
    settings = replace(results["test"].settings, difficult="ignore", threshold=0.25)
    metrics = results["test"].metrics | {"CF1@0.25": 0.5}
    later = {"test": replace(results["test"], metrics=metrics, settings=settings)}
    write_split_results(folder, later, keep_others=True)
    files = RunFiles(folder)
    assert "CF1@0.25" in repr(result_sections.metrics(files))
    codes = files.raw.codes
    assert (files.settings("test"), files.settings("val")) == (settings, results["val"].settings)
    assert f"all {int(((codes == 0) | (codes == 1)).sum()):,} scores pooled" in repr(
        result_sections.score_curves(files)
    )
