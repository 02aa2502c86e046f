"""Write `docs/published.md`, the numbers of the papers, from the data files of the papers.

python -m tools.docs.write_papers
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from mlmoe_jax.apps.papers.paper import PAPERS, Paper, PublishedRow, PublishedTable, load_paper, number_text
from mlmoe_jax.runtime.table import Column, Table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "published.md"
INTRODUCTION = """\
# Published numbers

All numbers of both papers, from the data files of this package. `mlmoe reproduce` trains what a table needs and prints
both numbers:

```bash
# all rows of ML-VPT, table 4; without --dry-run, it trains instead of printing the commands
mlmoe reproduce --table=mlvpt.4 --root=/data/coco --dry-run

# some rows, three seeds each; several data sets; the embedded data set, in minutes
mlmoe reproduce --table=mlvpt.1 --root=/data/coco --only=ML-VPT,DINOv2-B --seeds=0,1,2
mlmoe reproduce --table=mlvpt.3 --root=nuswide=/data/nuswide,vg256=/data/vg
mlmoe reproduce --table=drmoe.1 --dataset=digits
```

Each run has a folder below `--workdir` (default `runs/reproduce`); an existing run is read and not trained again.
Several processes can share the folder, except in an object store, which has no locks; divide the rows with `--only`
there. The table is written as `mlvpt.4.csv` and `mlvpt.4.md`. Any `--config.KEY=VALUE` applies to every run. Metrics
are computed as by the paper's own [evaluator](evaluation.md#metrics).

Numbers are in percent. `?` marks a number that could not simply be read, `–` a missing one. Rows without any number are
left out, and an empty backbone is the one above it. *ours* are the costs and label statistics of this package, in the
order of the columns. *notes* refer to the list under the paper's name. `python -m tools.docs.write_papers` writes this
page.
"""
_WIDTH = 120
_WIDEST = 10  # a table with more columns is shown with rows and columns exchanged


def page() -> str:
    """Return the text of docs/published.md."""
    return "\n".join([INTRODUCTION, *(line for name in PAPERS for line in _paper(load_paper(name)))])


def _paper(paper: Paper) -> Iterator[str]:
    tables = [result for result in paper.tables() if _is_readable(result)]
    common = set.intersection(*(set(result.notes) for result in tables if "mAP" in result.columns and result.notes))
    yield f"## {paper.name}\n"
    yield _wrapped(f"{paper.source}. Metrics as by `metrics.preset={paper.evaluator}`.") + "\n"
    for note, text in paper.notes.items():
        yield _wrapped(f"{paper.numbers[note]}. {text}", indent="   ")
    yield ""
    backbones = paper.backbones
    facts = [f"every mAP: {paper.marks(common)}"] if common else []
    facts += [f"{name}: {paper.marks(notes)}" for name, notes in backbones.items()]
    if facts:
        yield _wrapped(f"Notes on {'; '.join(facts)}.") + "\n"
    for result in tables:
        yield from _table(paper, result, common, {note for notes in backbones.values() for note in notes})
    others = [result for result in paper.tables() if not _is_readable(result)]
    yield from (
        "Without readable numbers:\n",
        *(f"* {_title(paper, one, common)}" for one in others),
        "",
    )


def _title(paper: Paper, result: PublishedTable, common: set[str]) -> str:
    notes = {*result.notes, *(note for row in result.rows for note in row.notes)} - common
    marks = f"; notes {paper.marks(notes)}" if notes else ""
    return f"{paper.name}, {result.title} (`--table={result.id}`{marks})"


def _is_readable(result: PublishedTable) -> bool:
    return any(number.certain for row in result.rows for number in row.numbers.values())


def _table(paper: Paper, result: PublishedTable, common: set[str], noted: set[str]) -> Iterator[str]:
    """Yield a table with one row for the runs that the paper prints side by side."""
    groups = result.side_by_side or ("",)
    rows = [result.rows[start : start + len(groups)] for start in range(0, len(result.rows), len(groups))]
    rows = [row for row in rows if any(number.value is not None for one in row for number in one.numbers.values())]
    varying, grouped = _varying([row[0] for row in rows]), _group_key(rows[0])
    outer = next((key for key in varying[1:] if _is_in_blocks([row[0].settings[key] for row in rows])), "")
    varying.sort(key=lambda key: key != outer)
    facts = [text for key, text in rows[0][0].settings.items() if key not in (*varying, grouped)]
    facts += [f"cells: {'/'.join(groups)}"] if grouped else []
    if own := set(result.notes) - common:
        facts.append(f"notes on all rows: {paper.marks(own)}")
    place, _, caption = result.title.partition(": ")
    yield f"### {paper.name}, {place if caption else 'originals'}\n"
    yield _wrapped(f"{caption or place}. {'; '.join([f'`--table={result.id}`', *facts])}.") + "\n"
    marks = [paper.marks({note for one in row for note in one.all_notes} - noted - {"unread"}) for row in rows]
    names = {"dataset": "data set"}
    head = [names.get(key, key.rpartition(".")[2]) for key in varying]
    table, above = [[*head, *result.columns]], ""
    for row in rows:
        texts = [row[0].settings[key].partition("=")[2] or row[0].settings[key] for key in varying]
        if outer and texts[0] == above:
            texts[0] = ""
        else:
            above = texts[0]
        table.append([*texts, *("/".join(str(one.numbers[column]) for one in row) for column in result.columns)])
    if any(row[0].ours for row in rows):
        table[0].append("ours")
        for cells, row in zip(table[1:], rows, strict=True):
            values = (number_text(value) if value is None else f"{value:.6g}" for value in row[0].ours.values())
            cells.append("/".join(values))
    align = ["<"] * len(varying) + [">"] * (len(table[0]) - len(varying))
    if any(marks):
        table, align = [[*cells, mark] for cells, mark in zip(table, ["notes", *marks], strict=True)], [*align, "<"]
    if len(result.columns) > _WIDEST:
        table = [[name.removeprefix("AP "), *cells] for name, *cells in zip(*table, strict=True)]
        align = ["<", *[">"] * len(rows)]
    heading = [Column(name, align=one) for name, one in zip(table[0], align, strict=True)]
    yield Table(heading, table[1:]).markdown()


def _group_key(row: Sequence[PublishedRow]) -> str:
    """Return the setting in which the runs of one row differ, or ""."""
    return next((key for key in row[0].settings if len({one.settings[key] for one in row}) > 1), "")


def _varying(rows: Sequence[PublishedRow]) -> list[str]:
    """Return the settings that differ between the rows; the method if there is none."""
    settings = [row.settings for row in rows]
    varying = [key for key in settings[0] if len({one.get(key) for one in settings}) > 1]
    return varying or ["method"]


def _is_in_blocks(values: Sequence[str]) -> bool:
    """Return whether equal values are in adjacent rows, at least two rows per value on average."""
    blocks = 1 + sum(one != other for one, other in itertools.pairwise(values))
    return blocks == len(set(values)) and 2 * blocks <= len(values)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(page())
