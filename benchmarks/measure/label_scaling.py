"""Requirements per device of a training step of configs/drmoe_20k.py, with all devices along `expert`.

    XLA_FLAGS=--xla_force_host_platform_device_count=64 \\
        python -m benchmarks.measure label_scaling --devices here:8 here:64
    python -m benchmarks.measure label_scaling --devices v5e:2x4 v5e:4x4

`here:8` are eight devices of this host, simulated or real. The --batch does not depend on the number of devices (strong
scaling), so memory should decrease with the number of --labels per device. A TPU slice needs libtpu (`pip install
"jax[tpu]"`), but no TPU. The results are in docs/scaling.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax

from benchmarks.measure.scaling_table import SETTINGS, compile_step
from benchmarks.report import heading, left, row
from mlmoe_jax.apps.tools.preflight.compile_check import capacity_elsewhere, device_bytes, tpu_devices
from mlmoe_jax.config import load_config
from mlmoe_jax.runtime.memory import GIB


@dataclass(frozen=True)
class Options:
    devices: tuple[str, ...] = ("v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8")
    batch: int = 64
    labels: int = 20_000


def measure_slice(topology: str, batch: int, labels: int) -> list:
    """Compile one step and return its table row."""
    here, _, count = topology.partition(":")
    local = here == "here"
    devices = jax.devices()[: int(count)] if local else tpu_devices(topology)
    config = load_config("drmoe_20k", [*SETTINGS, ("mesh.expert", "-1")])
    config.train.accumulate = max(1, min(config.train.accumulate, batch // len(devices)))  # parts divide over devices
    capacity = None if local else capacity_elsewhere(devices[0])[0]
    programs, report = compile_step(config, devices, batch, labels, capacity)
    if report["refused"]:
        return [topology, len(devices), "does not fit"]
    kinds = ", ".join(f"{kind} {row['bytes'] / 1e6:.1f}" for kind, row in report["collectives"].items())
    state, memory = programs.state, report["memory"]
    trained = device_bytes((state.trainable, state.opt, state.ema)) / GIB
    needs = [f"{trained:.3f}", f"{memory['temporaries'] / GIB:.3f}", f"{report['needed'] / GIB:.2f}"]
    work = [f"{report['flops'] / 1e9:,.0f}", f"{report['bytes_accessed'] / 1e9:.1f}"]
    return [topology, len(devices), *needs, *work, kinds]


def measure(options: Options) -> Iterator[str]:
    needs = ("along `expert`", "trained state, GiB", "temporaries, GiB", "needs, GiB", "GFLOPs", "GB accessed")
    yield heading("devices", *needs, left("MB in collectives"))
    for topology in options.devices:
        yield row(*measure_slice(topology, options.batch, options.labels))
