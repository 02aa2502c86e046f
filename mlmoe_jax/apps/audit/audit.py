"""Audit the labels of a data set (`--mode=data --audit`): suggest corrections, as a page with images and as a CSV.

A regularized logistic regression on the features of the frozen backbone gives each image probabilities, by a fit
without its fold. If the given value of a label is less probable than its other value, the other value is suggested.
Shape letters: N images, K labels, S suggestions.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Bool, Float, Int
from ml_collections import ConfigDict

from mlmoe_jax.apps.audit.page import audit_page
from mlmoe_jax.apps.tools.duplicates import find_duplicates, inspect_images
from mlmoe_jax.config import default_config
from mlmoe_jax.data.images import Decoding
from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE
from mlmoe_jax.data.labels.grouping import cooccurrence
from mlmoe_jax.data.sources.corrections import CELL_OF, COLUMNS, Correction, read_corrections
from mlmoe_jax.data.sources.open import open_split, place_of
from mlmoe_jax.data.split import Split, number_groups
from mlmoe_jax.data.split_checks import check_splits, examples, require_readable
from mlmoe_jax.errors import DONE, UserError
from mlmoe_jax.evaluation.metrics.cooccurrence import Pair, training_pairs
from mlmoe_jax.evaluation.metrics.label_quality import image_quality, self_confidence
from mlmoe_jax.inference.feature_extractor import FeatureExtractor
from mlmoe_jax.models.calibration import probabilities
from mlmoe_jax.models.consistency import Consistency
from mlmoe_jax.runtime.formats import row_writer, to_json
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.storage import Folder, Target, open_target
from mlmoe_jax.runtime.text import quantity
from mlmoe_jax.training.classifier import read_features
from mlmoe_jax.training.logistic import FOLDS, fit_logistic

FOLDER, SUGGESTIONS, PAGE = "audit", "suggestions.csv", "audit.html"
FEWEST = FOLDS  # images, or groups of images, with and without a label, so that the fits without a fold have both
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
    def quality(self) -> Float[np.ndarray, " n"]:
        """The score of each image."""
        return image_quality(self.confidence)

    @cached_property
    def judged(self) -> Bool[np.ndarray, " k"]:
        """Whether each label is judged."""
        return can_judge(self.split)

    @cached_property
    def suggestions(self) -> Int[np.ndarray, "s 2"]:
        """(row, label) of each suggestion, the least probable given label first."""
        return ranked(self.confidence)[: int((self.confidence < LEAST).sum())]

    @cached_property
    def twins(self) -> list[tuple[int, int]]:
        """The rows of `similar` that differ in a label."""
        return [pair for pair in self.similar if self.differences(*pair)]

    def differences(self, row: int, other: int) -> list[int]:
        """Return the labels that one of two images has, and the other is known not to have."""
        codes = np.sort(self.split.labels[[row, other]], axis=0)
        return np.flatnonzero((codes[0] == NEGATIVE) & (codes[1] == POSITIVE)).tolist()

    def is_missing(self, row: int, label: int) -> bool:
        """Return whether a suggestion adds a label. Otherwise it removes the label."""
        return bool(self.split.labels[row, label] != POSITIVE)


def ranked(confidence: Float[np.ndarray, "n k"]) -> Int[np.ndarray, "m 2"]:
    """Return (row, label) of all labels with a confidence, the lowest first; of equal ones, the first row first."""
    order = np.argsort(confidence, axis=None, kind="stable")[: int((~np.isnan(confidence)).sum())]
    return np.stack(np.unravel_index(order, confidence.shape), axis=1)


def can_judge(split: Split) -> Bool[np.ndarray, " k"]:
    """Return whether at least FEWEST images, or groups, have each label, and as many are known not to have it."""
    group = number_groups(split.groups, len(split))
    order = np.argsort(group, kind="stable")
    firsts = np.unique(group[order], return_index=True)[1]
    counts = [np.logical_or.reduceat(split.labels[order] == code, firsts).sum(axis=0) for code in (POSITIVE, NEGATIVE)]
    return np.min(counts, axis=0) >= FEWEST


def audit(config: ConfigDict, output: str, *, as_json: bool = False) -> int:
    """Audit the whole training split, write the page and the CSV to the folder `output`, and return 0.

    Raises:
      UserError: the data cannot be opened, no label can be judged, or the folder has suggestions that are accepted.
    """
    folder = Folder(output or FOLDER)
    folder.require_place()
    table = folder / SUGGESTIONS
    if table.exists() and (accepted := read_corrections(table)):
        raise UserError(
            f"{table} has {quantity(len(accepted), 'accepted correction')}, which a new audit would overwrite; name "
            "another --output, or move the file"
        )
    config = probe_config(config)
    name = config.data.corrections
    earlier = read_corrections(place_of(config.data, name)) if name else ()
    result = audit_split(open_split(config.data, config.data.train_split, seed=config.seed), config)
    page = audit_page(result, config)
    with folder.writing():
        write_suggestions(table, result, earlier)
        folder.write_text(PAGE, page)
    print(to_json(as_dict(result), indent=2) if as_json else format_audit(result))
    where = table.resolve() if folder.is_local else table
    status(
        f"look at {folder / PAGE}, write yes into the column accept of {table} where a suggestion is right, and train "
        f"with {shlex.quote(f'--config.data.corrections={where}')}"
    )
    return DONE


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
    """Return the audit of a split with the backbone of a config; UserError if no label can be judged."""
    require_readable([split], config.data)
    for warning in check_splits(split, []):
        status(f"warning: {warning}")
    if not can_judge(split).any():
        raise UserError(
            f"no label can be judged: a label needs {FEWEST} {units(split)} of split {split.name} that have it and "
            f"{FEWEST} that are known not to have it; label more images"
        )
    split, features = backbone_features(split, config)
    status(f"fitting {quantity(len(split.classes), 'label')} on {quantity(len(split), 'image')} without each fold")
    fit = fit_logistic(features, split.labels, difficult="ignore", seed=config.seed, groups=split.group_numbers)
    with contextlib.closing(Progress("similar images", len(split), 1)) as progress:
        images, _ = inspect_images(split, np.arange(len(split)), progress.advance, Decoding.of(config.data))
    similar = sorted({tuple(sorted(pair)) for item in find_duplicates([split], [images]) for pair in item.pairs})
    together = training_pairs(*cooccurrence(split.labels), len(split), level=TOGETHER, support=SUPPORT)
    tree, labels = split.tree, len(split.classes)
    closure = tree.augmented(np.eye(labels, dtype=bool))
    scores = Consistency.of(tree, LEAST, labels)(probabilities(fit.logits_outside))
    return Audit(split, scores, similar, [pair for pair in together if not closure[pair.a, pair.b]])


def units(split: Split) -> str:
    """Return what is in one fold: images or groups of images."""
    return "images" if split.groups is None else "groups of images"


def backbone_features(split: Split, config: ConfigDict) -> tuple[Split, Float[np.ndarray, "n d"]]:
    """Return the images of a split that can be read, and their features by the backbone of a `probe_config`."""
    features, read = read_features(FeatureExtractor.of(config, len(split.classes)).cached(split).features)
    return split.take(np.flatnonzero(read), split.name), features


# -------------------------------------------------------------------------------------------------------------- output
def rows_of(result: Audit) -> Iterator[tuple[str, str, str, str, str, str]]:
    """Yield the suggestions as rows of COLUMNS."""
    split = result.split
    for row, label in result.suggestions.tolist():
        suggested = POSITIVE if result.is_missing(row, label) else NEGATIVE
        codes = (CELL_OF[code] for code in (int(split.labels[row, label]), suggested))
        yield split.ids[row], split.classes[label], *codes, f"{result.confidence[row, label]:.6f}", ""


def write_suggestions(path: epath.Path, result: Audit, earlier: Sequence[Correction] = ()) -> None:
    """Write the CSV that `data.corrections` reads: the suggestions, and the corrections of earlier audits."""
    with open_target(Target(path, "csv")) as file:
        write = row_writer(file)
        for row in (COLUMNS, *rows_of(result)):
            write(row)
        for correction in earlier:
            code = CELL_OF[correction.code]
            write((correction.image, correction.label, code, code, "", "yes"))


def as_dict(result: Audit) -> dict[str, Any]:
    """Return the audit as values for JSON."""
    split, names = result.split, result.split.classes
    missing = sum(result.is_missing(*place) for place in result.suggestions.tolist())
    return {
        "split": split.name,
        "images": len(split),
        "missing": missing,
        "superfluous": len(result.suggestions) - missing,
        "suggestions": [dict(zip(COLUMNS[:-1], row, strict=False)) for row in rows_of(result)],
        "similar_images_with_other_labels": [[split.ids[i], split.ids[j]] for i, j in result.twins],
        "together": [{"label": names[p.a], "with": names[p.b], "share": p.p_b_given_a} for p in result.pairs],
        "not_judged": [name for name, judged in zip(names, result.judged, strict=True) if not judged],
    }


def format_audit(result: Audit) -> str:
    """Return the audit as text."""
    values, images = as_dict(result), len(np.unique(result.suggestions[:, 0]))
    lines = [
        f"{quantity(values['images'], 'image')} of split {values['split']}: {values['missing']:,} missing and "
        f"{values['superfluous']:,} superfluous labels suggested on {quantity(images, 'image')}"
    ]
    if twins := values["similar_images_with_other_labels"]:
        pairs = examples((" and ".join(pair) for pair in twins), "; ")
        lines.append(f"{quantity(len(twins), 'pair')} of similar images with different labels: {pairs}")
    if result.pairs:
        pairs = examples(f"{p['label']} with {p['with']} ({100 * p['share']:.0f} %)" for p in values["together"])
        lines.append(f"labels nearly always together: {pairs}")
    if values["not_judged"]:
        lines.append(
            f"not judged, because fewer than {FEWEST} {units(result.split)} have the label or are known not to have "
            f"it: {examples(values['not_judged'])}"
        )
    return "\n".join(lines)
