"""The terms that adapters add to the outputs of frozen layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import jax
from flax import nnx

KernelAndBias = tuple[jax.Array, jax.Array | None]  # f32[inputs,outputs] and f32[outputs], or None without a bias


@dataclass(frozen=True)
class LayerCall:
    """The call of a frozen layer, from which an adapter computes the delta of its output.

    Attributes:
      tokens: [b,T,inputs], the input of the layer.
      output: [b,T,outputs], the output without deltas.
      weights: returns kernel and bias of a linear layer. Only deltas that need them call it.
    """

    tokens: jax.Array
    output: jax.Array
    weights: Callable[[], KernelAndBias]


# A term that an adapter adds to the output of a layer. Adapters see the frozen output, so their order does not matter.
Delta = Callable[[LayerCall], jax.Array]
Deltas = Mapping[str, Delta]  # by layer path, see `BackboneShape.layer_paths`
NO_DELTAS: Deltas = MappingProxyType({})


def layer_path(block: int, layer: str = "") -> str:
    """Return the path of a layer in a block, such as `blocks/3/query`; without a layer, `blocks/3/`."""
    return f"blocks/{block}/{layer}"


def block_deltas(deltas: Deltas, block: int) -> Deltas:
    """Return the deltas of the layers of a block, by the names of the layers."""
    start = layer_path(block)
    return {path.removeprefix(start): delta for path, delta in deltas.items() if path.startswith(start)}


def call_layer(layer: nnx.Module, tokens: jax.Array, name: str, deltas: Deltas) -> jax.Array:
    """Return the output of a linear layer or a norm, plus its delta if there is one."""
    return add_delta(layer(tokens), name, tokens, deltas, partial(kernel_and_bias, layer))


def add_delta(
    output: jax.Array, name: str, tokens: jax.Array, deltas: Deltas, weights: Callable[[], KernelAndBias]
) -> jax.Array:
    """Return the output of a layer plus its delta if there is one.

    Args:
      output: the output of the layer for `tokens`.
      name: the key of the layer in `deltas`.
      tokens: the input of the layer.
      deltas: the deltas by name.
      weights: see `LayerCall`.
    """
    if name not in deltas:
        return output
    return output + deltas[name](LayerCall(tokens, output, weights)).astype(output.dtype)


def kernel_and_bias(layer: nnx.Linear) -> KernelAndBias:
    """Return kernel and bias of a linear layer."""
    return layer.kernel[...], None if layer.bias is None else layer.bias[...]


def raise_no_kernel() -> KernelAndBias:
    """Stand in for the weights of an operation that is no linear layer: always raise ValueError."""
    raise ValueError("only linear layers have a kernel")
