"""Requirements per device of a training step of configs/drmoe_20k.py, with all devices along `expert`.

    XLA_FLAGS=--xla_force_host_platform_device_count=64 python -m benchmarks.label_scaling --devices here:8 here:64
    python -m benchmarks.label_scaling --devices v5e:2x4 v5e:4x4

`here:8` are eight devices of this host, simulated or real. The batch does not depend on the number of devices (strong
scaling), so memory should decrease with the number of labels per device. A TPU slice needs libtpu (`pip install
"jax[tpu]"`), but no TPU. The results are in docs/scaling.md.
"""

import argparse

import jax

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.tools.preflight.compile_check import Programs, capacity_elsewhere, examine, tpu_devices
from mlmoe_jax.runtime.memory import GIB, device_bytes
from mlmoe_jax.runtime.setup import setup_jax

SETTINGS = [("model.dtype", "bfloat16"), ("model.frozen_dtype", "bfloat16")]


def row(topology: str, batch: int, labels: int) -> str:
    """Compile one step and return its table row."""
    here, _, count = topology.partition(":")
    mesh = [("mesh.expert", "-1")]
    local = here == "here"
    devices = jax.devices()[: int(count)] if local else tpu_devices(topology)
    config = configuration.load_config("drmoe_20k", [*SETTINGS, *mesh])
    config.train.accumulate = max(1, min(config.train.accumulate, batch // len(devices)))  # parts divide over devices
    configuration.validate(config)
    capacity = None if local else capacity_elsewhere(devices[0])[0]
    programs = Programs(config, setup_jax(config, devices, training=False), labels)
    report = examine(programs.training(batch), len(devices), capacity, quick=True)
    if report["refused"]:
        return f"| {topology} | {len(devices)} | does not fit |"
    kinds = ", ".join(f"{kind} {row['bytes'] / 1e6:.1f}" for kind, row in report["collectives"].items())
    state, memory = programs.state, report["memory"]
    trained = device_bytes((state.trainable, state.opt, state.ema)) / GIB
    return (
        f"| {topology} | {len(devices)} | {trained:.3f} | {memory['temporaries'] / GIB:.3f} | "
        f"{report['needed'] / GIB:.2f} | {report['flops'] / 1e9:,.0f} | {report['bytes_accessed'] / 1e9:.1f} | "
        f"{kinds} |"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", default=["v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--labels", type=int, default=20_000)
    options = parser.parse_args()
    print("| devices | along `expert` | trained state, GiB | temporaries, GiB | needs, GiB |", end="")
    print(" GFLOPs | GB accessed | MB in collectives |\n|---|---:|---:|---:|---:|---:|---:|---|")
    for topology in options.devices:
        print(row(topology, options.batch, options.labels), flush=True)


if __name__ == "__main__":
    main()
