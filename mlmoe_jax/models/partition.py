"""Sharding by label: the named axes of parameters, and the seam between activations per image and per label.

A parameter with an entry per label names its axes where it is created, with Flax's metadata `out_sharding`, see `axes`.
Sharding, padding, and transfer to other labels read the names from `ModelDef.axes`.

In the backbone, and in the encoder of a head, the batch is sharded over all axes. At the seam of a head that is sharded
by label, the inputs of the labels are gathered over the axis `expert`; from there on, labels are sharded over `expert`
and the batch over `data` × `fsdp`. With one device along `expert`, or without a mesh, these functions have no effect.

The mesh is hidden state: a context variable that exists only while a step is traced. A step sets it with `over`, the
model opens the seam for its head with `crossing`, and only the functions below read it. Passing the mesh as an argument
would add it to the signature of every head, decoder and expert. `crossing` limits the scope: it disables the seam for
heads whose labels interact, and raises an error if a head that is sharded by label has not crossed the seam.
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
"""An axis with an entry per label, in the order of the labels, then an equal number of further entries for any K."""
LABEL_GROUP = "label_group"
"""An axis whose entries each serve a group of labels, numbered in the order of the labels."""
PROMPT = "prompt"
"""An axis over prompts of label groups, or over the groups; it fits only groups of the same structure."""
WORD_VECTOR = "word_vector"
"""An axis of features of word vectors; it fits only the same word vectors."""


def axes(*names: str | None) -> dict[str, Any]:
    """Return the metadata of a parameter whose axes have these names; None is an axis without a name.

    Flax must not place the value when it is created (`eager_sharding`): the names are not axes of the mesh.
    """
    return {"out_sharding": names, "eager_sharding": False}


def axes_of(variable: nnx.Variable) -> tuple[str | None, ...]:
    """Return the names of the axes of a parameter; () if it has none."""
    return variable.get_metadata("out_sharding", None) or ()


def label_axes(names: Sequence[str | None]) -> tuple[int, ...]:
    """Return the axes named LABEL."""
    return tuple(axis for axis, name in enumerate(names) if name == LABEL)


@dataclass
class _Seam:
    """The mesh of the traced step, and whether a head has called `gathered`."""

    mesh: Mesh | None
    crossed: bool = False


_SEAM: ContextVar[_Seam | None] = ContextVar("seam", default=None)


@contextlib.contextmanager
def over(mesh: Mesh | None) -> Iterator[_Seam]:
    """Shard the computation traced inside over `mesh`; None = do not shard it."""
    seam = _Seam(mesh)
    token = _SEAM.set(seam)
    try:
        yield seam
    finally:
        _SEAM.reset(token)


@contextlib.contextmanager
def crossing(head: Any) -> Iterator[None]:
    """Open the seam for `head` (a contracts.Head): it is sharded by label if `by_label` is set, else replicated.

    Raises RuntimeError on exit if the head is sharded by label and has not called `gathered`.
    """
    mesh = label_mesh() if head.by_label else None
    with over(mesh) as seam:
        yield
        if mesh is not None and not seam.crossed:
            raise RuntimeError(
                f"{type(head).__name__} is sharded by label but has not called partition.gathered on its inputs"
            )


def label_mesh() -> Mesh | None:
    """Return the mesh if labels are sharded over it, or None."""
    seam = _SEAM.get()
    return seam.mesh if seam and seam.mesh is not None and seam.mesh.shape["expert"] > 1 else None


def gathered(tokens: jax.Array) -> jax.Array:
    """Shard the batch of f32[B,…] over `data` × `fsdp`: all devices along `expert` have the same images."""
    if seam := _SEAM.get():
        seam.crossed = True
    return _constrained(tokens, ("data", "fsdp"))


def by_label(values: jax.Array) -> jax.Array:
    """Shard the batch of f32[B,K,…] over `data` × `fsdp` and its labels over `expert`."""
    return _constrained(values, ("data", "fsdp"), "expert")


def _constrained(values: jax.Array, *axes: str | tuple[str, ...]) -> jax.Array:
    mesh = label_mesh()
    if mesh is None:
        return values
    if values.shape[0] == 1:  # values shared by all images have no batch to shard
        axes = (None, *axes[1:])
    return jax.lax.with_sharding_constraint(values, NamedSharding(mesh, PartitionSpec(*axes)))
