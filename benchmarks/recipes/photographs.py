"""A data set in the layout of VOC 2012 as folders with a table, which all recipes read, and its score."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn.metrics import average_precision_score, f1_score

from mlmoe_jax.config import default_config
from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.split import Split

LEAST_POSITIVES, THRESHOLD = 10, 0.5
TABLE = "labels.csv"


def read_split(root: Path, name: str) -> Split:
    data = default_config().data
    data.name, data.root = "voc2012", str(root)
    return open_split(data, name)


def draw(split: Split, count: int, seed: int) -> np.ndarray:
    """Return the sorted rows of `count` random images, or of all if `count` is 0."""
    rows = np.random.default_rng(seed).permutation(len(split))
    return np.sort(rows[: count or None])


def write_folder(split: Split, rows: Sequence[int], folder: Path) -> None:
    """Link images into a folder, and write the table of their positive labels."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / TABLE).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "labels"])
        for row in rows:
            source = Path(split.images.name(row)).resolve()
            link = folder / source.name
            if not link.is_symlink():
                link.symlink_to(source)
            labels = [split.classes[column] for column in np.flatnonzero(split.labels[row] == POSITIVE)]
            writer.writerow([source.name, ";".join(labels)])


@dataclass(frozen=True)
class Target:
    """The images that are scored.

    Attributes:
      positive: bool[N,K]; difficult labels count as absent.
    """

    names: list[str]
    classes: tuple[str, ...]
    positive: np.ndarray

    @classmethod
    def of(cls, split: Split) -> Target:
        names = [Path(split.images.name(row)).name for row in range(len(split))]
        return cls(names, split.classes, split.labels[:] == POSITIVE)

    def measure(self, scores: Path, thresholds: Sequence[float] | None) -> dict[str, float]:
        """Return mAP and macro F1 as fractions, over the classes with at least ten positives.

        Args:
          scores: a CSV file with the columns `image` and a class each. A class without a column scores 0.
          thresholds: of the classes, if the recipe fits any.
        """
        with scores.open() as file:
            rows = {Path(row["image"]).name: row for row in csv.DictReader(file)}
        table = [[float(rows[name].get(one) or 0) for one in self.classes] for name in self.names]
        columns = np.flatnonzero(self.positive.sum(axis=0) >= LEAST_POSITIVES)
        positive, score = self.positive[:, columns], np.array(table)[:, columns]
        metrics = {
            "mAP": float(average_precision_score(positive, score, average="macro")),
            f"F1@{THRESHOLD:g}": macro_f1(positive, score >= THRESHOLD),
        }
        if thresholds is not None:
            metrics["F1, fitted"] = macro_f1(positive, score >= np.array(thresholds)[columns])
        return metrics


def macro_f1(positive: np.ndarray, predicted: np.ndarray) -> float:
    return float(f1_score(positive, predicted, average="macro", zero_division=0))
