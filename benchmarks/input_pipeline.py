"""Speed of the input pipeline from JPEG files to batches, images/s on one core, compared with a PyTorch DataLoader.

    python -m benchmarks.input_pipeline --images=FOLDER [--size=224] [--seconds=5] [--torch=PYTHON]

All rows read the same files: with data/pipeline.py, or in PyTorch with PIL decoding, square bilinear resizing, cutout,
torchvision's RandAugment and conversion to a normalized tensor. `full` is the complete training input: decoding,
resizing, cutout and RandAugment; `device` leaves the last two to the accelerator. `--torch` is a Python interpreter
with torch and torchvision.
"""

import argparse
import json
import statistics
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import numpy as np


def rows() -> dict[str, dict]:
    """Return name -> changes to config.data and config.augment."""
    published = {"cutout": 0.5, "randaugment": "uda"}
    return {
        "decode + resize": {"data": {}, "augment": {}},
        "decode + resize, reduced": {"data": {"reduced_decoding": True}, "augment": {}},
        "full, host": {"data": {}, "augment": {**published, "where": "host"}},
        "full, host, reduced": {"data": {"reduced_decoding": True}, "augment": {**published, "where": "host"}},
        "full, device": {"data": {}, "augment": {**published, "where": "device"}},
        "full, device, reduced": {"data": {"reduced_decoding": True}, "augment": {**published, "where": "device"}},
    }


def ours(changes: dict, files: list[str], size: int, seconds: float) -> float:
    """Return images per second of one thread of this process."""
    from mlmoe_jax.config import default_config
    from mlmoe_jax.data.images import ImageFiles
    from mlmoe_jax.data.pipeline import build_loader
    from mlmoe_jax.data.split import Split

    config = default_config()
    config.data.update({"image_size": size, "threads": 1, **changes["data"]})
    config.augment.update(changes["augment"])
    split = Split("files", ("a",), np.zeros((len(files), 1), np.int8), files, ImageFiles("", files))
    batches = build_loader(config.data, split, batch_size=16, augment=config.augment)
    next(batches)
    started, images = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        images += len(next(batches)["id"])
    return images / (time.perf_counter() - started)


def mean_difference(files: list[str], size: int) -> float:
    """Return the mean absolute difference caused by reduced decoding after resizing, in gray levels."""
    from mlmoe_jax.data.images import Decoding, read_image
    from mlmoe_jax.data.transforms import resize_square

    full = (resize_square(read_image(file), size) for file in files)
    reduced = (resize_square(read_image(file, decoding=Decoding(size)), size) for file in files)
    return float(np.mean([np.abs(a.astype(int) - b).mean() for a, b in zip(full, reduced, strict=True)]))


def theirs(python: str, files: list[str], size: int, seconds: float, full: bool) -> float:
    """Return images per second of a PyTorch DataLoader, in a process of another Python interpreter."""
    request = json.dumps([files, size, seconds, full])
    program = Path(__file__).with_name("input_pipeline_torch.py")
    done = subprocess.run([python, program], input=request, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", required=True, type=Path, help="folder with JPEG files")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--torch", default="", help="Python interpreter with torch and torchvision")
    options = parser.parse_args()
    files = sorted(str(path) for path in options.images.rglob("*.jpg"))[:500]
    if not files:
        parser.error(f"{options.images} holds no .jpg file")

    figures = defaultdict(list)
    for _ in range(options.repeats):  # alternating, so that other load affects all rows
        for name, changes in rows().items():
            figures[name].append(ours(changes, files, options.size, options.seconds))
        for name, full in (("PyTorch: decode + resize", False), ("PyTorch: full", True)) if options.torch else ():
            figures[name].append(theirs(options.torch, files, options.size, options.seconds, full))
    print(f"{len(files)} files, {options.size} px, one thread; images/s: median (least … most)")
    for name, values in figures.items():
        print(f"{name:<28}{statistics.median(values):>8.0f}  ({min(values):.0f} … {max(values):.0f})")
    difference = mean_difference(files[:100], options.size)
    print(f"reduced decoding changes a pixel by {difference:.2f} gray levels on average")


if __name__ == "__main__":
    main()
