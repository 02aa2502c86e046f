"""How activations are sharded over the device mesh: the seam between what belongs to images and what to labels.

In the backbone, and in the encoder of a head, the batch is sharded over every axis. Where a head that is sharded by
label goes from images to labels, what the labels read is gathered over the axis `expert`; from there labels are sharded
over `expert` and the batch over `data` × `fsdp`. With one device along `expert`, or without a mesh, nothing here has an
effect.

The mesh is hidden state: a context variable that exists only while a step is traced. A step sets it with `over`, the
model opens the seam for its head with `crossing`, and only the functions below read it, deep inside the heads; handing
it through every head, decoder and expert would put a mesh into the signature of all of them. `crossing` contains it: it
switches the seam off for heads whose labels interact, and fails if a head that is sharded by label has not crossed it.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclass
class _Seam:
    """The mesh that is traced for, and whether anything has been gathered over it."""

    mesh: Mesh | None
    crossed: bool = False


_SEAM: ContextVar[_Seam | None] = ContextVar("seam", default=None)


@contextlib.contextmanager
def over(mesh: Mesh | None) -> Iterator[_Seam]:
    """Shard what is traced inside over `mesh`; None leaves it as it is."""
    seam = _Seam(mesh)
    token = _SEAM.set(seam)
    try:
        yield seam
    finally:
        _SEAM.reset(token)


@contextlib.contextmanager
def crossing(head: Any) -> Iterator[None]:
    """Let `head` (a contracts.Head) go from images to labels: sharded by label if it can be, or replicated.

    Raises RuntimeError at the end if the head is sharded by label and has not called `gathered`.
    """
    mesh = label_mesh() if head.by_label else None
    with over(mesh) as seam:
        yield
        if mesh is not None and not seam.crossed:
            raise RuntimeError(
                f"{type(head).__name__} is sharded by label and has not called partition.gathered on what labels read"
            )


def label_mesh() -> Mesh | None:
    """Return the mesh if labels are sharded over it, else None."""
    seam = _SEAM.get()
    return seam.mesh if seam and seam.mesh is not None and seam.mesh.shape["expert"] > 1 else None


def gathered(tokens: jax.Array) -> jax.Array:
    """Shard f32[B,…] with its batch over `data` × `fsdp`: every device along `expert` has the same images."""
    if seam := _SEAM.get():
        seam.crossed = True
    return _laid(tokens, ("data", "fsdp"))


def by_label(values: jax.Array) -> jax.Array:
    """Shard f32[B,K,…] with its batch over `data` × `fsdp` and its labels over `expert`."""
    return _laid(values, ("data", "fsdp"), "expert")


def each_label(function: Callable[[Any, jax.Array], jax.Array], values: Any, features: jax.Array) -> jax.Array:
    """Apply a function of all labels on the devices of their share of the labels only, by `jax.shard_map`.

    function: (values, features) -> result, for which labels are apart: leading axis K of every leaf of `values`, axis 1
    of `features` f32[B,K,…] and of the result f32[B,K,…]. Where K does not divide over `expert`, zeros fill it up.
    Nothing moves but what is elsewhere when it comes in. Without labels sharded over a mesh it is a plain call.
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
    if values.shape[0] == 1:  # what is the same for every image has no batch to shard
        axes = (None, *axes[1:])
    return jax.lax.with_sharding_constraint(values, NamedSharding(mesh, PartitionSpec(*axes)))
