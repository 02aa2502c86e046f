"""The device mesh, the sharding of arrays, and global arrays from host batches.

In the backbone the batch is sharded over all three axes. In a head that is sharded by label, labels are sharded over
`expert` and the batch over `data` × `fsdp` (`models.partition` changes between the two). Parameters with one row per
label are sharded over `expert`; large arrays are also sharded over `fsdp`.

The size of a sharded axis must be a multiple of its number of devices between steps, so the label axis is padded with
zeros. The step removes the padding before any computation: it has no effect on results, and its gradient is zero.
Checkpoints contain no padding.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.machine import remember_forks, require_unforked
from mlmoe_jax.runtime.text import quantity

AXES = ("data", "fsdp", "expert")
BATCH = PartitionSpec(AXES)  # in the backbone the batch is sharded over all axes
REPLICATED = PartitionSpec()
LEAST_SHARDED = 2**12  # minimum number of entries of an array sharded over `fsdp`


@dataclass(frozen=True)
class LabelAxes:
    """The position of the label axis in the parameters that have one.

    Attributes:
      num_labels: the number of labels K.
      axis: parameter path -> index of the label axis.
    """

    num_labels: int
    axis: Mapping[str, int]

    def find(self, path: tuple) -> int | None:
        """Return the label axis of the leaf at a JAX tree path, which contains a parameter path as a key.

        Return None if the parameter has no label axis.
        """
        keys = (getattr(key, "key", None) for key in path)
        return next((self.axis[key] for key in keys if key in self.axis), None)


def find_devices() -> list[jax.Device]:
    """Return `jax.devices()`.

    Raises UserError if there is no device of the platform that JAX_PLATFORMS names, or as `require_unforked`.
    """
    require_unforked()
    remember_forks()
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        if not (platforms := jax.config.jax_platforms):
            raise
        reason = str(error).partition(" (set JAX_PLATFORMS")[0] or "it has no plugin"
        raise UserError(
            f"JAX finds no device for JAX_PLATFORMS={platforms} ({reason}); install the plugin, for cuda the extra "
            "cuda, or unset JAX_PLATFORMS"
        ) from error


def make_mesh(sizes, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Build the device mesh with the axes `data`, `fsdp` and `expert`, by default of all devices.

    `sizes` is `config.mesh`, the sizes of `fsdp` and `expert`. One of them may be −1, which means all devices that the
    other axis leaves. `data` gets the remaining factor. Raises UserError if the sizes do not divide the number of
    devices.
    """
    devices = np.asarray(find_devices() if devices is None else devices)
    fsdp, expert = sizes["fsdp"], sizes["expert"]
    if fsdp == -1 and expert > 0:
        fsdp = len(devices) // expert
    elif expert == -1 and fsdp > 0:
        expert = len(devices) // fsdp
    if min(fsdp, expert) < 1 or len(devices) % (fsdp * expert):
        raise UserError(
            f"mesh fsdp={sizes['fsdp']}, expert={sizes['expert']} does not fit {quantity(len(devices), 'device')}; set "
            "at most one of config.mesh.* to -1"
        )
    return Mesh(devices.reshape(-1, fsdp, expert), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def shard_tree(tree: Any, mesh: Mesh, label_axes: LabelAxes | None = None) -> Any:
    """Put a tree of arrays on the mesh, with label axes padded to a multiple of the mesh axis `expert`."""
    padded = _pad_tree(tree, mesh, label_axes)
    return jax.tree.map(jax.device_put, padded, tree_shardings(padded, mesh, label_axes))


def tree_shardings(tree: Any, mesh: Mesh, label_axes: LabelAxes | None = None) -> Any:
    """Return the NamedSharding that each leaf of `tree` has between steps. Leaves may be ShapeDtypeStructs."""

    def placement(path: tuple, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, _spec(np.shape(leaf), _axis(path, label_axes), mesh))

    return jax.tree_util.tree_map_with_path(placement, tree)


def remove_padding(tree: Any, label_axes: LabelAxes | None) -> Any:
    """Remove the padding that `shard_tree` has added to the label axis; for use inside jit and grad."""

    def remove(path: tuple, leaf: jax.Array) -> jax.Array:
        axis = _axis(path, label_axes)
        if axis is None or leaf.shape[axis] == label_axes.num_labels:
            return leaf
        return jax.lax.slice_in_dim(leaf, 0, label_axes.num_labels, axis=axis)

    return jax.tree_util.tree_map_with_path(remove, tree)


def unpad(tree: Any, mesh: Mesh, label_axes: LabelAxes | None = None) -> Any:
    """Return a sharded tree in the form in which checkpoints store it.

    Padded arrays are sliced to K labels and replicated. Other arrays are unchanged. A leaf may be a ShapeDtypeStruct;
    the result is then a ShapeDtypeStruct with a sharding.
    """
    everywhere = NamedSharding(mesh, REPLICATED)
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    axes = [_axis(path, label_axes) for path, _ in leaves]
    values = [leaf for _, leaf in leaves]
    padded = [k for k, axis in enumerate(axes) if axis is not None and values[k].shape[axis] != label_axes.num_labels]
    if not padded:
        return tree
    slices = _slicer(tuple(axes[k] for k in padded), label_axes.num_labels, everywhere)
    abstract = any(isinstance(values[k], jax.ShapeDtypeStruct) for k in padded)
    run = functools.partial(jax.eval_shape, slices) if abstract else slices
    for k, leaf in zip(padded, run([values[k] for k in padded]), strict=True):
        values[k] = leaf.update(sharding=everywhere) if abstract else leaf
    return structure.unflatten(values)


# One program: simulated devices can wait forever for one another in many small ones. A new function would be compiled
# at every checkpoint.
@functools.cache
def _slicer(axes: tuple[int, ...], size: int, sharding: NamedSharding) -> Callable[[list], list]:
    def slices(leaves: list) -> list:
        return [jax.lax.slice_in_dim(leaf, 0, size, axis=axis) for leaf, axis in zip(leaves, axes, strict=True)]

    return jax.jit(slices, out_shardings=sharding)


def abstract_shards(tree: Any, mesh: Mesh, label_axes: LabelAxes | None = None) -> Any:
    """Return the tree that `shard_tree` would return, as ShapeDtypeStructs with shardings. No memory is allocated."""

    padded = jax.eval_shape(lambda leaves: _pad_tree(leaves, mesh, label_axes), tree)
    shardings = tree_shardings(padded, mesh, label_axes)
    return jax.tree.map(lambda x, spread: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread), padded, shardings)


def _axis(path: tuple, label_axes: LabelAxes | None) -> int | None:
    return None if label_axes is None else label_axes.find(path)


def _spec(shape: tuple[int, ...], label_axis: int | None, mesh: Mesh) -> PartitionSpec:
    axes: list[str | None] = [None] * len(shape)
    if label_axis is not None:
        axes[label_axis] = "expert"
    fsdp = mesh.shape["fsdp"]
    if fsdp > 1 and math.prod(shape) >= LEAST_SHARDED:
        free = [axis for axis, size in enumerate(shape) if axes[axis] is None and size % fsdp == 0]
        if free:
            axes[max(free, key=lambda axis: shape[axis])] = "fsdp"
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def _pad_tree(tree: Any, mesh: Mesh, label_axes: LabelAxes | None) -> Any:
    def pad(path: tuple, leaf: Any) -> Any:
        axis = _axis(path, label_axes)
        missing = 0 if axis is None else -leaf.shape[axis] % mesh.shape["expert"]
        if not missing:
            return leaf
        return jnp.pad(leaf, [(0, missing if i == axis else 0) for i in range(leaf.ndim)])

    return jax.tree_util.tree_map_with_path(pad, tree)


def shard_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Return this process's part of a batch as global arrays, whose leading axis is sharded over the whole mesh."""
    sharding = NamedSharding(mesh, BATCH)
    if distributed.process()[1] == 1:
        return jax.device_put(batch, sharding)  # one call for all arrays
    return {name: jax.make_array_from_process_local_data(sharding, part) for name, part in batch.items()}


@jax.jit  # one small program instead of one for each shape
def copy_tree(values: Any) -> Any:
    """Return a copy of a tree of arrays. The copy remains valid if the original arrays are donated to a step."""
    return jax.tree.map(jnp.copy, values)


def interleave(batch: dict[str, jax.Array], parts: int, mesh: Mesh) -> dict[str, jax.Array]:
    """Split a global batch into `parts` along a new leading axis; for use inside jit.

    Part i has the images i, i + parts, i + 2·parts, … Each part has equally many images of each device, so that no
    image is transferred between devices.
    """
    spread = NamedSharding(mesh, PartitionSpec(None, AXES))

    def split(values: jax.Array) -> jax.Array:
        values = values.reshape(-1, parts, *values.shape[1:]).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(values, spread)

    return {name: split(values) for name, values in batch.items()}
