"""The logs of a training in an object store: few requests, no waiting, and nothing lost."""

import jax.numpy as jnp
import pytest
from helpers import fake_store
from helpers.jobs import until

from mlmoe_jax.runs import uploads
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.metric_log import MetricLog
from mlmoe_jax.runs.trackers import EventFiles
from mlmoe_jax.runs.uploads import Uploads
from mlmoe_jax.runtime.progress import Progress
from mlmoe_jax.training.hooks import Log


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
    Log(None, log, Progress("train", 1000, 8)).before_save(50, None)
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
