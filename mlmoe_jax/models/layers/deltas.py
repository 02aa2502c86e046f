"""Deltas: the terms that adapters add to the outputs of frozen layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import jax
from flax import nnx

KernelAndBias = tuple[jax.Array, jax.Array | None]  # f32[inputs,outputs] and f32[outputs], or None without a bias


@dataclass(frozen=True)
class LayerCall:
    """Input, output and weights of one call of a frozen layer, from which adapters compute deltas."""

    tokens: jax.Array  # [b,T,inputs], the input of the layer
    output: jax.Array  # [b,T,outputs], the output of the layer without deltas
    # A function that returns kernel and bias of the layer. Only deltas that need the weights call it.
    weights: Callable[[], KernelAndBias]


# A term that an adapter adds to the output of a layer. Adapters see the frozen output, so their order does not matter.
Delta = Callable[[LayerCall], jax.Array]
Deltas = Mapping[str, Delta]  # by layer path, see `BackboneShape.layer_paths`
NO_DELTAS: Deltas = MappingProxyType({})


def layer_path(block: int, layer: str = "") -> str:
    """Return the path of a layer in a block, such as `blocks/3/query`; without a layer, `blocks/3/`."""
    return f"blocks/{block}/{layer}"


def block_deltas(deltas: Deltas, block: int) -> Deltas:
    """Return the deltas of one block, {name of the layer in the block: delta}, such as {"query": …}."""
    start = layer_path(block)
    return {path.removeprefix(start): delta for path, delta in deltas.items() if path.startswith(start)}


def call_layer(layer: nnx.Module, tokens: jax.Array, name: str, deltas: Deltas) -> jax.Array:
    """Return `layer(tokens)` of a linear layer or a norm, plus `deltas[name]` if this key exists."""
    return add_delta(layer(tokens), name, tokens, deltas, partial(kernel_and_bias, layer))


def add_delta(
    output: jax.Array, name: str, tokens: jax.Array, deltas: Deltas, weights: Callable[[], KernelAndBias]
) -> jax.Array:
    """Return the `output` of a layer for `tokens`, plus `deltas[name]` if this key exists; see LayerCall."""
    if name not in deltas:
        return output
    return output + deltas[name](LayerCall(tokens, output, weights)).astype(output.dtype)


def kernel_and_bias(layer: nnx.Linear) -> KernelAndBias:
    """Return kernel f32[inputs,outputs] and bias f32[outputs] of a linear layer; bias None if it has none."""
    return layer.kernel[...], None if layer.bias is None else layer.bias[...]


def raise_no_kernel() -> KernelAndBias:
    """Raise ValueError. This is `LayerCall.weights` of operations that are not linear layers."""
    raise ValueError("only linear layers have a kernel")
