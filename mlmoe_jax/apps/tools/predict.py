"""`--mode=predict`: label image files, and write one row per image to a CSV or JSON lines file."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TextIO

import numpy as np
from etils import epath

from mlmoe_jax.apps.tools.image_list import find_images
from mlmoe_jax.apps.tools.select_images import SELECTION_COLUMNS, select_images
from mlmoe_jax.config.defaults import default_config
from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.sources.formats import FORMATS, Entry, LabelFile, output_path
from mlmoe_jax.errors import DONE, OUTDATED, USER_ERROR, UserError
from mlmoe_jax.inference.predict import BATCH, Predictor, Result, by_label
from mlmoe_jax.runs.folder import THRESHOLDS, RunFolder
from mlmoe_jax.runs.restore import BEST
from mlmoe_jax.runtime import distributed, formats
from mlmoe_jax.runtime.formats import to_json
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.storage import STANDARD_OUTPUT, Target, open_target
from mlmoe_jax.runtime.text import printable, quantity, text_table

MOST_ROWS = 20  # maximum number of printed rows, and of printed errors


def predict_files(
    folder: RunFolder,
    items: Sequence[str],
    output: str | None,
    overrides: Sequence[tuple[str, str]],
    *,
    checkpoint: str = BEST,
    batch_size: int | None = None,
    top_k: int | None = None,
    gates: bool = False,
    as_json: bool = False,
    form: str | None = None,
    select: str | None = None,
    count: int = 0,
) -> int:
    """Label images, write one row per image, and print a summary.

    The summary is a short table on stdout, or with `as_json` the numbers of images. If the rows are written to stdout,
    which is the default with `as_json`, it is one line on stderr.

    Args:
      items: see image_list.py.
      output: see `choose_target`.
      overrides, checkpoint: as in `Predictor.from_run`.
      batch_size: number of images at a time, by default 32 per device.
      top_k, gates: as in `Predictor.stream`.
      as_json: print JSON.
      form: name of the format of a labeling tool; None for CSV or JSON lines.
      select, count: `method` and `count` of `select_images`, to label only these images; None for all.

    Returns:
      the exit code: 0; 2 if an image could not be read, after labeling the readable images; 3 if the newest checkpoint
      is damaged and an older checkpoint was used.
    """
    target = choose_target(output, folder, as_json=as_json, gates=gates, form=form, select=bool(select))
    folder.require_model()
    # Only the first process has a standard input. If it finds no image, it fails with the reason, which ends the job.
    paths = distributed.broadcast_from_first(find_images(items, bool(form)) if distributed.is_first() else None)
    predictor = Predictor.from_run(folder.path, overrides, checkpoint=checkpoint)
    if top_k is None and target.kind == "csv":
        _require_other_names(predictor.names, {*_COLUMNS, *(SELECTION_COLUMNS if select else ())})
    file = _label_file(form, target, predictor, paths)
    writes, size, selection = distributed.is_first(), _batch_size(predictor, paths, batch_size), {}
    if select:
        paths = list(selection := select_images(predictor, paths, select, count, size))
        size, file = _batch_size(predictor, paths, batch_size), file and replace(file, images=paths)
    summary = _Summary(len(paths))
    with contextlib.closing(Progress("predict", math.ceil(len(paths) / size), size)) as progress:
        results = predictor.stream(paths, batch_size=size, top_k=top_k, gates=gates, progress=progress)
        if writes and top_k is None:
            _report_thresholds(predictor, folder, overrides)
        results = summary.counted(results)
        note = _write(target, file, predictor.names, top_k, selection, results) if writes else deque(results, maxlen=0)
    if writes:
        summary.print(target, as_json=as_json)
    if note:
        status(note)
    if summary.unread:
        return USER_ERROR
    return OUTDATED if predictor.run.outdated else DONE


def _require_other_names(names: Collection[str], columns: Collection[str]) -> None:
    if same := set(names) & set(columns):
        raise UserError(
            f"the label {min(same)} has the name of a column of the CSV; write --output=….jsonl, or use --top-k"
        )


def _label_file(form: str | None, target: Target, predictor: Predictor, paths: Sequence[str]) -> LabelFile | None:
    if not form:
        return None
    file = LabelFile(target.path, predictor.names, paths, version=predictor.version)
    FORMATS[form].require(file)
    return file


def _batch_size(predictor: Predictor, paths: Sequence[str], size: int | None) -> int:
    devices = predictor.run.mesh.size
    return even_batch(len(paths), size or BATCH * devices, devices)


def even_batch(images: int, most: int, devices: int) -> int:
    """Return a batch size of about `most`, a multiple of `devices`, for which the last batch needs little padding."""
    return devices * math.ceil(images / math.ceil(images / most) / devices)


def _report_thresholds(predictor: Predictor, folder: RunFolder, overrides: Sequence[tuple[str, str]]) -> None:
    if (predictor.thresholds == default_config().eval.threshold).all():
        return
    finite = np.unique(predictor.thresholds[np.isfinite(predictor.thresholds)])
    text = " to ".join(f"{value:.3g}" for value in finite[[0, -1][: len(finite)]])
    never = int(np.count_nonzero(np.isinf(predictor.thresholds)))
    text = " and ".join(filter(None, [text, f"never for {quantity(never, 'label')}" if never else ""]))
    fitted = f", fitted on {predictor.source['split']}" if "split" in predictor.source else ""
    place = f"{folder / THRESHOLDS}{fitted}"
    status(f"thresholds: {text} ({'--config.eval.threshold' if 'eval.threshold' in dict(overrides) else place})")


# ------------------------------------------------------------------------------------------------------------- target
def choose_target(
    output: str | None,
    folder: RunFolder,
    *,
    as_json: bool = False,
    gates: bool = False,
    form: str | None = None,
    select: bool = False,
) -> Target:
    """Return the target of `--output`: a .csv or .jsonl file, or - for standard output (CSV, or JSONL if `as_json`).

    The default is standard output if `as_json`, else predictions.csv in the run folder, or selected.csv with `select`,
    or .jsonl with gates, whose weights are lists, which do not fit into CSV cells. Raises UserError for other suffixes,
    and if the file cannot be written. A format of a labeling tool, `form`, has a file or folder of its own, without
    a default.
    """
    if form:
        if gates:
            raise UserError(f"--gates needs JSON lines; leave out --format={form}")
        return Target(output_path(output, form), form)
    if output == STANDARD_OUTPUT or (as_json and not output):
        target = Target(None, "jsonl" if as_json else "csv")
    else:
        name = "selected" if select else "predictions"
        path = epath.Path(output or folder / f"{name}.{'jsonl' if gates else 'csv'}")
        if path.suffix not in (".csv", ".jsonl"):
            raise UserError(f"--output={path} should end in .csv or .jsonl, or be - for standard output")
        if path.is_dir() or (output and "://" not in str(path) and not path.parent.is_dir()):
            raise UserError(f"--output={path} should be a file in a folder that exists")
        target = Target(path, path.suffix[1:])
    if gates and target.kind == "csv":
        raise UserError("--gates needs JSON lines; give --output=FILE.jsonl, or --output=- with --json")
    return target


# --------------------------------------------------------------------------------------------------------------- rows
_COLUMNS = ("image", "labels", "error")  # columns of a CSV before the scores
NOTHING: Mapping[str, Mapping] = MappingProxyType({})


def _write(
    target: Target,
    file: LabelFile | None,
    names: Sequence[str],
    top_k: int | None,
    selection: Mapping[str, Mapping],
    results: Iterable[Result],
) -> str:
    """Write the results to the target, or to the file of a labeling tool; return a sentence about further files."""
    if file:  # without the images that could not be read
        read = (result for result in results if not result.error)
        entries = (Entry(result.image, dict.fromkeys(result.labels, POSITIVE), result.scores) for result in read)
        return FORMATS[target.kind].write(file, entries)
    with open_target(target) as rows:
        write = row_writer(rows, target.kind, names, top_k, selection)
        for result in results:
            write(result)
    return ""


def row_writer(
    file: TextIO, kind: str, names: Sequence[str], top_k: int | None = None, selection: Mapping[str, Mapping] = NOTHING
) -> Callable[[Result], None]:
    """Return a function that writes a result as a row of `kind` csv or jsonl; write the heading of a CSV.

    Columns of a CSV: image, labels (see `formats.join_names`), error and one score per label; with `top_k`, the
    number of labels per result: image, error, and label_1, score_1, label_2, …, best first.
    Keys in JSONL: image, and either error, or labels and scores (with `top_k` only of the best labels, best first),
    and gates {name: {label: weights}} if a result has them.
    The values of `select_images` for an image, if any, follow its name.
    """
    if kind == "jsonl":
        return lambda result: print(json.dumps(_json_row(result, names, top_k, selection), allow_nan=False), file=file)
    write_row = formats.row_writer(file)
    ranks = range(1, (top_k or 0) + 1)
    ranked = [column for rank in ranks for column in (f"label_{rank}", f"score_{rank}")]
    added = SELECTION_COLUMNS if selection else ()
    write_row(["image", *added, *(["error", *ranked] if top_k else [*_COLUMNS[1:], *names])])

    def write(result: Result) -> None:
        score = {name: f"{value:.6f}" for name, value in (result.scores or {}).items()}
        image = [result.image, *(selection[result.image][column] for column in added)]
        if top_k:
            cells = [cell for name in result.labels for cell in (name, score[name])]
            write_row([*image, result.error, *(cells or [""] * len(ranked))])
        else:
            labels = formats.join_names(result.labels)
            write_row([*image, labels, result.error, *(score.get(name, "") for name in names)])

    return write


def _json_row(
    result: Result, names: Sequence[str], top_k: int | None, selection: Mapping[str, Mapping]
) -> dict[str, Any]:
    if result.error:
        return {"image": result.image, "error": result.error}
    scores = result.scores or {}
    row: dict[str, Any] = {"image": result.image, **selection.get(result.image, {}), "labels": result.labels}
    row["scores"] = {name: scores[name] for name in result.labels} if top_k else scores
    if result.gates is not None:
        row["gates"] = {gate: by_label(names, weights) for gate, weights in result.gates.items()}
    return row


# ------------------------------------------------------------------------------------------------------------ summary
class _Summary:
    """The printed summary of a prediction: its first rows, the errors, and the speed."""

    def __init__(self, images: int):
        self.images, self.unread, self.started = images, 0, time.perf_counter()
        self.first: list[Result] = []

    def counted(self, results: Iterable[Result]) -> Iterator[Result]:
        """Yield the results, and add each to the summary."""
        for result in results:
            yield result
            self._add(result)

    def _add(self, result: Result) -> None:
        if len(self.first) < MOST_ROWS:
            self.first.append(result)
        if result.error:
            self.unread += 1
            if self.unread <= MOST_ROWS and distributed.is_first():
                status(f"error: {printable(result.error)}")

    def print(self, target: Target, *, as_json: bool) -> None:
        """Print the summary to stdout, with `as_json` only numbers; log it if the rows are written to stdout."""
        labeled, rate = self.images - self.unread, self.images / max(1e-9, time.perf_counter() - self.started)
        if self.unread > MOST_ROWS:
            where = "" if target.kind in FORMATS else f"; {target} contains all of them"
            status(f"… and {self.unread - MOST_ROWS:,} more errors{where}")
        sentence = f"{labeled:,} of {quantity(self.images, 'image')} labeled ({rate:.3g} images/s); written to {target}"
        if target.path is None:
            status(sentence)
        elif as_json:
            numbers = {"images": self.images, "labeled": labeled, "unreadable": self.unread}
            print(to_json({**numbers, "images_per_second": rate, "output": str(target)}, indent=2))
        else:
            print(self._table(), sentence, sep="\n")

    def _table(self) -> str:
        rows = []
        for result in self.first:
            scores = result.scores or {}
            best = sorted(result.labels, key=scores.__getitem__, reverse=True)
            text = "  ".join(f"{printable(label)} {100 * scores[label]:.0f} %" for label in best)
            name = printable(result.image.encode(errors="surrogateescape").decode(errors="replace"))
            rows.append([name, "unreadable" if result.error else text or "(no label reaches its threshold)"])
        if self.images > len(self.first):
            rows.append([f"… and {self.images - len(self.first)} more"])
        return text_table(rows, align="<")
