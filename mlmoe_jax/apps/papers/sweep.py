"""A sweep: trainings over a grid of values, with a table and a plot of their results.

    --sweep=config.model.prompts.num_groups=2,3,5,8 --sweep=config.seed=0,1,2

trains twelve runs, each in its own folder below --workdir. The same command resumes a stopped sweep: finished runs are
only read, and an unfinished run resumes from its checkpoint. --sweep=config=vpt,gvpt,mlvpt_digits sweeps configs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mlmoe_jax.apps.papers.grid import GridPoint, GridRun, execute, plan_runs, short_names, value_text
from mlmoe_jax.apps.papers.plot import Mark, draw_plot
from mlmoe_jax.evaluation.metrics.multilabel import sample_deviation
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.table import Column, Outcome, Table
from mlmoe_jax.runtime.text import percent, quantity

SWEEP_TABLE, PLOT = "sweep.csv", "sweep.png"
SEED_KEY = "seed"
_OVER_SEEDS, _ON_TEST = "mean ± sample standard deviation over seeds", "selected on test, as published"
_WIDTH = 14  # of a column of scores


class SeedStatistics(NamedTuple):
    """The mAP of one split over seeds: mean, sample standard deviation (nan for one value) and number of values."""

    mean: float
    std: float
    count: int

    def __str__(self) -> str:
        return f"{percent(self.mean)} ± {percent(self.std)}" if self.count > 1 else percent(self.mean)


def sweep(points: Sequence[GridPoint], folder: RunFolder) -> Outcome:
    """Train all unfinished runs of the grid, write sweep.csv and sweep.png, and return the tables to print.

    Raises UserError as `plan_runs` does, before the first run.
    """
    runs = plan_runs(points, folder)

    def report() -> Outcome:
        if any(statistics for _, statistics in average_seeds(runs)):
            with folder.writing(wait=True):
                folder.write_bytes(PLOT, plot(runs))
        tables = [runs_table(runs)]
        if SEED_KEY in runs[0].values:
            tables.append(seeds_table(runs))
        notes = [_ON_TEST] if _selected_on_test(runs) else []
        return Outcome([*tables, *notes], sweep_document(runs))

    return execute(runs, folder, lambda: write_sweep(folder, runs), report)


def write_sweep(folder: RunFolder, runs: Sequence[GridRun]) -> None:
    """Write sweep.csv: one row per finished or failed run, metrics as unrounded fractions, empty if undefined."""
    metrics = dict.fromkeys(
        (split, name) for run in runs for split, values in (run.results or {}).items() for name in values
    )
    rows = []
    for run in runs:
        if run.results is not None or run.error:
            measured = [(run.results or {}).get(split, {}).get(name) for split, name in metrics]
            rows.append([*map(value_text, run.values.values()), run.selected, *measured, run.name, run.error])
    folder.write_csv(SWEEP_TABLE, [*runs[0].values, "selected", *map("/".join, metrics), "run", "error"], rows)


def sweep_document(runs: Sequence[GridRun]) -> dict[str, Any]:
    """Return the output of --json: the metrics of every run as fractions, and the mAP over seeds if they are swept."""
    listed = [
        {
            "run": run.name,
            "config": run.values,
            "selected": run.selected or None,
            "results": run.results,
            "error": run.error or None,
        }
        for run in runs
    ]
    if SEED_KEY not in runs[0].values:
        return {"runs": listed}
    means = [
        {"config": values, "mAP": {split: one._asdict() for split, one in statistics.items()}}
        for values, statistics in average_seeds(runs)
    ]
    return {"runs": listed, "over_seeds": means}


# ----------------------------------------------------------------------------------------------------------- tables
def list_splits(runs: Sequence[GridRun]) -> list[str]:
    """Return all splits on which runs were evaluated."""
    return list(dict.fromkeys(split for run in runs for split in run.results or {}))


def average_seeds(runs: Sequence[GridRun]) -> list[tuple[dict[str, Any], dict[str, SeedStatistics]]]:
    """Group the runs by all values but the seed; return (values, statistics of the mAP per split) per group.

    If seeds are not swept, each run has its own statistics.
    """
    groups: dict[tuple, list[GridRun]] = {}
    for run in runs:
        others = tuple((key, value) for key, value in run.values.items() if key != SEED_KEY)
        groups.setdefault(others, []).append(run)
    return [(dict(others), _statistics(members)) for others, members in groups.items()]


def _statistics(runs: Sequence[GridRun]) -> dict[str, SeedStatistics]:
    """Return the statistics of the finite mAPs of each split."""
    statistics = {}
    for split in list_splits(runs):
        measured = [run.results[split]["mAP"] for run in runs if split in (run.results or {})]
        if finite := [value for value in measured if math.isfinite(value)]:
            statistics[split] = SeedStatistics(float(np.mean(finite)), sample_deviation(finite), len(finite))
    return statistics


def runs_table(runs: Sequence[GridRun]) -> Table:
    """Return the mAP of each run in percent."""
    splits, rows = list_splits(runs), []
    for run in runs:
        if run.results is not None:
            measured = [run.results.get(split, {}).get("mAP", math.nan) for split in splits]
            rows.append([run.name, *measured, run.selected])
        else:
            rows.append([run.name, f"failed: {run.error}" if run.error else "another process is training it"])
    scores = [Column(split, percent, width=_WIDTH) for split in splits]
    return Table(["mAP, %", *scores, Column("weights", align="<")], rows)


def seeds_table(runs: Sequence[GridRun]) -> Table:
    """Return the mean and sample standard deviation of the mAP over seeds in percent."""
    splits, short, rows = list_splits(runs), short_names(runs[0].values, runs[0].config), []
    for values, statistics in average_seeds(runs):
        seeds = max((one.count for one in statistics.values()), default=0)
        rows.append([_label(values, short) or "all", *map(statistics.get, splits), quantity(seeds, "seed")])
    scores = [Column(split, width=_WIDTH) for split in splits]
    return Table(["mAP, %", *scores, Column("", align="<")], rows, title=_OVER_SEEDS)


def _label(values: dict[str, Any], short: dict[str, str]) -> str:
    return ", ".join(f"{short[key]}={value_text(value)}" for key, value in values.items())


def _selected_on_test(runs: Sequence[GridRun]) -> bool:
    return any(run.config.eval.select_on == "test" for run in runs)


# ------------------------------------------------------------------------------------------------------------- plot
def plot(runs: Sequence[GridRun]) -> bytes:
    """Draw the mAP of each split over the first swept key, as PNG.

    One key: one line per split. Several keys: one panel per split, and one line per combination of the further keys.
    Seeds are averaged, with error bars of one sample standard deviation. If only seeds are swept, each is a point.
    """
    x_key, *further = [key for key in runs[0].values if key != SEED_KEY] or [SEED_KEY]
    short, marks = short_names(runs[0].values, runs[0].config), []
    for split in list_splits(runs):
        for values, statistics in _points(runs):
            label = _label({key: values[key] for key in further}, short) or split
            x = value_text(values[x_key]) if x_key == SEED_KEY else values[x_key]  # seeds have no scale
            mean, std, count = statistics.get(split, (math.nan, 0.0, 0))
            marks.append(Mark(split if further else "", label, x, 100 * mean, 100 * std if count > 1 else 0.0))
    notes = [_OVER_SEEDS] if SEED_KEY in runs[0].values else []
    if _selected_on_test(runs):
        notes.append(_ON_TEST)
    return draw_plot(marks, x_label=x_key, y_label="mAP (%)", title="; ".join(notes))


def _points(runs: Sequence[GridRun]) -> list[tuple[dict[str, Any], dict[str, SeedStatistics]]]:
    """Return (values, statistics of the mAP per split) for the points of the plot."""
    if runs[0].values.keys() != {SEED_KEY}:
        return average_seeds(runs)
    return [(run.values, _statistics([run])) for run in runs]
