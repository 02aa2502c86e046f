import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlmoe_jax.data.pipeline import SkippedImages
from mlmoe_jax.runtime import distributed, preemption
from mlmoe_jax.runtime.distributed import VARIABLES, Job, find_job
from mlmoe_jax.runtime.preemption import asked_to_stop


def variables(coordinator="10.0.0.1:5000", processes="3", process="1") -> dict[str, str]:
    return {name: v for name, v in zip(VARIABLES, (coordinator, processes, process), strict=True) if v is not None}


# ----------------------------------------------------------------------------------------------- the processes of a job
def test_three_variables_give_the_index_of_a_process():
    assert find_job(variables()) == Job(
        1,
        {
            "coordinator_address": "10.0.0.1:5000",
            "num_processes": 3,
            "process_id": 1,
            "cluster_detection_method": "deactivate",
        },
    )
    assert find_job({}) is None
    assert find_job(variables(processes="1", process="0")) is None, "a single process has no others to join"
    assert find_job(variables(coordinator="[fe80::1]:5000")).arguments["coordinator_address"] == "[fe80::1]:5000"


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (variables(coordinator=None), "MLMOE_COORDINATOR is not set; set all of "),
        (variables(processes=""), "MLMOE_PROCESSES is not set; set all of "),
        (variables(coordinator="10.0.0.1"), "MLMOE_COORDINATOR=10.0.0.1 is not HOST:PORT, such as 10.0.0.1:5000"),
        (variables(coordinator="host:70000"), "MLMOE_COORDINATOR=host:70000 is not HOST:PORT"),
        (variables(process="3"), "MLMOE_PROCESS=3 is not one of the 3 processes, which count from 0"),
        (variables(process="-1"), "MLMOE_PROCESS=-1 is not one of the 3 processes"),
        (variables(processes="two"), "MLMOE_PROCESS=1 is not one of the two processes"),
    ],
)
def test_inconsistent_variables_are_refused(refusal, environment, sentence):
    assert refusal(find_job, environment).startswith(sentence)


SLURM = {"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "8", "SLURM_PROCID": "5"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
HOSTS = {"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": "2"}


@pytest.mark.parametrize(
    ("environment", "index", "method"),
    [
        (SLURM, 5, "slurm"),
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"}, 3, "ompi"),
        (OPEN_MPI, 3, "mpi4py"),
        (HOSTS, 2, "gketpu"),
        ({}, 1, "gcetpu"),
    ],
)
def test_jax_connects_the_processes_of_a_cluster(monkeypatch, environment, index, method):
    monkeypatch.setattr(distributed, "_has_tpu", lambda environment: True)
    metadata = {"worker-network-endpoints": "a:1:10.0.0.1,b:2:10.0.0.2", "agent-worker-number": "1"}
    monkeypatch.setattr(distributed, "_metadata", metadata.__getitem__)
    assert find_job(environment) == Job(index, {"cluster_detection_method": method})


@pytest.mark.parametrize(
    "environment",
    [
        SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"},  # in the batch script
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
        {"TPU_SKIP_MDS_QUERY": "1"},
        {},
    ],
)
def test_a_process_without_others_is_alone(monkeypatch, environment):
    def nobody(name):
        raise urllib.error.URLError("no such host")

    monkeypatch.setattr(distributed, "_has_tpu", lambda environment: True)
    monkeypatch.setattr(distributed, "_metadata", nobody)
    assert find_job(environment) is None


@pytest.mark.parametrize(
    ("environment", "vendor", "found"),
    [
        ({"TPU_LIBRARY_PATH": "/lib"}, "0x1ae0", True),
        ({"TPU_LIBRARY_PATH": "/lib", "JAX_PLATFORMS": "tpu,cpu"}, "0x1ae0", True),
        ({"TPU_LIBRARY_PATH": "/lib", "JAX_PLATFORMS": "cpu"}, "0x1ae0", False),
        ({"TPU_LIBRARY_PATH": "/lib"}, "0x10de", False),
        ({}, "0x1ae0", False),  # without libtpu
    ],
)
def test_a_tpu_is_a_device_of_google_with_its_library(monkeypatch, tmp_path, environment, vendor, found):
    (tmp_path / "vendor").write_text(f"{vendor}\n")
    monkeypatch.setattr(distributed.Path, "glob", lambda path, pattern: [tmp_path / "vendor"])
    monkeypatch.setattr(distributed.importlib.util, "find_spec", lambda name: None)
    assert distributed._has_tpu(environment) is found


def test_is_first_does_not_import_jax():
    program = "import mlmoe_jax.runtime.distributed as d, sys; assert d.is_first(); assert 'jax' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", program], check=True, env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    )


def test_waiting_for_a_coordinator_that_starts_late(refusal):
    with socket.socket() as late:
        late.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{late.getsockname()[1]}"
        threading.Timer(0.3, late.listen).start()
        began = time.monotonic()
        distributed._wait_for(address, 20)
        assert time.monotonic() - began > 0.2
    assert refusal(distributed._wait_for, address, 0).startswith(f"cannot reach MLMOE_COORDINATOR={address} after 0 s")


# ----------------------------------------------------------------------------------------------------------- agreeing
def test_one_process_agrees_with_itself():
    assert distributed.process() == (0, 1)
    assert distributed.is_first()
    assert distributed.gather({"a": [1, None, "ä"]}) == [{"a": [1, None, "ä"]}]
    assert distributed.broadcast_from_first([1]) == [1]
    distributed.barrier("here")
    vote = distributed.Vote()
    assert [vote.any(yes) for yes in (False, True, False)] == [False, True, False]
    assert SkippedImages("split", {4, 2}).everywhere().rows == {2, 4}


def test_to_host_keeps_every_bit():
    tree = {"a": jnp.array([jnp.nan, -0.0, 1e-42]), "b": np.arange(3), "c": 4}
    there = distributed.to_host(tree)
    assert there["a"].tobytes() == np.asarray(tree["a"]).tobytes()
    assert isinstance(there["a"], np.ndarray)
    assert there["b"].tolist() == [0, 1, 2]
    assert there["c"] == 4


def test_only_arrays_sharded_over_processes_are_gathered(monkeypatch):
    class Parts(jax.Array):
        is_fully_addressable, is_fully_replicated = False, False

        def __init__(self):
            pass

    Parts.__abstractmethods__ = frozenset()
    gathered = []
    monkeypatch.setattr(
        "jax.experimental.multihost_utils.process_allgather",
        lambda leaf, tiled: gathered.append(leaf) or np.full(2, int(tiled)),
    )
    parts = Parts()
    there = distributed.to_host({"parts": parts, "whole": jnp.ones(2)})
    assert gathered == [parts]
    assert there["parts"].tolist() == [1, 1]
    assert there["whole"].tolist() == [1, 1]


def test_one_process_agrees_to_its_own_request_to_stop():
    with asked_to_stop() as asked:
        assert not asked.agreed()
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.wait(5)
        assert asked.agreed()


@pytest.mark.parametrize(("enabled", "stops"), [(True, [False, False, True]), (False, [False, False, False])])
def test_several_processes_heed_the_notices_of_jax(monkeypatch, enabled, stops):
    """A notice is announced to all processes at the same call; JAX compares the numbers of their calls."""
    calls = []
    monkeypatch.setattr(distributed, "process", lambda: (0, 2))
    monkeypatch.setattr(distributed.Vote, "any", lambda self, yes: yes)
    monkeypatch.setattr(
        "jax.experimental.multihost_utils.reached_preemption_sync_point",
        lambda call: calls.append(call) or len(calls) == 3,
    )
    monkeypatch.setattr("jax.config", SimpleNamespace(jax_enable_preemption_service=enabled))
    with asked_to_stop() as asked:
        assert [asked.agreed() for _ in range(3)] == stops
    with asked_to_stop() as asked:
        asked.agreed()
    assert calls == list(range(calls[0], calls[0] + 4)) if enabled else not calls


def test_a_request_after_the_last_step_is_shared(monkeypatch):
    monkeypatch.setattr(distributed, "gather", lambda value: [value, True])
    with asked_to_stop() as asked:
        assert asked.agreed_at_end()


def test_sigterm_interrupts_as_ctrl_c_does():
    before = signal.getsignal(signal.SIGTERM)

    def wait():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    with pytest.raises(KeyboardInterrupt), preemption.interruptible():
        wait()
    assert signal.getsignal(signal.SIGTERM) == before
