"""`--mode=reproduce` as a user runs it: a training on digits, its numbers beside the paper's, and read again."""

import csv

import pytest
from helpers import tiny
from helpers.commands import succeeded
from helpers.scored_run import stored_metrics


@pytest.fixture
def run(command, monkeypatch, tmp_path):
    """Return a function that reproduces a table with short trainings on few scenes and a backbone of one block."""
    tiny.use_scenes(monkeypatch, train=60, val=40, test=40, test_shift=40)
    tiny.use_vit(monkeypatch, depth=1, patch=16)
    settings = ("model.backbone.weights=none", "train.epochs=1", "train.batch_size=20", "eval.batch_size=40")
    overrides = [f"--config.{setting}" for setting in settings]
    flags = ("--mode=reproduce", "--dataset=digits", f"--workdir={tmp_path / 'all'}")
    return lambda *more: command(*flags, *more, *overrides)


@pytest.mark.slow
def test_a_row_is_trained_measured_and_read_again(run, tmp_path):
    done = succeeded(run("--table=mlvpt.2", "--only=VPT,DINOv2-B,224"))
    assert "run 1 of 1, vpt,dataset=digits" in done.stderr
    stored = stored_metrics(tmp_path / "all" / "vpt,dataset=digits")["test"]
    expected = [stored["mAP_envelope"], stored["CF1@prior_matched_transductive"]]
    line = next(line for line in done.stdout.splitlines() if line.split()[:1] == ["ours"])
    assert line.split()[1:3] == [f"{100 * value:.2f}" for value in expected]

    again = succeeded(run("--table=mlvpt.4", "--only=VPT"))  # another table with the same run
    assert "run 1 of 1, vpt,dataset=digits: already finished" in again.stderr
    with open(tmp_path / "all" / "mlvpt.4-digits.csv", newline="") as file:
        rows = {(row["row"].partition(",")[0], row["column"]): row for row in csv.DictReader(file)}
    assert float(rows["VPT", "mAP"]["ours"]) == pytest.approx(100 * stored["mAP_envelope"])
    assert rows["ML-VPT", "mAP"]["ours"] == ""
    assert float(rows["ML-VPT", "trainable, M"]["ours"]) > 0  # costs need no training


def test_a_run_that_cannot_be_trained_is_refused_before_any_other(run, tmp_path):
    done = run("--table=mlvpt.4", "--config.train.patience=-1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: the run finetune,dataset=digits cannot be trained: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "all").exists()
