"""Where activations lie on the device mesh: the seam between a backbone and a head that is sharded by label.

In the backbone the batch lies over every axis. At the entrance of a head whose labels lie over `expert`, what it reads
is gathered over that axis, and from there labels lie over `expert` and the batch over `data` × `fsdp`. On a mesh with
one device along `expert`, and where no mesh is set, nothing here does anything.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_MESH: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


@contextlib.contextmanager
def over(mesh: Mesh) -> Iterator[None]:
    """Lay what is traced inside over `mesh`."""
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


def _laid(values: jax.Array, *axes: str | tuple[str, ...]) -> jax.Array:
    mesh = label_mesh()
    if mesh is None:
        return values
    if values.shape[0] == 1:  # what is the same for every image has no batch to spread
        axes = (None, *axes[1:])
    return jax.lax.with_sharding_constraint(values, NamedSharding(mesh, PartitionSpec(*axes)))
