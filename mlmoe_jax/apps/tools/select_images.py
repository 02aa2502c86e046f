"""`mlmoe predict --select`: choose the images to label next, from the scores and features of a trained model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import numpy as np

from mlmoe_jax.apps.tools.acquisition import Candidates, choose_images, entropy, normalize, rarity
from mlmoe_jax.data.label_codes import UNKNOWN
from mlmoe_jax.data.sources.open import open_splits
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.runs.restore import Run
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.files import find_file
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.text import quantity

SELECTION_COLUMNS = ("rank", "uncertainty", "distance")


def select_images(
    predictor: Predictor, paths: Sequence[str], method: str, count: int, batch_size: int
) -> dict[str, dict[str, float | None]]:
    """Choose `count` of the images `paths` to label next. `method` is one of `acquisition.METHODS`.

    Repeated paths and images with labels in the data set of the run are ignored. Raises UserError if there are fewer
    than `count` readable images without labels.

    Returns:
      Path of each chosen image -> rank, uncertainty and distance (keys SELECTION_COLUMNS), sorted by rank. `distance`
        is None for the method `uncertain`.
    """
    # Only the disk of the first process may have the data set.
    parts = _divide_by_labels(predictor.run, paths) if distributed.is_first() else None
    labeled, unlabeled = distributed.broadcast_from_first(parts)
    _require_images(len(unlabeled), count)
    names, candidates = _candidates(predictor, labeled if method != "uncertain" else [], unlabeled, batch_size)
    _require_images(len(names), count)
    with contextlib.closing(Progress("choose", count, 1)) as progress:
        order, distances = choose_images(method, candidates, count, progress.advance)
    columns = (
        range(1, count + 1),
        np.round(candidates.uncertainty[order], 6).tolist(),
        [None] * count if distances is None else np.round(distances.astype(np.float64), 6).tolist(),
    )
    return {
        names[row]: dict(zip(SELECTION_COLUMNS, values, strict=True))
        for row, *values in zip(order.tolist(), *columns, strict=True)
    }


def _require_images(available: int, count: int) -> None:
    if count > available:
        raise UserError(
            f"--count={count} is more than the {quantity(available, 'image')} without labels that can be chosen; give "
            "a smaller --count or more --images"
        )


def _candidates(
    predictor: Predictor, labeled: Sequence[str], unlabeled: Sequence[str], batch_size: int
) -> tuple[list[str], Candidates]:
    """Return the paths of the N readable unlabeled images, and the candidates, whose images have this order."""
    uncertainty, features = _embed(predictor, [*labeled, *unlabeled], batch_size)
    is_read = np.isfinite(uncertainty)
    is_labeled = np.arange(len(uncertainty)) < len(labeled)
    free = is_read & ~is_labeled
    names = [unlabeled[row - len(labeled)] for row in np.flatnonzero(free).tolist()]
    if unread := len(unlabeled) - len(names):
        status(f"left out: {quantity(unread, 'image')} that cannot be read")
    return names, Candidates(uncertainty[free], features[free], features[is_read & is_labeled])


def _embed(predictor: Predictor, paths: Sequence[str], batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the uncertainty f64[N], nan for unreadable images, and the scaled features f32[N,D] of N images."""
    weights = rarity(predictor.run.label_space.positives)
    uncertainty, features = np.full(len(paths), np.nan), np.zeros((len(paths), 0), np.float32)
    for rows, scores, vectors in predictor.embed(paths, batch_size=batch_size, task="features"):
        if not features.shape[1]:
            features = np.zeros((len(paths), vectors.shape[1]), np.float32)
        uncertainty[rows] = entropy(scores, weights)
        features[rows] = normalize(vectors)
    return uncertainty, features


def _divide_by_labels(run: Run, paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the sorted paths of all labeled images of the run's data set that exist, and the unlabeled `paths`.

    If the data set cannot be opened, all `paths` count as unlabeled.
    """
    data = run.config.data.copy_and_resolve_references()
    data.bad_images = "skip"
    given = {_real_path(path): path for path in paths}
    try:
        splits = open_splits(data, [data.val_split, *data.test_splits], seed=run.config.seed)
    except UserError as error:
        status(f"all images count as unlabeled, because the data set of the run cannot be opened: {error}")
        return [], list(given.values())
    labeled = {
        _real_path(split.images.name(row))
        for split in splits.values()
        for row in np.flatnonzero(split.labels.count(UNKNOWN, axis=1) < len(split.classes)).tolist()
    }
    unlabeled = [path for real, path in given.items() if real not in labeled]
    files = sorted(path for path in labeled if "://" in path or os.path.isfile(path))
    status(f"{len(unlabeled):,} of {quantity(len(given), 'image')} have no labels in the data set of the run")
    return files, unlabeled


def _real_path(path: str) -> str:
    return path if "://" in path else os.path.realpath(find_file(path))
