"""`mlmoe predict`: label image files, and write one row per image to a CSV or JSON lines file."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from etils import epath

from mlmoe_jax.apps.tools.image_list import find_images, sample_inputs
from mlmoe_jax.apps.tools.result_rows import ResultRows
from mlmoe_jax.apps.tools.select_images import select_images
from mlmoe_jax.data.containers.video import Moment, find_moment
from mlmoe_jax.data.decoding import Decoding
from mlmoe_jax.data.images import ImageNames, Images
from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.sources.labeling_formats import FORMATS, LabelEntry, LabelFile, output_path
from mlmoe_jax.data.sources.named_files import require_no_table
from mlmoe_jax.data.usage import Usage
from mlmoe_jax.errors import USER_ERROR, UserError, success
from mlmoe_jax.inference.predictor import LabeledImage, Predictor
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import STANDARD_OUTPUT, OutputTarget
from mlmoe_jax.runtime.table import Outcome
from mlmoe_jax.runtime.text import printable, quantity

PRINTED_IMAGES = 20  # maximum number of printed images, and of printed errors


def predict_files(
    open_predictor: Callable[[], Predictor],
    items: Sequence[str],
    target: OutputTarget,
    *,
    batch_size: int | None = None,
    top_k: int | None = None,
    gates: bool = False,
    select: str | None = None,
    count: int = 0,
    column: str = "",
    every: Fraction | None = None,
    per_video: bool = False,
) -> Outcome:
    """Label images and write one row per image.

    Args:
      open_predictor: function that opens the predictor. It is called after the images are found.
      items: the values of `--images`, see image_list.py.
      target: where to write the rows, see `choose_target`.
      batch_size: approximate number of images per batch, as `most` in `Predictor.even_batch`.
      top_k, gates: as in `Predictor.stream`.
      select: the `method` of `select_images`, to label only the `count` images that it chooses; None = all images.
      column: the column of images in Parquet files; "" finds it.
      every: the seconds between frames of videos, see `open_video`.
      per_video: whether the frames of a video are one row, see `join_frames`.

    Returns:
      The labels of the first images to print, and the numbers of images for --json. Both are empty if the rows are
        written to standard output. The exit code is 2 if an image could not be read (the readable images are labeled),
        otherwise 3 if the newest checkpoint is damaged and an older checkpoint was used, otherwise 0.
    """
    found = find_images(items, repeats=not select and target.kind not in FORMATS, column=column, every=every)
    images, selection = found.images, {}
    predictor = open_predictor()
    require_no_table(target.path, predictor.run.config.data)
    _require_videos_possible(images, predictor, target, per_video=per_video)
    sample_inputs(images, Decoding.from_config(predictor.run.config.data))
    if select:
        images, selection = select_images(predictor, images, select, count, batch_size)
    size, summary = predictor.even_batch(len(images), batch_size), Summary(found.usages, describe_labels)
    results = predictor.stream(images, batch_size=size, top_k=top_k, gates=gates, task="predict")
    results = summary.count_results(join_frames(results, predictor, top_k) if per_video else results)
    if target.kind in FORMATS:
        _write_label_file(predictor, images, target, results)
    else:
        beside = "rank" if predictor.ranked else "time" if per_video else ""
        rows = ResultRows.of(predictor, top_k, selection, beside, images.of_videos and not per_video)
        _write_rows(rows, target, results, resumable=not (select or per_video))
    return summary.outcome(target, USER_ERROR if summary.unread else success(predictor.run.outdated))


def _write_rows(rows: ResultRows, target: OutputTarget, results: Iterable[LabeledImage], *, resumable: bool) -> None:
    """Write rows to a target. A stop says whether parts, which another command writes, are `resumable`."""
    unfinished = f"stopped; {target} is not written"
    if resumable and target.path is not None:
        unfinished += ", but with --output=FOLDER/ the same command would resume"
    with stop_explained(lambda: unfinished):
        rows.write(target, results)


@contextlib.contextmanager
def stop_explained(sentence: Callable[[], str]) -> Iterator[None]:
    """Replace the text of a KeyboardInterrupt, to say what was done and what the next command does."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(sentence()) from error


def _require_videos_possible(images: Images, predictor: Predictor, target: OutputTarget, *, per_video: bool) -> None:
    """Raise UserError if the output cannot hold frames of videos, or they cannot be joined."""
    if images.of_videos and target.kind in FORMATS:
        raise UserError(
            f"--format={target.kind} is for image files, and --images has videos; write a table, as with "
            "--output=FILE.csv, or give --images without videos"
        )
    if per_video and not images.of_videos:
        raise UserError("--per-video is for videos, and --images has none; name videos, or give --every for a folder")
    if per_video and predictor.ranked:
        raise UserError("--per-video joins scores, not ranks; set a threshold, as with --config.eval.threshold=0.1")


def join_frames(
    results: Iterable[LabeledImage], predictor: Predictor, top_k: int | None = None
) -> Iterator[LabeledImage]:
    """Yield one result for the frames of each video: of each label the highest score, and its time. Images stay.

    Labels are assigned by these scores. A video has the error of its first frame that cannot be read.
    """
    moments = ((find_moment(result.image), result) for result in results)
    for video, frames in itertools.groupby(moments, key=lambda pair: pair[0] and pair[0].video):
        if video:
            yield _join_video(video, frames, predictor, top_k)
        else:
            yield from (result for _, result in frames)


def _join_video(
    video: str, frames: Iterable[tuple[Moment, LabeledImage]], predictor: Predictor, top_k: int | None
) -> LabeledImage:
    scores, times, error = np.full(len(predictor.names), -np.inf), np.zeros(len(predictor.names)), ""
    for moment, frame in frames:
        error = error or frame.error
        if frame.scores is not None:
            values = np.array(list(frame.scores.values()))
            times[values > scores] = moment.time
            scores = np.maximum(scores, values)
    if np.isinf(scores).all():
        return LabeledImage(video, error=error)
    by_name = predictor.by_name
    labels, attributes = predictor.assign(scores, top_k)
    return LabeledImage(video, labels, by_name(scores), error, times=by_name(times), attributes=attributes)


# ------------------------------------------------------------------------------------------------------------- target
def choose_target(
    output: str | None,
    folder: RunFolder,
    *,
    json_lines: bool = False,
    gates: bool = False,
    form: str | None = None,
    select: bool = False,
) -> OutputTarget:
    """Return where predictions are written: a .csv or .jsonl file, standard output, or the file of a labeling tool.

    Args:
      output: a path, or - for standard output. If it is None or "" and `json_lines` is False, the target is
        predictions.csv in `folder`, or selected.csv with `select`. If somebody has edited an earlier file of this name,
        it is kept under another name.
      json_lines: if True, standard output is the default target, and it gets JSON lines instead of CSV.
      gates: whether the rows have gate weights. The default suffix is then .jsonl, as lists do not fit into CSV cells.
      form: name of the format of a labeling tool, which requires `output`; None = CSV or JSON lines.
      select: whether the rows have the ranks of selected images.

    Raises:
      UserError: the suffix is neither .csv nor .jsonl, the file cannot be written, or gate weights are requested in
        another format than JSON lines.
    """
    if form:
        target = OutputTarget(output_path(output, form), form)
    elif output == STANDARD_OUTPUT or (json_lines and not output):
        target = OutputTarget(None, "jsonl" if json_lines else "csv")
    elif output:
        target = _file_target(output)
    else:
        kind = "jsonl" if gates else "csv"
        target = OutputTarget(folder / f"{'selected' if select else 'predictions'}.{kind}", kind, is_named=False)
    if gates and target.kind != "jsonl":
        raise UserError("--gates needs JSON lines; give --output=FILE.jsonl, or --output=- with --json")
    return target


def _file_target(output: str) -> OutputTarget:
    path = epath.Path(output)
    is_possible = not path.is_dir() and ("://" in output or path.parent.is_dir())
    if path.suffix not in (".csv", ".jsonl") or not is_possible:
        raise UserError(
            f"--output={path} should be a .csv or .jsonl file in a folder that exists, or - for standard output"
        )
    return OutputTarget(path, path.suffix[1:])


# ---------------------------------------------------------------------------------------------------------------- files
def _write_label_file(
    predictor: Predictor, images: Images, target: OutputTarget, results: Iterable[LabeledImage]
) -> None:
    """Write the predictions of the readable images in the format `target.kind` of a labeling tool.

    Raises UserError if the format cannot represent the names of the images or labels.
    """
    form, names = FORMATS[target.kind], list(ImageNames(images))
    file = LabelFile(target.path, predictor.names, names, version=predictor.version, tree=predictor.tree)
    form.require(file)
    entries = (
        LabelEntry(result.image, dict.fromkeys(result.labels, POSITIVE), result.scores)
        for result in results
        if not result.error
    )
    if note := form.write(file, entries):
        status(note)


# ------------------------------------------------------------------------------------------------------------ summary
class Summary:
    """The summary that `mlmoe predict` prints: the first images with their labels, the errors, and the speed.

    `describe` returns the text of a result, or is None if results are not shown. `done` is what an image with a result
    is.
    """

    def __init__(self, usages: Sequence[Usage], describe: Callable[[Any], str] | None, done: str = "labeled"):
        self.usages, self.describe, self.done = usages, describe, done
        self.images, self.unread, self.started = 0, 0, time.perf_counter()
        self.lines: list[str] = []

    def count_results(self, results: Iterable[Any]) -> Iterator[Any]:
        """Yield the results, and add each to the summary."""
        for result in results:
            yield result
            self.images += 1
            if self.describe and self.images <= PRINTED_IMAGES:
                shown = "unreadable" if result.error else self.describe(result)
                self.lines.append(printable(f"{result.image}  {shown}"))
            if result.error:
                self.unread += 1
                if self.unread <= PRINTED_IMAGES:
                    status(f"error: {printable(result.error)}")

    def outcome(self, target: OutputTarget | str, exit_code: int) -> Outcome:
        """Return the summary of images that were written to `target`.

        If the rows were written to standard output, print one line to stderr, and return only the exit code.
        """
        read = self.images - self.unread
        rate = self.images / max(1e-9, time.perf_counter() - self.started)
        done = f"{read:,} of {quantity(self.images, 'image')} {self.done}"
        sentence = f"{done} ({rate:.3g} images/s); written to {target}"
        if isinstance(target, OutputTarget) and target.path is None:
            status(sentence)
            return Outcome(exit_code=exit_code)
        numbers = {"images": self.images, self.done: read, "unreadable": self.unread}
        usage = [account.document() for account in self.usages]
        document = {**numbers, "usage": usage, "images_per_second": rate, "output": str(target)}
        shown = ["\n".join(self.lines), sentence] if self.lines else [sentence]
        return Outcome(shown, document, exit_code)


def describe_labels(result: LabeledImage) -> str:
    """Return the labels of an image that was read, with their scores or ranks."""
    if not result.labels:
        return "(no label reaches its threshold)"
    if result.ranks:
        return "  ".join(f"{label} {result.ranks[label]:+.1f}" for label in result.labels)
    best = sorted(result.labels, key=result.scores.__getitem__, reverse=True)
    return "  ".join(f"{label} {100 * result.scores[label]:.0f} %" for label in best)
