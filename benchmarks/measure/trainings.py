"""Trainings that are compared: each in a run folder of its own, which is read if it is finished and else continued."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from ml_collections import ConfigDict

from benchmarks.report import progress
from mlmoe_jax.errors import DiskError, UserError
from mlmoe_jax.evaluation.metrics.bootstrap import WeightedMetrics, draw, percentile_interval
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.runs.assemble import assemble, preprocess_for
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.setup import setup_jax
from mlmoe_jax.training.experiment import make_experiment
from mlmoe_jax.training.loop import train
from mlmoe_jax.training.training_data import open_training_data

THRESHOLD, RESAMPLES = 0.5, 1000
HELD_OUT = "held_out"
TIMES = "benchmark.json"
T = TypeVar("T")


def run(config: ConfigDict, folder: Path) -> dict[str, SplitScores]:
    """Return the scores of a training by split; train first if necessary."""
    run_folder = RunFolder(folder)
    if not (folder / TIMES).exists():
        if config.data.cache_features != "no":
            compute_features(config)
        began = time.process_time()
        train(config, run_folder)
        run_folder.write_json(TIMES, {"cpu_seconds": round(time.process_time() - began, 1)})
    run = StoredRun(run_folder)
    return {name: run.split(name) for name in run.scored_splits}


def compute_features(config: ConfigDict) -> None:
    """Fill the cache of features, so that the time of a training does not depend on the trainings before it."""
    mesh, data = setup_jax(config), open_training_data(config)
    parts = assemble(config, data.label_space)
    make_experiment(config, RunFolder("unused"), data, parts, preprocess_for(config), mesh)


def hold_out(config: ConfigDict) -> None:
    """Score a training on a fifth of `train`, on which it does not train."""
    config.data.val_split, config.data.val_fraction, config.data.test_splits = HELD_OUT, 0.2, (HELD_OUT,)


def compare(
    choices: Iterable[T],
    training: Callable[[T, int, bool], tuple[ConfigDict, Path]],
    seeds: Sequence[int],
    columns: Any,
    *,
    tuned_on: str,
    measured_on: str,
) -> tuple[T, list[Path], list[SplitScores], dict[str, Any]]:
    """Return the best choice, run folders and scores of trainings with it, one per seed, and what all results have.

    `training` returns config and run folder for a choice and a seed, to tune or to measure: the choice with the best
    mAP on the split `tuned_on` is measured on `measured_on`. A choice without another is not tuned, and one whose
    training fails is not taken.
    """
    first, *others = choices
    tuning = {}
    for choice in [first, *others] if others else ():
        try:
            tuning[choice] = mean_ap(run(*training(choice, seeds[0], True))[tuned_on].with_labels(columns))
        except DiskError:
            raise
        except UserError as error:
            progress(f"{text_of(choice)}: {error}")
    if others and not tuning:
        raise UserError("all trainings have failed, for the reasons above")
    best = max(tuning, key=tuning.get, default=first)
    trained = [training(best, seed, False) for seed in seeds]
    scores = [run(*one)[measured_on].with_labels(columns) for one in trained]
    folders = [folder for _, folder in trained]
    common = {
        "tuning": {text_of(choice): value for choice, value in tuning.items()},
        "cpu_seconds": [json.loads((folder / TIMES).read_text())["cpu_seconds"] for folder in folders],
        "resampled_mAP": resampled_map(scores).tolist(),
    }
    return best, folders, scores, common


def text_of(choice: Any) -> str:
    """Return a choice as text: a number, or names with their values."""
    return f"{choice:g}" if isinstance(choice, float) else "rate={:g},epochs={}".format(*choice)


def measure(scored: SplitScores) -> WeightedMetrics:
    """Return the metrics of a split, as functions of the weights of its images."""
    entries = scored.entries("negative")
    return WeightedMetrics(entries.scores, entries.positive, entries.valid, THRESHOLD)


def mean_ap(scored: SplitScores) -> float:
    return float(measure(scored)(np.ones((len(scored), 1), np.float32))[0]["mAP"][0])


def resampled_map(scores: Sequence[SplitScores]) -> np.ndarray:
    """Return the mAP, averaged over seeds, of resamples of the images that are equal for all methods, f64[R]."""
    measures = [measure(one) for one in scores]
    parts = draw(len(scores[0]), RESAMPLES, 0)
    return np.concatenate([np.mean([one(weights)[0]["mAP"] for one in measures], axis=0) for weights in parts])


def difference(one: dict, other: dict) -> str:
    """Return the difference of two mAPs in points with its interval over resamples of the images; "" for one mAP."""
    if one is other:
        return ""
    low, high = percentile_interval(np.subtract(one["resampled_mAP"], other["resampled_mAP"]))
    return f"{100 * (np.mean(one['mAP']) - np.mean(other['mAP'])):+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"
