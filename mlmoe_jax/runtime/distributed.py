"""Run one job on several processes: start, agree, and end together.

Every process runs the same program on its part of every batch; the first one writes, and prints the results. A process
that fails exits at once. The others detect it within seconds by a broken connection or a missing heartbeat, and exit
too, since none can continue alone. See `cluster` for how processes find one another, `watchdog` for hanging processes.

Environment variables: MLMOE_START_SECONDS, how long to wait for the other processes (default 300), and
MLMOE_HANG_SECONDS, how long a step may take (default 45; 0 = no limit; if set, a single process is watched as well).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from mlmoe_jax.errors import INTERRUPTED, UserError
from mlmoe_jax.runtime import files, watchdog
from mlmoe_jax.runtime.cluster import VARIABLES, Cluster, find_cluster, number

HEARTBEAT_SECONDS, SHUTDOWN_SECONDS = 10, 5  # after these a silent process counts as dead


# ------------------------------------------------------------------------------------------------- start and end
def run(work: Callable[[], int], *, together: bool) -> int:
    """Join the other processes of the job, if there are any, and return the exit code of `work`.

    together: whether the processes share this work; otherwise the first one does it alone and the others do nothing.
    If one of several processes fails, this does not return but prints the reason and ends the process.
    """
    cluster = find_cluster(os.environ)
    if cluster is None:
        if os.environ.get("MLMOE_HANG_SECONDS"):
            watchdog.start("the process", _hang_seconds())
        try:
            return work()
        finally:
            watchdog.stop()
    if not together:
        # The accelerators of several hosts can only be initialized by all of them together.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        return work() if cluster.index == 0 else 0
    who = f"process {cluster.index} of {cluster.count}"
    try:
        _join(cluster, who)
        code = work()
        _leave()
        return code
    except BaseException as error:
        _end(error, who)


def _join(cluster: Cluster, who: str) -> None:
    """Connect to the other processes; UserError if they do not start in time."""
    seconds = number(os.environ, "MLMOE_START_SECONDS", float, 300)
    _results_only_from(cluster.index == 0)
    watchdog.start(who, _hang_seconds())
    # JAX's own timeout ends the process with a stack trace, so it has to be longer than those with a message here.
    watchdog.sign("wait", f"it began to wait for the {cluster.count} processes of the job", seconds)
    if (address := cluster.arguments.get("coordinator_address")) and cluster.index > 0:
        _wait_for(address, seconds, who)

    import jax

    before = signal.getsignal(signal.SIGTERM)
    try:
        jax.distributed.initialize(
            **cluster.arguments,
            initialization_timeout=int(seconds) + 60,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"{who} cannot join the others: {reason}") from error
    signal.signal(signal.SIGTERM, before)  # JAX's handler only takes note of SIGTERM; here it ends or saves
    watchdog.sign("begin", "it joined the others")


def _hang_seconds() -> float:
    return number(os.environ, "MLMOE_HANG_SECONDS", float, watchdog.SECONDS)


def _wait_for(address: str, seconds: float, who: str) -> None:
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(
                    f"{who} cannot reach {VARIABLES[0]}={address} after {seconds:g} s ({error.strerror or error}); "
                    "start process 0, and give all processes its address"
                ) from error
        time.sleep(0.2)


def _results_only_from(first: bool) -> None:
    """Reserve stdout for the results of the first process; messages that C++ libraries print there go to stderr."""
    sys.stdout.flush()
    results = os.dup(1) if first else os.open(os.devnull, os.O_WRONLY)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(results, "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def _leave() -> None:
    """Wait for the other processes, then disconnect."""
    import jax

    sys.stdout.flush()
    watchdog.sign("leave", "it was done and began to wait for the others")
    barrier("leave")  # JAX itself would wait only seconds for a process that is still writing
    jax.distributed.shutdown()
    watchdog.stop()


def _end(error: BaseException, who: str) -> NoReturn:
    """Exit at once after a failure in one process of a job; a normal exit would wait for the others."""
    code = 1
    known = error if isinstance(error, UserError) else files.no_room(error)
    if known is not None:
        code = known.exit_code
        print(f"error: {known}", file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        code = INTERRUPTED
        print(f"{who} was interrupted", file=sys.stderr)
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
    else:
        traceback.print_exception(error)
        print(
            f"error: {who} ends, since it or another one failed: {str(error).splitlines()[0] if str(error) else ''} "
            f"({type(error).__name__}); rerun the same command to resume from the last checkpoint",
            file=sys.stderr,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# -------------------------------------------------------------------------------------------------------- identity
def process() -> tuple[int, int]:
    """Return (the index of this process, the number of processes): (0, 1) if there is only one."""
    jax = sys.modules.get("jax")  # a process that has not imported JAX has not joined others
    if jax is None or not jax.distributed.is_initialized():
        return 0, 1
    return jax.process_index(), jax.process_count()


def is_first() -> bool:
    """Return whether this is the process that writes files, prints and reports."""
    return process()[0] == 0


# ---------------------------------------------------------------------------------------------------------- agreeing
# All processes have to call each of these, in the same order.
def barrier(name: str) -> None:
    """Wait until every process has reached this call; all of them have to pass the same name."""
    if process()[1] > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def gather(value: Any) -> list[Any]:
    """Return the values of all processes, ordered by process index; `value` is anything that JSON can hold."""
    if process()[1] == 1:
        return [value]
    from jax.experimental.multihost_utils import process_allgather

    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = process_allgather(np.array(len(text), np.int32))
    padded = process_allgather(np.pad(text, (0, int(sizes.max()) - len(text))))
    return [json.loads(row[:size].tobytes()) for row, size in zip(padded, sizes, strict=True)]


def broadcast_from_first(value: Any) -> Any:
    """Return the first process's value on every process, for decisions that have to be the same everywhere."""
    return gather(value if is_first() else None)[0]


class Vote:
    """A yes-or-no question to all processes, once per step."""

    def __init__(self):
        self._count = self._before = None

    def any(self, yes: bool) -> bool:
        """Return whether any process passed yes: in this call if there is one process, otherwise in the previous call.

        The values of a step are fetched in the next one, so that the device never waits for them.
        """
        if process()[1] == 1:
            return yes
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        if self._count is None:
            mesh = Mesh(np.array(jax.devices()), ("all",))
            self._apart, together = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("all",), ()))
            self._count = jax.jit(jax.numpy.max, out_shardings=together)
        answers = np.full(jax.local_device_count(), yes, np.int32)
        present = jax.make_array_from_process_local_data(self._apart, answers)
        before, self._before = self._before, self._count(present)
        return before is not None and bool(before)


def to_host(tree: Any) -> Any:
    """Return a tree of arrays as numpy, complete on every process.

    An array that is sharded over several processes is gathered, one array at a time; all others are only copied.
    """
    import jax
    from jax.experimental.multihost_utils import process_allgather

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            return process_allgather(leaf, tiled=True)
        return jax.device_get(leaf)

    return jax.tree.map(whole, tree)
