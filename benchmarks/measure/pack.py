"""Pack many small images from files, Parquet or tar shards: images per second, memory, and reads per image.

    python -m benchmarks.measure pack --images=100000 --out=runs/pack

JPEG files of --side pixels are made of noise. They are stored with a CSV table (csv), in Parquet files (parquet) with
row groups of --group rows, and in tar shards (webdataset), each file with --file images, and packed by --workers
processes. Memory is the largest sum of the proportional set sizes of all processes. The reads of an image are calls of
`Images.encoded`.
"""

import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.report import publish
from benchmarks.usage import run_measured
from mlmoe_jax.apps.tools import pack as packing
from mlmoe_jax.config import default_config
from mlmoe_jax.data.decoding import Decoding
from mlmoe_jax.data.images import Images
from mlmoe_jax.runtime.table import Column, Table

DISTINCT = 1000  # images, which are repeated
CLASSES = 10


@dataclass(frozen=True)
class Options:
    out: Path
    images: int = 100_000
    side: int = 64
    group: int = 1000
    file: int = 10_000
    workers: int = 2
    kinds: tuple[str, ...] = ("csv", "parquet", "webdataset")


class Counted(Images):
    """Images that count the reads of each row in a file, for all processes."""

    def __init__(self, images: Images, counts: str):
        self.images, self.counts = images, counts

    def __len__(self) -> int:
        return len(self.images)

    def open(self, row: int, decoding: Decoding) -> np.ndarray | Image.Image:
        return self.images.open(row, decoding)

    def stamp(self, row: int) -> str:
        return self.images.stamp(row)

    def encoded(self, row: int) -> bytes:
        np.memmap(self.counts, np.uint8, "r+")[row] += 1
        return self.images.encoded(row)


def jpeg_files(side: int) -> list[bytes]:
    """Return DISTINCT JPEG files of noise."""
    files = []
    for pixels in np.random.default_rng(0).integers(0, 256, (DISTINCT, side, side, 3), np.uint8):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG")
        files.append(buffer.getvalue())
    return files


def write_csv(root: Path, files: list[bytes], options: Options) -> None:
    lines = ["image,labels"]
    for row in range(options.images):
        name = f"{row // options.file:04d}/{row:08d}.jpg"
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(files[row % DISTINCT])
        lines.append(f"{name},{row % CLASSES}")
    (root / "train.csv").write_text("\n".join(lines))


def write_parquet(root: Path, files: list[bytes], options: Options) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    for start in range(0, options.images, options.file):
        rows = range(start, min(start + options.file, options.images))
        labels = pa.array([[str(row % CLASSES)] for row in rows])
        table = pa.table({"image": [files[row % DISTINCT] for row in rows], "labels": labels})
        parquet.write_table(table, root / f"train-{start // options.file:05d}.parquet", row_group_size=options.group)


def write_webdataset(root: Path, files: list[bytes], options: Options) -> None:
    for start in range(0, options.images, options.file):
        with tarfile.open(root / f"train-{start // options.file:05d}.tar", "w") as archive:
            for row in range(start, min(start + options.file, options.images)):
                label = json.dumps({"labels": [str(row % CLASSES)]}).encode()
                for suffix, content in (("jpg", files[row % DISTINCT]), ("json", label)):
                    member = tarfile.TarInfo(f"{row:08d}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


WRITE = {"csv": write_csv, "parquet": write_parquet, "webdataset": write_webdataset}


def run(kind: str, root: str, output: str, workers: int) -> None:
    """Pack a data set, and write the number of reads of each image beside the output."""
    config = default_config()
    config.data.name, config.data.root, config.data.val_split, config.data.test_splits = kind, root, "", ()
    config.data.workers = workers
    counts, opened = f"{output}.reads", packing.open_whole

    def open_counted(config):
        (split,) = opened(config)
        np.zeros(len(split), np.uint8).tofile(counts)
        return [replace(split, images=Counted(split.images, counts))]

    packing.open_whole = open_counted
    packing.pack(config, output)


def measure(options: Options) -> Iterator[str]:
    files, results = jpeg_files(options.side), {}
    for kind in options.kinds:
        root, output = options.out / kind, options.out / f"{kind}.packed"
        if not root.exists():
            root.mkdir(parents=True)
            WRITE[kind](root, files, options)
        arguments = [kind, str(root.absolute()), str(output.absolute()), options.workers]
        code = f"from benchmarks.measure.pack import run; run(*{arguments!r})"
        began = time.perf_counter()
        usage = run_measured([sys.executable, "-c", code], os.environ, options.out / f"{kind}.txt")
        seconds = time.perf_counter() - began
        reads = np.fromfile(f"{output}.reads", np.uint8)
        bytes_written = sum(path.stat().st_size for path in output.iterdir())
        results[kind] = {
            "images/s": len(reads) / seconds,
            "CPU s": usage.cpu_seconds,
            "MB of memory": usage.peak_mib * 2**20 / 1e6,
            "fewest reads": int(reads.min()),
            "most reads": int(reads.max()),
            "files": len(list(output.iterdir())),
            "MB": bytes_written / 1e6,
        }
    columns = ["input", *(Column(name, "{:,.0f}".format) for name in next(iter(results.values())))]
    table = Table(columns, [[kind, *values.values()] for kind, values in results.items()])
    yield publish(options.out / "pack", results, table.markdown())
