"""The places where adapters add terms to the outputs of frozen layers, see `outputs.Delta`."""

from collections.abc import Callable
from functools import partial
from types import MappingProxyType

import jax
from flax import nnx

from mlmoe_jax.models.outputs import Call, Deltas

NO_DELTAS: Deltas = MappingProxyType({})
Weights = Callable[[], tuple[jax.Array, jax.Array | None]]  # as in Call


def block_place(index: int, layer: str = "") -> str:
    """Return the place of a layer in block `index`, or the common beginning of its places."""
    return f"blocks/{index}/{layer}"


def deltas_of_block(deltas: Deltas, index: int) -> Deltas:
    """Return the deltas of the layers of a block by name."""
    start = block_place(index)
    return {place.removeprefix(start): delta for place, delta in deltas.items() if place.startswith(start)}


def call_layer(layer: nnx.Module, tokens: jax.Array, name: str, deltas: Deltas) -> jax.Array:
    """Return the output of a linear layer or a norm plus its delta, if any."""
    return add_delta(layer(tokens), name, tokens, deltas, partial(weights_of, layer))


def add_delta(output: jax.Array, name: str, tokens: jax.Array, deltas: Deltas, weights: Weights) -> jax.Array:
    """Return the output of a layer on `tokens` plus its delta, if any. `weights` is described in Call."""
    if name not in deltas:
        return output
    return output + deltas[name](Call(tokens, output, weights)).astype(output.dtype)


def weights_of(layer: nnx.Linear) -> tuple[jax.Array, jax.Array | None]:
    """Return kernel and bias of a linear layer."""
    return layer.kernel[...], None if layer.bias is None else layer.bias[...]


def no_weights() -> tuple[jax.Array, None]:
    """Raise ValueError: a delta needs the kernel of an operation that is no linear layer."""
    raise ValueError("only linear layers have a kernel")
