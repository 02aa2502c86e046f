"""Jobs of several processes: how the processes connect, and how they agree.

Every process runs the same program on its part of every batch. The first process writes files and prints the results.
JAX connects the processes, and ends all of them within seconds after one has died. A process that hangs is detected by
the age of its heartbeat, see `progress.heartbeat`.

A job is detected in this order: the variables MLMOE_COORDINATOR=HOST:PORT, MLMOE_PROCESSES=N and MLMOE_PROCESS=0…N−1;
the tasks of srun; the ranks of Open MPI; the hosts of a TPU slice. MLMOE_START_SECONDS is the time to wait for the
other processes (default 300).
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlmoe_jax.errors import UserError

VARIABLES = ("MLMOE_COORDINATOR", "MLMOE_PROCESSES", "MLMOE_PROCESS")
HEARTBEAT_SECONDS, SHUTDOWN_SECONDS = 10, 5  # a process that is silent for longer counts as dead
_LOCAL_INDEX = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")  # the index of a process, and of its GPU, on a machine
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"


# ------------------------------------------------------------------------------------------------- start and end
@dataclass(frozen=True)
class Job:
    """A job: the index of this process, their number, and the keyword arguments of `jax.distributed.initialize`."""

    index: int
    count: int
    arguments: dict[str, Any]


def find_job(environment: Mapping[str, str]) -> Job | None:
    """Return this process's job according to environment variables; None for a single process.

    Raises UserError if the variables MLMOE_COORDINATOR, MLMOE_PROCESSES and MLMOE_PROCESS are incomplete or invalid.
    """
    if any(environment.get(name) for name in VARIABLES):
        return _job_from_variables(environment)
    if "SLURM_STEP_NODELIST" in environment:  # only srun sets it
        return _job("slurm", environment["SLURM_PROCID"], environment["SLURM_NTASKS"])
    if "OMPI_COMM_WORLD_SIZE" in environment:  # Open MPI 5 gives its processes no address
        method = "ompi" if "OMPI_MCA_orte_hnp_uri" in environment else "mpi4py"
        return _job(method, environment["OMPI_COMM_WORLD_RANK"], environment["OMPI_COMM_WORLD_SIZE"])
    if not _has_tpu(environment):
        return None
    if hosts := environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES"):
        return _job("gketpu", environment.get("TPU_WORKER_ID", 0), len(hosts.split(",")))
    if "TPU_SKIP_MDS_QUERY" in environment:
        return None
    from urllib.error import URLError  # here, because importing it takes a fifth of the time of --help

    try:
        return _job("gcetpu", _metadata("agent-worker-number"), len(_metadata("worker-network-endpoints").split(",")))
    except URLError:  # a TPU outside Google's cloud
        return None


def _job(method: str, index: str | int, count: str | int) -> Job | None:
    return Job(int(index), int(count), {"cluster_detection_method": method}) if int(count) > 1 else None


def _job_from_variables(environment: Mapping[str, str]) -> Job | None:
    address, count, index = (environment.get(name, "") for name in VARIABLES)
    host, _, port = address.rpartition(":")
    are_numbers = all(text.isdecimal() for text in (port, count, index))
    if not (host and are_numbers and 0 < int(port) < 65536 and int(index) < int(count)):
        values = ", ".join(f"{name}={environment.get(name, '')}" for name in VARIABLES)
        raise UserError(f"{values} should be HOST:PORT, such as 10.0.0.1:5000, a number N and a number from 0 to N - 1")
    names = {"coordinator_address": address, "num_processes": int(count), "process_id": int(index)}
    return Job(int(index), int(count), {**names, "cluster_detection_method": "deactivate"}) if int(count) > 1 else None


def _has_tpu(environment: Mapping[str, str]) -> bool:
    """Return whether JAX can use a TPU here.

    This requires a PCI device of Google, an installed libtpu, and JAX_PLATFORMS without a value or with tpu.
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    usable = "TPU_LIBRARY_PATH" in environment or importlib.util.find_spec("libtpu") is not None
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return (
        usable
        and (not platforms or "tpu" in platforms.split(","))
        and any(path.read_text().strip() == "0x1ae0" for path in vendors)
    )


def _metadata(name: str) -> str:
    import urllib.request

    request = urllib.request.Request(_METADATA + name, headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return answer.read().decode()


def connect(job: Job) -> None:
    """Connect the processes of a job; UserError if the first process cannot be reached in time."""
    import jax

    seconds = int(os.environ.get("MLMOE_START_SECONDS", 300))
    if (address := job.arguments.get("coordinator_address")) and job.index > 0:
        _wait_for(address, seconds)
    before = signal.getsignal(signal.SIGTERM)
    jax.distributed.initialize(
        **job.arguments,
        initialization_timeout=seconds,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
    )
    signal.signal(signal.SIGTERM, before)  # JAX's handler would only record SIGTERM


def stand_alone() -> tuple[int, int]:
    """Return (index of this process in its job, number of processes) without connecting; (0, 1) for a single process.

    JAX will use the devices that this process would have in the job. Call it before JAX looks for devices.
    """
    job, environment = find_job(os.environ), os.environ
    if job is None:
        return 0, 1
    if _has_tpu(environment):  # a slice of several hosts has four chips on each
        chips = environment.get("TPU_CHIPS_PER_HOST_BOUNDS", "2,2,1")
        environment.update(TPU_PROCESS_BOUNDS="1,1,1", TPU_CHIPS_PER_PROCESS_BOUNDS=chips, TPU_WORKER_ID="0")
    if local := next(filter(None, map(environment.get, _LOCAL_INDEX)), ""):
        import jax

        jax.config.update("jax_cuda_visible_devices", local)
        jax.config.update("jax_rocm_visible_devices", local)
    return job.index, job.count


def _wait_for(address: str, seconds: float) -> None:
    """Wait until the first process accepts connections; UserError after `seconds`.

    Without this wait, JAX would end the process with a native stack trace.
    """
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(
                    f"cannot reach {VARIABLES[0]}={address} after {seconds:g} s ({error.strerror or error}); "
                    "start process 0, and give all processes its address"
                ) from error
        time.sleep(0.2)


def disconnect() -> None:
    """Wait until all processes are ready to leave, then disconnect."""
    import jax

    barrier("leave")  # JAX would wait only SHUTDOWN_SECONDS for a process that is still writing
    jax.distributed.shutdown()


# -------------------------------------------------------------------------------------------------------- identity
def process() -> tuple[int, int]:
    """Return (index of this process, number of processes), which is (0, 1) for a single process."""
    jax = sys.modules.get("jax")  # a process without JAX has not joined a job
    if jax is None or not jax.distributed.is_initialized():
        return 0, 1
    return jax.process_index(), jax.process_count()


def is_first() -> bool:
    """Return whether this process has index 0. Only this process writes files and prints results."""
    return process()[0] == 0


# ---------------------------------------------------------------------------------------------------------- agreeing
# All processes must call each of these functions, in the same order.
def barrier(name: str) -> None:
    """Wait until every process has reached this call. All processes must pass the same name."""
    if process()[1] > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def gather(value: Any) -> list[Any]:
    """Return a list with the `value` of every process, ordered by process index. `value` must be JSON-serializable."""
    if process()[1] == 1:
        return [value]
    import numpy as np  # here, because --help does without it
    from jax.experimental.multihost_utils import process_allgather

    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = process_allgather(np.array(len(text), np.int32))
    padded = process_allgather(np.pad(text, (0, int(sizes.max()) - len(text))))
    return [json.loads(row[:size].tobytes()) for row, size in zip(padded, sizes, strict=True)]


def broadcast_from_first(value: Any) -> Any:
    """Return the JSON-serializable `value` of the first process on every process, so that all use one value."""
    return gather(value if is_first() else None)[0]


class Vote:
    """A repeated vote of all processes on whether any process says yes, without waiting for the device.

    Each process calls `any` once per step. A vote takes place about every `seconds`, in the same step on all processes.
    With each vote the processes also agree on the number of steps until the next vote: the smallest number of steps
    that a process has run in `seconds`.
    """

    def __init__(self, seconds: float = 1.0):
        self._seconds, self._wait, self._calls = seconds, 0, 0
        self._reduce = self._votes = None
        self._began = time.monotonic()

    def any(self, yes: bool) -> bool:
        """Return whether any process has voted yes.

        With one process, the result is `yes`. With several processes, the result of a vote is returned in the step
        after the vote, and other steps return False. A process must pass yes=True in every step until the result is
        True, because votes do not take place in every step.
        """
        if process()[1] == 1:
            return yes
        import numpy as np

        answer, self._calls = False, self._calls + 1
        if self._votes is not None:
            yes_count, steps = np.asarray(self._votes)
            answer, self._wait, self._votes = bool(yes_count), -int(steps), None
        if self._wait > 0:
            self._wait -= 1
        else:
            steps = int(self._calls * self._seconds / max(1e-9, time.monotonic() - self._began))
            self._votes = self._start(np.array([yes, -min(steps, 2 * self._calls)], np.int32))
            self._calls, self._began = 0, time.monotonic()
        return answer

    def _start(self, ballot: Any) -> Any:
        """Dispatch the maximum of the ballots i32[2] of all processes, and return it as a global array."""
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        if self._reduce is None:
            mesh = Mesh(np.array(jax.devices()), ("all",))
            self._apart, together = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("all",), ()))
            self._reduce = jax.jit(lambda ballots: ballots.max(axis=0), out_shardings=together)
        ballots = np.tile(ballot, (jax.local_device_count(), 1))
        return self._reduce(jax.make_array_from_process_local_data(self._apart, ballots))


def to_host(tree: Any) -> Any:
    """Return a tree of arrays as NumPy arrays of their global shapes on every process.

    An array that is sharded over several processes is gathered, one array at a time. Any other array is only copied.
    """
    import jax
    from jax.experimental.multihost_utils import process_allgather

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            return process_allgather(leaf, tiled=True)
        return jax.device_get(leaf)

    return jax.tree.map(whole, tree)
