"""A sweep: trainings over a grid of values, with a table and a plot of their results.

    --sweep=config.model.prompts.num_groups=2,3,5,8 --sweep=config.seed=0,1,2

trains twelve runs, each in its own folder below --workdir. The same command resumes a stopped sweep: finished runs are
only read, and an unfinished one resumes from its checkpoint. --sweep=config=vpt,gvpt,mlvpt_digits sweeps configs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.papers.engine import GridRun, execute, planned, require_no_errors
from mlmoe_jax.apps.papers.grid import Point, as_text, short_names
from mlmoe_jax.apps.papers.plot import Mark, draw
from mlmoe_jax.evaluation.metrics.multilabel import sample_deviation
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.formats import to_json
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.text import percent, text_table

TABLE, PLOT = "sweep.csv", "sweep.png"
SEED = "seed"
_UNITS = {"data.image_size": "pixels", "augment.margin": "pixels", "train.batch_size": "images"}


class SeedStatistics(NamedTuple):
    """The mAP of one split over seeds: mean, sample standard deviation (nan for one value) and number of values."""

    mean: float
    std: float
    count: int


def sweep(points: Sequence[Point], folder: RunFolder, *, as_json: bool = False) -> int:
    """Train all runs of the grid that are not finished, write sweep.csv and sweep.png, print the table.

    A failed run does not stop the remaining runs.

    Returns:
      The exit code: 0, or 130 after SIGTERM or Ctrl-C.

    Raises:
      UserError: before the first run if a run cannot be trained in its folder, and at the end if runs have failed.
    """
    runs = planned(points, folder)
    if not execute(runs, folder, lambda: write_table(folder, runs)):
        return 130
    if distributed.is_first() and any(statistics for _, statistics in over_seeds(runs)):
        with folder.writing(wait=True):
            folder.write_bytes(PLOT, plot(runs))
    print(to_json(report(runs), indent=2) if as_json else format_table(runs))
    status(f"sweep folder: {folder}")
    require_no_errors(runs)
    return 0


def write_table(folder: RunFolder, runs: Sequence[GridRun]) -> None:
    """Write sweep.csv: one row per finished or failed run, metrics as unrounded fractions, empty if undefined."""
    columns = dict.fromkeys(
        (split, name) for run in runs for split, metrics in (run.results or {}).items() for name in metrics
    )
    rows = []
    for run in runs:
        if run.results is None and not run.error:
            continue
        metrics = [(run.results or {}).get(split, {}).get(name, math.nan) for split, name in columns]
        chosen = [run.selected.get(name, "") for name in ("step", "kind", "split", "metric")]
        numbers = ["" if math.isnan(value) else float(value) for value in metrics]
        rows.append([*map(as_text, run.values.values()), *chosen, *numbers, run.name, run.error])
    selected = ("step", "weights", "selected_on", "selected_by")
    folder.write_csv(TABLE, [*runs[0].values, *selected, *map("/".join, columns), "run", "error"], rows)


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
    """Return the splits that any run was evaluated on."""
    return list(dict.fromkeys(split for run in runs for split in run.results or {}))


def over_seeds(runs: Sequence[GridRun]) -> list[tuple[dict[str, Any], dict[str, SeedStatistics]]]:
    """Return the grid without its seeds, as (other values, statistics of the mAP per split).

    If seeds are not swept, each run has statistics of its own.
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
    splits = split_names(runs)
    short = short_names(runs[0].values, runs[0].config)
    rows = [["mAP, %", *splits, "weights"], *([run.name, *_cells(run, splits)] for run in runs)]
    if SEED in runs[0].values:
        rows += [[""], ["mean ± sample standard deviation over seeds"]]
        for values, statistics in over_seeds(runs):
            cells = (_mean_and_deviation(statistics[split]) if split in statistics else "" for split in splits)
            seeds = max((one.count for one in statistics.values()), default=0)
            rows.append([_label(values, short) or "all", *cells, "1 seed" if seeds == 1 else f"{seeds} seeds"])
    if _selected_on_test(runs):
        rows += [[""], ["selected on test, as published"]]
    return text_table(rows, align="<" + ">" * len(splits) + "<", least=(0, *[14] * len(splits), 0))


def _cells(run: GridRun, splits: Sequence[str]) -> list[str]:
    """Return the cells of a run after its name: the mAP of each split and the selected weights, or a remark."""
    if run.error:
        return [f"failed: {run.error}"]
    if run.results is None:
        return ["another process is training it"]
    chosen = f"{run.selected['kind']} of step {run.selected['step']}" if run.selected else ""
    if metric := run.selected.get("metric"):
        chosen += f", by {metric}"
    return [*(f"{100 * run.results.get(split, {}).get('mAP', math.nan):.2f}" for split in splits), chosen]


def _label(values: dict[str, Any], short: dict[str, str]) -> str:
    return ", ".join(f"{short[key]}={as_text(v)}" if short else as_text(v) for key, v in values.items())


def _mean_and_deviation(statistics: SeedStatistics) -> str:
    mean = percent(statistics.mean)
    return f"{mean} ± {percent(statistics.std)}" if statistics.count > 1 else mean


def _selected_on_test(runs: Sequence[GridRun]) -> bool:
    return any(run.config.eval.select_on == "test" for run in runs)


# ------------------------------------------------------------------------------------------------------------- plot
def plot(runs: Sequence[GridRun]) -> bytes:
    """Draw the mAP of each split over the first swept key, as PNG.

    One key: one line per split. Several keys: one panel per split, and one line per combination of the other keys.
    Seeds are averaged, with error bars of one sample standard deviation. If only seeds are swept, each is a point.
    """
    keys = [key for key in runs[0].values if key != SEED]
    short = short_names(runs[0].values, runs[0].config)
    x_key, *others = keys or [SEED]
    points = over_seeds(runs) if keys else [(run.values, of_run) for run in runs for _, of_run in over_seeds([run])]
    marks = []
    for split in split_names(runs):
        for values, statistics in points:
            combination = {key: values[key] for key in others}
            label = _label(combination, short if len(others) > 1 else {}) if others else split
            mean, std, count = statistics.get(split, (math.nan, 0.0, 0))
            bar = 100 * std if count > 1 else 0.0
            marks.append(Mark(split if others else "", label, _tick(values[x_key], x_key), 100 * mean, bar))
    unit = f" ({_UNITS[x_key]})" if x_key in _UNITS else ""
    return draw(
        marks,
        x_label=f"{x_key}{unit}",
        y_label="mAP (%)",
        legend=", ".join(short[key] for key in others) or "split",
        title=_title(runs),
    )


def _tick(value: Any, key: str) -> Any:
    """Return an x value: a number unchanged, and a value without a scale, such as a seed, as text."""
    has_scale = isinstance(value, int | float) and not isinstance(value, bool) and key != SEED
    return value if has_scale else as_text(value)


def _title(runs: Sequence[GridRun]) -> str:
    """Return the settings that the runs have in common, and below them notes on the numbers."""
    flat = [configuration.flatten(run.config) for run in runs]
    keys = ("data.name", "model.backbone.name", "model.head.kind")
    common = [flat[0][key] for key in keys if len({one[key] for one in flat}) == 1]
    notes = ["mean ± sample standard deviation over seeds"] if SEED in runs[0].values else []
    if _selected_on_test(runs):
        notes.append("selected on test, as published")
    if failed := sum(bool(run.error) for run in runs):
        notes.append(f"{failed} of {len(runs)} runs failed")
    return "\n".join(filter(None, (", ".join(common), "; ".join(notes))))
