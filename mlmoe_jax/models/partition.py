"""Where activations lie on the device mesh: the seam between what is of images and what is of labels.

In the backbone, and in the encoder of a head, the batch lies over every axis. Where a head whose labels lie over
`expert` goes from images to labels, what the labels read is gathered over that axis; from there labels lie over
`expert` and the batch over `data` × `fsdp`. On a mesh with one device along `expert`, and where no mesh is set, nothing
here does anything.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_MESH: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


@contextlib.contextmanager
def over(mesh: Mesh | None) -> Iterator[None]:
    """Lay what is traced inside over `mesh`; None leaves it where it is."""
    token = _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(token)


def label_mesh() -> Mesh | None:
    """Return the mesh if labels are spread over it, else None."""
    mesh = _MESH.get()
    return mesh if mesh is not None and mesh.shape["expert"] > 1 else None


def gathered(tokens: jax.Array) -> jax.Array:
    """Lay f32[B,…] with its batch over `data` × `fsdp`: every device along `expert` has the same images."""
    return _laid(tokens, ("data", "fsdp"))


def by_label(values: jax.Array) -> jax.Array:
    """Lay f32[B,K,…] with its batch over `data` × `fsdp` and its labels over `expert`."""
    return _laid(values, ("data", "fsdp"), "expert")


def each_label(function: Callable[[Any, jax.Array], jax.Array], values: Any, features: jax.Array) -> jax.Array:
    """Apply a function of all labels on the devices of their share of the labels only, by `jax.shard_map`.

    function: (values, features) -> result, for which labels are apart: leading axis K of every leaf of `values`, axis 1
    of `features` f32[B,K,…] and of the result f32[B,K,…]. Where K does not divide over `expert`, zeros fill it up.
    Nothing moves but what lies elsewhere when it comes in. Without labels over a mesh the function is just called.
    """
    mesh = label_mesh()
    if mesh is None:
        return function(values, features)
    labels = features.shape[1]
    missing = -labels % mesh.shape["expert"]

    def filled(leaf: jax.Array, axis: int) -> jax.Array:
        return jnp.pad(leaf, [(0, missing if at == axis else 0) for at in range(leaf.ndim)]) if missing else leaf

    batch = None if features.shape[0] == 1 else ("data", "fsdp")
    alone = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(PartitionSpec("expert"), PartitionSpec(batch, "expert")),
        out_specs=PartitionSpec(batch, "expert"),
    )
    return alone(jax.tree.map(lambda leaf: filled(leaf, 0), values), filled(features, 1))[:, :labels]


def _laid(values: jax.Array, *axes: str | tuple[str, ...]) -> jax.Array:
    mesh = label_mesh()
    if mesh is None:
        return values
    if values.shape[0] == 1:  # what is the same for every image has no batch to spread
        axes = (None, *axes[1:])
    return jax.lax.with_sharding_constraint(values, NamedSharding(mesh, PartitionSpec(*axes)))
