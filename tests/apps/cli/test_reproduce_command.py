"""`--mode=reproduce` as a user runs it: a training on digits, its numbers beside the paper's, and read again."""

import pytest
from helpers import tiny
from helpers.commands import csv_rows, succeeded
from helpers.scored_run import stored_metrics


@pytest.mark.slow
def test_a_row_is_trained_measured_and_read_again(command, monkeypatch, tmp_path):
    tiny.use(monkeypatch)
    keys = ("model.backbone.weights=none", "train.epochs=1", "train.batch_size=20", "eval.batch_size=40")
    flags = ("reproduce", "--dataset=digits", f"--workdir={tmp_path}", *(f"--config.{key}" for key in keys))
    done = succeeded(command(*flags, "--table=mlvpt.2", "--only=VPT,DINOv2-B,224"))
    assert "run 1 of 1, vpt,dataset=digits" in done.stderr
    stored = stored_metrics(tmp_path / "vpt,dataset=digits")["test"]
    expected = [stored["mAP_envelope"], stored["CF1@prior_matched_transductive"]]
    line = next(line for line in done.stdout.splitlines() if line.split()[:1] == ["ours"])
    assert line.split()[1:3] == [f"{100 * value:.2f}" for value in expected]

    again = succeeded(command(*flags, "--table=mlvpt.4", "--only=VPT"))  # another table with the same run
    assert "run 1 of 1, vpt,dataset=digits: already finished" in again.stderr
    ours = {
        (row["row"].partition(",")[0], row["column"]): row["ours"] for row in csv_rows(tmp_path / "mlvpt.4-digits.csv")
    }
    assert float(ours["VPT", "mAP"]) == pytest.approx(100 * stored["mAP_envelope"])
    assert ours["ML-VPT", "mAP"] == ""
    assert float(ours["ML-VPT", "trainable, M"]) > 0  # costs need no training
