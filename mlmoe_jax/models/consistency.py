"""Scores that agree with a tree of labels, on the host and inside jit.

Scores agree with a tree and thresholds if three things hold:

* The score of a label is at least the score of every label that implies it.
* If a label reaches its threshold, every label that it implies reaches its own threshold.
* At most one label of each group of exclusive labels reaches its threshold.

Scores that agree are not changed. Other scores are changed in two ways:

* Implied labels are raised. The new score of a label is the maximum of its score and the scores of the labels that
  imply it (the maximum of C-HMCNN, E. Giunchiglia and T. Lukasiewicz, "Coherent hierarchical multi-label classification
  networks", NeurIPS 2020). If a label that implies it reaches its threshold, the new score is also at least the
  threshold of the implied label.
* Excluded labels are lowered. Among the exclusive labels of a group that reach their thresholds, the strongest keeps
  its score. The strength of a label is the maximum of its score and the scores of the labels that imply it. If
  strengths are equal, the first label counts as the strongest. Weaker labels, and the labels that imply them, get
  scores just below their thresholds.

The scores of values of attributes, which have a softmax, are not changed.

Shape letters: K labels, P labels of a level, C neighbors of a label, G groups of M exclusive labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlmoe_jax.data.label_tree import Attribute, LabelTree
from mlmoe_jax.models.attributes import AttributeSoftmax, assign
from mlmoe_jax.models.calibration import Calibration
from mlmoe_jax.runtime.array_types import Bools, Floats, Ints

_GAP = 2.0**-20  # relative distance of a score below a threshold from it; float32 resolves it
_UNBOUNDED = 2.0  # the bound of a label without a bound, above every score
_ROWS = 4096  # images that the host treats at a time


@dataclass(frozen=True)
class _Level:
    """Labels of one level of the tree, and the neighbors of each, from which its score or bound is computed.

    Attributes:
      labels: i64[P], label numbers.
      neighbors: i64[P,C]. If a label has fewer than C neighbors, its last neighbor is repeated.
    """

    labels: Ints
    neighbors: Ints

    @classmethod
    def of(cls, neighbors: Mapping[int, Sequence[int]]) -> _Level:
        most = max(map(len, neighbors.values()))
        padded = [[*some, *some[-1:] * (most - len(some))] for some in neighbors.values()]
        return cls(np.array(list(neighbors)), np.array(padded))

    def replace(self, scores: Any, values: Any, xp: Any) -> Any:
        """Return `scores` [...,K] with `values` [...,P] for `labels`. Some export formats have no scatter."""
        count = scores.shape[-1]
        source = np.arange(count)
        source[self.labels] = count + np.arange(len(self.labels))
        return xp.concatenate([scores, values], axis=-1)[..., source]


def _sort_into_levels(neighbors: Mapping[int, Sequence[int]]) -> tuple[_Level, ...]:
    """Sort the labels that have neighbors into levels, each later than the levels of all its neighbors.

    `neighbors` has all labels in topological order: the neighbors of a label come first.
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
    """A function from scores to scores that agree with a tree of labels at given thresholds; by default the identity.

    Attributes:
      limits: f64[K], the thresholds. A label is predicted if its score is at least its threshold. A label with the
        threshold infinity is never predicted.
      upward: levels of the implied labels, from children to parents. The neighbors of a label imply it directly.
      downward: levels of the implying labels, from parents to children. A label implies its neighbors directly.
      groups: i64[G,M], the labels of each group of exclusive labels. Groups with fewer than M labels are padded with
        -1.
      slots: the exclusive labels. The neighbors of a label are its positions in `groups.ravel()`. None without
        exclusive labels.
    """

    limits: Floats = field(default_factory=lambda: np.zeros(0))
    upward: tuple[_Level, ...] = ()
    downward: tuple[_Level, ...] = ()
    groups: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    slots: _Level | None = None
    attributes: tuple[Attribute, ...] = ()

    @classmethod
    def of(cls, tree: LabelTree, limits: ArrayLike, labels: int) -> Consistency:
        """Return the function for a tree of K = `labels` labels; `limits` are thresholds f64[K], or one for all labels.

        The threshold of an implied label is clipped to at most 1, because the label is predicted with the labels that
        imply it. The thresholds of exclusive labels, and of the labels that imply others, are raised above 0 if there
        are exclusive labels, so that a score can be below them.
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
        levels = _sort_into_levels(tree.children), _sort_into_levels(tree.parents)
        return cls(limits, *levels, groups, slots, tree.attributes)

    def assign(self, scores: Floats) -> Bools:
        """Return which labels are assigned by scores [...,K] that agree with the tree."""
        return assign(scores, self.limits, self.attributes)

    def __call__(self, scores: Any) -> Any:
        """Return scores [...,K] that agree with the tree, in the type of `scores`: a NumPy or a JAX array."""
        if not (self.upward or self.slots):
            return scores
        if not isinstance(scores, np.ndarray):
            return self._agree(scores, scores.__array_namespace__())  # jax.numpy, which the host does not need
        if scores.ndim == 2 and len(scores) > _ROWS:
            return np.concatenate([self(scores[at : at + _ROWS]) for at in range(0, len(scores), _ROWS)])
        return self._agree(scores, np)

    def _agree(self, scores: Any, xp: Any) -> Any:
        agreeing = self._apply_rules(scores, xp)
        is_value = AttributeSoftmax.of(self.attributes, len(self.limits)).is_value
        return xp.where(is_value, scores, agreeing) if is_value.any() else agreeing

    def _apply_rules(self, scores: Any, xp: Any) -> Any:
        """Return scores [...,K] that agree with the tree; `xp` is numpy or jax.numpy."""
        limits = self.limits.astype(scores.dtype)  # rounded up, so that a score at a limit is not below the threshold
        limits = np.where(limits < self.limits, np.nextafter(limits, limits.dtype.type(np.inf)), limits)
        raised = self._raise_implied(scores, limits, xp)
        if self.slots is None:
            return raised
        strength = self._raise_implied(scores, np.full_like(limits, np.inf), xp)
        bounds = self._bound_excluded(strength, raised >= limits, limits, xp)
        return self._raise_implied(xp.minimum(scores, bounds), limits, xp)

    def _raise_implied(self, scores: Any, limits: NDArray, xp: Any) -> Any:
        """Return scores [...,K] in which the score of a label is at least the score of every label that implies it."""
        for level in self.upward:
            implying, least = scores[..., level.neighbors], limits[level.labels][:, None]
            reached = implying >= limits[level.neighbors]
            needed = xp.where(reached, xp.maximum(implying, least), implying).max(axis=-1)
            scores = level.replace(scores, xp.maximum(scores[..., level.labels], needed), xp)
        return scores

    def _bound_excluded(self, strength: Any, predicted: Any, limits: NDArray, xp: Any) -> Any:
        """Return the largest allowed score of each label, [...,K], for strengths [...,K] (see the module docstring).

        A label is excluded if a stronger label of its group is `predicted`. The largest allowed score of an excluded
        label, and of a label that implies an excluded label, is just below its threshold.
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
    """A function from logits to the scores of a run: calibrated per label, then in agreement with the tree."""

    calibration: Calibration = field(default_factory=Calibration)
    consistency: Consistency = field(default_factory=Consistency)

    def __call__(self, logits: Any) -> Any:
        """Return the scores [...,K] of logits [...,K]: a NumPy array for a NumPy array, else a JAX array inside jit."""
        return self.consistency(self.calibration(logits))
