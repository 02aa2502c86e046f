"""One split of a data set, as every source returns it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from mlmoe_jax.data.images import ImageNames, Images
from mlmoe_jax.data.label_codes import DIFFICULT, POSITIVE
from mlmoe_jax.data.label_tree import INDEPENDENT, LabelTree
from mlmoe_jax.data.names import require_names
from mlmoe_jax.data.usage import Usage
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.array_types import Arrays

if TYPE_CHECKING:
    from mlmoe_jax.data.features import FeatureTable
    from mlmoe_jax.data.label_matrix import LabelMatrix


def name_units(ids: Sequence[str], groups: Sequence[str] | None) -> Sequence[str]:
    """Return the name of each image's unit: its group, or the image itself if its group is "".

    `groups` is None if the data has no groups.
    """
    return ids if groups is None else [group or name for name, group in zip(ids, groups, strict=True)]


@dataclass(frozen=True)
class Split:
    """One split of a data set with N images and K labels.

    Attributes:
      labels: label codes i8[N,K]: NEGATIVE, POSITIVE, UNKNOWN or DIFFICULT. A dense array is converted. The pipeline,
        not the source, decides how UNKNOWN and DIFFICULT are treated in training.
      ids: name of each image, a path or a generated name. (`id` in a batch is the row of the image instead.)
      groups: name of each image's group, such as the patient, or "" for a group of its own. None means that the data
        has no groups. The images of a group should not be in two splits.
      missing: the images that were left out because they have no file; None if all have one.
      features: cached features that replace the images in batches; None if batches contain images.
      tree: the label tree of `data.tree`. The labels are consistent with it.
      contradictions: bool[N,2], where the original labels contradicted the tree, see `LabelTree.close`. None without a
        tree.
      usage: what was given to the source of this split, and what it left out.
    """

    name: str
    classes: tuple[str, ...]
    labels: LabelMatrix
    ids: Sequence[str]
    images: Images
    groups: Sequence[str] | None = None
    missing: SkippedImages | None = None
    features: FeatureTable | None = None
    tree: LabelTree = INDEPENDENT
    contradictions: np.ndarray | None = None
    usage: tuple[Usage, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def units(self) -> Sequence[str]:
        """The name of each image's unit, see `name_units`."""
        return name_units(self.ids, self.groups)

    @property
    def fingerprint(self) -> str:
        """A sha256 of the names, labels and groups of all images."""
        digest = hashlib.sha256("\0".join(self.ids).encode(errors="surrogatepass"))
        for codes in self.labels.blocks():
            digest.update(codes)
        digest.update("\0".join(self.groups or ()).encode(errors="surrogatepass"))
        return digest.hexdigest()

    @cached_property
    def frames(self) -> list[Usage]:
        """The account of the images with several frames; [] if there is none."""
        notes = self.images.frames_note()
        return [Usage(f"split {self.name}", "image", {self.name: len(self)}, notes=notes)] if notes else []

    def take(self, rows: np.ndarray, name: str) -> Split:
        """Return a split named `name` with the images of the row numbers `rows`, i64[n], in that order."""
        places = [int(row) for row in rows]
        return replace(
            self,
            name=name,
            labels=self.labels.take(rows),
            ids=[self.ids[row] for row in places],
            images=self.images.take(rows),
            groups=None if self.groups is None else [self.groups[row] for row in places],
            contradictions=None if self.contradictions is None else self.contradictions[rows],
            missing=None,
            features=None,
        )

    def close_labels(self, tree: LabelTree) -> Split:
        """Return the split with labels that are consistent with a label tree, see `LabelTree.close`.

        Raises UserError if an image has two values of an attribute.
        """
        if not (tree or tree.attributes):
            return self
        closed = [(self.labels.of(codes), rows) for codes, rows in map(tree.close, self.labels.blocks())]
        labels, parts = zip(*closed, strict=True)
        contradictions = np.concatenate(parts)
        if contradictions[:, 2].any():
            raise UserError(self._why_several(tree, int(contradictions[:, 2].argmax())))
        rules = contradictions[:, :2] if tree else None
        return replace(self, labels=self.labels.join(labels), tree=tree, contradictions=rules)

    def _why_several(self, tree: LabelTree, row: int) -> str:
        codes, line = tree.without_attributes().close(self.labels[[row]])[0][0], self.images.line(row)
        present = {k for k, code in enumerate(codes) if code in (POSITIVE, DIFFICULT)}
        values = next(some for item in tree.attributes if len(some := present.intersection(item.labels)) > 1)
        place = f"{line[0]} line {line[1]} ({self.ids[row]})" if line and line[1] else self.ids[row]
        shown = " and ".join(self.classes[k] for k in sorted(values))
        return f"{place} has {shown}, of which an image has one (data.attributes); correct its labels"

    def without_missing(self) -> Split:
        """Return the split without the images that have no file, which become the attribute `missing` of the result."""
        absent = self.images.missing()
        if not len(absent):
            return self
        present = np.setdiff1d(np.arange(len(self)), absent)
        kept = self.take(present, self.name).leave_out("with no file", [self.ids[int(row)] for row in absent])
        return replace(kept, missing=SkippedImages(self.take(absent, self.name), range(len(absent))))

    def leave_out(self, reason: str, images: Sequence[str]) -> Split:
        """Return the split with an account that counts `images`, which it no longer has, as left out for `reason`."""
        usage = self.usage or (Usage(f"split {self.name}", "image", {self.name: len(self) + len(images)}),)
        own = [account.drop(self.name, reason, images) if self.name in account.used else account for account in usage]
        return replace(self, usage=tuple(own))

    def __post_init__(self):
        lengths = [len(values) for values in (self.ids, self.images, self.groups) if values is not None]
        if self.labels.shape != (len(self.ids), len(self.classes)) or len(set(lengths)) > 1:
            raise ValueError(
                f"split {self.name}: {lengths} ids, images and groups, {len(self.classes)} classes and labels of shape "
                f"{self.labels.shape} do not fit together"
            )
        require_names(self.classes, f"split {self.name}")
        from mlmoe_jax.data.label_matrix import LabelMatrix  # here, because it imports scipy, and --help needs none

        object.__setattr__(self, "labels", LabelMatrix.of(self.labels))


def unlabeled(images: Images) -> Split:
    """Return a split of images without labels."""
    return Split("images", (), np.zeros((len(images), 0), np.int8), ImageNames(images), images)


class SkippedImages:
    """The images of a split that are not used, because they have no file or could not be read."""

    def __init__(self, split: Split, rows: Iterable[int] = ()):
        self.split, self.rows = split, set(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def watch(self, batches: Iterator[Arrays]) -> Iterator[Arrays]:
        """Yield the batches unchanged, and add the images that were skipped in them."""
        for batch in batches:
            skipped = (batch["mask"] == 0) & (batch["id"] >= 0)
            self.rows.update(batch["id"][skipped].tolist())
            yield batch

    def everywhere(self) -> SkippedImages:
        """Return the images that were skipped by any process. All processes must call this method."""
        return SkippedImages(self.split, set().union(*distributed.gather(sorted(self.rows))))

    def table(self) -> list[list[str]]:
        """Return a list of [split, id, reason]. It includes the images that were left out because they have no file.

        Each image is read again to find the reason.
        """
        split, later = self.split, "it could not be read before, but now it can"
        table = [[split.name, str(split.ids[row]), split.images.problem(row) or later] for row in sorted(self.rows)]
        return table + split.missing.table() if split.missing else table
