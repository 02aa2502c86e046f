"""Compare exported programs on a split: size, mAP, images per second.

    python -m benchmarks.measure exported --run=runs/photographs --exported exported_onnx exported_int8 --split=val

--run is the run folder, whose config names the data set. Ratios and differences are to the first exported folder.
Classes with fewer than --least-positives are left out. Programs of ONNX run in ONNX Runtime on --threads CPU cores.
They are timed in turn with --batches of images, --rounds times, and the shortest time of each counts, because other
programs disturb long times more often.
"""

import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mlmoe_jax.data.image_reader import ImageReader
from mlmoe_jax.data.label_codes import targets
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.evaluation.metrics.multilabel import average_precision, mean_average_precision
from mlmoe_jax.runs.folder import RunFolder, read_config
from mlmoe_jax.runtime.table import Table

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
    return images, *targets(split.labels[:], data.difficult_eval)


def times(programs: Mapping[str, Program], images: np.ndarray, rounds: int) -> dict[str, float]:
    """Return name -> the shortest time of a program for a batch of images in seconds.

    The programs take turns; their first round does not count.
    """
    calls = {name: partial(program, images) for name, program in programs.items()}
    taken = [{name: timeit.timeit(call, number=1) for name, call in calls.items()} for _ in range(rounds + 1)]
    return {name: min(one[name] for one in taken[1:]) for name in calls}


def table(rows: Mapping[str, Mapping[str, float]], batches: Sequence[int]) -> str:
    """Return a Markdown table of the rows name -> {bytes, mAP, and seconds by batch size}."""
    first, cells = next(iter(rows.values())), []
    for name, row in rows.items():
        size = [f"{row['bytes'] / 1e6:.1f}", f"{row['bytes'] / first['bytes']:.2f}"]
        quality = [f"{100 * row['mAP']:.2f}", f"{100 * (row['mAP'] - first['mAP']):+.2f}"]
        seconds = [(batch, first[str(batch)], row[str(batch)]) for batch in batches]
        speeds = [text for batch, other, own in seconds for text in (f"{batch / own:.1f}", f"{other / own:.2f}")]
        cells.append([name, *size, *quality, *speeds])
    speeds = [name for batch in batches for name in (f"images/s, batches of {batch}", "ratio")]
    return Table(["program", "MB", "ratio", "mAP", "− first", *speeds], cells).markdown().rstrip()


@dataclass(frozen=True)
class Options:
    run: Path
    exported: tuple[Path, ...]
    split: str = "val"
    least_positives: int = 1
    batches: tuple[int, ...] = (1, 8)
    threads: int = 2
    rounds: int = 20


def measure(options: Options) -> Iterator[str]:
    images, label, mask = read_split(RunFolder(options.run), options.split)
    frequent = label.sum(axis=0) >= options.least_positives
    programs = {folder.name: opened(folder, options.threads) for folder in options.exported}
    rows = {}
    for folder, program in zip(options.exported, programs.values(), strict=True):
        parts = [program(images[at : at + TOGETHER]) for at in range(0, len(images), TOGETHER)]
        precision = average_precision(np.concatenate(parts), label, mask=mask)
        size = sum(path.stat().st_size for path in folder.glob("model.onnx*"))
        rows[folder.name] = {"bytes": size, "mAP": float(mean_average_precision(precision[frequent]))}
    for batch in options.batches:
        for name, seconds in times(programs, images[:batch], options.rounds).items():
            rows[name][str(batch)] = seconds
    yield table(rows, options.batches)
