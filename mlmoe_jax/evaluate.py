"""One pass over a split, and the numbers that come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from mlmoe_jax import metrics, thresholds
from mlmoe_jax.assemble import Run, open_run
from mlmoe_jax.data.batch import targets
from mlmoe_jax.data.labels import LabelSpace
from mlmoe_jax.data.pipeline import SkippedImages, build_loader
from mlmoe_jax.data.sources import open_split
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runfolder import PER_CLASS, RESULTS, SCORES, SKIPPED, RunFolder
from mlmoe_jax.sharding import on_device
from mlmoe_jax.state import Params
from mlmoe_jax.steps import make_eval_step
from mlmoe_jax.writer import Progress, say


@dataclass(frozen=True)
class Scored:
    """A split with its probabilities f64[N,K], computed from float32 logits in float64 so that order is kept."""

    split: Split
    scores: np.ndarray

    @property
    def read(self) -> np.ndarray:
        """Which images could be read and therefore have scores, bool[N]."""
        return ~np.isnan(self.scores).any(axis=1)

    @property
    def skipped(self) -> SkippedImages:
        """Those that could not."""
        return SkippedImages(self.split, np.flatnonzero(~self.read).tolist())


def probabilities(logits: np.ndarray) -> np.ndarray:
    """σ of f32[...] in float64, without overflow."""
    logits = np.asarray(logits, np.float64)
    return np.exp(-np.logaddexp(0, -logits))


def score_split(
    eval_step: Callable, values: Params, frozen: Params, split: Split, data, batch_size: int, mesh: Mesh
) -> Scored:
    """Score every image of a split exactly once, on any number of processes; one that cannot be read scores NaN."""
    process = (jax.process_index(), jax.process_count())
    loader = build_loader(data, split, batch_size=batch_size, process=process)
    progress = Progress(f"evaluate {split.name}", -(-len(split) // batch_size), batch_size)
    outputs = []
    for batch in on_device(progress.waiting(loader), mesh):
        outputs.append(eval_step(values, frozen, batch))
        if len(outputs) > 1:
            outputs[-2] = jax.device_get(outputs[-2])  # one step behind, so that the device is never idle
        progress.advance()
    progress.close()
    logits, row, mask = (
        np.concatenate([jax.device_get(o[name]) for o in outputs]) for name in ("logits", "id", "mask")
    )
    scores = np.full((len(split), logits.shape[1]), np.nan)
    if diverged := int((~np.isfinite(logits[mask > 0])).any(axis=1).sum()):
        raise UserError(
            f"the model gives no finite score for {diverged:,} images of {split.name}: it has diverged; lower "
            "config.optim.learning_rate, or set model.dtype=float32"
        )
    scores[row[mask > 0]] = probabilities(logits[mask > 0])
    return Scored(split, scores)


def measure(scored: Scored, label_space: LabelSpace, *, difficult: str, threshold: float) -> dict[str, float]:
    """Return every metric over the images of a split that have scores; names say the definition, values are fractions.

    Raises UserError where no image has.
    """
    read = scored.read
    if not read.any():
        raise UserError(f"none of the {len(read):,} images of {scored.split.name} can be read")
    scores = scored.scores[read]
    label, mask = targets(scored.split.labels[read], difficult)
    cuts = thresholds.reported(scores, label_space.frequency, threshold=threshold)
    return metrics.evaluate_scores(scores, label, mask, cuts)


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
        scores = item.scores[item.read]
        label, mask = targets(item.split.labels[item.read], difficult)
        plain = metrics.average_precision(scores, label, mask=mask)
        envelope = metrics.average_precision(scores, label, mask=mask, interpolation="envelope")
        for k, cls in enumerate(item.split.classes):
            rows.append([name, cls, int((label * mask)[:, k].sum()), plain[k], envelope[k]])
    folder.write_csv(f"{prefix}{PER_CLASS}", ["split", "label", "positives", "AP", "AP_envelope"], rows)


def list_skipped(folder: RunFolder, skipped: Iterable[SkippedImages], *, prefix: str = "") -> None:
    """Write skipped_images.csv under `prefix` in the run folder, if any image was skipped, and say so."""
    if rows := [row for of_split in skipped for row in of_split.table()]:
        folder.write_csv(f"{prefix}{SKIPPED}", ["split", "image", "why"], rows)
        say(f"{len(rows):,} images could not be read and were skipped; {folder / f'{prefix}{SKIPPED}'} lists them")
    else:
        (folder / f"{prefix}{SKIPPED}").unlink(missing_ok=True)  # that of an earlier evaluation


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
        list_skipped(folder, (item.skipped for item in scored.values()), prefix="eval/")
    return results


def score_with(run: Run, eval_step: Callable, name: str) -> Scored:
    """Score one split of the run's data set with the run's selected values."""
    split = open_split(run.config.data, name, classes=run.label_space.names, seed=run.config.seed)
    return score_split(eval_step, run.values, run.frozen, split, run.config.data, run.config.eval.batch_size, run.mesh)


def format_results(results: Mapping[str, dict[str, float]]) -> str:
    """Return the metrics of each split as a table in percent."""
    names = list(next(iter(results.values())))
    width = max(len(name) for name in names)
    lines = [f"{'metric, %':<{width}}" + "".join(f"  {split:>10}" for split in results)]
    for name in names:
        lines.append(f"{name:<{width}}" + "".join(f"  {100 * values[name]:>10.2f}" for values in results.values()))
    return "\n".join(lines)
