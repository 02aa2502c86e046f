"""Adapters that become part of the weights of a backbone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.backbones.vit import ViT
from mlmoe_jax.models.build import Classifier, sum_deltas
from mlmoe_jax.models.layers.attention import PARTS, FusedProjection
from mlmoe_jax.models.layers.deltas import Delta, KernelAndBias, LayerCall, kernel_and_bias, raise_no_kernel
from mlmoe_jax.models.layers.recompute import LayerNorm


def merge_adapters(model: Classifier) -> Classifier:
    """Return an equivalent model whose adapters are merged into the weights of its backbone. Prompts are not merged.

    A delta is affine (`Adapter.merges`), so its values at 0 and at the identity matrix determine new weights. The
    weights are computed in float32, and the model must have been built with matmuls in float32. `model` is not changed.

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
                _add_to_weights(layer, part, path, *_weight_changes(delta, *_weights(layer, part)))
    merged.adapters = nnx.Dict({})
    return merged


def layer_weights(vit: ViT, path: str) -> KernelAndBias:
    """Return kernel f32[inputs,outputs] and bias f32[outputs] of the linear layer at a path of `Deltas`."""
    return _weights(*_layer_at(vit, path))


def _layer_at(vit: ViT, path: str) -> tuple[nnx.Module, str]:
    """Return the layer at a path of `Deltas`, and the name of the part if the layer is a FusedProjection."""
    *block_names, name = path.split("/")
    if not block_names:
        return getattr(vit, name), ""
    block = vit.blocks[int(block_names[1])]
    if name in PARTS:
        return block.attn.qkv, name
    if name in ("fc1", "fc2"):
        return getattr(block.mlp, name), ""
    return (block.attn.proj if name == "output" else getattr(block, name)), ""


def _weights(layer: nnx.Module, part: str) -> KernelAndBias:
    return layer.part(part) if part else kernel_and_bias(layer)


def _weight_changes(delta: Delta, kernel: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return the changes of kernel f32[inputs,outputs] and bias f32[outputs] that are equivalent to a delta."""
    kernel = kernel.astype(jnp.float32)
    inputs, outputs = kernel.shape
    zeros = jnp.zeros(outputs)
    bias = zeros if bias is None else bias

    def value_at(tokens: jax.Array, output: jax.Array, bias: jax.Array) -> jax.Array:
        return delta(LayerCall(tokens[None], output[None], lambda: (kernel, bias)))[0]

    origin = jnp.zeros((1, inputs))
    constant = value_at(origin, zeros[None], zeros)
    return value_at(jnp.eye(inputs), kernel, zeros) - constant, value_at(origin, bias[None], bias)[0]


def _add_to_weights(layer: nnx.Linear, part: str, path: str, kernel: jax.Array, bias: jax.Array) -> None:
    """Add to kernel and bias of a layer, or of a part of a FusedProjection. The path is for the error message."""
    columns = slice(None)
    entries = None if layer.bias is None else slice(None)
    if isinstance(layer, FusedProjection):
        columns = layer.columns(part)
        entries = layer.bias_entries(part)
    layer.kernel.set_value(layer.kernel[...].astype(jnp.float32).at[:, columns].add(kernel))
    if entries is not None:
        layer.bias.set_value(layer.bias[...].at[entries].add(bias))
    elif bias.any():
        raise UserError(f"merging {path} needs a bias, which this backbone lacks; leave --merge out")


def _merge_norm(norm: LayerNorm, delta: Delta) -> None:
    """Add a delta, an affine function of the output of a norm, to scale and bias of the norm."""
    scale = norm.scale[...]
    bias = norm.bias[...]

    def value_at(output: jax.Array) -> jax.Array:
        return delta(LayerCall(output[None, None], output[None, None], raise_no_kernel))[0, 0]

    norm.scale.set_value(scale + value_at(scale) - value_at(jnp.zeros_like(scale)))
    norm.bias.set_value(bias + value_at(bias))
