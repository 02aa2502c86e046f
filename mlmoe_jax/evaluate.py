"""One pass over a split, and the numbers that come of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from mlmoe_jax import metrics, thresholds
from mlmoe_jax.assemble import Run, open_run
from mlmoe_jax.data.batch import targets
from mlmoe_jax.data.labels import LabelSpace
from mlmoe_jax.data.pipeline import build_loader
from mlmoe_jax.data.sources import open_split
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runfolder import PER_CLASS, RESULTS, SCORES, RunFolder
from mlmoe_jax.sharding import shard_batch
from mlmoe_jax.state import Params
from mlmoe_jax.steps import make_eval_step
from mlmoe_jax.writer import Progress


@dataclass(frozen=True)
class Scored:
    """A split with its probabilities f64[N,K], computed from float32 logits in float64 so that order is kept."""

    split: Split
    scores: np.ndarray


def probabilities(logits: np.ndarray) -> np.ndarray:
    """σ of f32[...] in float64, without overflow."""
    logits = np.asarray(logits, np.float64)
    return np.exp(-np.logaddexp(0, -logits))


def score_split(
    eval_step: Callable, values: Params, frozen: Params, split: Split, data, batch_size: int, mesh: Mesh
) -> Scored:
    """Score every image of a split exactly once, on any number of processes."""
    process = (jax.process_index(), jax.process_count())
    loader = build_loader(data, split, batch_size=batch_size, training=False, process=process)
    progress = Progress(f"evaluate {split.name}", -(-len(split) // batch_size), batch_size)
    outputs = []
    for batch in progress.waiting(loader):
        outputs.append(eval_step(values, frozen, shard_batch(batch, mesh)))
        if len(outputs) > 1:
            outputs[-2] = jax.device_get(outputs[-2])  # one step behind, so that the device is never idle
        progress.advance()
    progress.close()
    logits, row, mask = (
        np.concatenate([jax.device_get(o[name]) for o in outputs]) for name in ("logits", "id", "mask")
    )
    scores = np.full((len(split), logits.shape[1]), np.nan)
    scores[row[mask > 0]] = probabilities(logits[mask > 0])
    return Scored(split, scores)


def measure(scored: Scored, label_space: LabelSpace, *, difficult: str, threshold: float) -> dict[str, float]:
    """Return every metric of a scored split; names say the definition, values are fractions."""
    label, mask = targets(scored.split.labels, difficult)
    cuts = thresholds.reported(scored.scores, label_space.frequency, threshold=threshold)
    return metrics.evaluate_scores(scored.scores, label, mask, cuts)


def write_results(
    folder: RunFolder, results: Mapping[str, dict], scored: Mapping[str, Scored], *, difficult: str, prefix: str = ""
) -> None:
    """Write results.json, scores.npz and per_class.csv for all splits, under `prefix` in the run folder."""
    folder.write_json(f"{prefix}{RESULTS}", dict(results))
    joined = {
        "ids": np.concatenate([np.asarray(s.split.ids, dtype=str) for s in scored.values()]),
        "scores": np.concatenate([s.scores for s in scored.values()]),
        "labels": np.concatenate([s.split.labels for s in scored.values()]),
        "split": np.concatenate([np.full(len(s.split), name) for name, s in scored.items()]),
    }
    folder.write_npz(f"{prefix}{SCORES}", **joined)
    rows = []
    for name, item in scored.items():
        label, mask = targets(item.split.labels, difficult)
        plain = metrics.average_precision(item.scores, label, mask=mask)
        envelope = metrics.average_precision(item.scores, label, mask=mask, interpolation="envelope")
        for k, cls in enumerate(item.split.classes):
            rows.append([name, cls, int((label * mask)[:, k].sum()), plain[k], envelope[k]])
    folder.write_csv(f"{prefix}{PER_CLASS}", ["split", "label", "positives", "AP", "AP_envelope"], rows)


def evaluate_run(folder: RunFolder, overrides: list[tuple[str, str]]) -> dict[str, dict[str, float]]:
    """Restore a run, evaluate its test splits and write the results under `eval/` in its folder.

    Raises UserError for a folder that cannot be restored, or data whose classes are not the run's.
    """
    run = open_run(folder, overrides)
    if not run.config.data.test_splits:
        raise UserError("data.test_splits is empty; name the splits to evaluate, such as --config.data.test_splits=val")
    eval_step = make_eval_step(run.definition, run.preprocess, run.mesh)
    scored = {name: score_with(run, eval_step, name) for name in run.config.data.test_splits}
    difficult, threshold = run.config.data.difficult, run.config.eval.threshold
    results = {
        name: measure(item, run.label_space, difficult=difficult, threshold=threshold) for name, item in scored.items()
    }
    if jax.process_index() == 0:
        write_results(folder, results, scored, difficult=difficult, prefix="eval/")
    return results


def score_with(run: Run, eval_step: Callable, name: str) -> Scored:
    """Score one split of the run's data set with the run's selected values."""
    split = open_split(run.config.data, name)
    if split.classes != run.label_space.names:
        raise UserError(
            f"{run.config.data.name} has the labels {', '.join(split.classes[:4])}, …, but the run was trained on "
            f"{', '.join(run.label_space.names[:4])}, …"
        )
    return score_split(eval_step, run.values, run.frozen, split, run.config.data, run.config.eval.batch_size, run.mesh)


def format_results(results: Mapping[str, dict[str, float]]) -> str:
    """Return the metrics of each split as a table in percent."""
    names = list(next(iter(results.values())))
    width = max(len(name) for name in names)
    lines = [f"{'metric, %':<{width}}" + "".join(f"  {split:>10}" for split in results)]
    for name in names:
        lines.append(f"{name:<{width}}" + "".join(f"  {100 * values[name]:>10.2f}" for values in results.values()))
    return "\n".join(lines)
