"""Judge the labels of a data set: which labels are improbable, and which images or labels contradict one another.

A regularized logistic regression is fitted to the features of the frozen backbone, with cross-validation. The images
are divided into folds, and the probabilities of an image are from the fit that leaves out its fold. The audit suggests
the opposite of a given value (present or absent) by `label_quality.Limits`, but only for labels that the fit finds.
Shape letters: N images, K labels, S suggestions.
"""

import contextlib
import logging
from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int
from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.audit.label_quality import HALF, Limits, image_quality, self_confidence
from mlmoe_jax.apps.tools.duplicates import find_duplicates, inspect_images
from mlmoe_jax.data.decoding import Decoding
from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE
from mlmoe_jax.data.labels.grouping import cooccurrence
from mlmoe_jax.data.sources.corrections import Suggestion
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.split_checks import check_splits, require_readable
from mlmoe_jax.data.twins import join_twins
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.metrics.cooccurrence import Pair, training_pairs
from mlmoe_jax.inference.feature_extractor import FeatureExtractor
from mlmoe_jax.models.attributes import AttributeSoftmax
from mlmoe_jax.models.consistency import Consistency
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.text import abbreviate, quantity
from mlmoe_jax.training.logistic.penalty_search import FOLDS, fit_logistic

MIN_IMAGES = FOLDS  # images, or groups of images, with and without a label, so that the fits without a fold have both
TOGETHER, SUPPORT = 0.95, 20  # share and number of the images with a label that have another label too


@dataclass(frozen=True)
class Audit:
    """The audited labels of a split. The attribute `split` has only the readable images of the split.

    Attributes:
      scores: f64[N,K], out-of-fold probabilities: the fit for an image does not use the image.
      similar: pairs of rows of `split` whose images have a similar appearance.
      pairs: pairs of labels (a, b): nearly all images with label a also have label b.
      answered: the keys of the suggestions that a person has answered. They are not suggested again.
    """

    split: Split
    scores: Float[np.ndarray, "n k"]
    similar: list[tuple[int, int]]
    pairs: list[Pair]
    answered: Set[tuple] = frozenset()

    @cached_property
    def confidence(self) -> Float[np.ndarray, "n k"]:
        """The `self_confidence` of each label of each image, f64[N,K]; nan for labels that cannot be judged."""
        return np.where(self.judged, self_confidence(np.asarray(self.split.labels), self.scores), np.nan)

    @cached_property
    def judged(self) -> Bool[np.ndarray, " k"]:
        """Whether each label is judged, bool[K]: enough images have it, see `can_judge`, and the fit finds it."""
        return can_judge(self.split) & self.limits.found

    @cached_property
    def limits(self) -> Limits:
        return Limits.of(np.asarray(self.split.labels), self.scores)

    @cached_property
    def suggestions(self) -> Int[np.ndarray, "s 2"]:
        """(row, label) of each unanswered suggestion, i64[S,2], sorted by increasing `confidence`."""
        codes = np.asarray(self.split.labels)
        issues = self.limits.issues(codes, self.scores)
        # Another value of an attribute replaces the given one, see `correct_labels`, and only one exceeds HALF.
        values = AttributeSoftmax.of(self.split.tree.attributes, len(self.split.classes)).is_value
        issues &= ~values | (codes != POSITIVE)
        found = ranked(np.where(issues, self.confidence, np.nan))
        is_open = [self.suggestion(*place).key not in self.answered for place in found.tolist()]
        return found[np.array(is_open, bool)]

    @cached_property
    def worst_images(self) -> list[int]:
        """The rows of the images with suggestions, sorted by increasing `image_quality`."""
        rows = np.unique(self.suggestions[:, 0])
        return rows[np.argsort(image_quality(self.confidence)[rows], kind="stable")].tolist()

    @cached_property
    def twins(self) -> list[tuple[int, int]]:
        """The pairs of `similar` in which the labels of the two images contradict each other, see `differences`."""
        return [pair for pair in self.similar if self.differences(*pair)]

    def not_judged(self) -> dict[str, list[str]]:
        """Return reason -> names of the labels that are not judged for this reason, without empty lists."""
        enough, names = can_judge(self.split), np.array(self.split.classes, object)
        few = f"fewer than {MIN_IMAGES} {fold_units(self.split)} have the label or are known not to have it"
        parts = {few: names[~enough], "the fit hardly finds the label": names[enough & ~self.judged]}
        return {reason: labels.tolist() for reason, labels in parts.items() if len(labels)}

    def sentences(self) -> list[str]:
        """Return sentences about the labels that are not judged; [] if all are judged."""
        weak = (
            "the fit is too weak to judge any label, so nothing is suggested; label more images, or use a larger model"
        )
        parts = [f"not judged, because {reason}: {abbreviate(names)}" for reason, names in self.not_judged().items()]
        return parts if self.judged.any() else [*parts, weak]

    def differences(self, row: int, other: int) -> list[int]:
        """Return the indices of the labels that are positive in one of the two images and negative in the other one."""
        codes = np.sort(self.split.labels[[row, other]], axis=0)
        return np.flatnonzero((codes[0] == NEGATIVE) & (codes[1] == POSITIVE)).tolist()

    def suggestion(self, row: int, label: int) -> Suggestion:
        """Return the unanswered suggestion for the image `row` and the label `label`, an index."""
        split = self.split
        codes = int(split.labels[row][label]), POSITIVE if self.is_missing(row, label) else NEGATIVE
        return Suggestion.of(split.ids[row], split.classes[label], codes, self.confidence[row, label])

    def is_missing(self, row: int, label: int) -> bool:
        """Return True if the suggestion for this image and label adds the label, and False if it removes the label."""
        return bool(self.split.labels[row][label] != POSITIVE)


def ranked(confidence: Float[np.ndarray, "n k"]) -> Int[np.ndarray, "m 2"]:
    """Return (row, label) of the entries that are not nan, by increasing confidence. Ties keep their order."""
    order = np.argsort(confidence, axis=None, kind="stable")[: int((~np.isnan(confidence)).sum())]
    return np.stack(np.unravel_index(order, confidence.shape), axis=1)


def can_judge(split: Split) -> Bool[np.ndarray, " k"]:
    """Return the labels that can be judged, bool[K]: with at least MIN_IMAGES positive and MIN_IMAGES negative images.

    In a split with groups of images, groups count instead of images.
    """
    group = np.unique(split.units, return_inverse=True)[1]
    order = np.argsort(group, kind="stable")
    firsts = np.unique(group[order], return_index=True)[1]
    counts = [np.logical_or.reduceat(split.labels[order] == code, firsts).sum(axis=0) for code in (POSITIVE, NEGATIVE)]
    return np.min(counts, axis=0) >= MIN_IMAGES


def probe_config(config: ConfigDict) -> ConfigDict:
    """Return a copy of a config that trains a linear classifier (a linear probe) on cached features.

    The copy has no prompts and no adapters, freezes the backbone, and holds no training images out for validation.
    """
    config, plain = config.copy_and_resolve_references(), configuration.default_config()
    for section in ("head", "prompts", "adapters"):
        config.model[section] = plain.model[section]
    config.model.backbone.batch_norm, config.trainable = "frozen", ((r"^backbone/", False), (r"", True))
    config.data.val_fraction = 0.0
    if config.data.cache_features == "no":
        config.data.cache_features = "float32"
    return config


def audit_split(split: Split, config: ConfigDict) -> Audit:
    """Fit linear classifiers to the features of a split by cross-validation, and return the audit of its labels.

    `config` is from `probe_config`. Raises UserError if no label can be judged, see `can_judge`.
    """
    require_readable([split], config.data)
    for warning in check_splits(split, []):
        logging.getLogger(__name__).warning(warning)
    if not can_judge(split).any():
        raise UserError(
            f"no label can be judged: a label needs {MIN_IMAGES} {fold_units(split)} of split {split.name} that have "
            f"it and {MIN_IMAGES} that are known not to have it; label more images"
        )
    split, features = extract_features(split, config)
    split = join_twins(split, config.data, features)
    status(f"fitting {quantity(len(split.classes), 'label')} on {quantity(len(split), 'image')} without each fold")
    options = {"difficult": "ignore", "seed": config.seed, "units": split.units}
    fit = fit_logistic(features, split.labels, **options, attributes=split.tree.attributes)
    scores = Consistency.of(split.tree, HALF, len(split.classes))(fit.held_out_scores)
    return Audit(split, scores, _find_similar(split, config), _find_together(split))


def _find_similar(split: Split, config: ConfigDict) -> list[tuple[int, int]]:
    """Return the sorted pairs of rows whose images are duplicates or have a similar appearance."""
    with contextlib.closing(Progress("similar images", len(split), 1)) as progress:
        inspection = inspect_images(split, np.arange(len(split)), progress.advance, Decoding.from_config(config.data))
    return sorted({tuple(sorted(pair)) for item in find_duplicates([inspection]) for pair in item.pairs})


def _find_together(split: Split) -> list[Pair]:
    """Return label pairs (a, b) such that nearly all images with a have b, unless a implies b in the label tree."""
    implied = split.tree.add_implied(np.eye(len(split.classes), dtype=bool))
    pairs = training_pairs(*cooccurrence(split.labels), len(split), level=TOGETHER, support=SUPPORT)
    return [pair for pair in pairs if not implied[pair.a, pair.b]]


def fold_units(split: Split) -> str:
    """Return the word for the units that are assigned to folds: "images", or "groups of images" for grouped splits."""
    return "images" if split.groups is None else "groups of images"


def extract_features(split: Split, config: ConfigDict) -> tuple[Split, Float[np.ndarray, "n d"]]:
    """Return a split with only its readable images, and their features f32[n,D]; `config` is from `probe_config`."""
    features, read = FeatureExtractor.from_config(config, len(split.classes)).cached(split).features.readable()
    return split.take(np.flatnonzero(read), split.name), features
