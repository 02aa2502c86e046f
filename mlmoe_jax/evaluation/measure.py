"""Compute the metrics of scored splits, and write them to a run folder."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ml_collections import ConfigDict

from mlmoe_jax.data.label_matrix import few_positives
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.data.split import SkippedImages
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.metrics import cooccurrence
from mlmoe_jax.evaluation.metrics.attribute_metrics import describe_confusions
from mlmoe_jax.evaluation.metrics.entries import Entries
from mlmoe_jax.evaluation.metrics.metric_groups import measure_entries
from mlmoe_jax.evaluation.metrics.published import measure_preset
from mlmoe_jax.evaluation.metrics.threshold_search import prior_matched
from mlmoe_jax.evaluation.results import (
    FALL,
    MetricSettings,
    Results,
    SplitResult,
    SplitScores,
    metric_scores,
    read_split_results,
    write_rows,
    write_scores,
    write_split_results,
)
from mlmoe_jax.runs.decisions import Thresholds
from mlmoe_jax.runs.folder import COOCCURRENCE, PER_CLASS, SKIPPED, RunFolder, training_finished
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.table import Column, Table
from mlmoe_jax.runtime.text import percent, quantity

Metrics = dict[str, float]  # name -> fraction
# Patterns of the main metrics. The first match counts, which is a metric at eval.threshold.
_HEADLINES = ("mAP", "CF1@.+", "OF1@.+", "AUC_macro", "precision@1", FALL)
_PER_CLASS = ("positives", "AP", "AP_envelope", "AP_11point", "AUC")  # columns of per_class.csv


@dataclass
class Measured:
    """A scored split with its metrics, name -> fraction.

    `entries` has the scores and labels of the readable images, from which the metrics are computed. `pairs` has one row
    per pair of labels that often co-occur in training, the result of `cooccurrence.pair_biases`.
    """

    scored: SplitScores
    entries: Entries
    metrics: Metrics
    pairs: list[cooccurrence.PairRow]


def measure(
    scored: SplitScores, label_space: LabelSpace, config: ConfigDict, fitted: Thresholds | None = None
) -> Metrics:
    """Return all metrics of a split over its readable images, name -> fraction; UserError if no image has a score.

    Metrics of a paper's own evaluator (`config.metrics.preset`) have its name as prefix. With `fitted` thresholds that
    were fitted on another split, there are additional metrics `…@fitted`.
    """
    return _measure_split(scored, label_space, MetricSettings.of(config), [], fitted).metrics


def measure_and_write(
    folder: RunFolder,
    scored: Mapping[str, SplitScores],
    label_space: LabelSpace,
    config: ConfigDict,
    *,
    fitted: Thresholds | None = None,
    ends_training: bool = False,
) -> Results:
    """Return the metrics of splits, split -> metric -> fraction, and write them to the run folder (process 0).

    The metrics include means over pairs of co-occurring labels, and the drop of mAP from `test` to `test_shift`.
    `measure` describes the arguments. If `ends_training` is True, these are the final results of the training: they
    replace all results in the folder, and the run is finished. Otherwise they replace only the earlier results of these
    splits.
    """
    settings = MetricSettings.of(config)
    pairs = cooccurrence.training_pairs(label_space.together, label_space.positives, label_space.images)
    measured = {name: _measure_split(item, label_space, settings, pairs, fitted) for name, item in scored.items()}
    _add_pair_means(measured, config.data.test_splits)
    if {"test", "test_shift"} <= measured.keys():
        test, shifted = measured["test"].metrics, measured["test_shift"].metrics
        shifted[FALL] = test["mAP"] - shifted["mAP"]
    for name, item in measured.items():
        if few := few_positives(item.scored.readable().codes):
            status(f"the metrics on {name} are rough: {few}")
    if distributed.is_first():
        write_measured(folder, measured, label_space.names, settings, ends_training=ends_training)
    return {name: item.metrics for name, item in measured.items()}


def _measure_split(
    scored: SplitScores,
    label_space: LabelSpace,
    settings: MetricSettings,
    pairs: Sequence[cooccurrence.Pair],
    fitted: Thresholds | None,
) -> Measured:
    readable = scored.readable()
    if not len(readable):
        raise UserError(f"no image of {scored.name} can be read")
    tree, threshold, frequency = label_space.tree, settings.threshold, label_space.frequency
    agreeing = metric_scores(readable, tree, settings)
    raw = None if agreeing is readable else readable.scores
    entries = agreeing.entries(settings.difficult)
    matched = prior_matched(entries.scores, frequency, mask=entries.valid)
    thresholds = {f"{threshold:g}": threshold, "prior_matched_transductive": matched}
    predicted = {}
    if fitted is not None and fitted.source.get("split", scored.name) != scored.name:
        predicted["fitted"] = fitted.predict(readable.scores, label_space.names, tree.consistent(raw is not None))
    entries = replace(entries, thresholds=thresholds, predicted=predicted, tree=tree, raw=raw)
    entries = replace(entries, categories=label_space.labels_by_category())
    published = measure_preset(settings.preset, entries, readable.codes, settings.difficult, frequency)
    biases = cooccurrence.pair_biases(entries.scores, entries.positive, pairs, threshold, mask=entries.valid)
    return Measured(scored, entries, measure_entries(entries) | published, biases)


def _add_pair_means(measured: Mapping[str, Measured], test_splits: Sequence[str]) -> None:
    """Add means over pairs of labels to the metrics of splits. All test splits use the same pairs."""
    pairs = {name: item.pairs for name, item in measured.items() if item.pairs}
    tests = {name: rows for name, rows in pairs.items() if name in test_splits}
    alone = [{name: rows} for name, rows in pairs.items() if name not in test_splits]
    for group in [tests, *alone] if tests else alone:
        for name, means in cooccurrence.summarize(group).items():
            measured[name].metrics |= {f"cooccurrence/{key}": value for key, value in means.items()}


# ------------------------------------------------------------------------------------------------------------ writing
def write_measured(
    folder: RunFolder,
    measured: Mapping[str, Measured],
    names: Sequence[str],
    settings: MetricSettings,
    *,
    ends_training: bool = False,
) -> None:
    """Write the results of splits: scores, per_class.csv, cooccurrence.csv and results.json.

    results.json is written last. A run is finished when results.json contains the final results of its training.
    `names` are those of the K labels. `ends_training` is described in `measure_and_write`.
    """
    replaced = None if ends_training else list(measured)
    per_class = [
        [split, label, *(item.entries.per_class[column][k] for column in _PER_CLASS)]
        for split, item in measured.items()
        for k, label in enumerate(names)
    ]
    columns = ["split", *cooccurrence.PAIR_COLUMNS]
    pairs = []
    for split, item in measured.items():
        for row in item.pairs:
            named = {**row, "split": split, "a": names[row["a"]], "b": names[row["b"]]}
            pairs.append([named[column] for column in columns])
    with folder.changing_results():
        write_rows(folder, PER_CLASS, ["split", "label", *_PER_CLASS], per_class, replaced)
        write_rows(folder, COOCCURRENCE, columns, pairs, replaced)
        finished = ends_training or training_finished(folder)
        results = {
            name: SplitResult(
                write_scores(folder, item.scored),
                settings,
                item.metrics,
                finished,
                describe_confusions(item.entries, names),
            )
            for name, item in measured.items()
        }
        write_split_results(folder, results, keep_others=not ends_training)


def list_skipped(folder: RunFolder, skipped: Iterable[SkippedImages], replaced: Iterable[str] | None = None) -> None:
    """Write the unreadable images `skipped` to skipped_images.csv in the run folder, and log their number.

    Earlier rows of the splits `replaced` are removed; None: all earlier rows. A file without rows is deleted.
    """
    rows = [row for images in skipped for row in images.table()]
    with folder.changing_results():
        write_rows(folder, SKIPPED, ["split", "image", "why"], rows, replaced)
    if rows:
        status(f"{quantity(len(rows), 'unreadable image')} skipped; {folder / SKIPPED} has the list")


# ------------------------------------------------------------------------------------------------------------ showing
def headlines(results: Results) -> list[str]:
    """Return the names of the main metrics that occur in the results of any split."""
    names = dict.fromkeys(name for values in results.values() for name in values)
    matches = (next((name for name in names if re.fullmatch(pattern, name)), None) for pattern in _HEADLINES)
    return [*filter(None, matches), *(name for name in names if name.startswith(("accuracy/", "balanced_accuracy/")))]


def results_table(results: Results, *, every: bool = False) -> Table:
    """Return a table of metrics in percent, with one row per metric and one column per split.

    A cell is empty if the split lacks the metric. By default, the table has only the main metrics. If `every` is True,
    it has all metrics, and the main metrics are the last rows.
    """
    main = headlines(results)
    names = dict.fromkeys(name for values in results.values() for name in values)
    further = [name for name in names if every and name not in main]
    columns = [Column("metric, %", align="<"), *(Column(split, percent, width=10) for split in results)]
    rows = [[name, *(values.get(name) for values in results.values())] for name in [*further, *main]]
    return Table(columns, rows, document=results)


def confusion_tables(folder: RunFolder, splits: Collection[str]) -> list[Table]:
    """Return the stored table of confusions of each of the splits and each attribute."""
    return [
        Table(
            [name, *one["values"]],
            [[value, *counts] for value, counts in zip(one["values"], one["images"], strict=True)],
            title=f"{name} of the images of {split}: the given value in rows, the most probable one in columns",
        )
        for split, entry in read_split_results(folder).items()
        for name, one in entry.confusions.items()
        if split in splits
    ]
