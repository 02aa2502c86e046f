"""`--mode=compare`: the comparison of two runs as tables, as JSON and as a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TextIO

from etils import epath

from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.compare import RESAMPLES, Change, ComparedRun, Comparison, Move, compare_split, shared_splits
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.spreadsheet import row_writer
from mlmoe_jax.runtime.storage import Target, opened, to_json
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
) -> int:
    """Compare two runs on one split, or on all that both have, and print tables, or JSON.

    output: a .csv or .json file to write in addition. Returns the exit code. Raises UserError as `compare_runs`, and if
    both folders are the same or the output cannot be written.
    """
    if a.path == b.path:
        raise UserError(f"both --workdir are {a}; give the folders of two runs")
    target = _target(output)
    first, second = ComparedRun.of(a), ComparedRun.of(b)
    splits = [split] if split else shared_splits(first, second)
    found = [compare_split(first, second, name, resamples=resamples) for name in splits]
    if first.difficult != second.difficult:
        status(f"difficult labels count as {first.difficult} for both runs, according to data.difficult_eval of {a}")
    report = {one.split: as_dict(one) for one in found}
    if target is not None:
        with opened(target) as file:
            if target.kind == "json":
                file.write(to_json(report, indent=2) + "\n")
            else:
                _write_table(file, found)
        status(f"written to {target}")
    print(to_json(report, indent=2) if as_json else "\n\n".join(map(format_comparison, found)))
    return 0


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


def _write_table(file: TextIO, comparisons: Sequence[Comparison]) -> None:
    """Write all as one CSV: fractions with all digits, empty if undefined; a and b of an image as in ChangedImage."""
    write = row_writer(file)
    write(["split", "kind", "name", "positives", "a", "b", "difference", "low", "high", "moves"])
    for one in comparisons:
        for kind, changes in (("metric", one.metrics), ("AP", one.ap)):
            for name, item in changes.items():
                numbers = map(_cell, (item.a, item.b, item.difference, item.low, item.high))
                write([one.split, kind, name, one.positives[name] if kind == "AP" else "", *numbers, ""])
        for image in one.changed:
            numbers = map(_cell, (image.a, image.b, image.b - image.a))
            moves = "; ".join(map(_as_text, image.moves))
            write([one.split, "image", image.id, len(image.labels), *numbers, "", "", moves])


def _cell(value: float) -> float | str:
    return "" if math.isnan(value) else value


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
