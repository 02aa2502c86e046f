"""`--mode=compare`: the comparison of two runs as tables, as JSON and as a file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, TextIO

import numpy as np
from etils import epath

from mlmoe_jax.apps.tools.compare import RESAMPLES, Change, ComparedRun, Comparison, compare_runs, shared_splits
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.results import hidden_evaluations
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.formats import row_writer, to_json
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import Target, opened
from mlmoe_jax.runtime.text import percent, text_table

_SHOWN = 10  # rows of a printed table
# The columns of the CSV; a and b of an image as in ChangedImage.
_COLUMNS = ("split", "kind", "name", "positives", "a", "b", "difference", "low", "high", "moves")


def compare_folders(
    a: RunFolder,
    b: RunFolder,
    *,
    split: str | None = None,
    output: str | None = None,
    as_json: bool = False,
    resamples: int = RESAMPLES,
) -> int:
    """Compare two runs on one split, or on all that both have, print tables or JSON, and return the exit code.

    output: path of a .csv or .json file to write in addition. Raises UserError as `compare_runs`, and if both folders
    are the same or the output cannot be written.
    """
    if a.path == b.path:
        raise UserError(f"both --workdir are {a}; give the folders of two runs")
    if output and not output.endswith((".csv", ".json")):
        raise UserError(f"--output={output} should end in .csv or .json")
    first, second = ComparedRun.of(a), ComparedRun.of(b)
    comparisons, names = [], [split] if split else shared_splits(first, second)
    for name in names:
        try:
            comparisons.append(compare_runs(first, second, split=name, resamples=resamples))
        except UserError as error:
            if not comparisons and name == names[-1]:
                raise
            status(f"{name} is left out: {error}")
    for name in (one.split for one in comparisons):
        for folder in (a, b):
            if hidden := hidden_evaluations(folder).get(name):
                status(f"{folder}: {hidden}")
        used, other = (run.settings[name].data.difficult_eval for run in (first, second))
        if used != other:
            status(f"difficult labels of {name} count as {used} for both runs, according to data.difficult_eval of {a}")
    report = to_json({one.split: as_dict(one) for one in comparisons}, indent=2)
    if output:
        with opened(Target(epath.Path(output), "")) as file:
            _write_table(file, comparisons) if output.endswith(".csv") else file.write(report + "\n")
        status(f"written to {output}")
    print(report if as_json else "\n\n".join(map(format_comparison, comparisons)))
    return 0


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as values for JSON: fractions with all digits."""
    values = asdict(comparison)
    values |= values.pop("counts")
    for changes in (values["metrics"], values["ap"]):
        for change in changes.values():
            change["difference"] = change["b"] - change["a"]
    return values


def _write_table(file: TextIO, comparisons: Sequence[Comparison]) -> None:
    """Write one CSV: fractions with all digits, empty if undefined or if a kind of row has no such value."""
    write = row_writer(file)
    write(_COLUMNS)
    for one in comparisons:
        for row in _rows(one):
            cells = [row.get(column, "") for column in _COLUMNS]
            write("" if isinstance(cell, float) and math.isnan(cell) else cell for cell in cells)


def _rows(one: Comparison) -> Iterator[dict[str, Any]]:
    for kind, changes in (("metric", one.metrics), ("AP", one.ap)):
        for name, item in changes.items():
            row = {"split": one.split, "kind": kind, "name": name, **vars(item), "difference": item.difference}
            yield row | ({"positives": one.positives[name]} if kind == "AP" else {})
    for image in one.changed:
        row = {"split": one.split, "kind": "image", "name": image.id, "positives": len(image.labels)}
        row |= {"a": image.a, "b": image.b, "difference": image.b - image.a}
        yield row | {"moves": "; ".join(map(str, image.moves))}


def format_comparison(comparison: Comparison) -> str:
    """Return a comparison as tables in percent."""
    one, counts = comparison, comparison.counts
    others = {"only_a": "only in a", "only_b": "only in b", "unread": "without scores"}
    beside = ", ".join(f"{counts[kind]:,} {what}" for kind, what in others.items() if counts[kind])
    labels = sorted(one.ap, key=lambda name: -np.nan_to_num(abs(one.ap[name].difference), nan=-1))[:_SHOWN]
    shown = f", the {len(labels)} of {len(one.ap)} labels that changed most" if len(one.ap) > _SHOWN else ""
    lines = [
        f"{one.split}: {counts['images']:,} images in both runs" + (f" ({beside})" if beside else ""),
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
        lines.append(
            f"{100 * image.change:6.2f}  {name} ({', '.join(image.labels)})  {'; '.join(map(str, image.moves))}"
        )
    return "\n".join(lines)


def _table(title: str, changes: dict[str, Change]) -> list[str]:
    rows = [["", "a", "b", "b − a", ""]]
    for name, item in changes.items():
        low, high = percent(item.low, sign="+"), percent(item.high, sign="+")
        interval = f"[{low}, {high}]{' *' if item.clear else ''}"
        rows.append([name, percent(item.a), percent(item.b), percent(item.difference, sign="+"), interval])
    return [title, text_table(rows, align="<>>><", least=(0, 6, 6, 6, 0))]
