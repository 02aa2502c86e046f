"""The losses by the values of `loss.kind`; a new loss is one function and one line here.

An entry is a builder `(settings, balance) -> per_element`. `settings` is `config.loss`. `balance()` returns the ratio
of negatives to positives per label in training, f32[K]; `balance` is None if no training labels are known.
`per_element` takes logits and labels f32[B,K] and returns the loss per element, f32[B,K].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlmoe_jax.runtime.registry import Registry

if TYPE_CHECKING:
    from jax import Array

    Balance = Callable[[], Array] | None
    PerElement = Callable[[Array, Array], Array]
    LossBuilder = Callable[[Any, Balance], PerElement]

LOSSES: Registry[LossBuilder] = Registry(
    "loss",
    {
        "asymmetric": "mlmoe_jax.models.losses:build_asymmetric",
        "bce": "mlmoe_jax.models.losses:build_bce",
        "focal": "mlmoe_jax.models.losses:build_focal",
        "softmax": "mlmoe_jax.models.losses:build_softmax",
    },
)
