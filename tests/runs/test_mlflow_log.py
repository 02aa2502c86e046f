"""Trainings in MLflow, with functions in place of MLflow's; (with --all) a training with MLflow itself."""

import contextlib
import json
import math
import sys
import threading
from collections import defaultdict, namedtuple
from types import SimpleNamespace

import pytest
from helpers import small_program
from helpers.jobs import until
from helpers.outside import outside_packages, outside_python, run_outside
from helpers.scored_run import stored_metrics

from mlmoe_jax.config import default_config
from mlmoe_jax.runs import mlflow_log
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.metric_log import TIMING
from mlmoe_jax.runs.mlflow_log import MLflowRun, send_results
from mlmoe_jax.runs.trackers import open_trackers

ROWS = [{"step": n, "epoch": n / 4, "loss": 1 / n} for n in range(1, 5)]
Metric = namedtuple("Metric", "key value timestamp step")


class FakeServer:
    """Keeps what is sent, each metric once, as MLflow's database does. It fails while `broken`."""

    def __init__(self):
        self.runs, self.uris, self.broken, self.active = {}, [], False, threading.local()
        self.go = threading.Event()
        self.go.set()

    def _run(self, run=None):
        if self.broken:
            raise ConnectionError("no answer.\nTraceback of the server")
        return self.runs[run or self.active.run]

    def set_tracking_uri(self, uri):
        self.uris.append(uri)

    def get_experiment_by_name(self, name):
        return name if self.runs else None

    def create_experiment(self, name, artifacts):
        self.artifacts = artifacts

    set_experiment = active_run = lambda self, name=None: getattr(self.active, "run", None)

    @contextlib.contextmanager
    def _until_end(self, run):
        yield SimpleNamespace(info=SimpleNamespace(run_id=run))
        self.end_run()

    def start_run(self, run_id=None, run_name=None, tags=None):
        assert self.active_run() is None
        if run_id is None:
            run_id = str(len(self.runs))
            self.runs[run_id] = SimpleNamespace(tags=tags, name=run_name, rows=[], params={}, files={})
        self._run(run_id).status = "RUNNING"
        self.active.run = run_id
        return self._until_end(run_id)

    def end_run(self, status="FINISHED"):
        self._run().status, self.active.run = status, None

    def get_run(self, run):
        metrics = {row.key: row.value for row in sorted(self._run(run).rows, key=lambda row: row.step)}
        return SimpleNamespace(data=SimpleNamespace(metrics=metrics), info=SimpleNamespace(start_time=1000))

    def log_metrics(self, metrics, step, timestamp):
        self.go.wait(20)
        assert not [name for name in metrics if "@" in name]
        rows = [Metric(name, value, timestamp, step) for name, value in metrics.items()]
        self._run().rows += [row for row in rows if row not in self._run().rows]

    def log_params(self, params):
        self._run().params |= params

    def log_text(self, text, name):
        self._run().files[name] = text


@pytest.fixture
def server(monkeypatch):
    fake = FakeServer()
    for name in mlflow_log._LIMITS:
        monkeypatch.setenv(name, "0")
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return fake


@pytest.fixture
def config():
    config = default_config()
    config.log.mlflow, config.log.tensorboard = "http://server", False
    return config


def write(folder, config, rows):
    """A training that writes rows and ends; returns its run folder."""
    run_folder = RunFolder(folder)
    (tracker,) = open_trackers(run_folder, config, 0)
    for row in rows:
        run_folder.append_row({**row, "time": 1.5})
        tracker.write(row)
    tracker.close()
    return run_folder


def values(run, name):
    return [(row.step, row.value) for row in run.rows if row.key == name]


def test_a_run_has_the_config_all_rows_and_the_results(tmp_path, server, config):
    folder = write(tmp_path / "a", config, [*ROWS, {"step": 5, "epoch": 1.25, "val/raw/OF1@0.5": 0.5, "loss": None}])
    [run] = server.runs.values()
    assert (run.name, run.tags["model.head.kind"], run.status) == ("a", config.model.head.kind, "KILLED")
    assert run.params["optim.learning_rate"] == str(config.optim.learning_rate)
    assert values(run, "epoch") == [(n, n / 4) for n in range(1, 6)]
    assert values(run, "val/raw/OF1_0.5") == [(5, 0.5)]
    assert math.isnan(values(run, "loss")[-1][1])
    assert not values(run, "time")
    folder.write_json("results.json", {"test": {}})
    for _ in range(2):  # the same command again
        send_results(folder, config, {"test": {"mAP": 0.75, "P@3": math.nan}})
    assert values(run, "test/mAP") == [(5, 0.75)]
    assert not values(run, "test/P_3")
    assert (run.status, [*run.files]) == ("FINISHED", ["results.json"])
    assert len(server.runs) == 1


def test_a_resumed_training_continues_its_run(tmp_path, server, config, monkeypatch):
    """It computes rows again that MLflow has, and sends those that were lost on the way."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = write(tmp_path, config, ROWS)
    folder.drop_rows_after(2)
    [run] = server.runs.values()
    run.rows = [row for row in run.rows if row.step < 4]
    write(tmp_path, config, [*ROWS[2:], {"step": 5, "epoch": 1.25}])
    assert values(run, "epoch") == [(n, n / 4) for n in range(1, 6)]
    assert len(server.runs) == 1
    config.log.mlflow = "~/local"
    write(tmp_path, config, [])
    [_, local] = server.runs.values()
    assert server.uris[-1] == f"sqlite:///{tmp_path}/local/mlflow.db"
    assert server.artifacts is None, "the experiment is there"
    assert len(values(local, "epoch")) == 5, "another store gets all rows"


def test_training_does_not_wait_for_a_slow_server(tmp_path, server, config, caplog, monkeypatch):
    tracker = MLflowRun(RunFolder(tmp_path), "http://server", config)
    server.go.clear()
    for row in ROWS:
        tracker.write(row)
    [run] = server.runs.values()
    monkeypatch.setattr(mlflow_log, "_PATIENCE", 0.1)
    tracker.close()
    assert run.rows == []
    assert "it is too slow; the same command" in caplog.text
    server.go.set()
    tracker._thread.join()
    assert values(run, "epoch") == [(n, n / 4) for n in range(1, 5)]


def test_a_server_that_fails_costs_a_warning_and_no_row(tmp_path, server, config, caplog):
    folder = RunFolder(tmp_path)
    MLflowRun(folder, "http://server", config).close()
    server.broken = True
    tracker = MLflowRun(folder, "http://server", config)  # a dead server does not prevent a resume
    for row in ROWS[:2]:
        folder.append_row({**row, "time": 1.5})
        tracker.write(row)
        until(lambda: caplog.messages and not tracker._wake.is_set())
    assert [message.endswith("no answer; it will be tried again") for message in caplog.messages] == [True]
    server.broken = False
    tracker.close()
    [run] = server.runs.values()
    assert values(run, "epoch") == [(n, n / 4) for n in range(1, 3)]
    server.broken = True
    send_results(folder, config, {"test": {"mAP": 0.75}})
    assert "no answer; the same command" in caplog.messages[-1]
    (tmp_path / "mlflow.json").unlink()
    send_results(folder, config, {"test": {"mAP": 0.75}})
    assert caplog.messages[-1] == "log.mlflow=http://server cannot be used (no answer)"


# ------------------------------------------------------------------------------------------------------ MLflow itself
_ROWS = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
[run] = client.search_runs([client.get_experiment_by_name("mlmoe_jax").experiment_id])
history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
rows = {name: [[one.step, one.value] for one in values] for name, values in history.items()}
files = [file.path for file in client.list_artifacts(run.info.run_id)]
print(json.dumps([rows, run.data.params, files, run.info.status]))
"""


@pytest.mark.slow
def test_the_store_of_mlflow_holds_every_row_once(tmp_path):
    """Of a training that is killed after a checkpoint, and resumed."""
    python = outside_python("mlflow")
    start = small_program.program_in(tmp_path, MLFLOW_DISABLE_TELEMETRY="true")
    path = start.place["env"]["PYTHONPATH"] + f":{outside_packages(python)}"
    own = ("--config=linear_probe:dataset=digits", "--workdir=run", "--config.log.mlflow=store")
    command = (*own, *small_program.SMALL)
    assert start(*command, SIGNAL_AFTER="9 5", PYTHONPATH=path).returncode == -9
    resumed = start(*command, PYTHONPATH=path)
    assert resumed.returncode == 0, resumed.stderr
    stored, params, files, state = json.loads(run_outside(python, _ROWS, f"sqlite:///{tmp_path}/store/mlflow.db"))
    expected = defaultdict(list)
    for row in RunFolder(tmp_path / "run").rows():
        for name in row.keys() - {"step", *TIMING}:
            expected[name.replace("@", "_")].append([row["step"], row[name]])
    assert len(expected["loss"]) == 8
    assert len(stored.keys() - {*TIMING}) > len(expected), "the results too"
    for name, pairs in expected.items():
        assert sorted(stored[name]) == pairs
    results = stored_metrics(tmp_path / "run")
    assert stored["test/mAP"] == [[8, results["test"]["mAP"]]]
    assert params["train.batch_size"] == "15"
    assert {"results.json", "per_class.csv", "config.json"} <= set(files)
    assert state == "FINISHED"
