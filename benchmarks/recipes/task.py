"""What a recipe of another library is given, and the scores that it writes. Only the standard library is imported.

python RECIPE.py TASK.json RUN                       # train
python RECIPE.py TASK.json RUN FOLDER SCORES.csv     # score the images of a folder
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

Scores = Iterable[tuple[str, Sequence[float]]]  # name of an image, score of each class


@dataclass(frozen=True)
class Task:
    """A training.

    Attributes:
      folder: has the training images and labels.csv.
      weights: pretrained weights with timm's names.
      threads: for computation.
    """

    folder: str
    classes: list[str]
    weights: str
    epochs: int
    seed: int
    threads: int

    @property
    def rows(self) -> list[tuple[Path, list[str]]]:
        """The path and the labels of each training image."""
        folder = Path(self.folder)
        with (folder / "labels.csv").open() as file:
            return [(folder / row["image"], row["labels"].split(";")) for row in csv.DictReader(file)]

    @property
    def targets(self) -> list[list[int]]:
        """1 or 0 for each training image and class."""
        return [[int(name in labels) for name in self.classes] for _, labels in self.rows]


def images_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jpg"))


def write_scores(path: Path, classes: Sequence[str], scores: Scores) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", *classes])
        writer.writerows([name, *map(float, values)] for name, values in scores)


def write_thresholds(run: Path, thresholds: Sequence[float]) -> None:
    """Store the threshold of each class that the library fits."""
    (run / "thresholds.json").write_text(json.dumps(list(thresholds)))


def write_losses(run: Path, losses: Sequence[float]) -> None:
    """Store the training losses, in their order, as often as the library reports them."""
    (run / "losses.json").write_text(json.dumps(list(losses)))


def carry_out(train: Callable[[Task, Path], None], score: Callable[[Task, Path, list[Path]], Scores]) -> None:
    """Train or score, as the command line of the recipe says."""
    given, run, *rest = map(Path, sys.argv[1:])
    task = Task(**json.loads(given.read_text()))
    if rest:
        folder, output = rest
        write_scores(output, task.classes, score(task, run, images_of(folder)))
    else:
        train(task, run)
