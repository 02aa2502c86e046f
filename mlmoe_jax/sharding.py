"""The device mesh, where each array lives on it, and host batches as global arrays."""

import math
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mlmoe_jax import rules
from mlmoe_jax.errors import UserError

AXES = ("data", "fsdp", "expert")
BATCH = PartitionSpec(AXES)  # in the backbone the batch lies over every axis
REPLICATED = PartitionSpec()

# Ordered (regex, PartitionSpec) over the paths of parameters, their averages and their optimizer moments.
PLACEMENT = ((r"", REPLICATED),)


def make_mesh(sizes) -> Mesh:
    """Build the mesh over all devices from `config.mesh`; one axis may be −1 = what remains.

    Raises UserError where the sizes do not multiply to the number of devices.
    """
    devices = np.asarray(jax.devices())
    shape = [sizes[axis] for axis in AXES]
    if shape.count(-1) == 1:
        rest = math.prod(size for size in shape if size != -1)
        shape[shape.index(-1)] = len(devices) // rest if rest > 0 else 0
    if math.prod(shape) != len(devices) or min(shape) < 1:
        raise UserError(
            f"mesh {', '.join(f'{axis}={sizes[axis]}' for axis in AXES)} does not fit {len(devices)} device(s); "
            "set at most one of config.mesh.* to -1"
        )
    return Mesh(devices.reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def place(tree, mesh: Mesh):
    """Put a tree of arrays on the mesh, each leaf by the first rule in PLACEMENT that its path matches."""
    return jax.tree.map(jax.device_put, tree, placements(tree, mesh))


def placements(tree, mesh: Mesh):
    """Return the NamedSharding of every leaf of `tree`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: NamedSharding(mesh, rules.first_match(PLACEMENT, _leaf_path(path), REPLICATED)), tree
    )


def _leaf_path(path) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def shard_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Make global arrays of this process's part of a batch, its leading axis over the whole mesh."""
    sharding = NamedSharding(mesh, BATCH)
    return {name: jax.make_array_from_process_local_data(sharding, part) for name, part in batch.items()}


def on_device(batches: Iterator[dict[str, np.ndarray]], mesh: Mesh) -> Iterator[dict[str, jax.Array]]:
    """Yield batches as `shard_batch` makes them, the next one under way to the device while one is worked on."""
    present = None
    for batch in batches:
        following = shard_batch(batch, mesh)
        if present is not None:
            yield present
        present = following
    if present is not None:
        yield present
