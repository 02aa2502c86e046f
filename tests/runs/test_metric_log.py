"""The rows of a training's metrics, the trackers that get them, and their uploads to an object store."""

import contextlib
import csv
import struct
import sys
import threading
import time
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from helpers import fake_store
from helpers.jobs import until

from mlmoe_jax.config import default_config
from mlmoe_jax.runs import uploads
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.metric_log import MetricLog
from mlmoe_jax.runs.trackers import EventFiles, open_trackers
from mlmoe_jax.runs.uploads import Uploads
from mlmoe_jax.runtime.progress import Progress
from mlmoe_jax.training.hooks import Log

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


def test_weights_and_biases_resumes_its_run(tmp_path, monkeypatch):
    started, logged = [], []
    run = SimpleNamespace(
        id="abc123", log=lambda row, step: logged.append((step, row)), finish=lambda: logged.append("end")
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: started.append(given) or run))
    config = default_config()
    config.log.tensorboard, config.log.wandb = False, "images"
    for _ in range(2):
        (tracker,) = open_trackers(RunFolder(tmp_path / "a"), config, 0)
        tracker.write({"step": 3, "loss": 0.5})
        tracker.close()
    assert [(given["id"], given["project"], given["name"]) for given in started] == [
        (None, "images", "a"),
        ("abc123", "images", "a"),
    ]
    assert started[0]["config"]["seed"] == 0
    assert logged == [(3, {"loss": 0.5}), "end"] * 2


def test_the_config_names_the_trackers(tmp_path):
    config = default_config()
    config.log.tensorboard = False
    assert open_trackers(RunFolder(tmp_path), config, 0) == []
    (tracker,) = open_trackers(RunFolder(tmp_path), default_config(), 7)
    assert isinstance(tracker, EventFiles)
    tracker.close()


@pytest.fixture(scope="module")
def running():
    with fake_store.running() as store:
        yield store


@pytest.fixture
def store(running, monkeypatch):
    for name, value in fake_store.environment(running).items():
        monkeypatch.setenv(name, value)
    running.objects.clear()
    return running


def log_of(folder: RunFolder) -> MetricLog:
    return MetricLog(folder, lambda step: jnp.float32(0.1), 100, [EventFiles(folder, 0)])


def log_rows(log: MetricLog, first: int, last: int) -> None:
    progress = Progress("train", 1000, 8)
    for step in range(first, last + 1):
        log.note(step, {"loss": jnp.float32(step)}, progress)
        log.write()
    progress.close()


def steps(folder: RunFolder) -> list[int]:
    """Return the steps of the rows in the store."""
    return [row["step"] for row in RunFolder(str(folder)).rows()]


def test_a_folder_needs_neither_locks_nor_renaming(store):
    folder = RunFolder("gs://bucket/run")
    with folder.writing(), folder.writing():
        folder.write_json("deep/x.json", {"a": 1})
        folder.append_row({"step": 1})
        folder.append_row({"step": 2})
        folder.drop_rows_after(1)
        folder.append_row({"step": 3})
        assert folder.rows() == [{"step": 1}, {"step": 3}]
        folder.uploads.close()
    assert folder.read_json("deep/x.json") == {"a": 1}
    assert steps(folder) == [1, 3]
    assert sorted(name for _, name in store.objects) == ["run/deep/x.json", "run/metrics.jsonl"]
    assert not store.refused


def test_fifty_rows_need_at_most_ten_requests(store):
    folder = RunFolder("gs://bucket/few")
    log, store.requests = log_of(folder), []
    log_rows(log, 1, 1)
    assert len(store.requests) <= 3, "earlier rows are read once"
    read = len(store.requests)
    log_rows(log, 2, 50)
    assert len(store.requests) == read, "the loop does not wait for the store"
    with contextlib.closing(Progress("train", 1000, 8)) as progress:
        Log(None, log, progress).before_save(50, None)
    assert read < len(store.requests) <= 10, store.requests
    assert steps(folder) == list(range(1, 51))
    log.close()
    assert any("events" in name for _, name in store.objects)
    assert ("bucket", "few/metrics.csv") in store.objects


def test_rows_are_uploaded_in_time_while_training_goes_on(store, monkeypatch):
    monkeypatch.setattr(uploads, "UPLOAD_SECONDS", 0.0)
    folder = RunFolder("gs://bucket/timely")
    log = log_of(folder)
    log_rows(log, 1, 3)
    until(lambda: ("bucket", "timely/metrics.jsonl") in store.objects)
    assert steps(folder)[0] == 1
    log.close()
    assert steps(folder) == [1, 2, 3]


def test_an_upload_does_not_start_while_one_is_running(monkeypatch):
    """Rows of a slow store would otherwise wait in memory, once per upload."""
    monkeypatch.setattr(uploads, "UPLOAD_SECONDS", 0.0)
    released, contents, written = threading.Event(), iter((b"first", b"second")), []

    def write(name: str, content: bytes) -> None:
        assert released.wait(10)
        written.append(content)

    files = Uploads(write)
    files.add("a.txt", lambda: next(contents))
    for _ in range(3):
        files.offer()
    released.set()
    files._running.result()
    assert written == [b"first"]
    files.close()
    assert written == [b"first", b"second"]


def test_a_failed_upload_is_repeated_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(uploads, "UPLOAD_SECONDS", 0.0)
    written, failing = [], [True, True, False]

    def write(name: str, content: bytes) -> None:
        if failing.pop(0):
            raise ConnectionError("the network is down\nand more")
        written.append((name, content))

    files = Uploads(write)
    files.add("a.txt", lambda: b"text")
    files.offer()
    files._running.exception()  # waits
    files.offer()
    assert caplog.messages == ["cannot upload a.txt: the network is down; it will be tried again"]
    files._running.exception()
    files.close()
    assert written == [("a.txt", b"text")]
