"""Scores that agree with a tree of labels, on the host and inside jit.

Scores agree with a tree if a label that another one implies has at least the score of that label, and reaches its
threshold if that label does, and if at most one of exclusive labels reaches its threshold. Such scores are not changed.
Otherwise,

* a label gets the largest score of the labels that imply it, if that is above its own (the maximum of C-HMCNN,
  E. Giunchiglia and T. Lukasiewicz, "Coherent hierarchical multi-label classification networks", NeurIPS 2020), and at
  least its threshold if one of them reaches its threshold;
* of exclusive labels that reach their thresholds, the strongest keeps its score: the one with the largest score, its
  own or of a label that implies it, and the first of equal ones. Weaker ones, and the labels that imply them, get
  scores just below their thresholds.

Shape letters: K labels, P labels of a level, C neighbors of a label, G groups of M exclusive labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlmoe_jax.data.label_tree import LabelTree
from mlmoe_jax.models.calibration import Calibration
from mlmoe_jax.runtime.array_types import Ints

_GAP = 2.0**-20  # relative distance from a threshold of a score below it, which float32 resolves
_FREE = 2.0  # the bound of a score that has none
_ROWS = 4096  # images at a time on the host


@dataclass(frozen=True)
class _Level:
    """Labels, i64[P], with their neighbors i64[P,C] in the tree, of which the last may repeat."""

    labels: Ints
    neighbors: Ints

    @classmethod
    def of(cls, neighbors: Mapping[int, Sequence[int]]) -> _Level:
        most = max(map(len, neighbors.values()))
        padded = [[*some, *some[-1:] * (most - len(some))] for some in neighbors.values()]
        return cls(np.array(list(neighbors)), np.array(padded))

    def put(self, into: Any, values: Any, xp: Any) -> Any:
        """Return an array [...,K] with new values [...,P]; without a scatter, which some export formats lack."""
        count = into.shape[-1]
        source = np.arange(count)
        source[self.labels] = count + np.arange(len(self.labels))
        return xp.concatenate([into, values], axis=-1)[..., source]


def _levels(neighbors: Mapping[int, Sequence[int]]) -> tuple[_Level, ...]:
    """Return the labels with neighbors such that a label comes at a later level than its neighbors."""
    depth: dict[int, int] = {}
    by_depth: dict[int, dict[int, Sequence[int]]] = {}
    for label, others in neighbors.items():  # each label after its neighbors
        depth[label] = 1 + max((depth[other] for other in others), default=-1)
        if others:
            by_depth.setdefault(depth[label], {})[label] = others
    return tuple(_Level.of(by_depth[level]) for level in sorted(by_depth))


@dataclass(frozen=True, eq=False)
class Consistency:
    """A function from scores to the scores that agree with a tree at given thresholds; by default the identity.

    Attributes:
      limits: the thresholds f64[K]: a label is predicted if its score is at least its threshold; infinity = never.
      upward, downward: the levels from the labels that imply others to those that imply nothing, and back.
      groups: the exclusive labels i64[G,M], -1 where a group has fewer.
      slots: the exclusive labels with their places in `groups`.
    """

    limits: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    upward: tuple[_Level, ...] = ()
    downward: tuple[_Level, ...] = ()
    groups: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    slots: _Level | None = None

    @classmethod
    def of(cls, tree: LabelTree, limits: ArrayLike, labels: int) -> Consistency:
        """Return the function for thresholds f64[K], or one threshold for all K = `labels`.

        The threshold of a label in a group is above 0, and a label that others imply has a threshold of at most 1: it
        is predicted with them.
        """
        limits = np.array(np.broadcast_to(np.asarray(limits, np.float64), labels))
        most = max(map(len, tree.exclusive), default=0)
        groups = np.array([[*group, *[-1] * (most - len(group))] for group in tree.exclusive], np.int64)
        groups = groups.reshape(len(tree.exclusive), most)
        places: dict[int, list[int]] = {}
        for place, label in enumerate(groups.ravel().tolist()):
            if label >= 0:
                places.setdefault(label, []).append(place)
        implied = [label for label, children in tree.children.items() if children]
        limits[implied] = np.minimum(limits[implied], 1)
        if places:
            touched = [*places, *tree.parents]
            limits[touched] = np.maximum(limits[touched], _GAP)
        slots = _Level.of(places) if places else None
        return cls(limits, _levels(tree.children), _levels(tree.parents), groups, slots)

    def __call__(self, scores: Any) -> Any:
        """Return the scores of scores [...,K], in their type: an array of NumPy, or one of JAX for use inside jit."""
        if not (self.upward or self.slots):
            return scores
        if not isinstance(scores, np.ndarray):
            return self._agreeing(scores, scores.__array_namespace__())  # jax.numpy, which the host does not need
        if scores.ndim == 2 and len(scores) > _ROWS:
            return np.concatenate([self(scores[at : at + _ROWS]) for at in range(0, len(scores), _ROWS)])
        return self._agreeing(scores, np)

    def _agreeing(self, scores: Any, xp: Any) -> Any:
        limits = self.limits.astype(scores.dtype)  # rounded up, so that a score at a limit is not below the threshold
        limits = np.where(limits < self.limits, np.nextafter(limits, limits.dtype.type(np.inf)), limits)
        raised = self._raised(scores, limits, xp)
        if self.slots is None:
            return raised
        strength = self._raised(scores, np.full_like(limits, np.inf), xp)
        bounds = self._bounds(strength, raised >= limits, limits, xp)
        return self._raised(xp.minimum(scores, bounds), limits, xp)

    def _raised(self, scores: Any, limits: NDArray, xp: Any) -> Any:
        """Return scores [...,K] in which each label keeps up with the labels that imply it."""
        for level in self.upward:
            below, least = scores[..., level.neighbors], limits[level.labels][:, None]
            below = xp.where(below >= limits[level.neighbors], xp.maximum(below, least), below).max(axis=-1)
            scores = level.put(scores, xp.maximum(scores[..., level.labels], below), xp)
        return scores

    def _bounds(self, strength: Any, predicted: Any, limits: NDArray, xp: Any) -> Any:
        """Return the largest score [...,K] of each label: below its threshold if a stronger label excludes it."""
        assert self.slots is not None
        under = (self.limits * (1 - _GAP)).astype(limits.dtype)
        rivals = xp.where((self.groups >= 0) & predicted[..., self.groups], strength[..., self.groups], -1)
        strongest = rivals.argmax(axis=-1)[..., None] == np.arange(self.groups.shape[1])
        weaker = ((rivals >= 0) & ~strongest).reshape(*strength.shape[:-1], self.groups.size)
        excluded = weaker[..., self.slots.neighbors].any(axis=-1)
        free = xp.full_like(strength, _FREE)
        bounds = self.slots.put(free, xp.where(excluded, under[self.slots.labels], _FREE), xp)
        for level in self.downward:
            above = bounds[..., level.neighbors].min(axis=-1)
            above = xp.where(above < _FREE, xp.minimum(above, under[level.labels]), above)
            bounds = level.put(bounds, xp.minimum(bounds[..., level.labels], above), xp)
        return bounds


@dataclass(frozen=True, eq=False)
class Scores:
    """From logits to the scores that a run reports: corrected per label, then in agreement with the tree of labels."""

    calibration: Calibration = field(default_factory=Calibration)
    consistency: Consistency = field(default_factory=Consistency)

    def __call__(self, logits: Any) -> Any:
        """Return the scores of logits [...,K]: an array of NumPy, or one of JAX for use inside jit."""
        return self.consistency(self.calibration(logits))
