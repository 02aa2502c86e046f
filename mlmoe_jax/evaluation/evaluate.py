"""Score the images of splits with a model, and evaluate runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlmoe_jax.data.pipeline import build_loader
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.split_checks import require_readable, warn_unused
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.measure import list_skipped, measure_and_write
from mlmoe_jax.evaluation.results import Results, SplitScores
from mlmoe_jax.inference.explain import write_requested_samples
from mlmoe_jax.models.calibration import probabilities
from mlmoe_jax.models.params import Params
from mlmoe_jax.runs.decisions import stored_thresholds
from mlmoe_jax.runs.folder import RESULTS, RunFolder
from mlmoe_jax.runs.image_record import warn_of_change, warn_of_leak
from mlmoe_jax.runs.restore import BEST, Run, open_run
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.batches import run_batches
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.text import quantity


def score_split(
    eval_step: Callable, candidates: Mapping[str, Params], frozen: Params, split: Split, config: ConfigDict, mesh: Mesh
) -> dict[str, SplitScores]:
    """Return the scores of all images of a split for each candidate, as {candidate: scores}.

    Each image is read, decoded and transferred once for all candidates, and scored exactly once, on any number of
    processes. The scores of unreadable images are NaN. `config.eval.batch_size` is per device, so that scores do not
    depend on the number of devices, to the last bit. `candidates` has the trainable parameters and statistics of the
    model by name, such as `raw` and `ema`. `eval_step` is a result of `Run.eval_step`. Raises UserError if a score is
    not finite, or a device is out of memory.
    """
    size = config.eval.batch_size * mesh.size
    loader = build_loader(config.data, split, batch_size=size, labels=False)
    batches = run_batches(
        lambda batch: {name: eval_step(values, frozen, batch) for name, values in candidates.items()},
        loader,
        mesh,
        advice="lower eval.batch_size",
        progress=Progress(f"evaluate {split.name}", -(-len(split) // size), size),
    )
    scores = {name: np.full(split.labels.shape, np.nan, np.float32) for name in candidates}
    diverged = dict.fromkeys(candidates, 0)
    for batch in batches:
        for name, output in batch.items():
            real = output["mask"] > 0
            logits = output["logits"][real]
            finite = np.isfinite(logits).all(axis=1)
            diverged[name] += np.count_nonzero(~finite)
            scores[name][output["id"][real][finite]] = probabilities(logits[finite])
    if images := max(diverged.values()):
        raise UserError(
            f"the scores of {quantity(images, 'image')} of {split.name} are not finite: the model has diverged; "
            "lower config.optim.learning_rate, or set model.dtype=float32 and eval.dtype=same"
        )
    return {name: SplitScores.of(split, scores[name]) for name in candidates}


def evaluate_run(folder: RunFolder, overrides: Sequence[tuple[str, str]] = (), *, which: str = BEST) -> Results:
    """Restore a run, evaluate its test splits, write their results, and return the results.

    New results of a split replace its earlier results in the folder. If `report.samples` is above 0, sample images with
    explanations are written too. `overrides` and `which` are arguments of `restore.open_run`. Raises UserError if the
    run cannot be restored, or the data has other classes than the run.
    """
    return evaluate_opened(folder, open_run(folder, overrides, which=which, own=True))


def evaluate_opened(folder: RunFolder, run: Run) -> Results:
    """Evaluate a run that `restore.open_run` has restored from `folder`; see `evaluate_run`."""
    config = run.config
    if not config.data.test_splits:
        raise UserError("data.test_splits is empty; name the splits to evaluate, such as --config.data.test_splits=val")
    status(f"results go to {folder / RESULTS}")
    eval_step = run.eval_step()
    scored = {}
    names = dict.fromkeys(config.data.test_splits)
    splits = [run.open_split(name) for name in names]
    require_readable(splits, config.data)
    warn_unused(splits)
    for split in splits:
        warn_of_change(folder, split)
        warn_of_leak(folder, split.name, split.ids)
        scored[split.name] = score_split(eval_step, {"": run.values}, run.frozen, split, config, run.mesh)[""]
    results = measure_and_write(folder, scored, run.label_space, config, fitted=stored_thresholds(folder))
    if distributed.is_first():
        list_skipped(folder, [item.skipped for item in scored.values()], replaced=scored)
    write_requested_samples(folder, config, run)
    return results
