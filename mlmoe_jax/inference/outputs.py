"""The result of a prediction, and the files and streams it is written to, one row per image."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import numpy as np
from etils import epath

from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime import spreadsheet
from mlmoe_jax.runtime.targets import STANDARD_OUTPUT, Target


@dataclass(frozen=True)
class Result:
    """The result for one image.

    labels: those at or above their threshold, in the order of the model; with `top_k`, the best ones, best first.
    scores: label -> probability, for all labels.
    error: the reason if the image could not be read; all other fields except `image` are then empty.
    gates: name of the gate -> routing weights f32[K,E], if requested.
    """

    image: str
    labels: tuple[str, ...] = ()
    scores: dict[str, float] | None = None
    error: str = ""
    gates: dict[str, np.ndarray] | None = field(default=None, compare=False)


def choose_target(output: str | None, folder: RunFolder, *, as_json: bool = False, gates: bool = False) -> Target:
    """Return the target of `--output`: a .csv or .jsonl file, or - for standard output (CSV, or JSONL if `as_json`).

    The default is standard output if `as_json`, else predictions.csv in the run folder, or predictions.jsonl with
    gates: the weights of a label are a list, which does not fit into a CSV cell, and rows can be written one by one,
    unlike an .npz. Raises UserError for other suffixes, and if the file cannot be written.
    """
    if output == STANDARD_OUTPUT or (as_json and not output):
        target = Target(None, "jsonl" if as_json else "csv")
    else:
        path = epath.Path(output or folder / f"predictions.{'jsonl' if gates else 'csv'}")
        if path.suffix not in (".csv", ".jsonl"):
            raise UserError(f"--output={path} should end in .csv or .jsonl, or be - for standard output")
        if path.is_dir():
            raise UserError(f"--output={path} is a folder; name a file")
        if output and "://" not in str(path) and not path.parent.is_dir():
            raise UserError(f"there is no folder {path.parent} to write {path.name} into")
        target = Target(path, path.suffix[1:])
    if gates and target.kind == "csv":
        raise UserError("--gates needs JSON lines; give --output=FILE.jsonl, or --output=- with --json")
    return target


# --------------------------------------------------------------------------------------------------------------- rows
_COLUMNS = ("image", "labels", "error")  # of a CSV, before the scores


def require_distinct_columns(names: Sequence[str]) -> None:
    """Raise UserError if a label has the name of another column of a CSV with a column per label."""
    if taken := [name for name in names if name in _COLUMNS]:
        raise UserError(
            f"the label {taken[0]} has the name of a column of the CSV; write --output=….jsonl, or use --top-k"
        )


def row_writer(file: TextIO, kind: str, names: Sequence[str], top_k: int | None = None) -> Callable[[Result], None]:
    """Return a function that writes a result as a row of `kind` csv or jsonl; write the heading of a CSV.

    Columns of a CSV: image, labels (see `spreadsheet.join_names`), error and one score per label; with top_k, the
    number of labels per result: image, error, and label_1, score_1, label_2, …, best first.
    Keys in JSONL: image, and either error, or labels and scores (with top_k only those of the best labels, best first),
    and gates {name: {label: weights}} if a result has them.
    """
    return _jsonl_writer(file, names, top_k) if kind == "jsonl" else _csv_writer(file, names, top_k)


def _csv_writer(file: TextIO, names: Sequence[str], top_k: int | None) -> Callable[[Result], None]:
    write_row = spreadsheet.row_writer(file)
    ranks = range(1, (top_k or 0) + 1)
    ranked = [column for rank in ranks for column in (f"label_{rank}", f"score_{rank}")]
    write_row(["image", "error", *ranked] if top_k else [*_COLUMNS, *names])

    def write(result: Result) -> None:
        score = {name: f"{value:.6f}" for name, value in (result.scores or {}).items()}
        if not top_k:
            labels = spreadsheet.join_names(result.labels)
            write_row([result.image, labels, result.error, *(score.get(n, "") for n in names)])
            return
        cells = [cell for name in result.labels for cell in (name, score[name])]
        write_row([result.image, result.error, *(cells or [""] * len(ranked))])

    return write


def _jsonl_writer(file: TextIO, names: Sequence[str], top_k: int | None) -> Callable[[Result], None]:
    def write(result: Result) -> None:
        row: dict[str, Any] = {"image": result.image}
        if result.error:
            row["error"] = result.error
        else:
            row["labels"] = result.labels
            scores = result.scores or {}
            row["scores"] = {name: scores[name] for name in result.labels} if top_k else scores
            if result.gates is not None:
                row["gates"] = {gate: by_label(names, weights) for gate, weights in result.gates.items()}
        file.write(json.dumps(row, allow_nan=False) + "\n")

    return write


def by_label(names: Sequence[str], weights: np.ndarray) -> dict[str, list[float]]:
    """Return label -> weights of f32[K,E], rounded: six digits suffice and take a third of the space."""
    return dict(zip(names, np.round(weights.astype(np.float64), 6).tolist(), strict=True))
