"""The label space of a model: the names of the labels and their statistics in training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from scipy.sparse import csr_array

from mlmoe_jax.data.label_tree import INDEPENDENT, LabelTree
from mlmoe_jax.data.labels.graph import as_long_as_glove, cooccurrence_vectors, read_glove
from mlmoe_jax.data.labels.grouping import cooccurrence, group_labels
from mlmoe_jax.data.labels.name_vectors import NameVectors
from mlmoe_jax.data.names import names_problem
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained, read_text
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.text import quantity

TAU = {"co": 2.0, "dc": 3.0}  # of the published groups, see grouping.affinity
PUBLISHED_GROUPS = Path(__file__).parents[1] / "files" / "label_groups.json"
_OF_NAMES = "name_vectors/"  # the prefix of their arrays in an npz file
PUBLISHED_FOR = {"coco2014": "coco", "voc2007": "voc2007", "voc2012": "voc2007", "nuswide": "nuswide", "vg256": "vg256"}


@dataclass(frozen=True)
class LabelSpace:
    """The names of the K labels of a model, and statistics of the labels in the training split.

    Attributes:
      together: sparse i64[K,K], the number of training images with both labels, with a zero diagonal. A dense array is
        converted.
      positives: i64[K], the number of training images with each label.
      co_group: i32[K], the group of each label in the grouping of labels that occur together ("co" in `affinity`).
      dc_group: i32[K], the group of each label in the grouping of labels that rarely occur together ("dc").
      vectors: f32[K,d], one vector per label name; None if the model needs no vectors.
      name_vectors: the vectors of the names in the space of an image-text model; None if the model was made without
        them.
      categories: the category of each label, see `data.categories`; () without categories.
    """

    names: tuple[str, ...]
    together: csr_array
    positives: np.ndarray
    images: int
    co_group: np.ndarray
    dc_group: np.ndarray
    vectors: np.ndarray | None = None
    tree: LabelTree = INDEPENDENT
    name_vectors: NameVectors | None = None
    categories: tuple[str, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "together", csr_array(self.together))

    @property
    def counts(self) -> np.ndarray:
        """`together` as a dense array i64[K,K]."""
        return self.together.toarray()

    @property
    def frequency(self) -> np.ndarray:
        """The fraction of training images with each label, f64[K]."""
        return self.positives / max(1, self.images)

    def with_names(self, vectors: NameVectors) -> LabelSpace:
        """Return the label space with the further labels of `vectors` at its end.

        A further label has no training images and is in group 0. Raises UserError if `vectors` lack a label of the
        label space or have no further label, or if the label space has no `name_vectors` or differs from `vectors` in
        them.
        """
        if self.name_vectors is None:
            raise UserError("the labels of the run have no vectors of names; train it with model.head.names first")
        further = [name for name in vectors.names if name not in self.names]
        if not further:
            raise UserError("the vectors of names have no name that is not a label of the run; add one to their file")
        names, missing = (*self.names, *further), (0, len(further))
        ordered, pairs = vectors.for_labels(names), self.together.tocoo()
        if not np.allclose(ordered.vectors[: len(self.names)], self.name_vectors.vectors, atol=1e-5):
            raise UserError("the run has other vectors of its labels; encode all names as it was done then")
        return replace(
            self,
            names=names,
            together=csr_array((pairs.data, (pairs.row, pairs.col)), shape=(len(names), len(names))),
            positives=np.pad(self.positives, missing),
            co_group=np.pad(self.co_group, missing),
            dc_group=np.pad(self.dc_group, missing),
            vectors=None if self.vectors is None else as_long_as_glove(ordered.vectors),
            name_vectors=ordered,
            categories=self.categories and (*self.categories, *[""] * len(further)),
        )

    def labels_by_category(self) -> dict[str, np.ndarray]:
        """Return category -> the indices of its labels, sorted by name; labels without a category are left out."""
        categories = np.array(self.categories, str)
        return {str(name): np.flatnonzero(categories == name) for name in np.unique(categories) if name}

    def vectors_by_name(self) -> dict[str, np.ndarray]:
        """Return label -> its vector, as the head reads it, from `vectors` or else `name_vectors`; {} without both."""
        vectors = self.vectors
        if vectors is None and self.name_vectors is not None:
            vectors = self.name_vectors.vectors
        return {} if vectors is None else dict(zip(self.names, vectors, strict=True))

    def save(self, path) -> None:
        """Write the label space to an npz file. `path` is a path or a file that is open for writing."""
        pairs = self.together.tocoo()
        arrays: dict[str, Any] = {
            "names": np.asarray(self.names),
            "together": np.stack([pairs.row, pairs.col, pairs.data]),
            "positives": self.positives,
            "images": self.images,
            "co_group": self.co_group,
            "dc_group": self.dc_group,
            "tree": np.asarray(self.tree.dump()),
        }
        if self.categories:
            arrays["categories"] = np.asarray(self.categories)
        if self.vectors is not None:
            arrays["vectors"] = self.vectors
        if self.name_vectors is not None:
            arrays |= {f"{_OF_NAMES}{name}": array for name, array in self.name_vectors.arrays().items()}
            arrays[f"{_OF_NAMES}about"] = np.asarray(self.name_vectors.about())
        np.savez_compressed(path, **arrays)

    @classmethod
    def from_arrays(cls, stored: Mapping[str, np.ndarray]) -> LabelSpace:
        """Return the label space from the arrays that `save` wrote; ValueError if they do not fit together."""
        names = tuple(map(str, stored["names"]))
        if problem := names_problem(names) if names else "has no labels":
            raise ValueError(f"it {problem}")
        labels = len(names)
        row, column, images = stored["together"]
        space = cls(
            names,
            csr_array((images, (row, column)), shape=(labels, labels)),
            stored["positives"],
            int(stored["images"]),
            stored["co_group"],
            stored["dc_group"],
            stored.get("vectors"),
            LabelTree.load(str(stored["tree"]), names),
            _read_name_vectors(stored, names),
            tuple(map(str, stored.get("categories", ()))),
        )
        counts = (space.positives, space.co_group, space.dc_group, space.together, stored["images"])
        are_counts = all(array.dtype.kind in "iu" and (not array.size or array.min() >= 0) for array in counts)
        shapes = [array.shape for array in counts[:3]]
        if space.vectors is not None:
            shapes.append(space.vectors.shape[:-1])
        fit = {*shapes} == {(labels,)} and len(space.categories) in (0, labels)
        if not are_counts or not fit:
            raise ValueError(f"its arrays do not fit its {labels} names, or are not counts")
        return space


def _read_name_vectors(stored: Mapping[str, np.ndarray], names: tuple[str, ...]) -> NameVectors | None:
    """Return the vectors of the names from the arrays of an npz file; None if it has none.

    Raises ValueError if the vectors are of other names.
    """
    arrays = {key.removeprefix(_OF_NAMES): array for key, array in stored.items() if key.startswith(_OF_NAMES)}
    if not arrays:
        return None
    vectors = NameVectors.from_arrays(arrays, str(arrays["about"]))
    if vectors.names != names:
        raise ValueError("its vectors are of other names")
    return vectors


def compute_label_space(
    train: Split,
    data_name: str,
    model_config: ConfigDict,
    seed: int,
    *,
    grouped: bool = False,
    vectors: bool = False,
    name_vectors: NameVectors | None = None,
) -> LabelSpace:
    """Compute the label space from the labels of the training split. No image is read.

    Args:
      data_name: name of the data set, which selects the published groups. `seed` is for groups that are computed.
      grouped: whether the model needs label groups. Otherwise all labels are in one group.
      vectors: whether the model needs vectors of the labels.
      name_vectors: the vectors of the names, in any order; None if the model is made without them.

    Raises:
      UserError: no groups are published for this data set, or a file of groups or vectors does not fit the labels.
    """
    if name_vectors is not None:
        name_vectors = name_vectors.for_labels(train.classes)
    together, positives = cooccurrence(train.labels)
    co_group = dc_group = np.zeros(len(positives), np.int32)
    if grouped:
        co_group, dc_group = _groups(together, positives, data_name, model_config.prompts, seed)
    word_vectors = None
    if vectors:
        graph = model_config.head.graph
        if name_vectors is not None:
            word_vectors = as_long_as_glove(name_vectors.vectors)
        elif graph.word_vectors:
            word_vectors = read_glove(graph.word_vectors, train.classes)
        else:
            word_vectors = cooccurrence_vectors(together.toarray(), positives, len(train), width=graph.vector_width)
    sides = co_group, dc_group
    return LabelSpace(train.classes, together, positives, len(train), *sides, word_vectors, train.tree, name_vectors)


def label_space_of(vectors: NameVectors) -> LabelSpace:
    """Return the label space whose labels are the names of `vectors`, without training images."""
    space = synthetic_label_space(len(vectors.names), 1)
    return replace(space, names=vectors.names, name_vectors=vectors)


def synthetic_label_space(labels: int, groups: int) -> LabelSpace:
    """Return a label space of artificial labels, for use without a data set.

    All groups have about equally many labels.
    """
    group = (np.arange(labels) % groups).astype(np.int32)
    names = tuple(f"label {k}" for k in range(labels))
    together = csr_array((labels, labels), dtype=np.int64)
    return LabelSpace(names, together, np.zeros(labels, np.int64), 0, group, group)


def _groups(
    together: csr_array, positives: np.ndarray, data_name: str, prompts: ConfigDict, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the "co" and the "dc" group of each label, i32[K] each.

    `prompts.groups` says whether they are computed, published or read from a file.
    """
    if prompts.groups == "computed":
        status(f"grouping {quantity(len(positives), 'label')}")
        options = {"num_groups": prompts.num_groups, "seed": seed}
        counts = together.toarray()
        co_group, dc_group = (
            group_labels(counts, positives, tau=tau, side=side, **options) for side, tau in TAU.items()
        )
        return co_group, dc_group
    if prompts.groups == "published":
        numbers = _published(data_name, prompts.num_groups)
    else:
        numbers = _read_groups(prompts.groups)
    co_group, dc_group = (_check_groups(numbers, side, len(positives), prompts) for side in ("co", "dc"))
    return co_group, dc_group


def _read_groups(path: str) -> dict[str, list[int]]:
    if not Path(path).is_file():
        raise UserError(f"model.prompts.groups is '{path}', which is neither computed, nor published, nor a file")
    with damage_explained(path):
        numbers = json.loads(read_text(path))
        return {side: [int(group) for group in numbers[side]] for side in ("co", "dc")}


def _check_groups(numbers: Mapping[str, list[int]], side: str, labels: int, prompts: ConfigDict) -> np.ndarray:
    """Return `numbers[side]` as i32[K]; UserError unless each label has one in 0 … `prompts.num_groups` − 1."""
    group = np.asarray(numbers[side], np.int32)
    if group.shape != (labels,) or group.min() < 0 or group.max() >= prompts.num_groups:
        raise UserError(
            f"the {side} groups from {prompts.groups} are {group.size} numbers from {min(group, default=0)} to "
            f"{max(group, default=0)}, but the data has {labels} labels and model.prompts.num_groups is "
            f"{prompts.num_groups}"
        )
    return group


def _published(data_name: str, num_groups: int) -> dict[str, list[int]]:
    table = json.loads(PUBLISHED_GROUPS.read_text()).get(PUBLISHED_FOR.get(data_name, ""), {})
    if str(num_groups) not in table:
        raise UserError(
            f"no {num_groups} label groups of {data_name} are published; set model.prompts.groups=computed to derive "
            "them from the training labels"
        )
    return table[str(num_groups)]
