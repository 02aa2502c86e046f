"""The logs of a training: its starts, metric rows and trackers."""

import csv
import importlib.metadata
import json
import platform
import struct
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from etils import epath

from mlmoe_jax.config import default_config
from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.metric_log import (
    EventFiles,
    MetricLog,
    open_trackers,
    read_starts,
    record_start,
    require_trackers,
    versions,
)
from mlmoe_jax.runtime.sharding import make_mesh

PROGRESS = SimpleNamespace(speed=lambda: {"images_per_second": 12.5, "data_wait": 0.25})


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


# ---------------------------------------------------------------------------------------------------------------- rows
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


def test_a_row_is_written_only_after_its_metrics_are_accepted(folder, refusal):
    def refuse(metrics):
        raise UserError(f"the loss is {metrics['loss']}")

    log = MetricLog(folder, lambda step: 0.1, steps_per_epoch=4, require=refuse)
    log.note(8, {"loss": jnp.float32(0.5)}, PROGRESS)
    assert refusal(log.write) == "the loss is 0.5"
    assert folder.rows() == []


def test_only_the_first_process_writes_rows(folder, monkeypatch):
    monkeypatch.setattr("mlmoe_jax.runtime.distributed.process", lambda: (1, 2))
    log = MetricLog(folder, lambda step: 0.1, steps_per_epoch=4)
    log.note(1, {"loss": jnp.float32(1)}, PROGRESS)
    log.write()
    assert folder.rows() == []
    assert log.summary == "loss 1, rate 0.1"


def test_the_log_writes_a_table_and_every_tracker_has_every_row(tmp_path):
    folder, seen = RunFolder(tmp_path), []
    tracker = SimpleNamespace(write=seen.append, close=lambda: seen.append("closed"))
    log = MetricLog(folder, lambda step: jnp.float32(0.25), 4, [tracker])
    log.note(2, {"loss": jnp.float32(0.5)}, PROGRESS)
    log.write()
    assert not (tmp_path / "metrics.csv").exists()
    log.note(4, {"loss": jnp.float32(0.125)}, PROGRESS)
    log.add({"val/raw/mAP": 0.75})
    log.write()
    assert log.summary == "loss 0.125, rate 0.25"
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["loss"], row["val/raw/mAP"]) for row in rows] == [
        ("2", "0.5", ""),
        ("4", "0.125", "0.75"),
    ]
    log.note(5, {"loss": jnp.float32(1)}, PROGRESS)
    log.write()
    log.close()
    assert (tmp_path / "metrics.csv").read_text().count("\n") == 4
    rows = [{name: value for name, value in row.items() if name != "time"} for row in folder.rows()]
    assert seen == [*rows, "closed"], "trackers have a clock of their own"


# ------------------------------------------------------------------------------------------------------------ trackers
def events(folder) -> list:
    """Return the records of all event files, in the order in which TensorBoard reads them."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        while content:  # length u64, checksum u32, the record, checksum u32
            (length,) = struct.unpack("<Q", content[:8])
            found.append(Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return found


def scalars(folder) -> list[tuple[str, int, float]]:
    return [(value.tag, event.step, value.simple_value) for event in events(folder) for value in event.summary.value]


def test_rows_become_scalars_and_a_resumed_run_discards_the_rows_that_it_repeats(tmp_path):
    folder = RunFolder(tmp_path)
    first = EventFiles(folder, first_step=0)
    first.write({"step": 2, "loss": 0.5, "val/raw/mAP": 0.25})
    assert scalars(tmp_path / "tensorboard") == [("loss", 2, 0.5), ("val/raw/mAP", 2, 0.25)], "live, before the end"
    first.write({"step": 4, "loss": 0.125})
    first.close()
    second = EventFiles(folder, first_step=2)
    second.write({"step": 4, "loss": 0.0625})
    second.close()
    assert scalars(tmp_path / "tensorboard")[2:] == [("loss", 4, 0.125), ("loss", 4, 0.0625)]
    marks = [event.step for event in events(tmp_path / "tensorboard") if event.HasField("session_log")]
    assert marks == [3], "TensorBoard discards earlier events from step 3 on"


@pytest.mark.parametrize("link", ["tensorboard", "tensorboard/events"])
def test_events_are_not_written_through_a_link(tmp_path, precious, refusal, link):
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to(precious.parent)
    assert f"{tmp_path}/{link} is a link out of the run folder" in refusal(EventFiles, RunFolder(tmp_path), 0)


def test_an_object_store_gets_the_whole_file(tmp_path):
    folder = RunFolder(tmp_path)
    folder.is_local = False
    (tmp_path / "tensorboard").mkdir()  # an object needs no folder
    tracker = EventFiles(folder, first_step=0)
    tracker.write({"step": 1, "loss": 0.5})
    folder.uploads.send()
    assert scalars(epath.Path(tmp_path) / "tensorboard") == [("loss", 1, 0.5)]
    tracker.write({"step": 2, "loss": 0.25})
    folder.uploads.close()
    tracker.close()
    assert scalars(epath.Path(tmp_path) / "tensorboard") == [("loss", 1, 0.5), ("loss", 2, 0.25)]


class FakeWandb:
    def __init__(self):
        self.started, self.logged, self.finished = [], [], 0
        self.id = "abc123"

    def init(self, **given):
        self.started.append(given)
        return self

    def log(self, row, step):
        self.logged.append((step, row))

    def finish(self):
        self.finished += 1


def test_weights_and_biases_resumes_its_run(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = default_config()
    config.log.tensorboard, config.log.wandb = False, "images"
    folder = RunFolder(tmp_path / "a")
    for _ in range(2):
        (tracker,) = open_trackers(folder, config, 0)
        tracker.write({"step": 3, "loss": 0.5})
        tracker.close()
    assert [given["id"] for given in fake.started] == [None, "abc123"]
    assert fake.started[0]["project"] == "images"
    assert fake.started[0]["name"] == "a"
    assert fake.started[0]["config"]["seed"] == 0
    assert fake.logged == [(3, {"loss": 0.5})] * 2
    assert fake.finished == 2


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_without_its_package_is_refused(name, monkeypatch, refusal):
    monkeypatch.setitem(sys.modules, name, None)
    config = default_config()
    require_trackers(config)
    config.log[name] = "images"
    assert refusal(require_trackers, config).startswith(f"log.{name}=images needs ")


def test_the_config_names_the_trackers(tmp_path):
    config = default_config()
    config.log.tensorboard = False
    assert open_trackers(RunFolder(tmp_path), config, 0) == []
    (tracker,) = open_trackers(RunFolder(tmp_path), default_config(), 7)
    assert isinstance(tracker, EventFiles)
    tracker.close()


# -------------------------------------------------------------------------------------------------------------- starts
def test_every_start_is_recorded(tmp_path):
    folder, mesh = RunFolder(tmp_path), make_mesh(default_config().mesh)
    assert read_starts(folder) == []
    record_start(folder, 0, mesh)
    record_start(folder, 7, mesh)
    starts = json.loads((tmp_path / "starts.json").read_text())
    assert [start["step"] for start in starts] == [0, 7]
    assert starts == read_starts(folder)
    found = starts[0]["versions"]
    assert found == versions()
    assert found["python"] == platform.python_version()
    assert (found["jax"], found["flax"]) == (jax.__version__, importlib.metadata.version("flax"))
    assert starts[0]["devices"] == jax.device_count()
    assert starts[0]["mesh"] == {"data": jax.device_count(), "fsdp": 1, "expert": 1}
    assert (starts[0]["device"], starts[0]["processes"]) == (jax.devices()[0].device_kind, 1)


@pytest.mark.parametrize("content", [b"", b'[{"step": 0', b"\xff\xfe"])
def test_a_damaged_file_is_named_and_does_not_stop_a_training(tmp_path, caplog, content):
    folder = RunFolder(tmp_path)
    (tmp_path / "starts.json").write_bytes(content)
    assert read_starts(folder) == []
    (warning,) = caplog.messages
    assert warning.startswith(f"{tmp_path / 'starts.json'} is damaged: ")
    record_start(folder, 7, make_mesh(default_config().mesh))
    assert [start["step"] for start in read_starts(folder)] == [7]
