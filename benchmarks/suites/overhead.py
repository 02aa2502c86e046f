"""overhead: the host's time per step of the training loop, with one and two processes and a slow object store."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks import harness
from benchmarks.suites.cases import Settings

sys.path.append(str(harness.ROOT / "tests"))  # for the store and the ports of the tests

PROGRAM = harness.PEERS / "idle_loop.py"
DELAY, DEVICE_SECONDS = 0.05, 0.01  # per request to the object store, and per step beside it
CASES = {  # processes, whether the run folder is in an object store, seconds of the device per step
    "1 process": (1, False, 0.0),
    "2 processes, on the CPU": (2, False, 0.0),
    "1 process, steps of 10 ms": (1, False, DEVICE_SECONDS),
    "1 process, steps of 10 ms, a store of 50 ms per request": (1, True, DEVICE_SECONDS),
}


def run(settings: Settings, workers: harness.Workers, results: harness.Results) -> list[str]:
    """Return a table with one row per case."""
    workers.close()
    rows, notes = [], []
    steps = 100 if settings.quick else 2000
    for name, case in CASES.items():
        if case[1] and importlib.util.find_spec("gcsfs") is None:
            notes.append(f"Without the row “{name}”, which needs the package gcsfs.")
            continue
        if outcome := results.measure("overhead", name, measured, steps, *case):
            requests = outcome.get("requests")
            per_step = f"{1000 * outcome['seconds']:.2f}"
            rows.append([name, per_step, "" if requests is None else f"{1000 * requests / steps:.1f}"])
    columns = ("", "ms per step", "requests per 1,000 steps")
    return [harness.table("A loop whose step computes nothing", columns, rows, notes)]


def measured(steps: int, processes: int, in_store: bool, wait: float) -> dict[str, Any]:
    """Return the seconds per step of a job, and the number of requests to the object store for its logs."""
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        environment, workdir, store = dict(harness.our_side("ours").environment), f"{place}/run", None
        if in_store:
            from helpers import fake_store

            store = stack.enter_context(fake_store.running())
            store.delay, workdir = DELAY, "gs://bucket/run"
            environment |= fake_store.environment(store)
        command = [sys.executable, str(PROGRAM), f"--workdir={workdir}", f"--steps={steps}", f"--wait={wait}"]
        environment |= {"MLMOE_CACHE": f"{place}/cache"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        jobs = [subprocess.Popen(command, env=environment | of_job, **pipes) for of_job in _jobs(processes)]
        outputs = [job.communicate() for job in jobs]
        if any(job.returncode for job in jobs):
            raise harness.Failed(f"the idle loop failed: {outputs[0][1].strip().splitlines()[-1]}")
        outcome = json.loads(outputs[0][0])
        if store is not None:
            logs = [name for name in store.requests if "metrics.jsonl" in name or "events" in name]
            outcome["requests"] = len(logs)
        return outcome


def _jobs(processes: int) -> list[dict[str, str]]:
    """Return the variables of each process of a job."""
    if processes == 1:
        return [{}]
    from helpers.ports import free_port

    address = f"127.0.0.1:{free_port()}"
    return [
        # Processes cannot share an accelerator.
        {"JAX_PLATFORMS": "cpu", "MLMOE_COORDINATOR": address}
        | {"MLMOE_PROCESSES": str(processes), "MLMOE_PROCESS": str(index)}
        for index in range(processes)
    ]
