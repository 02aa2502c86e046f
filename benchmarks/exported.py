"""Compare exported programs on a split: size, mAP, images per second.

    python -m benchmarks.exported runs/photographs exported_onnx exported_int8 --split=val --batches=1,8 --threads=2

The first argument is the run folder, whose config names the data set. The exported folders follow; ratios and
differences are to the first. Programs of ONNX run in ONNX Runtime on --threads CPU cores. They are timed in turn,
--rounds times, and the shortest time of each counts, because other programs disturb long times more often.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from mlmoe_jax.data.image_reader import ImageReader
from mlmoe_jax.data.label_codes import targets
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.evaluation.metrics.multilabel import average_precision, mean_average_precision
from mlmoe_jax.runs.folder import RunFolder, read_config

Program = Callable[[np.ndarray], np.ndarray]  # images u8[B,H,W,3] -> probabilities f32[B,K]
TOGETHER = 32  # images at a time for the mAP


def opened(folder: Path, threads: int) -> Program:
    """Return the program of an exported folder."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    path = folder / "model.onnx"
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(["probability"], {"image": images})[0]


def read_split(folder: RunFolder, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the images u8[N,H,W,3] of a split of the run's data set, its labels and their mask f32[N,K]."""
    data = read_config(folder).data
    split = open_split(data, name)
    reader = ImageReader.from_config(data)
    images = np.stack([reader(split.images, row) for row in range(len(split))])
    return images, *targets(split.labels, data.difficult_eval)


def times(programs: Mapping[str, Program], images: np.ndarray, rounds: int) -> dict[str, float]:
    """Return name -> the shortest time of a program for a batch of images in seconds."""
    measured: dict[str, list[float]] = {name: [] for name in programs}
    for program in programs.values():
        program(images)
    for _ in range(rounds):
        for name, program in programs.items():
            began = time.perf_counter()
            program(images)
            measured[name].append(time.perf_counter() - began)
    return {name: min(seconds) for name, seconds in measured.items()}


def table(rows: Mapping[str, Mapping[str, float]], batches: Sequence[int]) -> str:
    """Return a Markdown table of the rows name -> {bytes, mAP, and seconds by batch size}."""
    first = next(iter(rows.values()))
    heads = "".join(f" images/s, batches of {batch} | ratio |" for batch in batches)
    lines = [f"| program | MB | ratio | mAP | − first |{heads}", f"|---|{'---:|' * (4 + 2 * len(batches))}"]
    for name, row in rows.items():
        size = f"{row['bytes'] / 1e6:.1f} | {row['bytes'] / first['bytes']:.2f}"
        quality = f"{100 * row['mAP']:.2f} | {100 * (row['mAP'] - first['mAP']):+.2f}"
        speeds = [f"{batch / row[str(batch)]:.1f} | {first[str(batch)] / row[str(batch)]:.2f}" for batch in batches]
        lines.append(f"| {' | '.join([name, size, quality, *speeds])} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("exported", nargs="+", type=Path)
    parser.add_argument("--split", default="val")
    parser.add_argument("--least-positives", type=int, default=1, help="leave classes with fewer positives out")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    flags = parser.parse_args()
    batches = [int(batch) for batch in flags.batches.split(",")]
    images, label, mask = read_split(RunFolder(flags.run), flags.split)
    frequent = label.sum(axis=0) >= flags.least_positives
    programs = {folder.name: opened(folder, flags.threads) for folder in flags.exported}
    rows = {}
    for folder, program in zip(flags.exported, programs.values(), strict=True):
        parts = [program(images[at : at + TOGETHER]) for at in range(0, len(images), TOGETHER)]
        precision = average_precision(np.concatenate(parts), label, mask=mask)
        size = sum(path.stat().st_size for path in folder.glob("model.onnx*"))
        rows[folder.name] = {"bytes": size, "mAP": float(mean_average_precision(precision[frequent]))}
    for batch in batches:
        for name, seconds in times(programs, images[:batch], flags.rounds).items():
            rows[name][str(batch)] = seconds
    print(table(rows, batches))


if __name__ == "__main__":
    main()
