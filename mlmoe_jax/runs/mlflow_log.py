"""A training as a run of MLflow: its config, the rows of its metrics, its results and the files that describe it."""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.config import flatten
from mlmoe_jax.config.table import REQUIRED
from mlmoe_jax.errors import UserError, reason_of
from mlmoe_jax.runs.folder import CONFIG, LABELS, PER_CLASS, RESULTS, STARTS, TABLE, THRESHOLDS, RunFolder
from mlmoe_jax.runtime.version import __version__

MLFLOW = "mlflow.json"  # the address and the id of the run
EXPERIMENT = "mlmoe_jax"  # unless the environment names one
_LIMITS = {  # of a server, whose defaults are minutes; the last prints to stdout, which has results only
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_FILES = (CONFIG, LABELS, STARTS, TABLE, RESULTS, PER_CLASS, THRESHOLDS)  # texts, without names of images
_LONGEST = 6000  # characters of a parameter
_PATIENCE = 60.0  # seconds for the last rows

_Results = Mapping[str, Mapping[str, float]]  # split -> metric -> value


class MLflowRun:
    """A run of MLflow that records a training.

    A thread sends the rows in their order, so a slow or dead server does not delay the training. If MLflow does not
    take a row, it is tried again with the next one. A resumed training continues the run, whose id is in the run
    folder, after the last row that MLflow has: rows that it computes again are not sent again. A row or a result that
    arrives twice has the same step, time and value, and MLflow keeps one of the two.

    `address` is a local folder, or the address of a server or a database. Raises UserError if a new run cannot be
    created.
    """

    def __init__(self, folder: RunFolder, address: str, config: ConfigDict):
        import mlflow

        for name, value in _LIMITS.items():
            os.environ.setdefault(name, value)
        self._folder, self._address = folder, address
        stored = folder.read_json(MLFLOW) if (folder / MLFLOW).exists() else {}
        try:
            uri, artifacts = _store(address)
            mlflow.set_tracking_uri(uri)
            if stored.get("uri") != uri:
                stored = {"uri": uri, "id": _create(folder.path.name, config, artifacts)}
                folder.write_json(MLFLOW, stored)
        except Exception as error:  # MLflow and the libraries of its stores raise their own types
            raise UserError(f"log.mlflow={address} cannot be used ({reason_of(error)})") from error
        self._id = stored["id"]
        self._rows = deque(folder.rows())
        self._results: _Results | None = None
        self._ending = self._warned = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def write(self, row: Mapping[str, float]) -> None:
        """Send a row of metrics in the background. The first failure is logged as a warning."""
        self._rows.append(row | {"time": time.time()})
        self._wake.set()

    def close(self, results: _Results | None = None) -> None:
        """Send the last rows and end the run: as finished, with its results and files, or as stopped without results.

        This takes at most _PATIENCE seconds. A failure, or the end of this time, is logged as a warning.
        """
        self._results, self._ending = results, True
        self._wake.set()
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            self._warn("it is too slow")

    def _warn(self, reason: str) -> None:
        again = f"the same command, or after removing {self._folder / MLFLOW} a new run, sends the rest"
        logging.getLogger(__name__).warning(
            f"log.mlflow={self._address}: {reason}; {again if self._ending else 'it will be tried again'}"
        )

    # -------------------------------------------------------------------------------------------------- in the thread
    def _work(self) -> None:
        ending = False
        while not ending:
            self._wake.wait()
            self._wake.clear()
            ending = self._ending
            try:
                self._send_rows()
                if ending:
                    self._end()
            except Exception as error:  # see `__init__`
                if ending or not self._warned:
                    self._warn(reason_of(error))
                self._warned = True

    def _send_rows(self) -> None:
        import mlflow

        if mlflow.active_run() is None:  # of this thread
            mlflow.start_run(run_id=self._id)
            last = mlflow.get_run(self._id).data.metrics.get("epoch", 0)  # which every row has
            while self._rows and self._rows[0]["epoch"] <= last:
                self._rows.popleft()
        while self._rows:
            row = self._rows[0]
            numbers = {name: row[name] for name in row if name not in ("step", "time")}
            mlflow.log_metrics(_metrics(numbers), step=row["step"], timestamp=int(1000 * row["time"]))
            self._rows.popleft()

    def _end(self) -> None:
        import mlflow

        if self._results is None:
            mlflow.end_run("KILLED")
            return
        numbers = {f"{split}/{name}": value for split, row in self._results.items() for name, value in row.items()}
        defined = {name: value for name, value in numbers.items() if not math.isnan(value)}
        start = mlflow.get_run(self._id).info.start_time
        last = max((row["step"] for row in self._folder.rows()), default=0)
        mlflow.log_metrics(_metrics(defined), step=last, timestamp=start)  # a constant time, see the class
        for name in _FILES:
            if (self._folder / name).exists():
                mlflow.log_text(self._folder.read_text(name), name)
        mlflow.end_run()


def send_results(folder: RunFolder, config: ConfigDict, results: _Results) -> None:
    """Send the rows, results and files of a finished training to MLflow, or do nothing if `log.mlflow` is empty.

    Errors are logged as warnings, not raised, because the run itself is complete.
    """
    if config.log.mlflow:
        try:
            MLflowRun(folder, config.log.mlflow, config).close(results)
        except UserError as error:
            logging.getLogger(__name__).warning(error)


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


def _create(run_name: str, config: ConfigDict, artifacts: str | None) -> str:
    """Create a run whose parameters are the keys of the config, and return the id of the run."""
    import mlflow

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
    if mlflow.get_experiment_by_name(name) is None:
        mlflow.create_experiment(name, artifacts)
    mlflow.set_experiment(name)
    values = flatten(config)
    tags = {"mlmoe_jax": __version__, **{key: str(values[key]) for key in REQUIRED}}
    with mlflow.start_run(run_name=run_name, tags=tags) as run:
        mlflow.log_params({key: str(value)[:_LONGEST] for key, value in values.items()})
    return run.info.run_id


def _metrics(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics with "_" for each character that MLflow does not allow, such as @; None is nan."""
    values = {re.sub(r"[^\w./ -]", "_", name): value for name, value in numbers.items()}
    return {name: math.nan if value is None else float(value) for name, value in values.items()}
