"""`--mode=predict --select`: choose the images to label next, from the scores and features of a trained model."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence

import numpy as np

from mlmoe_jax.apps.tools.acquisition import METHODS, Candidates, entropy, rarity, unit
from mlmoe_jax.data.sources.open import open_splits
from mlmoe_jax.data.split import UNKNOWN
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.predict import Predictor
from mlmoe_jax.runs.restore import Run
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.text import quantity

COLUMNS = ("rank", "uncertainty", "distance")


def select_images(
    predictor: Predictor, paths: Sequence[str], method: str, count: int, batch_size: int
) -> dict[str, dict[str, float | None]]:
    """Choose `count` of the images that have no labels in the data set of the run.

    Args:
      predictor: the trained model.
      paths: paths of the images. A repeated image counts once.
      method: a key of `acquisition.METHODS`.
      count: number of images.
      batch_size: as in `Predictor.embed`.

    Returns:
      path -> values of COLUMNS, in the order of the ranks. Without features, `distance` is None.

    Raises:
      UserError: fewer images than `count` have no labels and can be read.
    """
    parts = _by_labels(predictor.run, paths) if distributed.is_first() else None  # only its disk may have the data set
    labeled, unlabeled = distributed.broadcast_from_first(parts)
    _require(len(unlabeled), count)
    known = labeled if method != "uncertain" else []
    uncertainty, features = _embed(predictor, [*known, *unlabeled], batch_size)
    read, first = np.isfinite(uncertainty), len(known)
    rows = np.flatnonzero(read[first:])
    if len(rows) < len(unlabeled):
        status(f"left out: {quantity(len(unlabeled) - len(rows), 'image')} that cannot be read")
        _require(len(rows), count)
    candidates = Candidates(uncertainty[first:][rows], features[first:][rows], features[:first][read[:first]])
    with contextlib.closing(Progress("choose", count, 1)) as progress:
        order, distances = METHODS[method](candidates, count, progress.advance)
    far = [None] * count if distances is None else np.round(distances.astype(np.float64), 6).tolist()
    values = zip(range(1, count + 1), np.round(candidates.uncertainty[order], 6).tolist(), far, strict=True)
    names = [unlabeled[row] for row in rows[order].tolist()]
    return {name: dict(zip(COLUMNS, row, strict=True)) for name, row in zip(names, values, strict=True)}


def _require(images: int, count: int) -> None:
    if count > images:
        raise UserError(
            f"--count={count} is more than the {quantity(images, 'image')} without labels that can be chosen; give a "
            "smaller --count or more --images"
        )


def _embed(predictor: Predictor, paths: Sequence[str], batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the uncertainty f64[N] of all images, nan if an image cannot be read, and their features f32[N,D]."""
    weights = rarity(predictor.run.label_space.positives)
    uncertainty, features = np.full(len(paths), np.nan), np.zeros((len(paths), 0), np.float32)
    with contextlib.closing(Progress("features", math.ceil(len(paths) / batch_size), batch_size)) as progress:
        for rows, scores, vectors in predictor.embed(paths, batch_size=batch_size, progress=progress):
            if not features.shape[1]:
                features = np.zeros((len(paths), vectors.shape[1]), np.float32)
            uncertainty[rows], features[rows] = entropy(scores, weights), unit(vectors)
    return uncertainty, features


def _by_labels(run: Run, paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the image files with labels in the data set of the run, and the images of `paths` without labels."""
    data, places = run.config.data.copy_and_resolve_references(), dict(zip(map(_place, paths), paths, strict=True))
    data.bad_images = "skip"
    try:
        splits = open_splits(data, [data.val_split, *data.test_splits], seed=run.config.seed)
    except UserError as error:
        status(f"all images count as unlabeled, because the data set of the run cannot be opened: {error}")
        return [], list(places.values())
    labeled = {
        _place(split.images.name(row))
        for split in splits.values()
        for row in np.flatnonzero((split.labels != UNKNOWN).any(axis=1)).tolist()
    }
    unlabeled = [path for place, path in places.items() if place not in labeled]
    files = sorted(place for place in labeled if "://" in place or os.path.isfile(place))
    status(f"{len(unlabeled):,} of {quantity(len(places), 'image')} have no labels in the data set of the run")
    if labeled and not files:
        status("warning: no labeled image of the run is a file here, so images may be chosen that have labels")
    return files, unlabeled


def _place(path: str) -> str:
    return path if "://" in path else os.path.realpath(path)
