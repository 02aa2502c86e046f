"""Score the images of splits with a model, and measure and write the results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.data.label_codes import few_positives
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.data.pipeline import SkippedImages, build_loader
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.split_checks import require_readable
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation import gate_shares
from mlmoe_jax.evaluation.metrics import cooccurrence, multilabel
from mlmoe_jax.evaluation.metrics import published as metric_presets
from mlmoe_jax.evaluation.metrics.groups import evaluate_scores
from mlmoe_jax.evaluation.metrics.thresholds import prior_matched
from mlmoe_jax.evaluation.results import EVALUATED, FALL, SplitScores, metric_scores
from mlmoe_jax.inference.explain import write_requested_samples
from mlmoe_jax.models.apply import make_eval_step
from mlmoe_jax.models.calibration import probabilities
from mlmoe_jax.models.params import Params
from mlmoe_jax.runs.folder import (
    CONFIG,
    COOCCURRENCE,
    GATES,
    PER_CLASS,
    RESULTS,
    SCORES,
    SKIPPED,
    RunFolder,
)
from mlmoe_jax.runs.restore import BEST, Run, open_run
from mlmoe_jax.runs.thresholds import Thresholds, stored_thresholds
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.batches import run_batches
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.table import Column, Table
from mlmoe_jax.runtime.text import percent, quantity

Metrics = dict[str, float]
# Patterns of the main metrics. The first match counts, which is a metric at eval.threshold.
_HEADLINES = ("mAP", "CF1@.+", "OF1@.+", "AUC_macro", "precision@1", FALL)


def score_split(
    eval_step: Callable, candidates: Mapping[str, Params], frozen: Params, split: Split, config: ConfigDict, mesh: Mesh
) -> dict[str, SplitScores]:
    """Score each image of a split exactly once per candidate, on any number of processes; return name -> scores.

    Every image is read, decoded and transferred once for all candidates; unreadable images score NaN.
    `config.eval.batch_size` is per device, so that scores do not depend on the number of devices, to the last bit.

    Args:
      eval_step: result of `make_eval_step`.
      candidates: name -> values of the model, such as `raw` and `ema`.
      frozen: the frozen values of the model.

    Raises:
      UserError: a score is not finite, or a device is out of memory.
    """
    size = config.eval.batch_size * mesh.size
    loader = build_loader(config.data, split, batch_size=size, labels=False, process=distributed.process())
    batches = run_batches(
        lambda batch: {name: eval_step(values, frozen, batch) for name, values in candidates.items()},
        loader,
        mesh,
        advice="lower eval.batch_size",
        progress=Progress(f"evaluate {split.name}", -(-len(split) // size), size),
    )
    scores = {name: np.full(split.labels.shape, np.nan, np.float32) for name in candidates}
    outputs, diverged = {name: [] for name in candidates}, dict.fromkeys(candidates, 0)
    for batch in batches:
        for name, output in batch.items():
            real = output["mask"] > 0
            logits = output.pop("logits")[real]  # of all batches, they would take as much memory as the scores
            finite = np.isfinite(logits).all(axis=1)
            diverged[name] += np.count_nonzero(~finite)
            scores[name][output["id"][real][finite]] = probabilities(logits[finite])
            outputs[name].append(output)
    if images := max(diverged.values()):
        raise UserError(
            f"the scores of {quantity(images, 'image')} of {split.name} are not finite: the model has diverged; "
            "lower config.optim.learning_rate, or set model.dtype=float32 and eval.dtype=same"
        )
    return {
        name: SplitScores.of(split, scores[name], gate_shares.collect(outputs[name], len(split))) for name in candidates
    }


def measure(
    scored: SplitScores, label_space: LabelSpace, config: ConfigDict, fitted: Thresholds | None = None
) -> Metrics:
    """Return all metrics over the images of a split that have scores: name -> fraction.

    The results of a paper's own evaluator (`config.metrics.preset`) are included under its name.

    Args:
      scored: the split with its scores.
      fitted: thresholds for additional metrics, unless they were fitted on this split.

    Raises:
      UserError: no image has a score.
    """
    settings, raw = config.metrics, scored.readable()
    if not len(raw):
        raise UserError(f"no image of {scored.name} can be read")
    scored = metric_scores(raw, label_space.tree, config)
    scores, (label, mask) = scored.scores, scored.targets(config.data.difficult_eval)
    thresholds: dict[str, float | np.ndarray] = {
        f"{config.eval.threshold:g}": config.eval.threshold,
        "prior_matched_transductive": prior_matched(scores, label_space.frequency, mask=mask),
    }
    if fitted is not None:
        thresholds |= fitted.fitted_for(scored.name, label_space.names)
    before = None if scored is raw else raw.scores
    metrics = evaluate_scores(scores, label, mask, thresholds, tree=label_space.tree, raw=before)
    if settings.preset != "none":
        published = metric_presets.preset(settings.preset, scores, scored.codes, frequency=label_space.frequency)
        metrics |= {f"{settings.preset}/{name}": value for name, value in published.items()}
    return metrics


def _measure_pairs(
    scored: Mapping[str, SplitScores], label_space: LabelSpace, config: ConfigDict
) -> dict[str, list[cooccurrence.PairRow]]:
    biases = {}
    pairs = cooccurrence.training_pairs(label_space.together, label_space.positives, label_space.images)
    for name, item in scored.items() if pairs else ():
        label, mask = item.targets(config.data.difficult_eval)
        biases[name] = cooccurrence.pair_biases(item.scores, label, pairs, config.eval.threshold, mask=mask)
    return biases


def measure_and_write(
    folder: RunFolder,
    scored: Mapping[str, SplitScores],
    label_space: LabelSpace,
    config: ConfigDict,
    *,
    prefix: str = "",
    fitted: Thresholds | None = None,
) -> dict[str, Metrics]:
    """Measure all splits and return the metrics of each; process 0 writes them under `prefix` in the run folder.

    The files are results.json, scores.npz, per_class.csv, gates.npz if the model has shared and task experts, and
    cooccurrence.csv if pairs of labels co-occur in training; under a prefix also the config.
    The metrics include the means over pairs of labels, and the drop of mAP from `test` to `test_shift`.
    """
    readable = {name: item.readable() for name, item in scored.items()}
    results = {name: measure(item, label_space, config, fitted) for name, item in readable.items()}
    reported = {name: metric_scores(item, label_space.tree, config) for name, item in readable.items()}
    pairs = _measure_pairs(reported, label_space, config)
    for name, means in _mean_pairs(pairs, config.data.test_splits).items():
        metrics = {metric: value for metric, value in means.items() if not metric.startswith("pairs")}
        results[name] |= {f"cooccurrence/{metric}": value for metric, value in metrics.items() if not np.isnan(value)}
    if {"test", "test_shift"} <= results.keys():
        results["test_shift"][FALL] = results["test"]["mAP"] - results["test_shift"]["mAP"]
    for name, item in readable.items():
        if few := few_positives(item.codes):
            status(f"the metrics on {name} are rough: {few}")
    if distributed.is_first():
        if any(pairs.values()):
            _write_pairs(folder, pairs, label_space.names, prefix)
        else:
            (folder / f"{prefix}{COOCCURRENCE}").unlink(missing_ok=True)  # from an earlier evaluation
        if prefix:  # without a prefix, the start of the training has written it
            folder.write_text(f"{prefix}{CONFIG}", configuration.to_json(config))
        difficult = config.data.difficult_eval
        write_results(folder, results, scored, label_space.names, difficult=difficult, prefix=prefix, reported=reported)
    return results


def write_results(
    folder: RunFolder,
    results: Mapping[str, Metrics],
    scored: Mapping[str, SplitScores],
    names: Sequence[str],
    *,
    difficult: str,
    prefix: str = "",
    reported: Mapping[str, SplitScores] | None = None,
) -> None:
    """Write scores.npz, per_class.csv and results.json for all splits, under `prefix` in the run folder.

    results.json is the last file of a training: a run that has it is finished. If the splits have shares of gates,
    gates.npz is written too, see `gate_shares`.

    Args:
      results: split -> metric -> value.
      scored: split -> scores.
      names: the names of the K labels.
      difficult: as in `data.label_codes.targets`.
      prefix: see `SplitScores`.
      reported: split -> the scores of which metrics are computed, if they differ.
    """
    joined = {
        "ids": np.concatenate([s.ids for s in scored.values()]),
        "scores": np.concatenate([s.scores for s in scored.values()]),
        "labels": np.concatenate([s.codes for s in scored.values()]),
        "split": np.concatenate([np.full(len(s), name) for name, s in scored.items()]),
    }
    groups = [np.full(len(s), "") if s.groups is None else s.groups for s in scored.values()]
    has_groups = any(s.groups is not None for s in scored.values())
    folder.write_npz(f"{prefix}{SCORES}", **joined, **({"groups": np.concatenate(groups)} if has_groups else {}))
    if shares := gate_shares.join(list(scored.values())):
        del joined["scores"]
        folder.write_npz(f"{prefix}{GATES}", **joined, **shares)
    metrics, rows = ("positives", "AP", "AP_envelope", "AP_11point", "AUC"), []
    for name, item in (reported or scored).items():
        read = item.readable()
        label, mask = read.targets(difficult)
        values = multilabel.per_class(read.scores, label, mask=mask)
        rows += [[name, label_name, *(values[metric][k] for metric in metrics)] for k, label_name in enumerate(names)]
    folder.write_csv(f"{prefix}{PER_CLASS}", ["split", "label", *metrics], rows)
    folder.write_json(f"{prefix}{RESULTS}", dict(results))


def _mean_pairs(pairs: Mapping[str, Sequence[cooccurrence.PairRow]], reported: Sequence[str]) -> dict[str, dict]:
    """Average the pairs of each split; all reported splits average the same pairs."""
    together = {name: rows for name, rows in pairs.items() if name in reported}
    groups = [together, *({name: rows} for name, rows in pairs.items() if name not in reported)]
    return {name: means for group in groups if group for name, means in cooccurrence.summarize(group).items()}


def _write_pairs(
    folder: RunFolder, pairs: Mapping[str, Sequence[cooccurrence.PairRow]], names: Sequence[str], prefix: str
) -> None:
    """Write cooccurrence.csv, one row per split and pair."""
    rows = [
        {"split": split} | row | {"a": names[row["a"]], "b": names[row["b"]]}
        for split, biases in pairs.items()
        for row in biases
    ]
    folder.write_csv(f"{prefix}{COOCCURRENCE}", list(rows[0]), [list(row.values()) for row in rows])


def list_skipped(folder: RunFolder, skipped: Iterable[SkippedImages], *, prefix: str = "") -> None:
    """Write skipped_images.csv under `prefix` in the run folder if images were skipped, and log their number."""
    if rows := [row for images in skipped for row in images.table()]:
        folder.write_csv(f"{prefix}{SKIPPED}", ["split", "image", "why"], rows)
        were = f"{quantity(len(rows), 'image')} could not be read and {'was' if len(rows) == 1 else 'were'} skipped"
        status(f"{were}; {folder / f'{prefix}{SKIPPED}'} has the list")
    else:
        (folder / f"{prefix}{SKIPPED}").unlink(missing_ok=True)  # from an earlier evaluation


def evaluate_run(
    folder: RunFolder, overrides: Sequence[tuple[str, str]] = (), *, which: str = BEST
) -> dict[str, Metrics]:
    """Restore a run, evaluate its test splits and write the results to `eval/` in its folder.

    Sample images are explained if `report.samples` is above 0.

    Args:
      overrides: as in `restore.open_run`.
      which: as in `restore.open_run`.

    Raises:
      UserError: the run cannot be restored, or the data has other classes than the run.
    """
    fitted = stored_thresholds(folder)  # before the model, which takes longer to read
    return evaluate_opened(folder, open_run(folder, list(overrides), which=which), fitted)


def evaluate_opened(folder: RunFolder, run: Run, fitted: Thresholds | None) -> dict[str, Metrics]:
    """Evaluate a restored run as `evaluate_run` does. `fitted` is a result of `stored_thresholds`."""
    config = run.config
    if not config.data.test_splits:
        raise UserError("data.test_splits is empty; name the splits to evaluate, such as --config.data.test_splits=val")
    status(f"results go to {folder / EVALUATED}")
    parts = (run.definition, run.preprocess, run.mesh, run.label_axes)
    eval_step = make_eval_step(*parts, shared=gate_shares.shared_entries(config))
    scored = {}
    for name in config.data.test_splits:
        split = open_split(config.data, name, classes=run.label_space.names, seed=config.seed)
        require_readable([split], config.data)
        scored[name] = score_split(eval_step, {"": run.values}, run.frozen, split, config, run.mesh)[""]
    results = measure_and_write(folder, scored, run.label_space, config, prefix=EVALUATED, fitted=fitted)
    if distributed.is_first():
        list_skipped(folder, (item.skipped for item in scored.values()), prefix=EVALUATED)
    write_requested_samples(folder, config, run)
    return results


def headlines(results: Mapping[str, Metrics]) -> list[str]:
    """Return the names of the main metrics that a split has."""
    names = dict.fromkeys(name for values in results.values() for name in values)
    matches = (next((name for name in names if re.fullmatch(pattern, name)), None) for pattern in _HEADLINES)
    return list(filter(None, matches))


def results_table(results: Mapping[str, Metrics], *, every: bool = False) -> Table:
    """Return the main metrics of each split in percent, with `every` below all further metrics.

    A cell is empty if the split lacks the metric.
    """
    main = headlines(results)
    names = dict.fromkeys(name for values in results.values() for name in values)
    further = [name for name in names if every and name not in main]
    columns = [Column("metric, %", align="<"), *(Column(split, percent, width=10) for split in results)]
    rows = [[name, *(values.get(name) for values in results.values())] for name in [*further, *main]]
    return Table(columns, rows, document=results)
