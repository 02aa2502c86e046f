"""A training as a run of MLflow: its config, the rows of its metrics, its results and the files that describe it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.config import flatten
from mlmoe_jax.config.table import REQUIRED
from mlmoe_jax.errors import UserError, reason_of
from mlmoe_jax.runs.folder import CONFIG, LABELS, PER_CLASS, RESULTS, STARTS, TABLE, THRESHOLDS, RunFolder
from mlmoe_jax.runtime.version import __version__

_logger = logging.getLogger(__name__)

MLFLOW = "mlflow.json"  # the address and the id of the run
EXPERIMENT = "mlmoe_jax"  # unless the environment names one
_EVERY_ROW = "epoch"  # a metric that every row has
_FILES = (CONFIG, LABELS, STARTS, TABLE, RESULTS, PER_CLASS, THRESHOLDS)  # texts, without names of images
_MOST_PARAMETERS, _MOST_METRICS, _LONGEST = 100, 1000, 6000  # in a call to MLflow; characters of a parameter


class MLflowRun:
    """A run of MLflow that records a training.

    The id of the run is stored in the run folder, so that a resumed training continues the run. Rows of metrics are
    sent in a background thread, so that a slow server does not delay the training. At the start and at the end, rows of
    the run folder that are missing on the server are sent. No row is sent twice, because MLflow would keep both copies.

    Args:
      folder: the run folder.
      address: the address of a server or a database, or a local folder.
      config: the config of the run.

    Raises:
      UserError: the server cannot be used, or the run on the server cannot be used.
    """

    def __init__(self, folder: RunFolder, address: str, config: ConfigDict):
        from mlflow import MlflowClient

        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the default waits for minutes
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # which has results only
        self._folder = folder
        self._address = address
        self._thread = ThreadPoolExecutor(1, "mlflow")
        self._warned = False
        with self._explained():
            uri, artifacts = _store(address)
            self._client = MlflowClient(uri)
            stored = folder.read_json(MLFLOW) if (folder / MLFLOW).exists() else {}
            if stored.get("uri") == uri:
                self._id = stored["id"]
                self._client.update_run(self._id, "RUNNING")
            else:
                self._id = self._create(config, artifacts)
                folder.write_json(MLFLOW, {"uri": uri, "id": self._id})
            self._steps = self._send_missing()

    def write(self, row: Mapping[str, float]) -> None:
        """Send a row of metrics in the background, unless the server has the row.

        The first failure is logged as a warning. Later failures are not reported.
        """
        if row["step"] not in self._steps:
            self._thread.submit(self._try_to_send, row | {"time": time.time()})

    def close(self) -> None:
        """Send the rows that are missing on the server, and mark the run as ended without results.

        Errors are logged as warnings, not raised.
        """
        self._thread.shutdown()
        with _warning(), self._explained():
            self._send_missing()
            self._client.set_terminated(self._id, "KILLED")

    def finish(self, results: Mapping[str, Mapping[str, float]]) -> None:
        """Send the results and the files that describe the run, and mark the run as finished.

        Args:
          results: split -> metric -> value.

        Raises:
          UserError: the server cannot be used.
        """
        numbers = {_name(f"{split}/{name}"): value for split, row in results.items() for name, value in row.items()}
        with self._explained():
            known = self._client.get_run(self._id).data.metrics
            new = {name: value for name, value in numbers.items() if not math.isnan(value) and known.get(name) != value}
            self._client.log_batch(self._id, metrics=_metrics(new, max(self._steps, default=0), time.time()))
            for name in _FILES:
                if (self._folder / name).exists():
                    self._client.log_text(self._id, self._folder.read_text(name), name)
            self._client.set_terminated(self._id, "FINISHED")

    # ----------------------------------------------------------------------------------------------------------- calls
    def _create(self, config: ConfigDict, artifacts: str | None) -> str:
        """Create a run whose parameters are the keys of the config, and return the id of the run."""
        from mlflow.entities import Param

        client, values = self._client, flatten(config)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name, artifacts)
        tags = {"mlmoe_jax": __version__, **{key: str(values[key]) for key in REQUIRED}}
        created = client.create_run(experiment, tags=tags, run_name=self._folder.path.name).info.run_id
        parameters = [Param(key, str(value)[:_LONGEST]) for key, value in values.items()]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            client.log_batch(created, params=parameters[start : start + _MOST_PARAMETERS])
        return created

    def _send_missing(self) -> set[int]:
        """Send the rows of the run folder that are missing on the server.

        Return the steps of all rows that are then on the server.
        """
        steps = {metric.step for metric in self._client.get_metric_history(self._id, _EVERY_ROW)}
        missing = [row for row in self._folder.rows() if row["step"] not in steps]
        size = _MOST_METRICS // max(map(len, missing), default=1) or 1  # whole rows, of which none is sent in part
        for start in range(0, len(missing), size):
            self._send(missing[start : start + size])
        return steps | {row["step"] for row in missing}

    def _send(self, rows: Sequence[Mapping[str, Any]]) -> None:
        metrics = [metric for row in rows for metric in _metrics(row, row["step"], row["time"])]
        self._client.log_batch(self._id, metrics=metrics)

    def _try_to_send(self, row: Mapping[str, Any]) -> None:
        try:
            self._send([row])
        except Exception as error:  # see `_explained`
            if not self._warned:
                _logger.warning(f"log.mlflow={self._address}: {reason_of(error)}; it will be tried again at the end")
            self._warned = True

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # MLflow and the libraries of its stores raise their own types
            raise UserError(
                f"log.mlflow={self._address} cannot be used ({reason_of(error)}); with a working address, or after "
                f"removing {self._folder / MLFLOW} for a new run there, the same command sends everything"
            ) from error


def send_results(folder: RunFolder, config: ConfigDict, results: Mapping[str, Mapping[str, float]]) -> None:
    """Send a finished training to MLflow: its rows, results and files. Do nothing if `log.mlflow` is empty.

    Errors are logged as warnings, not raised, because the run itself is complete.
    """
    if config.log.mlflow:
        with _warning():
            MLflowRun(folder, config.log.mlflow, config).finish(results)


@contextlib.contextmanager
def _warning() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        _logger.warning(error)


def _store(address: str) -> tuple[str, str | None]:
    """Return (tracking URI, artifact URI) for the value of `log.mlflow`.

    A server or a database is its own tracking URI, and the artifact URI is None. A local folder gets a SQLite database
    and a subfolder for artifacts.
    """
    if "://" in address or address.startswith("databricks"):
        return address, None
    path = Path(address).expanduser().resolve()
    path.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{path / 'mlflow.db'}", (path / "artifacts").as_uri()


def _metrics(row: Mapping[str, Any], step: int, seconds: float) -> Sequence[Any]:
    """Return the values of a row as MLflow metrics; an undefined value (None) is nan.

    Args:
      row: name -> value. `step` and `time` are left out.
      step: the step of the metrics.
      seconds: the time of the metrics, in seconds since the epoch.
    """
    from mlflow.entities import Metric

    metrics = []
    for name, value in row.items():
        if name not in ("step", "time"):
            number = math.nan if value is None else float(value)
            metrics.append(Metric(_name(name), number, int(1000 * seconds), step))
    return metrics


def _name(metric: str) -> str:
    """Return a metric name with each character that MLflow does not allow, such as @, replaced by "_"."""
    return re.sub(r"[^\w./ -]", "_", metric)
