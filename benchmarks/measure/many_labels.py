"""Check a table of many images and labels with `mlmoe data`: seconds and peak memory. No image exists or is read.

    python -m benchmarks.measure many_labels --out=out --images=200000 --labels=10000

--out is the folder of the table, which is written if it is not there. Each image has about --each labels; label k is
drawn with a probability in proportion to (k + 1)^-0.7, as the tags of public collections.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlmoe_jax.errors import FOUND_PROBLEMS, UserError

AT_ONCE = 10_000  # rows that are drawn together
KIB = 1024  # the unit of ru_maxrss on Linux
READ = 16  # images that the check looks for


@dataclass(frozen=True)
class Options:
    out: Path
    images: int = 200_000
    labels: int = 10_000
    each: int = 30


def write_table(path: Path, options: Options) -> None:
    """Write a table of images, with the names of their labels in one cell."""
    draw = np.random.default_rng(0)
    shares = np.cumsum(np.arange(1, options.labels + 1) ** -0.7)
    names = np.array([f"tag {k:05}" for k in range(options.labels)])
    with path.open("w") as file:
        file.write("image,labels\n")
        for start in range(0, options.images, AT_ONCE):
            count = min(AT_ONCE, options.images - start)
            drawn = np.searchsorted(shares, shares[-1] * draw.random((count, options.each)), side="right")
            for row, labels in enumerate(np.minimum(drawn, options.labels - 1), start):
                file.write(f"{row // 1000:04}/{row:07}.jpg,{';'.join(names[np.unique(labels)].tolist())}\n")


def measure(options: Options) -> Iterator[str]:
    """Yield a line with the seconds and the peak memory of the check, whose only problem is that images are missing."""
    folder = options.out / f"{options.images}-{options.labels}-{options.each}"
    if not (folder / "labels.csv").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_table(folder / "partial.csv", options)
        (folder / "partial.csv").rename(folder / "labels.csv")
    command = [sys.executable, "-m", "mlmoe_jax.main", "data", f"--config=own_csv:root={folder}", f"--sample={READ}"]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != FOUND_PROBLEMS or f"{READ} of the {options.images:,} images" not in done.stdout:
        raise UserError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-1_000:]}")
    seconds, peak = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * KIB
    yield f"{options.images:,} images, {options.labels:,} labels: {seconds:.0f} s, {peak / 1e9:.2f} GB"
