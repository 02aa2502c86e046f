"""Label many images in parts: speed against its reader and its step, and memory by the length of the list.

    python -m benchmarks.measure corpus --images=photos --count=2048
    python -m benchmarks.measure corpus --images=photos --lists=10000,1000000,10000000 --seconds=120

The first --count images of --images are labeled with the model --workdir. Three rates are measured on them, in batches
of 32 per device, without the first two batches: reading alone, the compiled step alone on one batch, and both as in
`mlmoe predict --output=FOLDER/`. "share" is the last rate over the slower of the first two.

For each length in --lists, `mlmoe predict` labels a list of one image and missing files in a process of its own, which
is stopped after --seconds. The table has its peak memory, and the time until the first part was written.
"""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from benchmarks.report import heading, row
from mlmoe_jax.apps.tools.image_list import find_images
from mlmoe_jax.apps.tools.parts import RECORD
from mlmoe_jax.data.images import Images
from mlmoe_jax.data.pipeline import build_loader
from mlmoe_jax.data.split import unlabeled
from mlmoe_jax.inference.predictor import LARGEST_BATCH, Predictor
from mlmoe_jax.runtime.sharding import shard_batch

WARM_UP = 2  # batches, which compile and start the reader


@dataclass(frozen=True)
class Options:
    images: str
    workdir: str = "demo:photographs"
    count: int = 2048
    lists: tuple[int, ...] = (10_000, 1_000_000)
    seconds: float = 60.0


def rate(batches: Iterable[object], size: int) -> float:
    """Return the images per second of batches of `size` images, after WARM_UP."""
    times = [time.perf_counter() for _ in batches]
    return size * (len(times) - WARM_UP) / (times[-1] - times[WARM_UP - 1])


def rates(predictor: Predictor, images: Images) -> dict[str, float]:
    """Return the images per second of the reader, of the step, and of both."""
    run, size = predictor.run, LARGEST_BATCH * predictor.run.mesh.size
    data = run.config.data.copy_and_resolve_references()
    data.bad_images = "skip"
    split = unlabeled(images)
    rows = range(len(images) // size * size)
    reading = rate(build_loader(data, split, batch_size=size, labels=False, rows=rows), size)
    batch = shard_batch(next(build_loader(data, split, batch_size=size, labels=False)), run.mesh)
    step = run.eval_step()
    computing = rate((jax.device_get(step(run.values, run.frozen, batch)) for _ in range(len(rows) // size)), size)
    results = predictor.label_rows(images, rows, batch_size=size)
    both = rate(itertools.islice(results, size - 1, None, size), size)
    return {"reader": reading, "step": computing, "predict": both, "share": both / min(reading, computing)}


def peak_memory(options: Options, image: str, length: int) -> tuple[float, float, float]:
    """Label a list of `image` and `length` missing files.

    Return the peak memory in MB, and the seconds to start and to a part.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with open(place / "list.txt", "w") as file:
            file.write(f"{os.path.abspath(image)}\n")
            file.writelines(f"missing/{number:010d}.jpg\n" for number in range(length))
        command = [sys.executable, "-m", "mlmoe_jax.main", "predict", f"--workdir={options.workdir}"]
        command += [f"--images=@{place / 'list.txt'}", f"--output={place / 'labels'}/"]
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        peak, seen = 0.0, {RECORD: float("nan"), "part-00000.parquet": float("nan")}
        while process.poll() is None and (elapsed := time.monotonic() - started) < options.seconds:
            peak = max(peak, _high_water(process.pid))
            for name, at in seen.items():
                if at != at and (place / "labels" / name).exists():
                    seen[name] = elapsed
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.wait()
    return peak, *seen.values()


def _high_water(process: int) -> float:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def measure(options: Options) -> Iterator[str]:
    """Yield the table of rates and the table of memory."""
    images = find_images([options.images]).images
    images = images.take(np.arange(min(options.count, len(images))))
    found = rates(Predictor.from_run(options.workdir), images)
    yield heading(*found)
    yield row(*(f"{value:.3g}" for value in found.values()))
    yield f"\n{os.cpu_count()} cores, {options.seconds:g} s of each list\n"
    yield heading("paths", "peak MB", "s to the start", "s to the first part")
    for length in options.lists:
        yield row(f"{length:,}", *(f"{value:,.0f}" for value in peak_memory(options, images.name(0), length)))
