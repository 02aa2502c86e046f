"""ViTs with random values in every parameter, and files with the tensors of models."""

import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.params import ModelDef


def make_vit(shape: ViTShape, seed: int) -> ViT:
    """Return a ViT with random values in every parameter."""
    vit, draw = nnx.eval_shape(lambda: ViT(shape, rngs=nnx.Rngs(0))), np.random.default_rng(seed)
    nnx.update(vit, jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape), x.dtype), nnx.state(vit)))
    return vit


def params_of(module: nnx.Module) -> dict[str, np.ndarray]:
    """Return the parameters by path."""
    return {path: np.asarray(value) for path, value in ModelDef.split(module)[1].items()}


def values_of(module: nnx.Module) -> dict[str, np.ndarray]:
    """Return the parameters and statistics by path."""
    _, params, stats = ModelDef.split(module)
    return {path: np.asarray(value) for path, value in {**params, **stats}.items()}


def write(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Write tensors to a file of the type that its name says, .npz or .safetensors."""
    if path.suffix == ".npz":
        np.savez(path, **tensors)
    else:
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)
    return path


def timm(p: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of a ViT in timm's layout, from our parameters."""
    tensors = {}
    for path, value in p.items():
        if path == "patch_embed/kernel":
            side = math.isqrt(len(value) // 3)
            value = value.reshape(side, side, 3, -1).transpose(3, 2, 0, 1)
        elif path.endswith("/kernel"):
            value = value.T
        name = re.sub(r"/(kernel|scale)$", "/weight", path).replace("/", ".")
        tensors[name.replace("patch_embed.", "patch_embed.proj.")] = value
    return tensors


def renamed(tensors: dict[str, np.ndarray], *changes: tuple[str, str]) -> dict[str, np.ndarray]:
    """Return tensors whose names are changed by (pattern, replacement)."""
    names = {name: name for name in tensors}
    for pattern, replacement in changes:
        names = {old: re.sub(pattern, replacement, new) for old, new in names.items()}
    return {names[name]: tensor for name, tensor in tensors.items()}
