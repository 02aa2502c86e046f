"""A run folder and pictures in, labels out: no data set, no training code."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from mlmoe_jax.config.defaults import default_config
from mlmoe_jax.config.overrides import Overrides, as_pairs
from mlmoe_jax.data.pipeline import SkippedImages, build_loader
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.inputs import GivenImages, ImageLike, find_pictures
from mlmoe_jax.inference.outputs import Result, choose_target, row_writer
from mlmoe_jax.inference.step import make_eval_step, probabilities
from mlmoe_jax.runs.folder import CHECKPOINTS, CONFIG, THRESHOLDS, RunFolder
from mlmoe_jax.runs.restore import Run, open_run
from mlmoe_jax.runs.thresholds import read_thresholds
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.memory import shortage_explained
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.sharding import on_device
from mlmoe_jax.runtime.storage import Target, opened
from mlmoe_jax.runtime.text import text_table

BATCH = 32  # pictures a device, where nothing else is asked for
SHOWN = 20  # rows of the printed table, and errors


class Predictor:
    """A trained model that labels pictures.

    thresholds: label -> the probability from which on the label is given. On many processes, every one makes the same
    calls with the same pictures, reads its part of each batch, and gets all results.
    """

    def __init__(self, run: Run, thresholds: Mapping[str, float]):
        self.run, self.names = run, run.label_space.names
        if unknown := [name for name in self.names if name not in thresholds]:
            raise UserError(f"there is no threshold for label {unknown[0]}; put one into {THRESHOLDS} of the run")
        self.thresholds = np.array([thresholds[name] for name in self.names], np.float64)
        self._data = run.config.data.copy_and_resolve_references()
        self._data.bad_images = "skip"
        parts = (run.definition, run.preprocess, run.mesh, run.label_axes)
        self._steps = {gates: make_eval_step(*parts, gates=gates) for gates in (False, True)}

    @classmethod
    def from_run(cls, workdir: str | Path, overrides: Overrides = ()) -> Predictor:
        """Open a run folder; UserError where it holds no trained model.

        overrides: config keys under data, eval and mesh that differ from the run's own; eval.threshold takes the place
        of all its thresholds.
        """
        folder, pairs = RunFolder(workdir), as_pairs(overrides)
        run = open_run(folder, pairs)
        if any(key == "eval.threshold" for key, _ in pairs):
            return cls(run, dict.fromkeys(run.label_space.names, run.config.eval.threshold))
        return cls(run, read_thresholds(folder).values)

    def __call__(
        self, images: Sequence[ImageLike], *, batch_size: int = BATCH, top_k: int | None = None, gates: bool = False
    ) -> list[Result]:
        """Label pictures given as paths, encoded bytes, u8[h,w,3] arrays or Pillow's, in their order; see `stream`."""
        return list(self.stream(images, batch_size=batch_size, top_k=top_k, gates=gates))

    def stream(
        self,
        images: Sequence[ImageLike],
        *,
        batch_size: int = BATCH,
        top_k: int | None = None,
        gates: bool = False,
        progress: Progress | None = None,
    ) -> Iterator[Result]:
        """Return an iterator over the results in the order of the pictures, which are read while the model works.

        batch_size: of all devices together, rounded up to their number. Every batch has this size, the last one padded,
        so that the model is compiled once. top_k: give each picture its so many best labels, whatever the thresholds.
        gates: return the routing weights of the labels as well. progress: is told of every batch.

        Raises UserError for a top_k that the labels do not fill, for gates of a model that has none, and later where
        the model gives scores that are no numbers.
        """
        if top_k is not None and not 1 <= top_k <= len(self.names):
            raise UserError(f"top_k is {top_k} and should be from 1 to the {len(self.names)} labels of the model")
        if batch_size < 1:
            raise UserError(f"the batch size is {batch_size} and should be above 0")
        devices = self.run.mesh.size
        batch_size = devices * math.ceil(batch_size / devices)
        if gates and not self._has_gates(batch_size):
            raise UserError(f"a model with the head {self.run.config.model.head.kind} has no gates to show")
        return self._results(images, batch_size, top_k, gates, progress) if len(images) else iter(())

    def _has_gates(self, batch_size: int) -> bool:
        size = self.run.preprocess.image_size
        batch = {"image": (batch_size, size, size, 3), "id": (batch_size,), "mask": (batch_size,)}
        shapes = {name: jax.ShapeDtypeStruct(shape, np.uint8) for name, shape in batch.items()}
        return bool(jax.eval_shape(self._steps[True], self.run.values, self.run.frozen, shapes)["gates"])

    def _results(self, images, batch_size, top_k, gates, progress) -> Iterator[Result]:
        given = GivenImages(images)
        names = [given.name(row) for row in range(len(given))]
        split = Split("pictures", (), np.zeros((len(given), 0), np.int8), names, given)
        loader = build_loader(self._data, split, batch_size=batch_size, labels=False, process=distributed.process())
        step, waiting = self._steps[gates], None
        with shortage_explained("take a smaller batch (--batch-size)"):
            for batch in on_device(progress.waiting(loader) if progress else loader, self.run.mesh):
                output = step(self.run.values, self.run.frozen, batch)
                if waiting is not None:  # one step behind, so that the device is never idle
                    yield from self._of_batch(jax.device_get(waiting), split, top_k)
                waiting = output
                if progress:
                    progress.advance()
            yield from self._of_batch(jax.device_get(waiting), split, top_k)

    def _of_batch(self, output: dict, split: Split, top_k: int | None) -> Iterator[Result]:
        read = output["mask"] > 0
        if not np.isfinite(output["logits"][read]).all():
            raise UserError("the model gives scores that are no numbers: its training has diverged, so train it again")
        for at, row in enumerate(output["id"].tolist()):
            if row < 0:  # padding
                continue
            if not read[at]:  # perhaps by another process, which has the reason
                [(_, name, error)] = SkippedImages(split, [row]).table()
                yield Result(name, error=error)
                continue
            weights = {
                gate: values[at % len(values)] for gate, values in output.get("gates", {}).items()
            }  # static: [1,K,E]
            scores = probabilities(output["logits"][at])
            labels = tuple(self.names[k] for k in self._chosen(scores, top_k))
            by_name = dict(zip(self.names, scores.tolist(), strict=True))
            yield Result(split.ids[row], labels, by_name, gates=weights or None)

    def _chosen(self, scores: np.ndarray, top_k: int | None) -> np.ndarray:
        """Return the rows of the labels to give; of equal scores the first label is the better."""
        return (
            np.flatnonzero(scores >= self.thresholds) if top_k is None else np.argsort(-scores, kind="stable")[:top_k]
        )


# ------------------------------------------------------------------------------------------------- the command line
def predict_files(
    folder: RunFolder,
    given: Sequence[str],
    output: str | None,
    overrides: Sequence[tuple[str, str]],
    *,
    batch_size: int | None = None,
    top_k: int | None = None,
    gates: bool = False,
    as_json: bool = False,
) -> int:
    """Label the pictures that `given` names (see pictures.py) and write a row a picture (see predictions.py).

    A short table goes to stdout, or a line to stderr where the rows go to stdout. batch_size: so many pictures at a
    time, by default 32 a device. Returns the exit code: 0, or 2 where a picture could not be read; the others are
    labelled all the same.
    """
    target = choose_target(output, folder, as_json=as_json, gates=gates)
    folder.require(CONFIG, CHECKPOINTS)
    paths = _of_first_process(lambda: find_pictures(given))
    predictor = Predictor.from_run(folder.path, overrides)
    devices = predictor.run.mesh.size
    size = even_batch(len(paths), BATCH * devices if batch_size is None else batch_size, devices)
    writes, summary = distributed.is_first(), _Summary(len(paths))
    progress = Progress("predict", math.ceil(len(paths) / size), size)
    try:
        results = predictor.stream(paths, batch_size=size, top_k=top_k, gates=gates, progress=progress)
        if not writes:
            for result in results:
                summary.add(result)
        else:
            if top_k is None:
                _tell_thresholds(predictor, folder, overrides)
            with opened(target) as file:
                write = row_writer(file, target.kind, predictor.names, top_k)
                for result in results:
                    write(result)
                    summary.add(result)
    finally:
        progress.close()
    if writes:
        summary.tell(target)
    return 2 if summary.unread else 0


def even_batch(pictures: int, most: int, devices: int) -> int:
    """Return the size of the batches, about `most` and a multiple of `devices`, that leaves little to pad in the last.

    Raises UserError for a `most` below 1.
    """
    if most < 1:
        raise UserError(f"--batch-size={most} should be above 0")
    return devices * math.ceil(pictures / math.ceil(pictures / most) / devices)


def _of_first_process(find: Callable[[], list[str]]) -> list[str]:
    """Return on every process what `find` returns, or raises, on the first: it alone may have a standard input."""
    message = {}
    if distributed.is_first():
        try:
            message["paths"] = find()
        except UserError as error:
            message["error"] = str(error)
    message = distributed.broadcast_from_first(message)
    if "error" in message:
        raise UserError(message["error"])
    return message["paths"]


def _tell_thresholds(predictor: Predictor, folder: RunFolder, overrides: Sequence[tuple[str, str]]) -> None:
    """Say which thresholds count, unless it is the default for every label."""
    if (predictor.thresholds == default_config().eval.threshold).all():
        return
    finite = np.unique(predictor.thresholds[np.isfinite(predictor.thresholds)])
    told = " to ".join(f"{value:.3g}" for value in finite[[0, -1][: len(finite)]])
    never = np.count_nonzero(np.isinf(predictor.thresholds))
    told = " and ".join(filter(None, [told, f"never for {never} labels" if never else ""]))
    if "eval.threshold" in dict(overrides):
        status(f"thresholds: {told} (--config.eval.threshold)")
        return
    source = read_thresholds(folder).source
    fitted = f", fitted on {source['split']}" if "split" in source else ""
    status(f"thresholds: {told} ({folder / THRESHOLDS}{fitted})")


class _Summary:
    """What a person is told of a prediction: its first rows, what could not be read, and how fast it went."""

    def __init__(self, pictures: int):
        self.pictures, self.done, self.unread = pictures, 0, 0
        self.first: list[Result] = []
        self.started = time.perf_counter()

    def add(self, result: Result) -> None:
        """Count a result; errors are told at once, but not thousands of them."""
        self.done += 1
        if len(self.first) < SHOWN:
            self.first.append(result)
        if result.error:
            self.unread += 1
            if self.unread <= SHOWN and distributed.is_first():
                status(f"error: {result.error}")

    def tell(self, target: Target) -> None:
        """Print it where it does not mix with the rows."""
        rate = self.done / max(1e-9, time.perf_counter() - self.started)
        if self.unread > SHOWN:
            status(f"… and {self.unread - SHOWN:,} more errors; {target} has them all")
        labelled = f"{self.done - self.unread} of {self.pictures} pictures labelled"
        tell = status if target.path is None else print
        if target.path is not None:
            tell(_table(self.first, self.done))
        tell(f"{labelled} ({rate:.3g} images/s); written to {target}")


def _table(first: Sequence[Result], count: int) -> str:
    names = [result.image.encode(errors="surrogateescape").decode(errors="replace") for result in first]
    rows = []
    for name, result in zip(names, first, strict=True):
        best = sorted(result.labels, key=lambda label: -result.scores[label])
        told = (
            "  ".join(f"{label} {100 * result.scores[label]:.0f} %" for label in best)
            or "(nothing above its threshold)"
        )
        rows.append([name, "unreadable" if result.error else told])
    if count > len(first):
        rows.append([f"… and {count - len(first)} more"])
    return text_table(rows, align="<")
