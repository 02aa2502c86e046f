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

from mlmoe_jax.apps.papers.grid import GridRun, Point, as_text, execute, plan_runs, short_names
from mlmoe_jax.apps.papers.plot import Mark, draw
from mlmoe_jax.evaluation.metrics.multilabel import sample_deviation
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.formats import to_json
from mlmoe_jax.runtime.text import percent, quantity, text_table

TABLE, PLOT = "sweep.csv", "sweep.png"
SEED = "seed"
_OVER_SEEDS, _ON_TEST = "mean ± sample standard deviation over seeds", "selected on test, as published"


class SeedStatistics(NamedTuple):
    """The mAP of one split over seeds: mean, sample standard deviation (nan for one value) and number of values."""

    mean: float
    std: float
    count: int


def sweep(points: Sequence[Point], folder: RunFolder, *, as_json: bool = False) -> int:
    """Train all unfinished runs of the grid, write sweep.csv and sweep.png, and print the table.

    Returns the exit code of `execute`. Raises UserError as `plan_runs` does, before the first run, and as `execute`
    does.
    """
    runs = plan_runs(points, folder)

    def finish() -> None:
        if any(statistics for _, statistics in over_seeds(runs)):
            with folder.writing(wait=True):
                folder.write_bytes(PLOT, plot(runs))
        print(to_json(report(runs), indent=2) if as_json else format_table(runs))

    return execute(runs, folder, lambda: write_table(folder, runs), finish)


def write_table(folder: RunFolder, runs: Sequence[GridRun]) -> None:
    """Write sweep.csv: one row per finished or failed run, metrics as unrounded fractions, empty if undefined."""
    columns = dict.fromkeys(
        (split, name) for run in runs for split, metrics in (run.results or {}).items() for name in metrics
    )
    rows = []
    for run in runs:
        if run.results is not None or run.error:
            metrics = ((run.results or {}).get(split, {}).get(name, "") for split, name in columns)
            rows.append([*map(as_text, run.values.values()), run.selected, *metrics, run.name, run.error])
    folder.write_csv(TABLE, [*runs[0].values, "selected", *map("/".join, columns), "run", "error"], rows)


def report(runs: Sequence[GridRun]) -> dict[str, Any]:
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
    if SEED not in runs[0].values:
        return {"runs": listed}
    means = [
        {"config": values, "mAP": {split: one._asdict() for split, one in statistics.items()}}
        for values, statistics in over_seeds(runs)
    ]
    return {"runs": listed, "over_seeds": means}


# ------------------------------------------------------------------------------------------------------------ table
def split_names(runs: Sequence[GridRun]) -> list[str]:
    """Return the splits on which a run was evaluated."""
    return list(dict.fromkeys(split for run in runs for split in run.results or {}))


def over_seeds(runs: Sequence[GridRun]) -> list[tuple[dict[str, Any], dict[str, SeedStatistics]]]:
    """Return the grid without its seeds, as (other values, statistics of the mAP per split).

    If seeds are not swept, each run has its own statistics.
    """
    groups: dict[tuple, list[GridRun]] = {}
    for run in runs:
        groups.setdefault(tuple((k, v) for k, v in run.values.items() if k != SEED), []).append(run)
    summary = []
    for values, members in groups.items():
        statistics = {}
        for split in split_names(members):
            measured = [run.results[split]["mAP"] for run in members if split in (run.results or {})]
            if finite := [value for value in measured if math.isfinite(value)]:
                statistics[split] = SeedStatistics(float(np.mean(finite)), sample_deviation(finite), len(finite))
        summary.append((dict(values), statistics))
    return summary


def format_table(runs: Sequence[GridRun]) -> str:
    """Return the mAP in percent, one line per run, and then its mean and sample standard deviation over seeds."""
    splits, short = split_names(runs), short_names(runs[0].values, runs[0].config)
    rows = [["mAP, %", *splits, "weights"]]
    for run in runs:
        if run.results is None:
            rows.append([run.name, f"failed: {run.error}" if run.error else "another process is training it"])
        else:
            rows.append([run.name, *(percent(run.results.get(split, {}).get("mAP")) for split in splits), run.selected])
    if SEED in runs[0].values:
        rows += [[""], [_OVER_SEEDS]]
        for values, statistics in over_seeds(runs):
            cells = (_mean_and_deviation(statistics[split]) if split in statistics else "" for split in splits)
            seeds = max((one.count for one in statistics.values()), default=0)
            rows.append([_label(values, short) or "all", *cells, quantity(seeds, "seed")])
    if _selected_on_test(runs):
        rows += [[""], [_ON_TEST]]
    return text_table(rows, align="<" + ">" * len(splits) + "<", least=(0, *[14] * len(splits), 0))


def _label(values: dict[str, Any], short: dict[str, str]) -> str:
    return ", ".join(f"{short[key]}={as_text(value)}" for key, value in values.items())


def _mean_and_deviation(statistics: SeedStatistics) -> str:
    mean = percent(statistics.mean)
    return f"{mean} ± {percent(statistics.std)}" if statistics.count > 1 else mean


def _selected_on_test(runs: Sequence[GridRun]) -> bool:
    return any(run.config.eval.select_on == "test" for run in runs)


# ------------------------------------------------------------------------------------------------------------- plot
def plot(runs: Sequence[GridRun]) -> bytes:
    """Draw the mAP of each split over the first swept key, as PNG.

    One key: one line per split. Several keys: one panel per split, and one line per combination of the further keys.
    Seeds are averaged, with error bars of one sample standard deviation. If only seeds are swept, each is a point.
    """
    keys = [key for key in runs[0].values if key != SEED]
    short = short_names(runs[0].values, runs[0].config)
    x_key, *further = keys or [SEED]
    points = over_seeds(runs) if keys else [(run.values, one) for run in runs for _, one in over_seeds([run])]
    marks = []
    for split in split_names(runs):
        for values, statistics in points:
            label = _label({key: values[key] for key in further}, short) or split
            x = as_text(values[x_key]) if x_key == SEED else values[x_key]  # seeds have no scale
            mean, std, count = statistics.get(split, (math.nan, 0.0, 0))
            marks.append(Mark(split if further else "", label, x, 100 * mean, 100 * std if count > 1 else 0.0))
    notes = [_OVER_SEEDS] * (SEED in runs[0].values) + [_ON_TEST] * _selected_on_test(runs)
    return draw(marks, x_label=x_key, y_label="mAP (%)", title="; ".join(notes))
