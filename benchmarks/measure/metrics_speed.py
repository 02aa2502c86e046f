"""Measure time and memory of computing the metrics of a whole split.

    python -m benchmarks.measure metrics_speed                         # COCO's test split, and 1,000,000 × 100
    python -m benchmarks.measure metrics_speed --shapes 107859x81      # another size

Scores are synthetic: float64, 3 % positive, a tenth of the entries masked. CPU seconds are of this process, so other
load on the machine is excluded. The peak is the memory allocated by numpy during the call, without its inputs, in
multiples of the score matrix.
"""

import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.report import heading, left, row
from mlmoe_jax.evaluation.metrics import metric_groups, multilabel, reliability
from mlmoe_jax.evaluation.metrics.entries import Entries
from mlmoe_jax.evaluation.metrics.ranking import check_inputs
from mlmoe_jax.runtime.table import Column


def made_up(images: int, classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw (scores f64, labels bool, mask bool), all [B,K]."""
    random = np.random.default_rng(0)
    labels = random.random((images, classes), np.float32) < 0.03
    scores = random.random((images, classes))
    scores[labels] **= 0.2
    return scores, labels, random.random((images, classes), np.float32) < 0.9


def calls(scores: np.ndarray, labels: np.ndarray, mask: np.ndarray) -> dict:
    """Return the measured calls: name -> function without arguments."""
    thresholds = {"0.5": 0.5, "per class": np.full(scores.shape[1], 0.7)}
    return {
        "per_class (3 AP, AUC)": lambda: multilabel.per_class(scores, labels, mask=mask),
        "micro_average_precision": lambda: multilabel.micro_average_precision(scores, labels, mask=mask),
        "map_at_k, k = 3": lambda: multilabel.map_at_k(scores, labels, 3, mask=mask),
        "precision_recall_f1": lambda: multilabel.precision_recall_f1(scores >= 0.5, labels, mask=mask),
        "reliability": lambda: reliability.reliability(scores, labels, mask=mask),
        "measure_entries, 2 thresholds": lambda: metric_groups.measure_entries(
            Entries(*check_inputs(scores, labels, mask), thresholds)
        ),
    }


@dataclass(frozen=True)
class Options:
    shapes: tuple[str, ...] = ("40137x80", "1000000x100")


def measure(options: Options) -> Iterator[str]:
    yield heading(Column("images"), "classes", left("call"), "seconds", "CPU seconds", "peak, × scores")
    for shape in options.shapes:
        images, classes = map(int, shape.split("x"))
        split = made_up(images, classes)
        for name, call in calls(*split).items():
            tracemalloc.start()
            start = time.perf_counter(), time.process_time()
            call()
            seconds, busy = time.perf_counter() - start[0], time.process_time() - start[1]
            peak = tracemalloc.get_traced_memory()[1] / split[0].nbytes
            tracemalloc.stop()
            yield row(f"{images:,}", classes, name, *(f"{value:.2f}" for value in (seconds, busy, peak)))
