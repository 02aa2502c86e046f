"""Write `docs/papers.md` from the data files of the papers.

python docs/write_papers.py
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from mlmoe_jax.apps.papers.paper import MISSING, PAPERS, Paper, Result, Row, load, markdown_table

PAGE = Path(__file__).with_name("papers.md")
_WIDTH = 120
_WIDEST = 10  # a table with more columns is shown with rows and columns exchanged

_INTRODUCTION = """\
# Published numbers

Every number of the tables and figures of both papers, with the details that limit its comparability, and with the
number that this package reaches where there is one. Metrics are in percent. `?` marks a number that could not simply be
read, – one that is missing; the column *notes* refers to the list at the beginning of the paper's section.

One command trains what a table needs, and compares it with the paper:

```bash
# all configs of ML-VPT's table 4; --dry-run prints the commands instead
python -m mlmoe_jax.main --mode=reproduce --table=mlvpt.4 --root=/data/coco --dry-run
python -m mlmoe_jax.main --mode=reproduce --table=mlvpt.4 --root=/data/coco

# some rows, three seeds each
python -m mlmoe_jax.main --mode=reproduce --table=mlvpt.1 --only=ML-VPT,DINOv2-B --seeds=0,1,2

# a table with several data sets
python -m mlmoe_jax.main --mode=reproduce --table=mlvpt.3 --root=nuswide=/data/nuswide,vg256=/data/vg

# the same grid on the embedded data set, in minutes
python -m mlmoe_jax.main --mode=reproduce --table=drmoe.1 --dataset=digits
```

All tables share one folder (`--workdir`, by default `runs/reproduce`), in which each run has its own. A run that exists
is read and not trained again. Several processes, also on several machines with a common file system, can work on the
same folder: a run that another process trains is skipped. (Object stores have no locks; divide the rows with `--only`
there.) The folder gets the table as `mlvpt.4.csv` and `mlvpt.4.md`, and a figure also as `mlvpt.fig3.png`. Any
`--config.KEY=VALUE` applies to every run. Our metrics are those of the paper's own evaluator, computed from the scores
of the run ([evaluation.md](evaluation.md#metrics)).

`python docs/write_papers.py` writes this page.
"""


def page() -> str:
    """Return docs/papers.md."""
    return "\n".join([_INTRODUCTION, *(line for name in PAPERS for line in _paper(load(name)))])


def _paper(paper: Paper) -> Iterator[str]:
    yield f"## {paper.name}\n"
    yield _wrapped(f"{paper.source}. Metrics as by `metrics.preset={paper.data['evaluator']}`.") + "\n"
    for kind, notes in (("How numbers were read", paper.readings), ("Why numbers may differ", paper.caveats)):
        yield f"{kind}:\n"
        for note, text in notes.items():
            yield _wrapped(f"{paper.numbers[note]}. {text}", indent="   ")
        yield ""
    for result in paper.results():
        yield from _result(paper, result)


def _result(paper: Paper, result: Result) -> Iterator[str]:
    yield f"### {paper.name}, {result.title}\n"
    everywhere = f" Notes on all rows: {paper.marks(result.notes)}." if result.notes else ""
    shared = {key: text for key, text in result.rows[0].settings.items() if key not in _varying(result)}
    same = f"{', '.join(shared.values())}. " if shared else ""
    yield f"{same}`--mode=reproduce --table={result.id}`.{everywhere}\n"
    if result.columns:
        table = [_head(result), *(_line(paper, result, row) for row in result.rows)]
        if len(result.columns) > _WIDEST:
            table = [list(cells) for cells in zip(*table, strict=True)]
        texts = len(_varying(result)) if len(result.columns) <= _WIDEST else 1
        rule = ["---"] * texts + ["---:"] * (len(table[0]) - texts - 2) + ["---"] * 2
        yield from (*markdown_table(table, rule), "")


def _varying(result: Result) -> list[str]:
    """Return the settings that differ between the rows, and always the method."""
    settings = [row.settings for row in result.rows]
    return [key for key in settings[0] if key == "method" or len({one.get(key) for one in settings}) > 1]


def _head(result: Result) -> list[str]:
    names = {"dataset": "data set"}
    shown = [names.get(key, key.rpartition(".")[2]) for key in _varying(result)]
    return [*shown, *result.columns, "ours", "notes"]


def _line(paper: Paper, result: Result, row: Row) -> list[str]:
    cells = map(str, row.numbers.values())
    ours = " / ".join(MISSING if value is None else f"{value:.6g}" for value in row.ours.values()) or MISSING
    return [*(row.settings[key] for key in _varying(result)), *cells, ours, paper.marks(row.all_notes)]


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(page())
