"""The runs of `--mode=reproduce`, and the equivalent commands.

Only the data files of the papers are read, so --dry-run answers at once.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ml_collections import ConfigDict

from mlmoe_jax.apps.papers.paper import (
    MINUS,
    Paper,
    PublishedRow,
    PublishedTable,
    Recipe,
    filter_rows,
    find_table,
)
from mlmoe_jax.config.loading import load_config
from mlmoe_jax.errors import UserError

_PROGRAM = "python -m mlmoe_jax.main"
WORKDIR = "runs/reproduce"  # one folder for all tables: they share runs


@dataclass(frozen=True)
class Request:
    """A published table, its rows to train, and the options of the command.

    Attributes:
      paper, table: the table and its paper.
      rows: the rows to train.
      dataset: another data set for all rows, or "".
      seeds: seeds of every run; () = the seed of its config.
      roots: data set -> folder; "" -> the folder of all data sets.
      overrides: config keys and values for every run.
    """

    paper: Paper
    table: PublishedTable
    rows: Sequence[PublishedRow]
    dataset: str
    seeds: Sequence[int]
    roots: Mapping[str, str]
    overrides: Sequence[tuple[str, str]]

    @property
    def name(self) -> str:
        """The name of its files, such as mlvpt.4, or mlvpt.4-digits with another data set."""
        return f"{self.table.id}-{self.dataset}" if self.dataset else self.table.id

    def repeat(self, recipe: Recipe | None) -> list[Recipe]:
        """Return the runs of a recipe, one per seed; [] without a recipe."""
        if recipe is None:
            return []
        return [recipe.with_seed(seed) for seed in self.seeds] or [recipe]

    @property
    def runs(self) -> list[Recipe]:
        """The different trainings of the rows, in order."""
        recipes = [recipe for row in self.rows for recipe in (row.subtracted, row.recipe)]
        return list(dict.fromkeys(run for recipe in recipes for run in self.repeat(recipe)))

    def run_overrides(self, run: Recipe) -> list[tuple[str, str]]:
        """Return the overrides of its row, its data folder and the request."""
        root = self.roots.get(run.dataset, self.roots.get(""))
        return [*run.overrides, *([("data.root", root)] if root else []), *self.overrides]

    def load_config(self, run: Recipe) -> ConfigDict:
        """Return the config of a run."""
        return load_config(run.reference, self.run_overrides(run))


def parse_request(
    table: str,
    *,
    only: str = "",
    dataset: str = "",
    root: str = "",
    seeds: Sequence[int] = (),
    overrides: Sequence[tuple[str, str]] = (),
) -> Request:
    """Return the request of the flags of `--mode=reproduce`; UserError for a wrong flag."""
    paper, published = find_table(table, dataset)
    roots = dict(part.partition("=")[::2] for part in root.split(",")) if "=" in root else {"": root}
    request = Request(paper, published, filter_rows(published.rows, only), dataset, seeds, roots, overrides)
    if unknown := roots.keys() - {run.dataset for run in request.runs} - {""}:
        raise UserError(f"--root names {', '.join(sorted(unknown))}, which the rows of {table} do not use")
    varied = {key for run in request.runs for key, _ in run.overrides} | ({"data.root"} if root else set())
    if both := varied & {key for key, _ in overrides}:
        raise UserError(f"{min(both)} is set by {table} itself; leave --config.{min(both)} out")
    return request


def training_command(request: Request, run: Recipe, workdir: str) -> str:
    """Return the command that trains one run into the folder of `--mode=reproduce`."""
    words = [f"--config={run.reference}", f"--workdir={workdir}/{run.name}"]
    words += [f"--config.{key}={text}" for key, text in request.run_overrides(run)]
    return f"{_PROGRAM} {shlex.join(words)}"


def commands_after(request: Request, workdir: str) -> list[str]:
    """Return the commands that show a figure after the trainings, for the first seed."""
    folders = {}
    for row in request.rows:
        for method, recipe in zip(row.settings["method"].split(MINUS), (row.recipe, row.subtracted), strict=False):
            if runs := request.repeat(recipe):
                folders[method] = f"{workdir}/{runs[0].name}"
    try:
        commands = [[word.format_map(folders) for word in shlex.split(one)] for one in request.table.then]
    except KeyError:  # --only has left out a run
        return []
    return [f"{_PROGRAM} {shlex.join(words)}" for words in commands]


def dry_run(request: Request, workdir: str) -> str:
    """Return all commands, one per line, as a shell script with comments."""
    runs, after = request.runs, commands_after(request, workdir)
    lines = [f"# {request.paper.name}, {request.table.title}", f"# number of runs: {len(runs)}"]
    lines += [training_command(request, run, workdir) for run in runs]
    lines += [f"# not in this package: {row.label}" for row in request.rows if row.recipe is None]
    if after:
        lines += ["# afterwards", *after]
    return "\n".join(lines)
