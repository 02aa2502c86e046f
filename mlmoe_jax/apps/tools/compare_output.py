"""`--mode=compare`: the comparison of two runs as tables, as JSON and as a file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from etils import epath

from mlmoe_jax.apps.tools import compare_pairs
from mlmoe_jax.apps.tools.compare import (
    RESAMPLES,
    Change,
    ComparedRun,
    Comparison,
    MatchedImages,
    Move,
    compare_matched,
    match_images,
    shared_splits,
)
from mlmoe_jax.apps.tools.compare_pairs import MeasuredPairs, pairs_of_runs
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.results import hidden_evaluations
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.spreadsheet import row_writer
from mlmoe_jax.runtime.storage import to_json
from mlmoe_jax.runtime.targets import Target, opened
from mlmoe_jax.runtime.text import percent, text_table

_SHOWN = 10  # rows of a printed table


def compare_folders(
    a: RunFolder,
    b: RunFolder,
    *,
    split: str | None = None,
    output: str | None = None,
    as_json: bool = False,
    resamples: int = RESAMPLES,
    pairs: str = "",
) -> int:
    """Compare two runs on one split, or on all that both have, and print tables, or JSON.

    output: a .csv or .json file to write in addition. pairs: pairs of labels, see `compare_pairs.pairs_of_runs`.
    Returns the exit code. Raises UserError as `compare_runs` and `pairs_of_runs`, and if both folders are the same or
    the output cannot be written.
    """
    if a.path == b.path:
        raise UserError(f"both --workdir are {a}; give the folders of two runs")
    target = _target(output)
    first, second = ComparedRun.of(a), ComparedRun.of(b)
    found = []
    for matched in [match_images(first, second, split)] if split else _matched(first, second):
        of_pairs = pairs_of_runs(first, second, matched, pairs=pairs)
        found.append((compare_matched(first, second, matched, resamples=resamples), of_pairs))
    for name in (one.split for one, _ in found):
        for folder in (a, b):
            if hidden := hidden_evaluations(folder).get(name):
                status(f"{folder}: {hidden}")
        if (used := first.difficult(name)) != second.difficult(name):
            status(f"difficult labels of {name} count as {used} for both runs, according to data.difficult_eval of {a}")
    report = {one.split: as_dict(one) | {"label_pairs": compare_pairs.as_dict(of_pairs)} for one, of_pairs in found}
    if target is not None:
        with opened(target) as file:
            if target.kind == "json":
                file.write(to_json(report, indent=2) + "\n")
            else:
                _write_table(file, found)
        status(f"written to {target}")
    tables = (format_comparison(one) + "\n\n" + compare_pairs.format_pairs(of_pairs) for one, of_pairs in found)
    print(to_json(report, indent=2) if as_json else "\n\n".join(tables))
    return 0


def _matched(first: ComparedRun, second: ComparedRun) -> list[MatchedImages]:
    """Return the images of each shared split; splits that cannot be matched are told and left out, unless all are."""
    found, why = [], None
    for name in shared_splits(first, second):
        try:
            found.append(match_images(first, second, name))
        except UserError as error:
            status(f"{name} is left out: {error}")
            why = error
    if not found:
        raise why
    return found


def _target(output: str | None) -> Target | None:
    if output is None:
        return None
    path = epath.Path(output)
    if path.suffix not in (".csv", ".json"):
        raise UserError(f"--output={output} should end in .csv or .json")
    if "://" not in output and not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} to write {path.name} into")
    return Target(path, path.suffix[1:])


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as values for JSON: fractions with all digits."""

    def change(item: Change) -> dict[str, float]:
        return {**vars(item), "difference": item.difference}

    flat = {}
    for name, value in vars(comparison).items():
        flat |= vars(value) if name == "counts" else {name: value}
    return flat | {
        "metrics": {name: change(item) for name, item in comparison.metrics.items()},
        "ap": {name: change(item) for name, item in comparison.ap.items()},
        "changed": [vars(image) | {"moves": [vars(move) for move in image.moves]} for image in comparison.changed],
    }


# The columns of the CSV; a and b of an image as in ChangedImage.
_COLUMNS = ("split", "kind", "name", "positives", "a", "b", "difference", "low", "high", "moves")
_RUN_INTERVALS = ("a_low", "a_high", "b_low", "b_high")


def _write_table(file: TextIO, found: Sequence[tuple[Comparison, MeasuredPairs]]) -> None:
    """Write all as one CSV: fractions with all digits, empty if undefined or if a kind of row has no such value."""
    write, columns = row_writer(file), (*_COLUMNS, *_RUN_INTERVALS)
    write(columns)
    for one, of_pairs in found:
        for row in (*_rows(one), *compare_pairs.table_rows(of_pairs)):
            cells = {"split": one.split} | {column: _cell(value) for column, value in row.items()}
            write(cells.get(column, "") for column in columns)


def _rows(one: Comparison) -> Iterator[dict[str, Any]]:
    for kind, changes in (("metric", one.metrics), ("AP", one.ap)):
        for name, item in changes.items():
            positives = {"positives": one.positives[name]} if kind == "AP" else {}
            yield {"kind": kind, "name": name, **positives, **vars(item), "difference": item.difference}
    for image in one.changed:
        of_runs = {"a": image.a, "b": image.b, "difference": image.b - image.a}
        moves = "; ".join(map(_as_text, image.moves))
        yield {"kind": "image", "name": image.id, "positives": len(image.labels), **of_runs, "moves": moves}


def _cell(value: Any) -> Any:
    return "" if isinstance(value, float) and math.isnan(value) else value


def format_comparison(comparison: Comparison) -> str:
    """Return a comparison as tables in percent."""
    one = comparison
    beside = [
        f"{count:,} {what}"
        for count, what in (
            (one.counts.only_a, "only in a"),
            (one.counts.only_b, "only in b"),
            (one.counts.unread, "without scores"),
        )
        if count
    ]
    labels = sorted(one.ap, key=lambda name: -_size(one.ap[name].difference))[:_SHOWN]
    shown = f", the {len(labels)} of {len(one.ap)} labels that changed most" if len(one.ap) > _SHOWN else ""
    lines = [
        f"{one.split}: {one.counts.images:,} images in both runs" + (f" ({', '.join(beside)})" if beside else ""),
        f"a = {one.a}",
        f"b = {one.b}",
        f"[95 % interval of b − a over {one.resamples:,} resamples of the images], * if it excludes 0",
        *_table("metric, %", one.metrics),
        "",
        *_table(f"AP, %{shown}", {name: one.ap[name] for name in labels}),
        "",
        "images that changed most: mean change of a probability, (present labels), label a → b, + closer to the truth",
    ]
    for image in one.changed[:_SHOWN]:
        name = image.id.encode(errors="surrogateescape").decode(errors="replace")
        moves = "; ".join(map(_as_text, image.moves))
        lines.append(f"{100 * image.change:6.2f}  {name} ({', '.join(image.labels)})  {moves}")
    return "\n".join(lines)


def _table(title: str, changes: dict[str, Change]) -> list[str]:
    rows = [["", "a", "b", "b − a", ""]]
    for name, item in changes.items():
        low, high = percent(item.low, sign="+"), percent(item.high, sign="+")
        interval = f"[{low}, {high}]{' *' if item.clear else ''}"
        rows.append([name, percent(item.a), percent(item.b), percent(item.difference, sign="+"), interval])
    return [title, text_table(rows, align="<>>><", least=(0, 6, 6, 6, 0))]


def _as_text(move: Move) -> str:
    sign = "+" if move.gain > 0 else "−"
    return f"{sign} {move.label} {100 * move.a:.0f} → {100 * move.b:.0f} %"


def _size(difference: float) -> float:
    return -1.0 if math.isnan(difference) else abs(difference)
