"""The label space of a model: the names of the labels and their statistics in training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from mlmoe_jax.data.label_tree import INDEPENDENT, LabelTree
from mlmoe_jax.data.labels.graph import cooccurrence_vectors, read_glove
from mlmoe_jax.data.labels.grouping import cooccurrence, group_labels
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import MOST_TEXT, damage_explained, read_bytes
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.text import quantity

TAU = {"co": 2.0, "dc": 3.0}  # of the published groups, see grouping.affinity
PUBLISHED_GROUPS = Path(__file__).parents[1] / "files" / "label_groups.json"
PUBLISHED_FOR = {"coco2014": "coco", "voc2007": "voc2007", "voc2012": "voc2007", "nuswide": "nuswide", "vg256": "vg256"}


@dataclass(frozen=True)
class LabelSpace:
    """The names of K labels and their statistics in training.

    Attributes:
      names: the names of the labels.
      together: sparse i64[K,K], the number of training images with both labels, with a zero diagonal; a dense array is
        converted.
      positives: i64[K], the number of training images with each label.
      images: the number of training images.
      co_group: i32[K], the group of each label on the co-occurrence side.
      dc_group: i32[K], the group of each label on the discriminative side.
      vectors: f32[K,d], one vector per label name, or None if the model needs no vectors.
      tree: the labels that imply or exclude others.
    """

    names: tuple[str, ...]
    together: csr_array
    positives: np.ndarray
    images: int
    co_group: np.ndarray
    dc_group: np.ndarray
    vectors: np.ndarray | None = None
    tree: LabelTree = INDEPENDENT

    def __post_init__(self):
        object.__setattr__(self, "together", csr_array(self.together))

    @property
    def counts(self) -> np.ndarray:
        """`together` as a dense i64[K,K]."""
        return self.together.toarray()

    @property
    def frequency(self) -> np.ndarray:
        """The fraction of training images with each label, f64[K]."""
        return self.positives / max(1, self.images)

    def save(self, path) -> None:
        """Write the label space as one npz to a path or an open file."""
        pairs = self.together.tocoo()
        arrays: dict[str, Any] = {
            "names": np.asarray(self.names),
            "together": np.stack([pairs.row, pairs.col, pairs.data]),
            "positives": self.positives,
            "images": self.images,
            "co_group": self.co_group,
            "dc_group": self.dc_group,
            **self.tree.arrays(),
        }
        if self.vectors is not None:
            arrays["vectors"] = self.vectors
        np.savez_compressed(path, **arrays)

    @classmethod
    def of(cls, stored: Mapping[str, np.ndarray]) -> LabelSpace:
        """Return the label space of the arrays that `save` wrote; ValueError if they do not fit together."""
        names, vectors = tuple(map(str, stored["names"])), stored.get("vectors")
        row, column, images = stored["together"]
        together = csr_array((images, (row, column)), shape=(len(names), len(names)))
        positives, co_group, dc_group = (stored[name] for name in ("positives", "co_group", "dc_group"))
        per_label = [positives.shape, co_group.shape, dc_group.shape, *([] if vectors is None else [vectors.shape[:1]])]
        fit = all(shape == (len(names),) for shape in per_label) and (vectors is None or vectors.ndim == 2)
        counts = (positives, co_group, dc_group, together, stored["images"])
        if not fit or any(array.dtype.kind not in "iu" or (array.size and array.min() < 0) for array in counts):
            raise ValueError(f"its arrays do not fit its {len(names)} names, or are not counts")
        tree = LabelTree.of(stored, names)
        return cls(names, together, positives, int(stored["images"]), co_group, dc_group, vectors, tree)


def label_space_of(
    train: Split, data_name: str, model_config, seed: int, *, grouped: bool = False, vectors: bool = False
) -> LabelSpace:
    """Compute the label space from the labels of the training split, without reading images.

    Args:
      train: the training split.
      data_name: name of the data set, for published groups.
      model_config: `config.model`; `prompts.groups`, `prompts.num_groups` and `head.graph` are used.
      seed: seed of the clustering.
      grouped: whether the model needs label groups; otherwise all labels are in one group.
      vectors: whether the model needs word vectors.

    Raises:
      UserError: no groups are published for this data set, or a file does not match the labels.
    """
    together, positives = cooccurrence(train.labels)
    co_group = dc_group = np.zeros(len(positives), np.int32)
    if grouped:
        co_group, dc_group = _groups(together, positives, data_name, model_config.prompts, seed)
    word_vectors = None
    if vectors:
        graph = model_config.head.graph
        word_vectors = (
            read_glove(graph.word_vectors, train.classes)
            if graph.word_vectors
            else cooccurrence_vectors(together.toarray(), positives, len(train), width=graph.vector_width)
        )
    return LabelSpace(train.classes, together, positives, len(train), co_group, dc_group, word_vectors, train.tree)


def synthetic_label_space(labels: int, groups: int) -> LabelSpace:
    """Return a label space of artificial labels, spread evenly over the groups, for use without a data set."""
    group = (np.arange(labels) % groups).astype(np.int32)
    names = tuple(f"label {k}" for k in range(labels))
    together = csr_array((labels, labels), dtype=np.int64)
    return LabelSpace(names, together, np.zeros(labels, np.int64), 0, group, group)


def _groups(together: csr_array, positives, data_name: str, prompts, seed: int) -> tuple[np.ndarray, np.ndarray]:
    num_labels, num_groups = len(positives), prompts.num_groups
    if prompts.groups == "computed":
        counts = together.toarray()
        status(f"grouping {quantity(num_labels, 'label')}")
        co_group, dc_group = (
            group_labels(counts, positives, num_groups=num_groups, tau=tau, side=side, seed=seed)
            for side, tau in TAU.items()
        )
        return co_group, dc_group
    if prompts.groups == "published":
        pair = _published(data_name, num_groups)
    elif not Path(prompts.groups).is_file():
        raise UserError(
            f"model.prompts.groups is '{prompts.groups}', which is neither computed, nor published, nor a file"
        )
    else:
        with damage_explained(prompts.groups):
            pair = json.loads(read_bytes(prompts.groups, MOST_TEXT))
            pair = {side: [int(group) for group in pair[side]] for side in ("co", "dc")}
    co_group, dc_group = (np.asarray(pair[side], np.int32) for side in ("co", "dc"))
    for side, group in (("co", co_group), ("dc", dc_group)):
        if group.shape != (num_labels,) or group.min() < 0 or group.max() >= num_groups:
            raise UserError(
                f"the {side} groups from {prompts.groups} are {group.size} numbers from {min(group, default=0)} to "
                f"{max(group, default=0)}, but the data has {num_labels} labels and model.prompts.num_groups is "
                f"{num_groups}"
            )
    return co_group, dc_group


def _published(data_name: str, num_groups: int) -> dict[str, list[int]]:
    table = json.loads(PUBLISHED_GROUPS.read_text()).get(PUBLISHED_FOR.get(data_name, ""), {})
    if str(num_groups) not in table:
        has = f"published for {', '.join(table)} groups, not for {num_groups}" if table else "not published"
        raise UserError(
            f"label groups of {data_name} are {has}; set model.prompts.groups=computed to derive them from the "
            "training labels"
        )
    return table[str(num_groups)]
