"""Cost of cutout and RandAugment on the device: bytes and FLOPs of each operation, and images/s beside the host's.

    python -m benchmarks.device_augmentation --topology=v5e:1x1     # compiled for a TPU, without a TPU
    python -m benchmarks.device_augmentation --seconds=5            # timed on the devices of this machine

The first command compiles each operation of RandAugment alone for one image, and sums up a batch: the images of a
device times the operations that ML-VPT's policy draws for each. The second one takes turns between one thread of the
host, with Pillow, and a batch on the device, including its transfer.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from mlmoe_jax.apps.tools.preflight.compile_check import tpu_compiler
from mlmoe_jax.config import default_config
from mlmoe_jax.data.augment import augment
from mlmoe_jax.data.device_randaugment import FUNCTIONS, Draw, on_bytes
from mlmoe_jax.data.randaugment import UDA
from mlmoe_jax.data.transforms import PixelTransforms


def costs(topology: str, size: int) -> dict[str, tuple[float, float]]:
    """Return the bytes accessed and the FLOPs of each operation for one image, by name."""
    found = {}
    with tpu_compiler(topology) as devices:

        def shape(dtype: jnp.dtype, *sides: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sides, dtype, sharding=SingleDeviceSharding(devices[0]))

        draw = Draw(shape(jnp.int32), shape(jnp.float32), shape(jnp.float32, 2))
        for name, function in FUNCTIONS.items():
            program = jax.jit(on_bytes(function)).lower(shape(jnp.uint8, 3, size, size), draw)
            cost = program.compile().cost_analysis()
            found[name] = cost["bytes accessed"], cost.get("flops", 0.0)
            print(f"{name:<14}{found[name][0] / 1e6:>10.2f} MB{found[name][1] / 1e6:>10.2f} MFLOPs", flush=True)
    return found


def ways(size: int, batch: int) -> dict[str, Callable[[int], None]]:
    """Return the functions, seed -> None, that augment a batch on the host and on the device."""
    settings = default_config().augment
    settings.where, settings.cutout, settings.randaugment = "device", 0.5, "uda"
    on_host = PixelTransforms(cutout=0.5, policy=UDA)
    rows = np.linspace(0, 200, size)[:, None, None] + np.random.default_rng(0).normal(0, 20, (batch, size, size, 3))
    images = np.clip(rows, 0, 255).astype(np.uint8)
    program = jax.jit(lambda images, key: augment(images.astype(jnp.float32), key, settings))
    program(images, jax.random.key(0)).block_until_ready()

    def host(seed: int) -> None:
        random = np.random.default_rng(seed)
        for image in images:
            on_host(image, random)

    return {
        "host, one thread": host,
        jax.devices()[0].device_kind: lambda seed: program(images, jax.random.key(seed)).block_until_ready(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="", help="TPU topology of one device, such as v5e:1x1")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=64, help="number of images on a device")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of the measurement")
    options = parser.parse_args()
    if options.topology:
        found = costs(options.topology, options.size)
        drawn = options.batch * UDA.count * UDA.probability
        for kind, unit in enumerate(("GB", "GFLOPs")):
            mean = statistics.mean(found[name][kind] for name in UDA.operations)
            most = max(cost[kind] for cost in found.values()) * options.batch * UDA.count
            print(f"{options.batch} images: {drawn * mean / 1e9:.2f} {unit} on average, {most / 1e9:.2f} at most")
        return
    measured = ways(options.size, options.batch)
    times: dict[str, list[float]] = {name: [] for name in measured}
    started = time.perf_counter()
    while time.perf_counter() - started < options.seconds or len(times["host, one thread"]) < 3:
        for name, way in measured.items():
            before = time.perf_counter()
            way(len(times[name]))
            times[name].append(time.perf_counter() - before)
    print(f"cutout and RandAugment of {options.batch} images, {options.size} px; images/s: median (least … most)")
    for name, seconds in times.items():
        rates = [options.batch / one for one in seconds]
        print(f"{name:<28}{statistics.median(rates):>8.0f}  ({min(rates):.0f} … {max(rates):.0f})")


if __name__ == "__main__":
    main()
