"""Compile the training and evaluation steps of a config for a device topology, and report memory and collectives.

Nothing is allocated or executed: model, state and batches are `jax.ShapeDtypeStruct`s. The compiler in libtpu compiles
for a TPU topology on any host. Without a topology, the steps are compiled for the local devices. Sizes are bytes per
device. A chip is one device, except on TPU v2, v3, v4 and 7x, where a chip is two devices.
"""

import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from mlmoe_jax.apps.tools.preflight import hlo
from mlmoe_jax.errors import DONE, FOUND_PROBLEMS, UserError
from mlmoe_jax.runtime import sharding
from mlmoe_jax.runtime.files import GIB
from mlmoe_jax.runtime.memory import device_capacity, memory_parts, required_bytes
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.setup import setup_jax
from mlmoe_jax.runtime.table import Outcome
from mlmoe_jax.runtime.text import quantity
from mlmoe_jax.training.build_steps import abstract_steps

Findings = dict[str, Any]  # a result of `examine` or `check_steps`
# Without these variables libtpu queries the metadata service of the cloud.
WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# XLA's O0: the program is slower, but its memory and its collectives are nearly the same (docs/scaling.md).
QUICK = {"optimization_level": 9}


@dataclass(frozen=True)
class StepProgram:
    """A jitted training or evaluation step with the shapes of its arguments, ready to be compiled.

    Attributes:
      arguments: name of an argument -> pytree of `jax.ShapeDtypeStruct`s with shardings.
      batch_size: number of images in the global batch.
      extra_bytes: bytes per device of arrays that are not arguments, but in memory while the step runs.
    """

    step: Any
    arguments: Mapping[str, Any]
    batch_size: int
    extra_bytes: int

    def lower(self) -> jax.stages.Lowered:
        return self.step.lower(*self.arguments.values())


def device_bytes(tree: Any) -> int:
    """Return the bytes that a tree of sharded arrays or ShapeDtypeStructs takes on one device, without padding."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


class Programs:
    """The training and evaluation steps of a config on a mesh.

    `num_labels` is the number of labels; 0 = the number in the data set. `devices` is the number of devices of the
    mesh, and `state` has the shapes and shardings of the training state.
    """

    def __init__(self, config: ConfigDict, mesh: Mesh, num_labels: int = 0):
        self.config, self.devices = config, mesh.size
        parts, self._steps = abstract_steps(config, mesh, num_labels)
        state = jax.eval_shape(self._steps.initial_state, parts)
        self.state = sharding.abstract_shards(state, mesh, self._steps.label_axes)

    def training(self, size: int) -> StepProgram:
        """Return the training step for global batches of `size` images.

        `extra_bytes` are the selected values of the best step, and the next batch, which is transferred in advance.
        """
        batch = self.batch(size)
        extra = device_bytes((self.state.latest(), batch))
        return StepProgram(self._steps.train_step, {"state": self.state, "batch": batch}, size, extra)

    def evaluation(self, size: int, training_size: int) -> StepProgram:
        """Return the evaluation step for global batches of `size` images, as it runs during a training.

        `extra_bytes` are the part of the training state that the step does not use, the next evaluation batch, and two
        training batches of `training_size` images.
        """
        batch, state, training_batch = self.batch(size), self.state, self.batch(training_size)
        arguments = {"values": state.latest(), "frozen": state.frozen, "batch": batch}
        rest = (state.trainable, state.stats, state.opt, state.ema)
        extra = device_bytes((*rest, batch, training_batch, training_batch))
        return StepProgram(self._steps.eval_step, arguments, size, extra)

    def batch(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return name -> shape and sharding of each array in a global batch of `size` images; see data/pipeline.py."""
        batch_sharding = NamedSharding(self._steps.mesh, sharding.BATCH)
        shapes = self._steps.preprocess.batch_shapes(size, self._steps.num_labels)
        return {name: shape.update(sharding=batch_sharding) for name, shape in shapes.items()}


# --------------------------------------------------------------------------------------------------- devices
def tpu_devices(topology: str) -> Sequence[Any]:
    """Return the devices of a TPU topology such as `v5e:4x4`, for compilation without a TPU.

    As a side effect, JAX uses the CPU for the rest of the process, and environment variables keep libtpu from searching
    for a TPU. Raises UserError if libtpu is not installed or does not know the topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError('--topology needs the TPU compiler, which also runs without a TPU: pip install "jax[tpu]"')
    from jax.experimental import topologies

    for name, value in WITHOUT_TPU.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    single = topology.rpartition(":")[2] in ("1x1", "1x1x1")
    options = {"chips_per_host_bounds": (1, 1, 1)} if single else {}
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        reason = str(error).partition(": ")[2].strip().splitlines()[0].partition(". ")[0].rstrip(".")
        form = "write it like v5e:4x4, v5p:2x2x2 or v6e:16x16"
        raise UserError(f"--topology={topology} is unknown to the TPU compiler ({reason}); {form}") from error


def capacity_elsewhere(device: Any) -> tuple[int | None, str]:
    """Return the memory of a device of a TPU topology in bytes, and text about the source of this number.

    The number is from the compiler's error message about a program that is too large; None if the message lacks it.
    """
    on_device = NamedSharding(Mesh(np.asarray([device]), ("all",)), PartitionSpec())
    too_large = jax.ShapeDtypeStruct((2**40,), jnp.int8, sharding=on_device)
    try:
        jax.jit(lambda x: x).lower(too_large).compile()
    except jax.errors.JaxRuntimeError as error:
        if shortage := memory_shortage(str(error)):
            return shortage[1], "the compiler's limit"
    return None, "not reported by the compiler"


def memory_shortage(message: str) -> tuple[int, int] | None:
    """Return needed and available bytes from an error of the TPU compiler; None if it is not about lack of memory."""
    size = r"([\d.]+)([KMGT]?)"
    match = re.search(rf"Used {size} of {size} hbm|\({size}\) exceeds available HBM \({size}\)", message)
    if match is None:
        return None
    needed, needed_unit, available, available_unit = (text for text in match.groups() if text is not None)
    return _parse_size(needed, needed_unit), _parse_size(available, available_unit)


def _parse_size(number: str, unit: str) -> int:
    """Return a size such as "20.5" of the unit "K", "M", "G", "T" or "" in bytes."""
    return round(float(number) * 1024 ** " KMGT".index(unit or " "))


# --------------------------------------------------------------------------------------------------- compiling
def examine(program: StepProgram, devices: int, capacity: int | None, *, quick: bool) -> Findings:
    """Compile a step, and return a report of its memory, FLOPs and collectives per device.

    `capacity` is the memory of a device in bytes; None if unknown. If `quick`, the options QUICK are used.

    Returns:
      `batch_size` (images), `batch_a_device` (images per device), `held` (see `StepProgram.extra_bytes`), `fits`
        (whether the step fits into memory; None if the capacity is unknown), `needed` (bytes), `refused` (whether the
        compiler refused the program as too large), `memory` (bytes by part), `flops`, `bytes_accessed`, `collectives`
        (see `hlo.totals`) and `compile_seconds`. If `refused` is True, `needed` is a lower bound, and the entries after
        `refused` are missing.
    """
    report = {
        "batch_size": program.batch_size,
        "batch_a_device": program.batch_size // devices,
        "held": program.extra_bytes,
    }
    lowered, started = program.lower(), time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=QUICK if quick else None)
    except jax.errors.JaxRuntimeError as error:
        if (shortage := memory_shortage(str(error))) is None:
            raise
        return report | {"fits": False, "needed": shortage[0] + program.extra_bytes, "refused": True}
    report["compile_seconds"] = time.perf_counter() - started
    memory, cost = memory_parts(compiled), compiled.cost_analysis()
    needed = required_bytes(memory) + program.extra_bytes
    return report | {
        "fits": None if capacity is None else needed <= capacity,
        "needed": needed,
        "refused": False,
        "memory": memory,
        "flops": cost["flops"],
        "bytes_accessed": cost["bytes accessed"],
        "collectives": hlo.totals(hlo.collectives(compiled.as_text(), devices)),
    }


def largest_fitting(fits: Callable[[int], bool], start: int) -> int:
    """Return approximately the largest size that fits, or 0 if the size 1 does not fit.

    All sizes below a fitting size are assumed to fit. The result is exact up to an eighth of the largest power of two
    that fits. The search starts near `start`, at least 1.
    """
    size = 2 ** (start.bit_length() - 1)
    if fits(size):
        while fits(2 * size):
            size *= 2
    else:
        size = next((2**power for power in reversed(range(start.bit_length() - 1)) if fits(2**power)), 0)
    low, high, step = size, 2 * size, max(1, size // 8)
    while high - low > step:
        middle = low + (high - low) // 2 // step * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# --------------------------------------------------------------------------------------------------- the command
def check_steps(
    config: ConfigDict, topology: str = "", *, find_batch: bool = False, num_labels: int = 0, quick: bool = False
) -> Findings:
    """Compile the training and the evaluation step of a config, and return a report.

    Args:
      topology: a TPU topology, see `tpu_devices`; "" = the local devices.
      find_batch: whether to search for the largest training batch per device that fits, instead of `train.batch_size`.
      num_labels: number of labels; 0 = the number of labels of the data set.
      quick: whether to compile with the lowest optimization level, in a fraction of the time. The reported memory and
        collectives are nearly the same.

    Returns:
      A dict that can be written as JSON: properties of the devices, `fits` (whether both steps fit; None if unknown)
        and `steps`, the reports of `examine` for train and eval.

    Raises:
      UserError: the mesh or the batch size does not match the devices, or under the conditions of `tpu_devices`.
    """
    devices = tpu_devices(topology) if topology else sharding.find_devices()
    mesh = setup_jax(config, devices, training=not find_batch)
    capacity, source = capacity_elsewhere(devices[0]) if topology else device_capacity(devices[0])
    if find_batch and capacity is None:
        raise UserError(f"--find-batch needs the memory of a device, which is {source}; name a --topology")
    programs = Programs(config, mesh, num_labels)
    steps = _examine_steps(programs, capacity, find_batch=find_batch, quick=quick)
    fits = [step["fits"] for step in steps.values()]
    return {
        "topology": topology or "local",
        "device": devices[0].device_kind,
        "devices": len(devices),
        "chips": len({tuple(getattr(device, "coords", (device.id,))) for device in devices}),
        "mesh": dict(mesh.shape),
        "capacity": capacity,
        "capacity_source": source,
        "quick": quick,
        "fits": None if None in fits else all(fits),
        "steps": steps,
    }


def _examine_steps(programs: Programs, capacity: int | None, *, find_batch: bool, quick: bool) -> dict[str, Findings]:
    """Return the reports of `examine` for train and eval.

    With `find_batch`, the training batch is the largest that fits; otherwise it has `train.batch_size` images.
    """
    config, devices = programs.config, programs.devices

    def examine_step(name: str, program: StepProgram) -> Findings:
        images = quantity(program.batch_size // devices, "image")
        status(f"compiling the {name} step, {images} per device on {quantity(devices, 'device')}")
        return examine(program, devices, capacity, quick=quick)

    def fits(units: int) -> bool:
        reports[units] = examine_step("train", programs.training(units * unit))
        status(f"  {_verdict(reports[units], capacity)}")
        return reports[units]["fits"]

    if find_batch:
        unit = config.train.accumulate * devices
        reports: dict[int, Findings] = {}
        train = reports[largest_fitting(fits, max(1, config.train.batch_size // unit)) or 1]
    else:
        train = examine_step("train", programs.training(config.train.batch_size))
    evaluation = programs.evaluation(config.eval.batch_size * devices, train["batch_size"])
    return {"train": train, "eval": examine_step("eval", evaluation)}


def check_outcome(report: Findings) -> Outcome:
    """Return a report of `check_steps` as text to print. The exit code is 1 if a step does not fit into memory."""
    devices = f"{quantity(report['chips'], 'chip')}, {quantity(report['devices'], 'device')} ({report['device']})"
    lines = [f"{report['topology']}: {devices}", f"mesh: {report['mesh']}"]
    for name, step in report["steps"].items():
        lines.append(f"{name}, {quantity(step['batch_a_device'], 'image')}: {_verdict(step, report['capacity'])}")
        if not step["refused"]:
            lines.append(f"  {step['flops'] / 1e9:,.1f} GFLOPs, {step['bytes_accessed'] / 1e9:,.2f} GB accessed")
            lines += [f"  {size / GIB:.3f} GiB {part}" for part, size in step["memory"].items()]
            lines += [
                f"  {row['bytes']:,} bytes in {row['count']:,} {kind}" for kind, row in step["collectives"].items()
            ]
    return Outcome(["\n".join(lines)], report, FOUND_PROBLEMS if report["fits"] is False else DONE)


def _verdict(step: Findings, capacity: int | None) -> str:
    needs = f"needs {step['needed'] / GIB:.2f} GiB"
    if capacity is None:
        return f"{needs}; whether it fits is unknown"
    return f"{'fits' if step['fits'] else 'does not fit'}: {needs} of {capacity / GIB:.2f} GiB"
