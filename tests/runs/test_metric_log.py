"""The rows of a training's metrics."""

import csv
import time
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.metric_log import MetricLog

PROGRESS = SimpleNamespace(speed=lambda: {"images_per_second": 12.5, "data_wait": 0.25})


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def test_one_row_per_step(folder, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1700000000.1234)
    log = MetricLog(folder, lambda step: jnp.float32(step / 8), steps_per_epoch=4)
    log.write()
    assert folder.rows() == []
    log.note(2, {"loss": jnp.float32(0.5), "loss/co": jnp.float32(0.25), "gradient_norm": jnp.float32(2)}, PROGRESS)
    assert folder.rows() == [], "values are fetched after the next step has started"
    log.add({"val/ema/mAP": 0.75})
    log.write()
    log.write()
    row = {
        "step": 2,
        "epoch": 0.5,
        "time": 1700000000.123,
        "images_per_second": 12.5,
        "data_wait": 0.25,
        "val/ema/mAP": 0.75,
        "learning_rate": 0.125,  # of this step, the second
        "loss": 0.5,
        "loss/co": 0.25,
        "gradient_norm": 2.0,
    }
    assert folder.rows() == [row]
    assert log.summary == "loss 0.5, rate 0.125"
    log.note(3, {"loss": jnp.float32(0.123456)}, PROGRESS)
    log.write()
    assert [row["step"] for row in folder.rows()] == [2, 3]
    assert "val/ema/mAP" not in folder.rows()[1]
    assert log.summary == "loss 0.1235, rate 0.25"


def test_only_the_first_process_writes_rows(folder, monkeypatch):
    monkeypatch.setattr("mlmoe_jax.runtime.distributed.process", lambda: (1, 2))
    log = MetricLog(folder, lambda step: 0.1, steps_per_epoch=4)
    log.note(1, {"loss": jnp.float32(1)}, PROGRESS)
    log.write()
    assert folder.rows() == []
    assert log.summary == "loss 1, rate 0.1"


def test_the_log_writes_a_table_and_every_tracker_has_every_row(folder):
    seen = []
    tracker = SimpleNamespace(write=seen.append, close=lambda: seen.append("closed"))
    log = MetricLog(folder, lambda step: jnp.float32(0.25), 4, [tracker])
    for step in (2, 4, 8):
        log.note(step, {"loss": jnp.float32(1 / step)}, PROGRESS)
        if step == 4:
            log.add({"val/raw/mAP": 0.75})
        log.write()
        assert (folder / "metrics.csv").exists() == (step > 2), "it is written after an evaluation"
    log.close()
    with open(folder / "metrics.csv", newline="") as file:
        rows = [(row["step"], row["loss"], row["val/raw/mAP"]) for row in csv.DictReader(file)]
    assert rows == [("2", "0.5", ""), ("4", "0.25", "0.75"), ("8", "0.125", "")]
    rows = [{name: value for name, value in row.items() if name != "time"} for row in folder.rows()]
    assert seen == [*rows, "closed"], "trackers have a clock of their own"
