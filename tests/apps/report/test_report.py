"""The report page: safety, missing files, and the contents of its sections."""

import base64
import hashlib
import html
import re
import shlex
import sys
import types

import jax
import numpy as np
import pytest
from helpers.made_run import (
    NAMES,
    SECTIONS,
    data_block,
    make_run,
    section,
)

from mlmoe_jax.apps.cli import commands as main
from mlmoe_jax.apps.report import labels, page, training
from mlmoe_jax.apps.report.resampling import resample
from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.apps.tools.compare import ComparedRun, compare_runs
from mlmoe_jax.evaluation.metrics.predictions import FIGURES
from mlmoe_jax.runs.folder import RunFolder


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
    for cells, name in zip(data_block(text, "label-table")["rows"], NAMES, strict=True):
        assert cells[0] == name


def test_the_content_of_a_script_cannot_close_it():
    page_text = page._inline('a = "</script><!-- b";')
    assert "</script" not in page_text
    assert "<!--" not in page_text


# ---------------------------------------------------------------------------------------------------- missing, damaged
def test_missing_files_are_explained_in_one_line(tmp_path, run, no_bundle):
    folder = RunFolder(tmp_path / "empty")
    folder.write_text("config.json", run.read_text("config.json"))
    found = page.sections(RunFiles(folder))
    missing = {part.name: part.missing for part in found}
    assert [name for name in SECTIONS if not missing[name]] == ["summary", "config"]
    assert all(part.missing.endswith(":" if part.command else ".") for part in found if part.missing)
    assert not any("\n" in line for line in missing.values())
    text = page.write_report(folder).read_text()
    assert "metrics.jsonl is written from the first logged step on." in section(text, "curves")
    commands = {part.name: shlex.split(part.command) for part in found if part.command}
    assert {"metrics", "labels", "differences", "gates", "attention", "scores", "mistakes"} <= commands.keys()
    for name, command in commands.items():
        assert command[:3] == ["python", "-m", "mlmoe_jax.main"]
        flags, _ = main.parse(command[3:])
        assert flags.workdir == str(folder)
        assert shlex.join(command) in section(text, name)


def test_the_output_can_be_another_folder(run, tmp_path, no_bundle):
    target = page.write_report(run, output=tmp_path / "pages" / "a.html")
    assert target.read_text().startswith("<!doctype html>")


def test_an_output_that_cannot_be_written_is_a_user_error(run, tmp_path, refusal, no_bundle):
    (tmp_path / "file").write_text("")
    assert "cannot write" in refusal(page.write_report, run, output=tmp_path / "file" / "a.html")


def test_missing_runs_and_damaged_files_are_user_errors(tmp_path, run, refusal, no_bundle):
    assert "there is no run folder" in refusal(page.write_report, RunFolder(tmp_path / "none"))
    for name, content in (
        ("scores.npz", b"PK"),
        ("results.json", b"{"),
        ("label_space.npz", b"nothing"),
        ("samples/index.json", b'{"samples": [{}]}'),
        ("samples/explained.npz", b"PK\x03\x04"),
        ("per_class.csv", b"a,b\n1,2\n"),
    ):
        folder = RunFolder(tmp_path / name.replace("/", "-"))
        folder.adopt(run)
        (folder / page.REPORT).unlink(missing_ok=True)
        folder.write_bytes(name, content)
        assert name in refusal(page.write_report, folder)
        assert not (folder / page.REPORT).exists()


@pytest.mark.parametrize("name", ["/etc/passwd", "../a.jpg", "samples/../../a.jpg", "config.json", "samples/", 5, None])
def test_a_sample_is_a_file_in_samples(tmp_path, run, refusal, no_bundle, name):
    folder = RunFolder(tmp_path / "run")
    folder.adopt(run)
    (tmp_path / "a.jpg").write_text("outside")
    index = folder.read_json("samples/index.json")
    index["samples"][1]["file"] = name
    folder.write_json("samples/index.json", index)
    sentence = f"{folder}/samples/index.json is damaged: it names the image {name!r}, which is not in samples/"
    assert refusal(page.write_report, folder, output=tmp_path / "a.html") == sentence
    assert not (tmp_path / "a.html").exists()


@pytest.mark.parametrize("link", ["samples/0000.jpg", "samples", "metrics.jsonl", "config.json", "scores.npz"])
def test_no_file_outside_the_run_folder_is_embedded(tmp_path, run, refusal, no_bundle, link):
    folder, outside = RunFolder(tmp_path / "run"), tmp_path / "outside"
    folder.adopt(run)
    (tmp_path / "run" / link).rename(outside)
    (tmp_path / "run" / link).symlink_to(outside)
    sentence = refusal(page.write_report, folder, output=tmp_path / "a.html")
    assert sentence.startswith(f"{folder}/{link}")
    assert f" is a link out of the run folder {folder}, to {outside}" in sentence
    if link == "scores.npz":
        assert sentence == refusal(page.write_report, run, against=folder, output=tmp_path / "a.html")
    assert not (tmp_path / "a.html").exists()


@pytest.mark.parametrize("link", [page.REPORT, f".{page.REPORT}.tmp"])
def test_a_page_is_not_written_through_a_link(tmp_path, run, precious, no_bundle, link):
    folder = RunFolder(tmp_path / "run")
    folder.write_text("config.json", run.read_text("config.json"))
    (tmp_path / "run" / link).symlink_to(precious)
    assert page.write_report(folder).read_text().startswith("<!doctype html>")


def test_runs_without_scores_cannot_be_compared(run, tmp_path, refusal, no_bundle):
    bare = RunFolder(tmp_path / "bare")
    for name in ("config.json", "labels.txt"):
        bare.write_text(name, run.read_text(name))
    assert "scores.npz" in refusal(page.write_report, run, against=bare)


# ------------------------------------------------------------------------------------------------------------- sections
def test_summary_names_the_selected_step(text, run):
    found = section(text, "summary")
    assert "ema weights of step 40 (best mAP on val, 60.00 %)" in found
    mean_ap = run.read_json("results.json")["test"]["mAP"]
    low, high = (f"{100 * end:.1f}" for end in resample(RunFiles(run), most=20).interval("mAP", mean_ap))
    assert f"mAP % {100 * mean_ap:.2f} on test, {low} to {high}" in found
    assert "CF1 at 0.5 % " in found
    assert "F1, macro at 0.5 % " in found
    assert "20 resamples of the images" in found
    assert "5 labels, 40 training images" in found
    assert "Selected on test" not in found


def test_selection_on_test_is_reported(tmp_path, no_bundle):
    folder = make_run(tmp_path / "run", samples=0, eval__select_on="test")
    assert "Selected on test, as published" in section(page.write_report(folder).read_text(), "summary")


def test_the_metric_that_selects_is_named_and_drawn(tmp_path):
    folder = make_run(tmp_path, samples=0, eval__select_metric="mAP_envelope")
    folder.append_row({"step": 80, "epoch": 4.0, "val/raw/mAP_envelope": 0.7, "val/ema/mAP_envelope": 0.65})
    files = RunFiles(folder)
    assert training.selected(files) == "raw weights of step 80 (best mAP_envelope on val, 70.00 %)"
    drawn = repr(training.curves(files))
    assert "mAP and mAP_envelope during training" in drawn
    assert "val/raw/mAP_envelope from 0.7 to 0.7" in drawn


def test_the_last_weights_and_runs_without_a_selection(run, tmp_path):
    assert training.selected(RunFiles(make_run(tmp_path / "a", samples=0, eval__select_on="none"))).startswith(
        "the last ema"
    )
    folder = make_run(tmp_path / "b", samples=0)
    (folder / "metrics.jsonl").unlink()
    assert training.selected(RunFiles(folder)) == ""


def test_the_loss_and_its_terms_have_axes_of_their_own(text):
    for chart, series in (("curve-loss", {"loss"}), ("curve-terms", {"loss/co"})):
        assert {row["series"] for row in data_block(text, chart)["datasets"]["rows"]} == series


def test_the_time_of_training_leaves_out_pauses():
    times = (110, 130, None, 500, 520)  # started at 100, resumed at 490
    rows = [{"step": step} | ({} if time is None else {"time": time}) for step, time in enumerate(times)]
    elapsed = [row.get("elapsed") for row in training.timed(rows, [100, 490])]
    assert elapsed == [10, 30, None, 40, 60]
    assert [row["elapsed"] for row in training.timed(rows[:2], [])] == [0, 20]
    assert training.timed([{"step": 1}], [100]) == [{"step": 1}]


def test_curves_have_a_clock_if_their_rows_have_times(text, run, tmp_path):
    assert data_block(text, "widget-axis")["title"] == "seconds of training"
    points = data_block(text, "curve-loss")["datasets"]["rows"]
    assert [point["elapsed"] for point in points] == [20, 40, 60]
    folder = RunFolder(tmp_path)
    folder.write_text("config.json", run.read_text("config.json"))
    for step in (1, 2):
        folder.append_row({"step": step, "epoch": step, "loss": 1.0})
    assert [part.kind for part in training.curves(RunFiles(folder)).parts] == ["charts"]


def test_long_curves_are_averaged():
    rows = [{"step": step, "loss": float(step)} for step in range(1, 1001)]
    points = training._thinned(rows, "loss")
    assert len(points) == training.MOST_POINTS
    assert points[0] == {"step": 2, "value": 1.5, "series": "loss"}
    assert training._thinned([*rows[:2], {"step": 3}], "loss")[-1]["step"] == 2


def test_metrics_are_in_percent_with_their_definitions(text, run):
    found, results = section(text, "metrics"), run.read_json("results.json")
    for name in ("mAP", "AUC_macro", "ECE_pooled"):
        assert f"{name} {100 * results['val'][name]:.2f} {100 * results['test'][name]:.2f}" in found
    for name in ("CP", "CR", "CF1", "precision_macro"):
        for cut in ("0.5", "top3"):
            shown = [f"{100 * results[split][f'{name}@{cut}']:.2f}" for split in ("val", "test")]
            assert f"{name} {' '.join(shown)} {FIGURES[name]}" in found
    scores = run.read_npz("scores.npz")
    never = int((scores["scores"][scores["split"] == "test"] < 0.5).all(axis=0).sum())
    assert f"{never} of 5 labels are never predicted on test at 0.5" in found
    assert "the 3 highest labels of each image are predicted" in found
    assert "Other values" not in found  # all metrics have a meaning


def test_differences_are_those_of_the_comparison(text, run, other):
    comparison = compare_runs(ComparedRun.of(other), ComparedRun.of(run), resamples=20)
    rows = {row[0]: row for row in data_block(text, "difference-table")["rows"]}
    assert set(rows) == set(NAMES)
    for name, change in comparison.ap.items():
        np.testing.assert_allclose(rows[name][2:], [change.difference, change.low, change.high, change.b, change.a])
    mean_ap = comparison.metrics["mAP"]
    assert f"mAP {100 * mean_ap.b:.2f} {100 * mean_ap.a:.2f} {100 * mean_ap.difference:+.2f}" in section(
        text, "differences"
    )
    drawn = [row["label"] for row in data_block(text, "ap-differences")["datasets"]["rows"]]
    assert drawn == sorted(NAMES, key=lambda name: -comparison.ap[name].difference)


def test_thresholds_and_their_origin(text):
    assert "split val" in section(text, "thresholds")
    assert "from 0.1 to 0.4" in section(text, "thresholds")
    assert data_block(text, "threshold-table")["rows"][-1] == [NAMES[-1], None]


def test_cost_is_read_from_the_file(text):
    found = section(text, "cost")
    assert "parameters, trainable 1,022,230 1.17 % of all" in found
    assert "GMACs as the papers count 24.51" in found


def test_cost_is_counted_on_request(run, tmp_path, monkeypatch, no_bundle):
    folder, counted = RunFolder(tmp_path / "run"), run.read_json("cost.json")
    folder.write_text("config.json", run.read_text("config.json"))
    counter = types.SimpleNamespace(summarize=lambda config: counted | {"name": config.data.name})
    monkeypatch.setitem(sys.modules, "mlmoe_jax.apps.tools.preflight.cost", counter)  # which is tested elsewhere
    assert "24.51" in section(page.write_report(folder, cost=True).read_text(), "cost")
    assert folder.read_json("cost.json")["name"] == "digits"


def test_config_shows_changed_keys_first(text):
    found = section(text, "config")
    assert "0 keys differ" in found
    assert "data.test_splits ('test',)" in found


def test_starts_and_the_versions_that_changed_between_them(text):
    found = section(text, "config")
    assert "2026-01-02T03:04:05+00:00: from step 20 on 16 × TPU v5e in 4 process(es)" in found
    assert "library from step 0 from step 40 this page" in found
    assert f"jax 0.8.0 0.9.1 {jax.__version__}" in found


def test_generic_table_of_cooccurrence(text):
    assert data_block(text, "cooccurrence-table") == {
        "columns": [["split", "text"], ["a", "text"], ["b", "text"], ["gap", "number"]],
        "rows": [["test", "cat", "dog", 0.25], ["test", "dog", "cat", None]],
    }


def test_labels_that_look_like_numbers_stay_text(tmp_path):
    folder = make_run(tmp_path, samples=0)
    folder.write_csv("cooccurrence.csv", ["split", "a", "b", "gap"], [["1", "007", "1e3", "0.5"]])
    table = labels.groups(RunFiles(folder)).parts[-1]
    assert [kind for _, kind in table.columns] == ["text", "text", "text", "number"]
    assert table.rows == [["1", "007", "1e3", 0.5]]
