"""The runs of `mlmoe reproduce`, and the equivalent commands.

Only the data files of the papers are read, so --dry-run answers at once.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.papers.paper import (
    MINUS,
    Paper,
    PublishedRow,
    PublishedTable,
    Recipe,
    filter_rows,
    find_table,
)
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.keys import KeyValues

WORKDIR = "runs/reproduce"  # one folder for all tables: they share runs


@dataclass(frozen=True)
class Request:
    """The parsed flags of `mlmoe reproduce`, as described in `parse_request`.

    Attributes:
      rows: the rows of the table to train.
      seeds: each run is repeated with each of these seeds; () = once, with the seed of its config.
      roots: name of a data set -> its folder. The key "" is for all data sets that have no key of their own.
    """

    paper: Paper
    table: PublishedTable
    rows: Sequence[PublishedRow]
    dataset: str
    seeds: Sequence[int]
    roots: Mapping[str, str]
    overrides: KeyValues

    @property
    def name(self) -> str:
        """The name of the output files without suffix: mlvpt.4, or mlvpt.4-digits if `dataset` is digits."""
        return f"{self.table.id}-{self.dataset}" if self.dataset else self.table.id

    def repeat(self, recipe: Recipe | None) -> list[Recipe]:
        """Return the recipe with each of `seeds`, or unchanged if `seeds` is empty. Return [] if `recipe` is None."""
        if recipe is None:
            return []
        return [recipe.with_seed(seed) for seed in self.seeds] or [recipe]

    @property
    def runs(self) -> list[Recipe]:
        """The trainings of the requested rows, without repetitions, in the order of the rows."""
        recipes = [recipe for row in self.rows for recipe in (row.subtracted, row.recipe)]
        return list(dict.fromkeys(run for recipe in recipes for run in self.repeat(recipe)))

    def run_overrides(self, run: Recipe) -> KeyValues:
        """Return the config overrides of a run: from its row, `data.root` from `roots`, and from the request."""
        root = self.roots.get(run.dataset, self.roots.get(""))
        return [*run.overrides, *([("data.root", root)] if root else []), *self.overrides]

    def load_config(self, run: Recipe) -> ConfigDict:
        """Return the config of a run, with all overrides applied."""
        return configuration.load_config(run.reference, self.run_overrides(run))


def parse_request(
    table: str,
    *,
    only: str = "",
    dataset: str = "",
    root: str = "",
    seeds: Sequence[int] = (),
    overrides: KeyValues = (),
) -> Request:
    """Parse the flags of `mlmoe reproduce`. UserError if a value is wrong, or the table sets the key of an override.

    Args:
      table: the name of a published table, such as mlvpt.1.
      only: terms that select rows, see `filter_rows`.
      dataset: the data set for all rows; "" = the data set of each row.
      root: a folder for all data sets, or DATASET=FOLDER,DATASET=FOLDER; "" = `data.root` of the configs.
      overrides: pairs of config key and text, for every run.
    """
    paper, published = find_table(table, dataset)
    roots = dict(part.partition("=")[::2] for part in root.split(",")) if "=" in root else {"": root}
    request = Request(paper, published, filter_rows(published.rows, only), dataset, seeds, roots, overrides)
    if unknown := roots.keys() - {run.dataset for run in request.runs} - {""}:
        raise UserError(f"--root names {', '.join(sorted(unknown))}, which the rows of {table} do not use")
    varied = {key for run in request.runs for key, _ in run.overrides} | ({"data.root"} if root else set())
    if both := varied & {key for key, _ in overrides}:
        raise UserError(f"{min(both)} is set by {table} itself; leave --config.{min(both)} out")
    return request


def commands_after(request: Request, workdir: str) -> list[str]:
    """Return the shell commands that make the images of a figure from the trained runs of the first seed.

    Return [] if the table has no such commands, or if `--only` left out a run that they need.
    """
    folders = {}
    for row in request.rows:
        for method, recipe in zip(row.settings["method"].split(MINUS), (row.recipe, row.subtracted), strict=False):
            if runs := request.repeat(recipe):
                folders[method] = f"{workdir}/{runs[0].name}"
    try:
        commands = [[word.format_map(folders) for word in shlex.split(one)] for one in request.table.then]
    except KeyError:  # --only has left out a run
        return []
    return [shlex.join(words) for words in commands]


def dry_run(request: Request, workdir: str) -> str:
    """Return the output of --dry-run: a shell script with one command per run, and comments."""
    runs, after = request.runs, commands_after(request, workdir)
    lines = [f"# {request.paper.name}, {request.table.title}", f"# number of runs: {len(runs)}"]
    for run in runs:
        overrides = [f"--config.{key}={text}" for key, text in request.run_overrides(run)]
        words = ["mlmoe", "train", f"--config={run.reference}", f"--workdir={workdir}/{run.name}", *overrides]
        lines.append(shlex.join(words))
    lines += [f"# not in this package: {row.label}" for row in request.rows if row.recipe is None]
    if after:
        lines += ["# afterwards", *after]
    return "\n".join(lines)
