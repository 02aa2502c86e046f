"""A run folder and pictures in, labels out: no data set, no training code."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import jax
import numpy as np

from mlmoe_jax.assemble import Run, open_run
from mlmoe_jax.data.images import BadImage, read_image
from mlmoe_jax.data.transforms import make_host_transform, smallest_useful_side
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluate import probabilities
from mlmoe_jax.runfolder import CHECKPOINTS, CONFIG, THRESHOLDS, RunFolder
from mlmoe_jax.sharding import shard_batch
from mlmoe_jax.steps import make_eval_step
from mlmoe_jax.writer import Progress, say

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
SHOWN = 20  # rows of the printed table


@dataclass(frozen=True)
class Result:
    """The answer for one picture: `scores` is label -> probability, `labels` those at or above their threshold.

    Where the picture could not be read, `error` says why and the rest is empty.
    """

    image: str
    labels: tuple[str, ...] = ()
    scores: dict[str, float] | None = None
    error: str = ""


class Predictor:
    """A trained model that labels pictures.

    thresholds: label -> the probability from which on the label is given.
    """

    def __init__(self, run: Run, thresholds: dict[str, float]):
        self.run, self.names = run, run.label_space.names
        self.thresholds = np.array([thresholds[name] for name in self.names])
        data = run.config.data
        self._transform = make_host_transform(data, None, training=False)
        self._at_least = smallest_useful_side(data, None, training=False) if data.reduced_decoding else 0
        self._step = make_eval_step(run.definition, run.preprocess, run.mesh)

    @classmethod
    def from_run(cls, workdir: str | Path, overrides: Sequence[tuple[str, str]] = ()) -> Predictor:
        """Open a run folder; UserError where it holds no trained model."""
        folder = RunFolder(workdir)
        run = open_run(folder, list(overrides))
        folder.require(THRESHOLDS)
        return cls(run, folder.read_json(THRESHOLDS))

    def __call__(self, images: Sequence[str | Path | bytes | np.ndarray], *, batch_size: int = 32) -> list[Result]:
        """Label pictures given as paths, encoded bytes or u8[h,w,3] arrays, in their order."""
        return list(self.stream(images, batch_size=batch_size))

    def stream(self, images: Sequence[str | Path | bytes | np.ndarray], *, batch_size: int = 32) -> Iterator[Result]:
        """Yield the result of each picture in order; pictures are read by threads, one batch ahead of the model."""
        with ThreadPoolExecutor(4) as pool:
            batches = [range(at, min(at + batch_size, len(images))) for at in range(0, len(images), batch_size)]
            ahead = [pool.submit(self._read, images[row]) for row in batches[0]] if batches else []
            for number, rows in enumerate(batches):
                ready = [future.result() for future in ahead]
                following = batches[number + 1] if number + 1 < len(batches) else ()
                ahead = [pool.submit(self._read, images[row]) for row in following]
                yield from self._label([_name(images[row], row) for row in rows], ready, batch_size)

    def _read(self, image: str | Path | bytes | np.ndarray) -> np.ndarray | BadImage:
        try:
            pixels = image if isinstance(image, np.ndarray) else read_image(image, at_least=self._at_least)
            return self._transform(pixels, None)
        except BadImage as error:
            return error

    def _label(self, names: list[str], ready: list[np.ndarray | BadImage], batch_size: int) -> Iterator[Result]:
        size, count = self.run.preprocess.image_size, len(self.names)
        pixels = np.zeros((batch_size, size, size, 3), np.uint8)
        for row, picture in enumerate(ready):
            if not isinstance(picture, BadImage):
                pixels[row] = picture
        batch = {
            "image": pixels,
            "label": np.zeros((batch_size, count), np.float32),
            "label_mask": np.zeros((batch_size, count), np.float32),
            "mask": np.ones(batch_size, np.float32),
            "id": np.arange(batch_size, dtype=np.int32),
        }
        output = self._step(self.run.values, self.run.frozen, shard_batch(batch, self.run.mesh))
        scores = probabilities(jax.device_get(output["logits"]))
        for name, picture, row in zip(names, ready, scores, strict=False):
            if isinstance(picture, BadImage):
                yield Result(name, error=str(picture))
                continue
            chosen = tuple(self.names[k] for k in np.flatnonzero(row >= self.thresholds))
            yield Result(name, chosen, dict(zip(self.names, row.tolist(), strict=True)))


def _name(image: str | Path | bytes | np.ndarray, row: int) -> str:
    return str(image) if isinstance(image, str | Path) else f"image {row}"


def find_images(given: Sequence[str]) -> list[Path]:
    """Return the picture files of paths and folders (searched in depth, by name); UserError where there are none."""
    found: list[Path] = []
    for item in given:
        path = Path(item)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
            if not inside:
                raise UserError(f"folder {path} holds no pictures ({', '.join(sorted(SUFFIXES))})")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise UserError(f"there is no picture or folder {path}")
    return found


def predict_files(folder: RunFolder, given: Sequence[str], output: str | None, overrides: list[tuple[str, str]]) -> int:
    """Label files, write a row a picture as CSV or JSONL, print a short table.

    Returns the exit code: 0, or 2 where a picture could not be read; the others are labelled all the same.
    """
    target = Path(output) if output else Path(str(folder / "predictions.csv"))
    if target.suffix not in (".csv", ".jsonl"):
        raise UserError(f"--output={target} should end in .csv or .jsonl")
    if not target.parent.is_dir():
        raise UserError(f"there is no folder {target.parent} to write {target.name} into")
    folder.require(CONFIG, CHECKPOINTS)
    paths = find_images(given)
    predictor = Predictor.from_run(folder.path, overrides)
    devices = predictor.run.mesh.size
    batch_size = devices * math.ceil(min(32, len(paths)) / devices)
    progress = Progress("predict", len(paths), 1)
    results = []
    for result in predictor.stream(paths, batch_size=batch_size):
        results.append(result)
        progress.advance()
    rate = f"{progress.images_per_second:.3g} images/s"
    progress.close()

    partial = target.with_name(f"{target.name}.tmp")
    with open(partial, "w", newline="") as file:
        (_write_csv if target.suffix == ".csv" else _write_jsonl)(file, results, predictor.names)
    partial.replace(target)
    print(_table(results))
    broken = [result for result in results if result.error]
    for result in broken:
        say(f"error: {result.error}")
    labelled = f"{len(results) - len(broken)} of {len(results)} pictures labelled"
    print(f"{labelled} ({rate}); written to {target}")
    return 2 if broken else 0


def _write_csv(file: TextIO, results: list[Result], names: Sequence[str]) -> None:
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(["image", "labels", "error", *names])
    for result in results:
        scores = [f"{result.scores[name]:.6f}" for name in names] if result.scores else [""] * len(names)
        rows.writerow([result.image, ";".join(result.labels), result.error, *scores])


def _write_jsonl(file: TextIO, results: list[Result], names: Sequence[str]) -> None:
    for result in results:
        row = {"image": result.image}
        row |= {"error": result.error} if result.error else {"labels": result.labels, "scores": result.scores}
        file.write(json.dumps(row) + "\n")


def _table(results: list[Result]) -> str:
    width = max(len(result.image) for result in results[:SHOWN])
    lines = []
    for result in results[:SHOWN]:
        best = sorted(result.labels, key=lambda name: -result.scores[name])
        told = (
            "  ".join(f"{name} {100 * result.scores[name]:.0f} %" for name in best) or "(nothing above its threshold)"
        )
        lines.append(f"{result.image:<{width}}  {'unreadable' if result.error else told}")
    if len(results) > SHOWN:
        lines.append(f"… and {len(results) - SHOWN} more")
    return "\n".join(lines)
