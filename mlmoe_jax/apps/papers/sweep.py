"""A sweep: trainings over a grid of values, with a table and a plot of their results.

    --sweep=config.model.prompts.num_groups=2,3,5,8 --sweep=config.seed=0,1,2

trains twelve runs, each in its own folder below --workdir. The same command resumes a stopped sweep: the results of
finished runs are read, and an unfinished run resumes from its checkpoint. --sweep=config=vpt,gvpt,mlvpt_digits trains
several configs.
"""

import io
import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np

from mlmoe_jax.apps.papers.grid import GridPoint, GridRun, plan_runs, point_name, train_missing, value_text
from mlmoe_jax.evaluation.metrics.multilabel import sample_deviation
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.table import Column, Outcome, Table
from mlmoe_jax.runtime.text import percent

SWEEP_TABLE, PLOT = "sweep.csv", "sweep.png"
SEED_KEY = "seed"
Point = dict[str, Any]  # of the plot, see `plot_points`
_OVER_SEEDS, _ON_TEST = "mean ± sample standard deviation over seeds", "selected on test, as published"
_LOGARITHMIC_FROM = 20  # ratio of largest to smallest x value from which the axis is logarithmic


def sweep(points: Sequence[GridPoint], folder: RunFolder) -> Outcome:
    """Train all unfinished runs of the grid, write sweep.csv and sweep.png, and return the tables to print.

    Raises UserError before the first training, under the conditions of `plan_runs`.
    """
    runs = plan_runs(points, folder)
    exit_code = train_missing(runs, folder, lambda: write_sweep(folder, runs))
    parts: list[Table | str] = [runs_table(runs)]
    # null = unfinished, or no error
    listed = [
        {"run": run.name, "config": run.values, "results": run.results or None, "error": run.error or None}
        for run in runs
    ]
    document: dict[str, Any] = {"runs": listed}
    if SEED_KEY in runs[0].values:
        document["over_seeds"] = average_seeds(runs)
        parts.append(seeds_table(runs))
    if any(run.config.eval.select_on == "test" for run in runs):
        parts.append(_ON_TEST)
    return Outcome(parts, document, exit_code)


def write_sweep(folder: RunFolder, runs: Sequence[GridRun]) -> None:
    """Write sweep.png, and sweep.csv with one row per finished or failed run and metrics as unrounded fractions."""
    metrics = dict.fromkeys((split, name) for run in runs for split, values in run.results.items() for name in values)
    rows = []
    for run in runs:
        if run.results or run.error:
            measured = [run.results.get(split, {}).get(name) for split, name in metrics]
            rows.append([*map(value_text, run.values.values()), *measured, run.name, run.error])
    folder.write_csv(SWEEP_TABLE, [*runs[0].values, *map("/".join, metrics), "run", "error"], rows)
    x_key = next((key for key in runs[0].values if key != SEED_KEY), SEED_KEY)
    if points := plot_points(runs, x_key):
        folder.write_bytes(PLOT, draw_plot(points, x_key))


def average_seeds(runs: Sequence[GridRun]) -> list[dict[str, Any]]:
    """Return the statistics of the mAP over seeds, one dict for each combination of the other swept values.

    "config" has the swept values without the seed. "mAP" maps each split to a dict of "mean", "std" (sample standard
    deviation; nan for one value) and "count" (number of finite values).
    """
    groups: dict[str, list[GridRun]] = {}
    for run in runs:
        groups.setdefault(_label(run, SEED_KEY), []).append(run)
    averages = []
    for members in groups.values():
        statistics = {}
        for split in _list_splits(members):
            if values := [scores[split] for scores in map(finite_scores, members) if split in scores]:
                statistics[split] = {
                    "mean": float(np.mean(values)),
                    "std": sample_deviation(values),
                    "count": len(values),
                }
        averages.append({"config": _other_values(members[0], SEED_KEY), "mAP": statistics})
    return averages


def finite_scores(run: GridRun) -> dict[str, float]:
    """Return split -> mAP of a run, as fractions. Splits whose mAP is missing or not finite are left out."""
    scores = {split: metrics.get("mAP", math.nan) for split, metrics in run.results.items()}
    return {split: score for split, score in scores.items() if math.isfinite(score)}


def _other_values(run: GridRun, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in run.values.items() if key not in keys}


def _label(run: GridRun, *keys: str) -> str:
    """Return a name made of the swept keys and values of a run, without the given keys."""
    return point_name(_other_values(run, *keys), run.config)


def _list_splits(runs: Sequence[GridRun]) -> list[str]:
    return list(dict.fromkeys(split for run in runs for split in run.results))


# ----------------------------------------------------------------------------------------------------------- tables
def runs_table(runs: Sequence[GridRun]) -> Table:
    """Return a table of the mAP in percent, with one row per run and one column per split."""
    splits, rows = _list_splits(runs), []
    for run in runs:
        if not run.results:
            rows.append([run.name, f"failed: {run.error}" if run.error else "another process is training it"])
        else:
            scores = finite_scores(run)
            rows.append([run.name, *(scores.get(split, math.nan) for split in splits)])
    return Table(["mAP, %", *(Column(split, percent) for split in splits)], rows)


def seeds_table(runs: Sequence[GridRun]) -> Table:
    """Return a table of the mean and sample standard deviation of the mAP over seeds, in percent, by split."""
    splits, rows = _list_splits(runs), []
    for average in average_seeds(runs):
        name = point_name(average["config"], runs[0].config)
        rows.append([name or "all", *map(average["mAP"].get, splits)])
    return Table(["mAP, %", *(Column(split, _mean_text) for split in splits)], rows, title=_OVER_SEEDS)


def _mean_text(statistics: dict[str, float]) -> str:
    mean, deviation = percent(statistics["mean"]), percent(statistics["std"])
    return f"{mean} ± {deviation}" if statistics["count"] > 1 else mean


# ------------------------------------------------------------------------------------------------------------- plot
def plot_points(runs: Sequence[GridRun], x_key: str) -> list[Point]:
    """Return the points of the plot of the mAP over the values of one swept key.

    There is one "panel" per split, and one "line" per combination of the other swept values without the seed. "x" is
    the value of `x_key`, a number or its text, and "y" the mAP in percent.
    """
    points = []
    for run in runs:
        line, x = _label(run, x_key, SEED_KEY) or "mAP", run.values[x_key]
        if type(x) not in (int, float):  # True is no number
            x = value_text(x)
        scores = finite_scores(run)
        points += [{"panel": split, "line": line, "x": x, "y": 100 * score} for split, score in scores.items()]
    return points


def draw_plot(points: Sequence[Point], x_key: str) -> bytes:
    """Draw `plot_points` as a PNG file, with means over seeds ± the sample standard deviation, and x title `x_key`."""
    scale = {"title": "mAP (%)", "scale": alt.Scale(zero=False)}
    base = alt.Chart(alt.Data(values=points)).encode(x=x_axis(points, x_key), color=alt.Color("line:N", title=None))
    lines = base.mark_line(point=True).encode(y=alt.Y("mean(y):Q", **scale))
    bars = base.mark_errorbar(extent="stdev").encode(y=alt.Y("y:Q", **scale))
    chart = (lines + bars).facet(column=alt.Column("panel:N", title=None, sort=None)).resolve_scale(y="independent")
    buffer = io.BytesIO()
    chart.save(buffer, format="png", scale_factor=2)
    return buffer.getvalue()


def x_axis(points: Sequence[Point], title: str) -> alt.X:
    """Return an x axis of texts or numbers, logarithmic if largest / smallest is at least _LOGARITHMIC_FROM."""
    values = list(dict.fromkeys(point["x"] for point in points))
    if any(isinstance(value, str) for value in values):
        return alt.X("x:N", title=title, sort=values)
    wide = min(values) > 0 and max(values) >= _LOGARITHMIC_FROM * min(values)
    return alt.X("x:Q", title=title, scale=alt.Scale(type="log" if wide else "linear", zero=False))
