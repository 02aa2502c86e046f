"""The softmax within attributes, and which labels are assigned, on the host and inside jit. K labels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mlmoe_jax.data.label_tree import Attribute
from mlmoe_jax.runtime.array_types import Bools, Floats, Ints


@dataclass(frozen=True)
class AttributeSoftmax:
    """A function from scores z [...,K] of labels to the logits of their probabilities, without attributes the identity.

    For a value k of an attribute, the logit is z_k − log Σ exp z_j over the other values j. Its sigmoid is the softmax
    of z over the values, so that everything which takes the sigmoid of logits has the softmax. Results and arguments
    are NumPy or JAX arrays.

    Attributes:
      groups: the labels of each of A attributes.
      labels: K, the number of all labels.
    """

    groups: tuple[tuple[int, ...], ...] = ()
    labels: int = 0

    @classmethod
    def of(cls, attributes: Iterable[Attribute], labels: int) -> AttributeSoftmax:
        return cls(tuple(attribute.labels for attribute in attributes), labels)

    def __bool__(self) -> bool:
        return bool(self.groups)

    @cached_property
    def is_value(self) -> Bools:
        """Whether each label is a value of an attribute, bool[K]."""
        return np.isin(np.arange(self.labels), [label for group in self.groups for label in group])

    @cached_property
    def _table(self) -> tuple[Ints, Bools, Ints]:
        """The labels i64[A,M] of the attributes, padded; which are not padding; and the place i64[K] of each label."""
        most = max(map(len, self.groups))
        padded = np.array([[*group, *[-1] * (most - len(group))] for group in self.groups])
        place = np.arange(self.labels)
        place[padded[padded >= 0]] = self.labels + np.flatnonzero(padded.ravel() >= 0)
        return np.maximum(padded, 0), padded >= 0, place

    def __call__(self, scores: Any) -> Any:
        if not self:
            return scores
        xp = scores.__array_namespace__()
        labels, is_used, place = self._table
        values = xp.where(is_used, scores[..., labels], -np.inf)
        is_top = values.argmax(axis=-1)[..., None] == np.arange(labels.shape[1])
        top = xp.where(is_top, values, 0).sum(axis=-1, keepdims=True)  # max divides its gradient among equal values
        others = xp.where(is_top, -np.inf, values)
        # No difference of nearly equal numbers: for the largest value, a sum without it is computed alone. For another
        # value, at most half of the whole sum is subtracted.
        second = others.max(axis=-1, keepdims=True)
        rest_of_top = second + xp.log(xp.exp(others - second).sum(axis=-1, keepdims=True))
        parts = xp.exp(others - top)
        rest = top + xp.log1p(parts.sum(axis=-1, keepdims=True) - parts)
        logits = values - xp.where(is_top, rest_of_top, rest)
        flat = logits.reshape(*logits.shape[:-2], labels.size)
        return xp.concatenate([scores, flat.astype(scores.dtype)], axis=-1)[..., place]

    def logarithms(self, logits: Any) -> Any:
        """Return scores [...,K] of which these logits are the result: the log probabilities of values."""
        if not self:
            return logits
        xp = logits.__array_namespace__()
        return xp.where(self.is_value, -xp.logaddexp(0, -logits), logits)


NO_SOFTMAX = AttributeSoftmax()


def assign(scores: Floats, limits: Floats | float, attributes: Iterable[Attribute]) -> Bools:
    """Return which labels are assigned, bool[...,K]: of tags those that reach their limits, of attributes one value.

    It is the most probable value. If a value is left out, it must also reach its limit, since a value that is left out
    may be more probable.
    """
    assigned = scores >= limits
    for attribute in attributes:
        labels = attribute.present
        if labels.size:
            best = scores[..., labels].argmax(axis=-1)[..., None] == np.arange(labels.size)
            assigned[..., labels] = best & assigned[..., labels] if -1 in attribute.labels else best
    return assigned
