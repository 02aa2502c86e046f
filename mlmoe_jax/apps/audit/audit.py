"""Judge the labels of a data set: which labels are improbable, and which images or labels contradict one another.

A regularized logistic regression on the features of the frozen backbone gives each image probabilities, by a fit
without its fold. If the given value of a label is less probable than its other value, the other value is suggested.
Shape letters: N images, K labels, S suggestions.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int
from ml_collections import ConfigDict

from mlmoe_jax.apps.tools.duplicates import find_duplicates, inspect_images
from mlmoe_jax.config import default_config
from mlmoe_jax.data.images import Decoding
from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE
from mlmoe_jax.data.labels.grouping import cooccurrence
from mlmoe_jax.data.split import Split, number_groups
from mlmoe_jax.data.split_checks import check_splits, require_readable
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.metrics.cooccurrence import Pair, training_pairs
from mlmoe_jax.evaluation.metrics.label_quality import image_quality, self_confidence
from mlmoe_jax.inference.feature_extractor import FeatureExtractor
from mlmoe_jax.models.calibration import probabilities
from mlmoe_jax.models.consistency import Consistency
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.text import quantity
from mlmoe_jax.training.logistic.fit import read_features
from mlmoe_jax.training.logistic.penalty_search import FOLDS, fit_logistic

MIN_IMAGES = FOLDS  # images, or groups of images, with and without a label, so that the fits without a fold have both
LEAST = 0.5  # probability of a label that is suggested
TOGETHER, SUPPORT = 0.95, 20  # share and number of the images with a label that have another label too


@dataclass(frozen=True)
class Audit:
    """The audited labels of a split.

    Attributes:
      split: the images that could be read.
      scores: probabilities of the labels, each by a fit without the image.
      similar: rows of two images of similar appearance.
      pairs: labels a that are nearly always with label b.
    """

    split: Split
    scores: Float[np.ndarray, "n k"]
    similar: list[tuple[int, int]]
    pairs: list[Pair]

    @cached_property
    def confidence(self) -> Float[np.ndarray, "n k"]:
        """The probability of each given label; nan for labels that cannot be judged."""
        return np.where(self.judged, self_confidence(self.split.labels, self.scores), np.nan)

    @cached_property
    def judged(self) -> Bool[np.ndarray, " k"]:
        """Whether each label is judged."""
        return can_judge(self.split)

    @cached_property
    def suggestions(self) -> Int[np.ndarray, "s 2"]:
        """(row, label) of each suggestion, the least probable given label first."""
        return ranked(self.confidence)[: int((self.confidence < LEAST).sum())]

    @cached_property
    def worst_images(self) -> list[int]:
        """The rows of the images with suggestions, the image with the lowest quality first."""
        rows = np.unique(self.suggestions[:, 0])
        return rows[np.argsort(image_quality(self.confidence)[rows], kind="stable")].tolist()

    @cached_property
    def twins(self) -> list[tuple[int, int]]:
        """The pairs of `similar` whose labels contradict each other."""
        return [pair for pair in self.similar if self.differences(*pair)]

    def differences(self, row: int, other: int) -> list[int]:
        """Return the labels on which two images contradict each other: positive in one, negative in the other."""
        codes = np.sort(self.split.labels[[row, other]], axis=0)
        return np.flatnonzero((codes[0] == NEGATIVE) & (codes[1] == POSITIVE)).tolist()

    def is_missing(self, row: int, label: int) -> bool:
        """Return whether a suggestion adds the label; otherwise it removes it."""
        return bool(self.split.labels[row, label] != POSITIVE)


def ranked(confidence: Float[np.ndarray, "n k"]) -> Int[np.ndarray, "m 2"]:
    """Return (row, label) of all finite confidences, sorted from low to high. Equal confidences keep their order."""
    order = np.argsort(confidence, axis=None, kind="stable")[: int((~np.isnan(confidence)).sum())]
    return np.stack(np.unravel_index(order, confidence.shape), axis=1)


def can_judge(split: Split) -> Bool[np.ndarray, " k"]:
    """Return which labels can be judged: MIN_IMAGES images or groups have the label, and as many lack it."""
    group = number_groups(split.groups, len(split))
    order = np.argsort(group, kind="stable")
    firsts = np.unique(group[order], return_index=True)[1]
    counts = [np.logical_or.reduceat(split.labels[order] == code, firsts).sum(axis=0) for code in (POSITIVE, NEGATIVE)]
    return np.min(counts, axis=0) >= MIN_IMAGES


def probe_config(config: ConfigDict) -> ConfigDict:
    """Return a config with a linear classifier on cached features, and with no training images held out."""
    config, plain = config.copy_and_resolve_references(), default_config()
    for section in ("head", "prompts", "adapters"):
        config.model[section] = plain.model[section]
    config.model.backbone.batch_norm, config.trainable = "frozen", ((r"^backbone/", False), (r"", True))
    config.data.val_fraction = 0.0
    if config.data.cache_features == "no":
        config.data.cache_features = "float32"
    return config


def audit_split(split: Split, config: ConfigDict) -> Audit:
    """Fit probes on the features of a split and return its audit; UserError if no label can be judged."""
    require_readable([split], config.data)
    for warning in check_splits(split, []):
        logging.getLogger(__name__).warning(warning)
    if not can_judge(split).any():
        raise UserError(
            f"no label can be judged: a label needs {MIN_IMAGES} {fold_units(split)} of split {split.name} that have "
            f"it and {MIN_IMAGES} that are known not to have it; label more images"
        )
    split, features = extract_features(split, config)
    status(f"fitting {quantity(len(split.classes), 'label')} on {quantity(len(split), 'image')} without each fold")
    fit = fit_logistic(features, split.labels, difficult="ignore", seed=config.seed, groups=split.group_numbers)
    scores = Consistency.of(split.tree, LEAST, len(split.classes))(probabilities(fit.held_out_logits))
    return Audit(split, scores, _find_similar(split, config), _find_together(split))


def _find_similar(split: Split, config: ConfigDict) -> list[tuple[int, int]]:
    """Return pairs of rows whose images are similar."""
    with contextlib.closing(Progress("similar images", len(split), 1)) as progress:
        images, _ = inspect_images(split, np.arange(len(split)), progress.advance, Decoding.from_config(config.data))
    return sorted({tuple(sorted(pair)) for item in find_duplicates([split], [images]) for pair in item.pairs})


def _find_together(split: Split) -> list[Pair]:
    """Return the pairs of labels that nearly always occur together. Pairs that the tree implies are left out."""
    implied = split.tree.add_implied(np.eye(len(split.classes), dtype=bool))
    pairs = training_pairs(*cooccurrence(split.labels), len(split), level=TOGETHER, support=SUPPORT)
    return [pair for pair in pairs if not implied[pair.a, pair.b]]


def fold_units(split: Split) -> str:
    """Return the noun for the parts of a fold: images, or groups of images."""
    return "images" if split.groups is None else "groups of images"


def extract_features(split: Split, config: ConfigDict) -> tuple[Split, Float[np.ndarray, "n d"]]:
    """Return the readable images of a split, and their features from the backbone of a `probe_config`."""
    features, read = read_features(FeatureExtractor.from_config(config, len(split.classes)).cached(split).features)
    return split.take(np.flatnonzero(read), split.name), features
