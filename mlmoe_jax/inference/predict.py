"""Label images with the model of a run folder; needs neither the data set nor training code."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import overload

import jax
import numpy as np

from mlmoe_jax.config.defaults import default_config
from mlmoe_jax.config.overrides import Overrides, as_pairs
from mlmoe_jax.data.pipeline import SkippedImages, build_loader
from mlmoe_jax.data.readers import untimed
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import DONE, OUTDATED, USER_ERROR, UserError
from mlmoe_jax.inference.inputs import GivenImages, ImageLike, find_images, is_one_image
from mlmoe_jax.inference.outputs import Result, choose_target, require_distinct_columns, row_writer
from mlmoe_jax.models.apply import make_eval_step, probabilities
from mlmoe_jax.runs.folder import THRESHOLDS, RunFolder
from mlmoe_jax.runs.restore import BEST, Run, open_run, read_label_space
from mlmoe_jax.runs.shared import run_folder
from mlmoe_jax.runs.thresholds import read_thresholds
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.memory import shortage_explained
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.sharding import on_device
from mlmoe_jax.runtime.storage import to_json
from mlmoe_jax.runtime.targets import Target, opened
from mlmoe_jax.runtime.text import counted, printable, text_table

BATCH = 32  # default number of images per device
# Images per device in a batch, if no batch size is given: few, so that few programs are compiled, and one image is not
# padded to 32.
SIZES = (1, 4, 16, BATCH)
SHOWN = 20  # maximum number of printed rows, and of printed errors


class Predictor:
    """A trained model that labels images.

    thresholds: label -> minimum probability for assigning the label. With several processes, all of them make the same
    calls with the same images; each reads its part of each batch and receives all results.
    """

    def __init__(self, run: Run, thresholds: Mapping[str, float]):
        self.run, self.names = run, run.label_space.names
        if unknown := [name for name in self.names if name not in thresholds]:
            raise UserError(f"label {unknown[0]} has no threshold; add one to {THRESHOLDS} of the run")
        self.thresholds = np.array([thresholds[name] for name in self.names], np.float64)
        self._data = run.config.data.copy_and_resolve_references()
        self._data.bad_images = "skip"
        self._data.update(untimed(self._data.threads, self._data.workers))
        parts = (run.definition, run.preprocess, run.mesh, run.label_axes)
        self._steps = {gates: make_eval_step(*parts, gates=gates) for gates in (False, True)}

    @classmethod
    def from_run(cls, workdir: str | os.PathLike, overrides: Overrides = (), *, checkpoint: str = BEST) -> Predictor:
        """Open a run, a model on the hub (hf:user/name), or demo:photographs; UserError if it has no trained model.

        overrides: config keys under data, eval and mesh that differ from those of the run; eval.threshold replaces all
        of its thresholds. checkpoint: "best", "latest" or a step, as `which` in `restore.open_run`.
        data.exif is "apply" unless it is set here: a method may have ignored the orientation of the images of a
        benchmark, but a photograph of a camera is labeled as people see it.
        """
        folder, pairs = run_folder(workdir), as_pairs(overrides)
        if all(key != "data.exif" for key, _ in pairs):
            pairs = [*pairs, ("data.exif", "apply")]
        fixed = any(key == "eval.threshold" for key, _ in pairs)
        fitted = {} if fixed else read_thresholds(folder).values  # before the model, which takes longer to read
        run = open_run(folder, pairs, which=checkpoint)
        values = {name: run.config.eval.threshold for name in run.label_space.names} if fixed else fitted
        return cls(run, values)

    @overload
    def __call__(
        self, images: ImageLike, *, batch_size: int | None = None, top_k: int | None = None, gates: bool = False
    ) -> Result: ...

    @overload
    def __call__(
        self,
        images: Sequence[ImageLike],
        *,
        batch_size: int | None = None,
        top_k: int | None = None,
        gates: bool = False,
    ) -> list[Result]: ...

    def __call__(self, images, *, batch_size=None, top_k=None, gates=False):
        """Label images given as paths, encoded bytes, u8[h,w,3] arrays or Pillow images; see `stream`.

        Returns a list of results in the order of the images; for one image that is not in a sequence, its result.
        """
        if is_one_image(images):
            return self([images], batch_size=batch_size, top_k=top_k, gates=gates)[0]
        return list(self.stream(images, batch_size=batch_size, top_k=top_k, gates=gates))

    def stream(
        self,
        images: Sequence[ImageLike],
        *,
        batch_size: int | None = None,
        top_k: int | None = None,
        gates: bool = False,
        progress: Progress | None = None,
    ) -> Iterator[Result]:
        """Return an iterator over the results in the order of the images, which are read while the model runs.

        batch_size: for all devices together, rounded up to a multiple of their number; by default the smallest of SIZES
        per device that takes all images, or else the largest. Every batch has this size (the last one is padded), and
        the model is compiled once per size. top_k: assign this number of best labels to each image instead of using the
        thresholds. gates: also return the routing weights of the labels. progress: advanced once per batch.

        Raises UserError for images that are not in a sequence, for a top_k above the number of labels and for gates of
        a model without gates; the iterator raises it if the model returns non-finite scores.
        """
        if is_one_image(images):
            raise UserError("stream takes a sequence of images; put the image in a list")
        self.check_top_k(top_k)
        devices = self.run.mesh.size
        if batch_size is None:
            batch_size = fitting_size(len(images), [size * devices for size in SIZES])
        if batch_size < 1:
            raise UserError(f"the batch size is {batch_size} and should be above 0")
        batch_size = devices * math.ceil(batch_size / devices)
        if gates and not self._has_gates(batch_size):
            raise UserError(f"a model with the head {self.run.config.model.head.kind} has no gates")
        return self._results(images, batch_size, top_k, gates, progress) if len(images) else iter(())

    def check_top_k(self, top_k: int | None) -> None:
        """Raise UserError for a number of labels that the model does not have."""
        require_top_k(top_k, len(self.names))

    def _has_gates(self, batch_size: int) -> bool:
        size = self.run.preprocess.image_size
        batch = {"image": (batch_size, size, size, 3), "id": (batch_size,), "mask": (batch_size,)}
        shapes = {name: jax.ShapeDtypeStruct(shape, np.uint8) for name, shape in batch.items()}
        return bool(jax.eval_shape(self._steps[True], self.run.values, self.run.frozen, shapes)["gates"])

    def _results(self, images, batch_size, top_k, gates, progress) -> Iterator[Result]:
        given = GivenImages(images)
        names = [given.name(row) for row in range(len(given))]
        split = Split("images", (), np.zeros((len(given), 0), np.int8), names, given)
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
            raise UserError("the model returns scores that are not finite: its training has diverged; train it again")
        for at, row in enumerate(output["id"].tolist()):
            if row < 0:  # padding
                continue
            if not read[at]:  # perhaps by another process, which knows the reason
                [(_, name, error)] = SkippedImages(split, [row]).table()
                yield Result(name, error=error)
                continue
            weights = {
                gate: values[at % len(values)] for gate, values in output.get("gates", {}).items()
            }  # static: [1,K,E]
            yield self.result(split.ids[int(row)], output["logits"][at], top_k, weights or None)

    def result(
        self, name: str, logits: np.ndarray, top_k: int | None = None, gates: dict[str, np.ndarray] | None = None
    ) -> Result:
        """Return the result for an image, given its logits f32[K] and the gates f32[K,E] that were asked for."""
        scores = probabilities(logits)
        labels = tuple(self.names[k] for k in self._chosen(scores, top_k))
        return Result(name, labels, dict(zip(self.names, scores.tolist(), strict=True)), gates=gates)

    def _chosen(self, scores: np.ndarray, top_k: int | None) -> np.ndarray:
        """Return the indices of the labels to assign; of equal scores, the first label ranks higher."""
        return (
            np.flatnonzero(scores >= self.thresholds) if top_k is None else np.argsort(-scores, kind="stable")[:top_k]
        )


def require_top_k(top_k: int | None, labels: int) -> None:
    """Raise UserError for a number of best labels that is not from 1 to K = `labels`; None stands for thresholds."""
    if top_k is not None and not 1 <= top_k <= labels:
        raise UserError(f"top_k is {top_k} and should be from 1 to the {labels} labels of the model")


def fitting_size(images: int, sizes: Sequence[int]) -> int:
    """Return the smallest of the increasing `sizes` that takes all images, or else the largest."""
    return next((size for size in sizes if size >= images), sizes[-1])


# ------------------------------------------------------------------------------------------------- the command line
def predict_files(
    folder: RunFolder,
    given: Sequence[str],
    output: str | None,
    overrides: Sequence[tuple[str, str]],
    *,
    checkpoint: str = BEST,
    batch_size: int | None = None,
    top_k: int | None = None,
    gates: bool = False,
    as_json: bool = False,
) -> int:
    """Label the images that `given` names (see inputs.py) and write one row per image (see outputs.py).

    A short table is printed to stdout, with `as_json` the numbers of images; or one line to stderr if the rows are
    written to stdout, which is the default with `as_json`. batch_size: number of images at a time, by default 32 per
    device. Returns the exit code: 0; 2 if an image could not be read, and all other images are labeled; 3 if the newest
    checkpoint is damaged and the one before it was used.
    """
    target = choose_target(output, folder, as_json=as_json, gates=gates)
    folder.require_model()
    if top_k is not None:
        require_top_k(top_k, len(read_label_space(folder).names))
    elif target.kind == "csv":
        require_distinct_columns(read_label_space(folder).names)
    if batch_size is not None:
        _require_batch(batch_size)
    paths = _of_first_process(lambda: find_images(given))
    predictor = Predictor.from_run(folder.path, overrides, checkpoint=checkpoint)
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
                _report_thresholds(predictor, folder, overrides)
            with opened(target) as file:
                write = row_writer(file, target.kind, predictor.names, top_k)
                for result in results:
                    write(result)
                    summary.add(result)
    finally:
        progress.close()
    if writes:
        summary.print(target, as_json=as_json)
    if summary.unread:
        return USER_ERROR
    return OUTDATED if predictor.run.outdated else DONE


def even_batch(images: int, most: int, devices: int) -> int:
    """Return a batch size of about `most`, a multiple of `devices`, for which the last batch needs little padding.

    Raises UserError for a `most` below 1.
    """
    _require_batch(most)
    return devices * math.ceil(images / math.ceil(images / most) / devices)


def _require_batch(size: int) -> None:
    if size < 1:
        raise UserError(f"--batch-size={size} should be above 0")


def _of_first_process(find: Callable[[], list[str]]) -> list[str]:
    """Call `find` on the first process, the only one with a standard input; return, or raise, its result on all."""
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


def _report_thresholds(predictor: Predictor, folder: RunFolder, overrides: Sequence[tuple[str, str]]) -> None:
    """Log the thresholds, unless all labels have the default."""
    if (predictor.thresholds == default_config().eval.threshold).all():
        return
    finite = np.unique(predictor.thresholds[np.isfinite(predictor.thresholds)])
    text = " to ".join(f"{value:.3g}" for value in finite[[0, -1][: len(finite)]])
    never = int(np.count_nonzero(np.isinf(predictor.thresholds)))
    text = " and ".join(filter(None, [text, f"never for {counted(never, 'label')}" if never else ""]))
    if "eval.threshold" in dict(overrides):
        status(f"thresholds: {text} (--config.eval.threshold)")
        return
    source = read_thresholds(folder).source
    fitted = f", fitted on {source['split']}" if "split" in source else ""
    status(f"thresholds: {text} ({folder / THRESHOLDS}{fitted})")


class _Summary:
    """The printed summary of a prediction: its first rows, the errors, and the speed."""

    def __init__(self, images: int):
        self.images, self.done, self.unread = images, 0, 0
        self.first: list[Result] = []
        self.started = time.perf_counter()

    def add(self, result: Result) -> None:
        """Count a result, and log its error at once unless there are more than SHOWN."""
        self.done += 1
        if len(self.first) < SHOWN:
            self.first.append(result)
        if result.error:
            self.unread += 1
            if self.unread <= SHOWN and distributed.is_first():
                status(f"error: {printable(result.error)}")

    def print(self, target: Target, *, as_json: bool) -> None:
        """Print the summary to stdout, its numbers alone with `as_json`; log it if the rows are written to stdout."""
        rate = self.done / max(1e-9, time.perf_counter() - self.started)
        if self.unread > SHOWN:
            status(f"… and {self.unread - SHOWN:,} more errors; {target} contains all of them")
        if as_json and target.path is not None:
            numbers = {"images": self.done, "labeled": self.done - self.unread, "unreadable": self.unread}
            print(to_json({**numbers, "images_per_second": rate, "output": str(target)}, indent=2))
            return
        labeled = f"{self.done - self.unread:,} of {counted(self.images, 'image')} labeled"
        show = status if target.path is None else print
        if target.path is not None:
            show(_table(self.first, self.done))
        show(f"{labeled} ({rate:.3g} images/s); written to {target}")


def _table(first: Sequence[Result], count: int) -> str:
    names = [printable(result.image.encode(errors="surrogateescape").decode(errors="replace")) for result in first]
    rows = []
    for name, result in zip(names, first, strict=True):
        scores = result.scores or {}
        best = sorted(result.labels, key=scores.__getitem__, reverse=True)
        text = (
            "  ".join(f"{printable(label)} {100 * scores[label]:.0f} %" for label in best)
            or "(no label reaches its threshold)"
        )
        rows.append([name, "unreadable" if result.error else text])
    if count > len(first):
        rows.append([f"… and {count - len(first)} more"])
    return text_table(rows, align="<")
