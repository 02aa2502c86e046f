import socket
import threading
import time
import urllib.error

import jax
import pytest

from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.distributed import VARIABLES, Job, find_job


def variables(coordinator="10.0.0.1:5000", processes="3", process="1") -> dict[str, str]:
    return {name: v for name, v in zip(VARIABLES, (coordinator, processes, process), strict=True) if v is not None}


# ----------------------------------------------------------------------------------------------- the processes of a job
def test_three_variables_give_the_index_of_a_process():
    assert find_job(variables()) == Job(
        1,
        3,
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


SLURM = {"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "8", "SLURM_PROCID": "5"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
HOSTS = {"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": "2"}
METADATA = {"worker-network-endpoints": "a:1:10.0.0.1,b:2:10.0.0.2", "agent-worker-number": "1"}


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        (SLURM, (5, 8, "slurm")),
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"}, (3, 4, "ompi")),
        (OPEN_MPI, (3, 4, "mpi4py")),
        (HOSTS, (2, 4, "gketpu")),
        (METADATA, (1, 2, "gcetpu")),
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        ({name: SLURM[name] for name in SLURM if name != "SLURM_STEP_NODELIST"}, None),  # in the batch script
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        (HOSTS | {"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        (METADATA | {"TPU_SKIP_MDS_QUERY": "1"}, None),
        ({}, None),
    ],
)
def test_jax_connects_the_processes_of_a_cluster(monkeypatch, environment, job):
    """The metadata server of the machine has its answers in the environment too."""

    def ask(name):
        if name not in environment:
            raise urllib.error.URLError("no such host")
        return environment[name]

    monkeypatch.setattr(distributed, "_has_tpu", lambda environment: True)
    monkeypatch.setattr(distributed, "_metadata", ask)
    assert find_job(environment) == (job and Job(*job[:2], {"cluster_detection_method": job[2]}))


@pytest.mark.parametrize(
    ("environment", "has_tpu", "worker", "devices"),
    [
        ({}, False, (0, 1), ""),
        (variables(), False, (1, 3), ""),
        (SLURM | {"SLURM_LOCALID": "1"}, False, (5, 8), "1"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "0"}, False, (3, 4), "0"),
        (HOSTS, True, (2, 4), ""),
    ],
)
def test_an_independent_process_has_its_own_devices(monkeypatch, environment, has_tpu, worker, devices):
    monkeypatch.setattr(distributed.os, "environ", environment)
    monkeypatch.setattr(distributed, "_has_tpu", lambda environment: has_tpu)
    visible = {}
    monkeypatch.setattr(jax.config, "update", visible.__setitem__)
    assert distributed.stand_alone() == worker
    assert visible == {f"jax_{platform}_visible_devices": devices for platform in ("cuda", "rocm") if devices}
    assert environment.get("TPU_PROCESS_BOUNDS") == ("1,1,1" if has_tpu else None)
    assert not jax.distributed.is_initialized()


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


def test_waiting_for_a_coordinator_that_starts_late():
    with socket.socket() as late:
        late.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{late.getsockname()[1]}"
        threading.Timer(0.3, late.listen).start()
        began = time.monotonic()
        distributed._wait_for(address, 20)
        assert time.monotonic() - began > 0.2
