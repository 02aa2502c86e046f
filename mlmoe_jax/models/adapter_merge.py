"""Adapters that become part of the weights of a backbone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.backbones.vit import ViT
from mlmoe_jax.models.build import Classifier, sum_deltas
from mlmoe_jax.models.layers.attention import PARTS, FusedProjection
from mlmoe_jax.models.layers.deltas import kernel_and_bias, raise_no_kernel
from mlmoe_jax.models.layers.recompute import LayerNorm
from mlmoe_jax.models.outputs import Delta, KernelAndBias, LayerCall


def merge_adapters(model: Classifier) -> Classifier:
    """Return a model without adapters that computes what a model with adapters computes. Prompts stay prompts.

    A delta is affine (`Adapter.merges`), so its values at 0 and at the identity matrix determine new weights. They are
    computed in float32; the model must have been built with matmuls in float32.

    Raises:
      UserError: an adapter cannot be merged, or a merged layer would need a bias that it lacks.
    """
    for name, adapter in model.adapters.items():
        if not adapter.merges:
            raise UserError(f"the adapter {name} is not linear, so it cannot be merged; leave --merge out")
    merged = nnx.clone(model)
    with jax.default_matmul_precision("highest"):
        for path, delta in sum_deltas([adapter.deltas() for adapter in model.adapters.values()]).items():
            layer, part = _layer_at(merged.backbone, path)
            if isinstance(layer, LayerNorm):
                _merge_norm(layer, delta)
            else:
                _set_weights(layer, part, path, *_changes(delta, *_weights(layer, part)))
    merged.adapters = nnx.Dict({})
    return merged


def layer_weights(vit: ViT, path: str) -> KernelAndBias:
    """Return kernel f32[inputs,outputs] and bias f32[outputs] of the linear layer at a path of `Deltas`."""
    return _weights(*_layer_at(vit, path))


def _layer_at(vit: ViT, path: str) -> tuple[nnx.Module, str]:
    """Return the layer at a path, and its part of a FusedProjection."""
    *inside, name = path.split("/")
    if not inside:
        return getattr(vit, name), ""
    block = vit.blocks[int(inside[1])]
    if name in PARTS:
        return block.attn.qkv, name
    if name in ("fc1", "fc2"):
        return getattr(block.mlp, name), ""
    return (block.attn.proj if name == "output" else getattr(block, name)), ""


def _weights(layer: nnx.Module, part: str) -> KernelAndBias:
    return layer.part(part) if part else kernel_and_bias(layer)


def _changes(delta: Delta, kernel: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return the changes of kernel and bias by which a delta changes the output of a linear layer."""
    kernel = kernel.astype(jnp.float32)
    inputs, outputs = kernel.shape
    none = jnp.zeros(outputs)
    bias = none if bias is None else bias

    def at(tokens: jax.Array, output: jax.Array, bias: jax.Array) -> jax.Array:
        return delta(LayerCall(tokens[None], output[None], lambda: (kernel, bias)))[0]

    origin = jnp.zeros((1, inputs))
    constant = at(origin, none[None], none)
    return at(jnp.eye(inputs), kernel, none) - constant, at(origin, bias[None], bias)[0]


def _set_weights(layer: nnx.Module, part: str, path: str, kernel: jax.Array, bias: jax.Array) -> None:
    """Add changes to the weights of a layer."""
    columns, has_bias = slice(None), layer.bias is not None
    biases = columns
    if isinstance(layer, FusedProjection):
        width, index = layer.in_features, PARTS.index(part)
        columns = biases = slice(index * width, (index + 1) * width)
        if not layer.key_bias:
            has_bias = part != "key"
            biases = slice(width, None) if part == "value" else columns
    layer.kernel.set_value(layer.kernel[...].astype(jnp.float32).at[:, columns].add(kernel))
    if has_bias:
        layer.bias.set_value(layer.bias[...].at[biases].add(bias))
    elif bias.any():
        raise UserError(f"merging {path} needs a bias, which this backbone lacks; leave --merge out")


def _merge_norm(norm: LayerNorm, delta: Delta) -> None:
    """Change a norm as a delta changes its output, of which the delta is an affine function."""
    scale, bias = norm.scale[...], norm.bias[...]

    def at(output: jax.Array) -> jax.Array:
        return delta(LayerCall(output[None, None], output[None, None], raise_no_kernel))[0, 0]

    norm.scale.set_value(scale + at(scale) - at(jnp.zeros_like(scale)))
    norm.bias.set_value(bias + at(bias))
