"""Padding of maps."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax

Pads = tuple[tuple[int, int], ...]  # rows before and after a map, and columns


def pad_maps(x: jax.Array, fill: jax.Array | float, pads: Iterable[tuple[int, int]]) -> jax.Array:
    """Return `x` [B,H,W,C] with `pads` rows and columns of the value `fill` before and after."""
    edges = [(before, after, 0) for before, after in pads]
    return lax.pad(x, jnp.asarray(fill, x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
