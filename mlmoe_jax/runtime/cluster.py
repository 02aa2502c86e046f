"""Detect the processes of a job from environment variables set by the launcher.

Checked in this order: the three variables MLMOE_COORDINATOR=HOST:PORT, MLMOE_PROCESSES=N and MLMOE_PROCESS=0…N−1;
Slurm (srun); Open MPI (mpirun); TPU hosts of GKE; TPU virtual machines. JAX itself connects the processes on each
platform; this module only decides whether there are several, and which GPUs each of them uses.
"""

from __future__ import annotations

import importlib.util
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlmoe_jax.errors import UserError

VARIABLES = ("MLMOE_COORDINATOR", "MLMOE_PROCESSES", "MLMOE_PROCESS")
METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"


@dataclass(frozen=True)
class Cluster:
    """The index of this process among `count`, and the arguments of `jax.distributed.initialize`."""

    index: int
    count: int
    arguments: dict[str, Any] = field(default_factory=dict)


def find_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """Return the cluster of this process, None if it is the only one; UserError for inconsistent variables."""
    for find in (_from_variables, _from_slurm, _from_open_mpi, _from_gke, _from_tpu_vm):
        cluster = find(environment)
        if cluster is not None:
            return cluster if cluster.count > 1 else None
    return None


def _from_variables(environment: Mapping[str, str]) -> Cluster | None:
    given = [name for name in VARIABLES if environment.get(name)]
    if not given:
        return None
    if missing := [name for name in VARIABLES if name not in given]:
        raise UserError(f"{given[0]} is set and {missing[0]} is not; set all of {', '.join(VARIABLES)}, or none")
    address = environment["MLMOE_COORDINATOR"]
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit() and 0 < int(port) < 65536):
        raise UserError(f"MLMOE_COORDINATOR={address} is not HOST:PORT, such as 10.0.0.1:5000")
    count, index = (number(environment, name) for name in VARIABLES[1:])
    if not 0 <= index < count:
        raise UserError(f"MLMOE_PROCESS={index} is out of range for MLMOE_PROCESSES={count}; processes count from 0")
    return Cluster(
        index,
        count,
        {
            "coordinator_address": address,
            "num_processes": count,
            "process_id": index,
            "cluster_detection_method": "deactivate",
        },
    )


def _from_slurm(environment: Mapping[str, str]) -> Cluster | None:
    # Inside an allocation but outside srun there is one process; only srun lists the nodes of its step.
    if not {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"} <= set(environment):
        return None
    here = environment.get("SLURM_STEP_TASKS_PER_NODE", "").partition("(")[0].partition(",")[0]
    devices = local_devices(
        local=int(environment["SLURM_LOCALID"]),
        processes=int(here) if here.isdigit() else None,
        visible=_visible_gpus(environment),
        on_machine=int(gpus) if (gpus := environment.get("SLURM_GPUS_ON_NODE", "")).isdigit() else None,
    )
    return Cluster(
        int(environment["SLURM_PROCID"]),
        int(environment["SLURM_NTASKS"]),
        {"cluster_detection_method": "slurm", "local_device_ids": devices},
    )


def _from_open_mpi(environment: Mapping[str, str]) -> Cluster | None:
    if "OMPI_COMM_WORLD_SIZE" not in environment:
        return None
    index, count = int(environment["OMPI_COMM_WORLD_RANK"]), int(environment["OMPI_COMM_WORLD_SIZE"])
    method = "ompi"
    if count > 1 and "OMPI_MCA_orte_hnp_uri" not in environment:  # Open MPI 5 gives its processes no address
        if importlib.util.find_spec("mpi4py") is None:
            raise UserError(
                "this version of Open MPI does not provide the address of the first process; install mpi4py, or set "
                f"{', '.join(VARIABLES)}"
            )
        method = "mpi4py"
    devices = local_devices(
        local=int(environment["OMPI_COMM_WORLD_LOCAL_RANK"]),
        processes=int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"]),
        visible=_visible_gpus(environment),
    )
    return Cluster(index, count, {"cluster_detection_method": method, "local_device_ids": devices})


def local_devices(
    *, local: int, processes: int | None, visible: int | None, on_machine: int | None = None
) -> list[int] | None:
    """Return the ids of the visible GPUs that process `local` of `processes` on a machine uses; None = JAX's default.

    JAX gives every process the one GPU of its own index. Here a single process uses all of them, several use equal
    shares, and a process that sees only some of the GPUs `on_machine` uses all it sees: they were divided beforehand.
    """
    total = visible if visible is not None else on_machine
    if not total or processes is None:
        return None
    if processes == 1 or (visible is not None and on_machine is not None and visible < on_machine):
        return list(range(total))
    share = total // processes
    return list(range(local * share, (local + 1) * share)) or None


def _visible_gpus(environment: Mapping[str, str]) -> int | None:
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    return None if listed is None else len([gpu for gpu in listed.split(",") if gpu.strip()])


def _from_gke(environment: Mapping[str, str]) -> Cluster | None:
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    if not hosts or "TPU_WORKER_ID" not in environment or not _uses_tpu(environment):
        return None
    workers = len(hosts.split(","))
    slices = int(environment.get("MEGASCALE_NUM_SLICES") or 1)
    index = int(environment.get("MEGASCALE_SLICE_ID") or 0) * workers + int(environment["TPU_WORKER_ID"])
    return Cluster(index, workers * slices, {"cluster_detection_method": "gketpu"})


def _from_tpu_vm(environment: Mapping[str, str]) -> Cluster | None:
    if "TPU_SKIP_MDS_QUERY" in environment or not _uses_tpu(environment) or not _has_tpu():
        return None
    try:
        workers = len(_metadata("worker-network-endpoints").split(","))
        index = int(_metadata("agent-worker-number"))
        described = dict(line.split(":", 1) for line in _metadata("tpu-env").splitlines() if ":" in line)
    except urllib.error.URLError:  # a TPU, but not on Google's cloud
        return None
    slices, number = (
        int(environment.get(name) or described.get(name, "").strip(" '") or default)
        for name, default in (("MEGASCALE_NUM_SLICES", 1), ("MEGASCALE_SLICE_ID", 0))
    )
    return Cluster(number * workers + index, workers * slices, {"cluster_detection_method": "gcetpu"})


def _uses_tpu(environment: Mapping[str, str]) -> bool:
    platforms = environment.get("JAX_PLATFORMS", "")
    wanted = not platforms or "tpu" in platforms.split(",")
    return wanted and ("TPU_LIBRARY_PATH" in environment or importlib.util.find_spec("libtpu") is not None)


def _has_tpu() -> bool:
    """Return whether this machine has a PCI device made by Google."""
    return any(path.read_text().strip() == "0x1ae0" for path in Path("/sys/bus/pci/devices").glob("*/vendor"))


def _metadata(name: str) -> str:
    request = urllib.request.Request(METADATA + name, headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return answer.read().decode()


def number(environment: Mapping[str, str], name: str, kind: type = int, default: float | None = None) -> float:
    """Return the non-negative number that a variable holds; UserError for anything else."""
    text = environment.get(name) or default
    try:
        value = kind(text)
    except (TypeError, ValueError):
        value = -1
    if value < 0:
        raise UserError(f"{name}={text} is not a number of 0 or more")
    return value
