"""ViTs with random values in every parameter, and files with the tensors of models."""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.params import ModelDef

PLAIN = ViTShape(width=16, depth=2, heads=2, patch=4, native=8)
DINOV2 = replace(PLAIN, layer_scale=1.0, mask_token=True)
REGISTERS = replace(DINOV2, registers=4)
GIANT = replace(DINOV2, mlp="swiglu")


@functools.cache
def _structure(shape: ViTShape):
    return nnx.split(nnx.eval_shape(lambda: ViT(shape, rngs=nnx.Rngs(0))))


def make_vit(shape: ViTShape, seed: int) -> ViT:
    """Return a ViT with random values in every parameter."""
    (graph, state), draw = _structure(shape), np.random.default_rng(seed)
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape), x.dtype), state))


def values_of(module: nnx.Module) -> dict[str, np.ndarray]:
    """Return the parameters and statistics by path."""
    _, params, stats = ModelDef.split(module)
    return {path: np.asarray(value) for path, value in {**params, **stats}.items()}


def assert_equal(module: nnx.Module, expected: dict[str, np.ndarray]):
    """Assert that a module has these values, and all of them are given."""
    values = values_of(module)
    assert values.keys() == expected.keys()
    for path, value in values.items():
        np.testing.assert_array_equal(value, expected[path], err_msg=path)


def write(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Write tensors to a file of the type that its name says, .npz or .safetensors."""
    if path.suffix == ".npz":
        np.savez(path, **tensors)
    else:
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)
    return path


def timm(p: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of a ViT in timm's layout, from our parameters."""
    tensors = {path: value.T if path.endswith("/kernel") else value for path, value in p.items()}
    kernel = p["patch_embed/kernel"]
    side = math.isqrt(len(kernel) // 3)
    tensors["patch_embed/kernel"] = kernel.reshape(side, side, 3, -1).transpose(3, 2, 0, 1)
    return renamed(tensors, (r"/(kernel|scale)$", ".weight"), ("/", "."), (r"patch_embed\.", "patch_embed.proj."))


def renamed(tensors: dict[str, np.ndarray], *changes: tuple[str, str]) -> dict[str, np.ndarray]:
    """Return tensors whose names are changed by (pattern, replacement)."""
    result = {}
    for name, tensor in tensors.items():
        for pattern, replacement in changes:
            name = re.sub(pattern, replacement, name)
        result[name] = tensor
    return result


def changed(tensors: dict[str, np.ndarray], changes: Mapping | tuple) -> dict[str, np.ndarray]:
    """Return tensors of which some have other values; those with None are missing."""
    return {name: value for name, value in (tensors | dict(changes)).items() if value is not None}
