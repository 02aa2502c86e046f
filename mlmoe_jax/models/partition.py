"""Sharding by label: the named axes of parameters, and the boundary between activations per image and per label.

A parameter with an entry per label names its axes where it is created, with Flax's metadata `out_sharding`, see `axes`.
Sharding, padding, and transfer to other labels read the names from `ModelDef.axes`.

In the backbone, and in the encoder of a head, the batch is sharded over all axes. A head that is sharded by label
gathers the inputs of the labels over the axis `expert`. After this boundary, labels are sharded over `expert` and the
batch over `data` × `fsdp`. With one device along `expert`, or without a mesh, these functions have no effect.

The mesh is hidden state: a context variable that exists only while a step is traced. A step sets it with `use_mesh`,
the model calls its head inside `shard_head`, and only the functions below read it. An argument would change the
signature of every head, decoder and expert. `shard_head` limits the scope: it hides the mesh from heads whose labels
interact, and raises an error if a head that is sharded by label has not called `shard_images`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LABEL = "label"
"""An axis with one entry per label, in the order of the labels.

Further entries may follow, whose number does not depend on the number of labels, such as the end of a sequence.
"""
LABEL_GROUP = "label_group"
"""An axis with one entry per group of neighboring labels, in the order of the labels."""
PROMPT = "prompt"
"""An axis over the prompts of label groups, or over the groups. Its values fit another model with equal groups only."""
WORD_VECTOR = "word_vector"
"""An axis over the entries of word vectors. Its values fit another model with equal word vectors only."""


def axes(*names: str | None) -> dict[str, Any]:
    """Return the metadata of a parameter whose axes have these names; None is an axis without a name.

    `eager_sharding` is off because the names are not axes of the mesh, so Flax cannot place the value.
    """
    return {"out_sharding": names, "eager_sharding": False}


def axis_names(variable: nnx.Variable) -> tuple[str | None, ...]:
    """Return the names of the axes of a parameter; () if it has none."""
    return variable.get_metadata("out_sharding", None) or ()


def label_axes(names: Sequence[str | None]) -> tuple[int, ...]:
    """Return the numbers of the axes named LABEL, for the names of all axes of a parameter."""
    return tuple(axis for axis, name in enumerate(names) if name == LABEL)


@dataclass
class _Boundary:
    """The mesh of the traced step, and whether a head has called `shard_images`."""

    mesh: Mesh | None
    crossed: bool = False


_BOUNDARY: ContextVar[_Boundary | None] = ContextVar("boundary", default=None)


@contextlib.contextmanager
def use_mesh(mesh: Mesh | None) -> Iterator[_Boundary]:
    """Set the mesh over which the computation inside is sharded; None = no sharding."""
    boundary = _Boundary(mesh)
    token = _BOUNDARY.set(boundary)
    try:
        yield boundary
    finally:
        _BOUNDARY.reset(token)


@contextlib.contextmanager
def shard_head(head: Any) -> Iterator[None]:
    """Shard `head` (a contracts.Head) by label if its `by_label` is set, or replicate it.

    Raises RuntimeError on exit if the head is sharded by label and has not called `shard_images`.
    """
    mesh = label_mesh() if head.by_label else None
    with use_mesh(mesh) as boundary:
        yield
        if mesh is not None and not boundary.crossed:
            raise RuntimeError(
                f"{type(head).__name__} is sharded by label but has not called partition.shard_images on its inputs"
            )


def label_mesh() -> Mesh | None:
    """Return the mesh if labels are sharded over it, or None."""
    mesh = boundary.mesh if (boundary := _BOUNDARY.get()) else None
    return mesh if mesh is not None and mesh.shape["expert"] > 1 else None


def shard_images(tokens: jax.Array) -> jax.Array:
    """Shard the images of f32[B,…] over `data` × `fsdp`, so that all devices along `expert` have the same images."""
    if boundary := _BOUNDARY.get():
        boundary.crossed = True
    return _constrain(tokens, ("data", "fsdp"))


def shard_labels(values: jax.Array) -> jax.Array:
    """Shard the images of f32[B,K,…] over `data` × `fsdp`, and the labels over `expert`."""
    return _constrain(values, ("data", "fsdp"), "expert")


def _constrain(values: jax.Array, *axes: str | tuple[str, ...]) -> jax.Array:
    mesh = label_mesh()
    if mesh is None:
        return values
    if values.shape[0] == 1:  # shared by all images
        axes = (None, *axes[1:])
    return jax.lax.with_sharding_constraint(values, NamedSharding(mesh, PartitionSpec(*axes)))
