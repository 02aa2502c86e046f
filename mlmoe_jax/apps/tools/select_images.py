"""`mlmoe predict --select`: choose the images to label next, from the scores and features of a trained model."""

import contextlib
import os

import numpy as np

from mlmoe_jax.apps.tools.acquisition import Candidates, choose_images, entropy, normalize, rarity
from mlmoe_jax.data.images import ImageNames, Images, JoinedImages
from mlmoe_jax.data.label_codes import UNKNOWN
from mlmoe_jax.data.sources.open import open_splits
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.inputs import MixedImages
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.runs.restore import Run
from mlmoe_jax.runtime.files import find_file
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.text import quantity

SELECTION_COLUMNS = ("rank", "uncertainty", "distance")


def select_images(
    predictor: Predictor, images: Images, method: str, count: int, batch_size: int | None = None
) -> tuple[Images, dict[str, dict[str, float | None]]]:
    """Choose `count` of the images to label next. `method` is one of `acquisition.METHODS`.

    `batch_size` is the approximate number of images per batch, as `most` in `Predictor.even_batch`.

    Images that are named again and images with labels in the data set of the run are ignored. Raises UserError if there
    are fewer than `count` readable images without labels.

    Returns:
      The chosen images, sorted by rank, and the name of each -> rank, uncertainty and distance (keys
        SELECTION_COLUMNS). `distance` is None for the method `uncertain`.
    """
    labeled, unlabeled = _divide_by_labels(predictor.run, images)
    _require_images(len(unlabeled), count)
    files = MixedImages(labeled if method != "uncertain" else [])
    size = predictor.even_batch(len(images), batch_size)
    free, candidates = _candidates(predictor, files, images.take(np.array(unlabeled)), size)
    _require_images(len(free), count)
    with contextlib.closing(Progress("choose", count, 1)) as progress:
        order, distances = choose_images(method, candidates, count, progress.advance)
    columns = (
        range(1, count + 1),
        np.round(candidates.uncertainty[order], 6).tolist(),
        [None] * count if distances is None else np.round(distances.astype(np.float64), 6).tolist(),
    )
    chosen = free.take(order)
    values = (dict(zip(SELECTION_COLUMNS, row, strict=True)) for row in zip(*columns, strict=True))
    return chosen, dict(zip(ImageNames(chosen), values, strict=True))


def _require_images(available: int, count: int) -> None:
    if count > available:
        raise UserError(
            f"--count={count} is more than the {quantity(available, 'image')} without labels that can be chosen; give "
            "a smaller --count or more --images"
        )


def _candidates(predictor: Predictor, labeled: Images, unlabeled: Images, batch_size: int) -> tuple[Images, Candidates]:
    """Return the N readable unlabeled images, and the candidates, whose images have this order."""
    uncertainty, features = _embed(predictor, JoinedImages([labeled, unlabeled]), batch_size)
    is_read = np.isfinite(uncertainty)
    is_labeled = np.arange(len(uncertainty)) < len(labeled)
    free = is_read & ~is_labeled
    readable = unlabeled.take(np.flatnonzero(free) - len(labeled))
    if unread := len(unlabeled) - len(readable):
        status(f"left out: {quantity(unread, 'image')} that cannot be read")
    return readable, Candidates(uncertainty[free], features[free], features[is_read & is_labeled])


def _embed(predictor: Predictor, images: Images, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the uncertainty f64[N], nan for unreadable images, and the scaled features f32[N,D] of N images."""
    weights = rarity(predictor.run.label_space.positives)
    uncertainty, features = np.full(len(images), np.nan), np.zeros((len(images), 0), np.float32)
    for rows, scores, vectors in predictor.embed(images, batch_size=batch_size, task="features"):
        if not features.shape[1]:
            features = np.zeros((len(images), vectors.shape[1]), np.float32)
        uncertainty[rows] = entropy(scores, weights)
        features[rows] = normalize(vectors)
    return uncertainty, features


def _divide_by_labels(run: Run, images: Images) -> tuple[list[str], list[int]]:
    """Return the sorted paths of all labeled images of the run's data set that exist, and the rows without labels.

    If the data set cannot be opened, all `images` count as unlabeled.
    """
    data = run.config.data.copy_and_resolve_references()
    data.bad_images = "skip"
    given = {_real_path(name): row for row, name in enumerate(ImageNames(images))}
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
    unlabeled = [row for path, row in given.items() if path not in labeled]
    files = sorted(path for path in labeled if "://" in path or os.path.isfile(path))
    status(f"{len(unlabeled):,} of {quantity(len(given), 'image')} have no labels in the data set of the run")
    return files, unlabeled


def _real_path(path: str) -> str:
    return path if "://" in path else os.path.realpath(find_file(path))
