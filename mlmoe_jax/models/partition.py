"""Sharding by label: the named axes of parameters, and the boundary between activations per image and per label.

A parameter with an entry per label names its axes where it is created, with Flax's metadata `out_sharding`, see `axes`.
Sharding, padding, and transfer to other labels read the names from `ModelDef.axes`.

In the backbone, and in the encoder of a head, the batch is sharded over all mesh axes (`data`, `fsdp`, `expert`). A
head that is sharded by label gathers the inputs of its labels over `expert`. After this boundary, labels are sharded
over `expert` and the batch over `data` × `fsdp`. With one device along `expert`, or without a mesh, these functions
have no effect.

The mesh is hidden state: a context variable that is set only while `jax.jit` traces a step. A step sets the mesh with
`use_mesh`, and only the functions below read it. An explicit argument would change the signature of every head, decoder
and expert. The model calls its head inside `shard_head`, which limits the scope in two ways. It hides the mesh from
heads whose labels interact. It raises an error if a head that is sharded by label has not called `shard_images`.
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
    """Return the metadata of a parameter with named axes, as keyword arguments of `nnx.Param`.

    `names` has one entry per axis: LABEL, LABEL_GROUP, PROMPT, WORD_VECTOR, or None for an axis without a name.
    `eager_sharding` is off because the names are not axes of the mesh, so Flax cannot place the value.
    """
    return {"out_sharding": names, "eager_sharding": False}


def axis_names(variable: nnx.Variable) -> tuple[str | None, ...]:
    """Return the names of the axes of a parameter; () if it has none."""
    return variable.get_metadata("out_sharding", None) or ()


def label_axes(names: Sequence[str | None]) -> tuple[int, ...]:
    """Return the indices of the axes named LABEL among the names of all axes of a parameter."""
    return tuple(axis for axis, name in enumerate(names) if name == LABEL)


@dataclass
class _Boundary:
    """The sharding state while a step is traced. `crossed` tells whether the head has called `shard_images`."""

    mesh: Mesh | None
    crossed: bool = False


_BOUNDARY: ContextVar[_Boundary | None] = ContextVar("boundary", default=None)


@contextlib.contextmanager
def use_mesh(mesh: Mesh | None) -> Iterator[_Boundary]:
    """Set the mesh for the computation inside the `with` block; None = no sharding."""
    boundary = _Boundary(mesh)
    token = _BOUNDARY.set(boundary)
    try:
        yield boundary
    finally:
        _BOUNDARY.reset(token)


@contextlib.contextmanager
def shard_head(head: Any) -> Iterator[None]:
    """Shard a contracts.Head by label inside the `with` block if `head.by_label` is set; otherwise, replicate it.

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
    """Return the current mesh if its axis `expert` has more than one device, so that labels are sharded; else None."""
    mesh = boundary.mesh if (boundary := _BOUNDARY.get()) else None
    return mesh if mesh is not None and mesh.shape["expert"] > 1 else None


def shard_images(tokens: jax.Array) -> jax.Array:
    """Shard the leading axis of f32[B,…] over `data` × `fsdp`, so that all devices along `expert` have the same images.

    An array with B = 1 is replicated.
    """
    if boundary := _BOUNDARY.get():
        boundary.crossed = True
    return _constrain(tokens, ("data", "fsdp"))


def shard_labels(values: jax.Array) -> jax.Array:
    """Shard f32[B,K,…]: images (axis 0) over `data` × `fsdp`, and labels (axis 1) over `expert`."""
    return _constrain(values, ("data", "fsdp"), "expert")


def _constrain(values: jax.Array, *axes: str | tuple[str, ...]) -> jax.Array:
    mesh = label_mesh()
    if mesh is None:
        return values
    if values.shape[0] == 1:  # shared by all images
        axes = (None, *axes[1:])
    return jax.lax.with_sharding_constraint(values, NamedSharding(mesh, PartitionSpec(*axes)))
