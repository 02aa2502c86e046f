"""Scores that agree with a tree of labels, on the host and inside jit.

Scores agree with a tree and thresholds if three things hold:

* A label scores at least as high as a label that implies it.
* A label reaches its threshold if a label that implies it reaches its own.
* At most one of several exclusive labels reaches its threshold.

Such scores are not changed. Other scores are changed in two ways:

* A label gets the largest score of the labels that imply it, if that is above its own (the maximum of C-HMCNN,
  E. Giunchiglia and T. Lukasiewicz, "Coherent hierarchical multi-label classification networks", NeurIPS 2020). It gets
  at least its threshold if one of them reaches its threshold.
* Of exclusive labels that reach their thresholds, the strongest keeps its score. The strength of a label is the largest
  score of the label and of the labels that imply it; of equal labels, the first is the strongest. Weaker labels, and
  the labels that imply them, get scores just below their thresholds.

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
from mlmoe_jax.runtime.array_types import Floats, Ints

_GAP = 2.0**-20  # relative distance of a score below a threshold from it; float32 resolves it
_UNBOUNDED = 2.0  # the bound of a label without a bound, above every score
_ROWS = 4096  # images that the host treats at a time


@dataclass(frozen=True)
class _Level:
    """Some labels and the neighbors of each.

    Attributes:
      labels: i64[P].
      neighbors: i64[P,C]; the last neighbor repeats if a label has fewer than others.
    """

    labels: Ints
    neighbors: Ints

    @classmethod
    def of(cls, neighbors: Mapping[int, Sequence[int]]) -> _Level:
        most = max(map(len, neighbors.values()))
        padded = [[*some, *some[-1:] * (most - len(some))] for some in neighbors.values()]
        return cls(np.array(list(neighbors)), np.array(padded))

    def replace(self, scores: Any, values: Any, xp: Any) -> Any:
        """Return scores [...,K] with the values [...,P] of these labels. There is no scatter in some export formats."""
        count = scores.shape[-1]
        source = np.arange(count)
        source[self.labels] = count + np.arange(len(self.labels))
        return xp.concatenate([scores, values], axis=-1)[..., source]


def _sort_into_levels(neighbors: Mapping[int, Sequence[int]]) -> tuple[_Level, ...]:
    """Return the labels that have neighbors, each at a later level than its neighbors.

    `neighbors` maps every label to its neighbors, and has a label after its neighbors.
    """
    depth: dict[int, int] = {}
    by_depth: dict[int, dict[int, Sequence[int]]] = {}
    for label, others in neighbors.items():
        depth[label] = 1 + max((depth[other] for other in others), default=-1)
        if others:
            by_depth.setdefault(depth[label], {})[label] = others
    return tuple(_Level.of(by_depth[level]) for level in sorted(by_depth))


@dataclass(frozen=True, eq=False)
class Consistency:
    """A function from scores to the scores that agree with a tree at given thresholds; by default the identity.

    Attributes:
      limits: the thresholds f64[K]; a label is predicted if its score is at least its threshold; infinity = never.
      upward: the labels that others imply, with the labels that imply them directly; those that imply come first.
      downward: the labels that imply others, with the labels that they imply directly; the implied ones come first.
      groups: the exclusive labels i64[G,M], -1 where a group has fewer.
      slots: the exclusive labels, with their positions in the flat `groups`; None without exclusive labels.
    """

    limits: Floats = field(default_factory=lambda: np.zeros(0))
    upward: tuple[_Level, ...] = ()
    downward: tuple[_Level, ...] = ()
    groups: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    slots: _Level | None = None

    @classmethod
    def of(cls, tree: LabelTree, limits: ArrayLike, labels: int) -> Consistency:
        """Return the function for thresholds f64[K], or one threshold for all K = `labels`.

        The threshold of a label that others imply is at most 1, because the label is predicted with them. The threshold
        of an exclusive label is above 0, so that a score can be below it.
        """
        limits = np.array(np.broadcast_to(np.asarray(limits, np.float64), labels))
        implied = [label for label, children in tree.children.items() if children]
        limits[implied] = np.minimum(limits[implied], 1)
        most = max(map(len, tree.exclusive), default=0)
        groups = np.array([[*group, *[-1] * (most - len(group))] for group in tree.exclusive], np.int64)
        groups = groups.reshape(len(tree.exclusive), most)
        positions: dict[int, list[int]] = {}
        for position, label in enumerate(groups.ravel().tolist()):
            if label >= 0:
                positions.setdefault(label, []).append(position)
        if positions:
            lowerable = [*positions, *tree.parents]
            limits[lowerable] = np.maximum(limits[lowerable], _GAP)
        slots = _Level.of(positions) if positions else None
        return cls(limits, _sort_into_levels(tree.children), _sort_into_levels(tree.parents), groups, slots)

    def __call__(self, scores: Any) -> Any:
        """Return the scores of scores [...,K], in their type: an array of NumPy, or one of JAX for use inside jit."""
        if not (self.upward or self.slots):
            return scores
        if not isinstance(scores, np.ndarray):
            return self._agree(scores, scores.__array_namespace__())  # jax.numpy, which the host does not need
        if scores.ndim == 2 and len(scores) > _ROWS:
            return np.concatenate([self(scores[at : at + _ROWS]) for at in range(0, len(scores), _ROWS)])
        return self._agree(scores, np)

    def _agree(self, scores: Any, xp: Any) -> Any:
        """Return the scores in agreement; `xp` is numpy or jax.numpy."""
        limits = self.limits.astype(scores.dtype)  # rounded up, so that a score at a limit is not below the threshold
        limits = np.where(limits < self.limits, np.nextafter(limits, limits.dtype.type(np.inf)), limits)
        raised = self._raise_implied(scores, limits, xp)
        if self.slots is None:
            return raised
        strength = self._raise_implied(scores, np.full_like(limits, np.inf), xp)
        bounds = self._bound_excluded(strength, raised >= limits, limits, xp)
        return self._raise_implied(xp.minimum(scores, bounds), limits, xp)

    def _raise_implied(self, scores: Any, limits: NDArray, xp: Any) -> Any:
        """Return scores [...,K] in which no label is below one that implies it."""
        for level in self.upward:
            implying, least = scores[..., level.neighbors], limits[level.labels][:, None]
            reached = implying >= limits[level.neighbors]
            needed = xp.where(reached, xp.maximum(implying, least), implying).max(axis=-1)
            scores = level.replace(scores, xp.maximum(scores[..., level.labels], needed), xp)
        return scores

    def _bound_excluded(self, strength: Any, predicted: Any, limits: NDArray, xp: Any) -> Any:
        """Return the largest allowed score [...,K] of each label.

        It is just below the threshold of a label that a stronger one excludes, and of the labels that imply such a
        label.

        Args:
          strength: [...,K], the strengths of the labels, see the module.
          predicted: bool[...,K], the labels that reach their thresholds.
          limits: [K], the thresholds.
          xp: numpy or jax.numpy.
        """
        assert self.slots is not None
        under = (self.limits * (1 - _GAP)).astype(limits.dtype)
        rivals = xp.where((self.groups >= 0) & predicted[..., self.groups], strength[..., self.groups], -1)
        strongest = rivals.argmax(axis=-1)[..., None] == np.arange(self.groups.shape[1])
        weaker = ((rivals >= 0) & ~strongest).reshape(*strength.shape[:-1], self.groups.size)
        excluded = weaker[..., self.slots.neighbors].any(axis=-1)
        unbounded = xp.full_like(strength, _UNBOUNDED)
        bounds = self.slots.replace(unbounded, xp.where(excluded, under[self.slots.labels], _UNBOUNDED), xp)
        for level in self.downward:
            implied = bounds[..., level.neighbors].min(axis=-1)
            implied = xp.where(implied < _UNBOUNDED, xp.minimum(implied, under[level.labels]), implied)
            bounds = level.replace(bounds, xp.minimum(bounds[..., level.labels], implied), xp)
        return bounds


@dataclass(frozen=True, eq=False)
class Scores:
    """From logits to the scores that a run reports: corrected per label, then in agreement with the tree of labels."""

    calibration: Calibration = field(default_factory=Calibration)
    consistency: Consistency = field(default_factory=Consistency)

    def __call__(self, logits: Any) -> Any:
        """Return the scores of logits [...,K]: an array of NumPy, or one of JAX for use inside jit."""
        return self.consistency(self.calibration(logits))
