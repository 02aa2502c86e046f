"""The digests of a checkpoint: a sha256 of every array, written and verified without gathering any array.

Each process computes the digests of its own shards, in the thread that writes the checkpoint. A shard on several
devices counts once. The first process writes `metadata`, and process i `metadata-i`:

    {"step": 7, "notes": "<sha256>", "state": {"<leaf>": "<sha256>"}, "selected": {…}}

A sharded array has a sha256 per shard instead, such as {"0:4,0:8": "<sha256>", …}, with its rows and columns.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import future

from mlmoe_jax.runtime import distributed

Digests = dict[str, str | dict[str, str]]  # leaf -> the digest of the array, or shard -> digest
_FILE = "metadata"
_WHOLE = ""  # the name of the only shard of an array


class _Handler(ocp.AsyncCheckpointHandler):
    """The Orbax handler that writes and reads the digests of a checkpoint."""

    async def async_save(self, directory: epath.Path, args: Save) -> list[future.Future]:
        parts = {name: host_shards(tree) for name, tree in args.trees.items()}
        write = _write(directory, args.plain, parts)
        return [future.CommitFutureAwaitingContractedSignals(write, name="digests")]

    def save(self, directory: epath.Path, args: Save) -> None:
        for written in asyncio.run(self.async_save(directory, args)):
            written.result()

    def restore(self, directory: epath.Path, args: Restore) -> dict[str, Any]:
        return read(directory)


@ocp.args.register_with_handler(_Handler, for_save=True)
@dataclass
class Save(ocp.args.CheckpointArgs):
    """The argument for saving digests with Orbax.

    Attributes:
      plain: {"step": the step, "notes": the digest of the notes}.
      trees: name -> tree of arrays, whose digests are computed and saved.
    """

    plain: dict[str, Any]
    trees: dict[str, Any]


@ocp.args.register_with_handler(_Handler, for_restore=True)
@dataclass
class Restore(ocp.args.CheckpointArgs):
    """The argument for restoring the digests of all processes with Orbax."""


def read(directory: epath.Path) -> dict[str, Any]:
    """Return the digests of all processes, merged into one dict; the module docstring has its layout.

    Raises:
      OSError or ValueError: the file of the first process is missing or damaged.
    """
    merged = json.loads((directory / _FILE).read_text())
    for path in directory.glob(f"{_FILE}-*"):
        for name, leaves in json.loads(path.read_text()).items():
            for leaf, shards in leaves.items():
                merged[name][leaf] = {**merged[name].get(leaf, {}), **shards}
    return merged


def json_digest(value: Any) -> str:
    """Return the hexadecimal sha256 of a value as JSON.

    The value is converted to JSON and back first, so a value has an equal digest before and after it is stored.
    """
    return hashlib.sha256(json.dumps(json.loads(json.dumps(value)), sort_keys=True).encode()).hexdigest()


def shard_digests(shards: Mapping[str, Mapping[str, np.ndarray]]) -> Digests:
    """Return the digests of arrays on the host.

    Args:
      shards: leaf -> shard -> values, the result of `host_shards`.

    Returns:
      leaf -> digest of the array, or leaf -> {shard: digest} if the array is sharded.
    """
    found = {leaf: {name: _sha256(values) for name, values in parts.items()} for leaf, parts in shards.items()}
    return {leaf: parts.get(_WHOLE, parts) for leaf, parts in found.items() if parts}


def host_shards(tree: Any) -> dict[str, dict[str, np.ndarray]]:
    """Copy the shards of a tree of arrays from the devices of this process to the host.

    If several devices have equal shards, only the first one is copied.

    Returns:
      leaf -> shard -> values. The name of a shard is its range of indices, such as "0:4,0:8", or "" for a whole array.
    """
    shards = {
        leaf: {
            _name(shard.index, array.shape): shard.data for shard in array.addressable_shards if not shard.replica_id
        }
        for leaf, array in _leaves(tree)
    }
    jax.copy_to_host_async(shards)
    return jax.tree.map(np.asarray, shards)


def damage(trees: Mapping[str, Any], stored: Mapping[str, Digests]) -> str:
    """Return a description of how restored arrays differ from the saved arrays; "" if they are equal.

    All processes must call this function. If an array is sharded as it was when it was saved, each process verifies its
    own shards. Otherwise each process verifies the whole array.

    Args:
      trees: name -> tree of restored arrays.
      stored: name -> digests of the saved arrays.
    """
    changed = [
        f"{name}: {path}"
        for name, tree in trees.items()
        for path, leaf in _leaves(tree)
        if not _is_intact(leaf, stored[name].get(path))
    ]
    return f"{len(changed)} arrays differ from the saved ones, the first is {changed[0]}" if changed else ""


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return (path, leaf) for each leaf of a tree.

    A dataclass and a dict of its fields have equal paths.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def _is_intact(array: Any, stored: str | dict[str, str] | None) -> bool:
    """Return whether an array has the stored digest, or whether all its shards have theirs.

    Args:
      array: the restored array.
      stored: the digest of the array, or shard -> digest; None if no digest is stored.
    """
    expected = {_WHOLE: stored} if isinstance(stored, str) else stored or {}
    if isinstance(array, jax.Array) and expected.keys() == _shard_names(array):
        shards = {_name(shard.index, array.shape): shard.data for shard in array.addressable_shards}
        return all(expected[name] == _sha256(np.asarray(values)) for name, values in shards.items())
    gathered = np.asarray(distributed.to_host(array))
    parts = {name: gathered[_index(name)] for name in expected}
    complete = sum(part.size for part in parts.values()) == gathered.size
    return complete and all(expected[name] == _sha256(part) for name, part in parts.items())


def _shard_names(array: jax.Array) -> set[str]:
    """Return the names of all shards of an array, as in `host_shards`, for the devices of all processes."""
    indices = array.sharding.devices_indices_map(array.shape).values()
    return {_name(index, array.shape) for index in indices}


def _name(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    bounds = [slice_.indices(size)[:2] for slice_, size in zip(index, shape, strict=True)]
    if math.prod(stop - start for start, stop in bounds) == math.prod(shape):
        return _WHOLE
    return ",".join(f"{start}:{stop}" for start, stop in bounds)


def _index(name: str) -> tuple[slice, ...]:
    return tuple(slice(*map(int, bounds.split(":"))) for bounds in name.split(",")) if name else ()


def _sha256(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).reshape(-1).view(np.uint8)).hexdigest()


async def _write(
    directory: epath.Path, plain: dict[str, Any], parts: dict[str, dict[str, dict[str, np.ndarray]]]
) -> None:
    """Write the digests of this process to its file in `directory`.

    Args:
      directory: the folder of the digests in the checkpoint.
      plain: entries that the first process adds to its file, see `Save`.
      parts: name of a tree -> result of `host_shards`.
    """
    index, _ = distributed.process()
    digests: dict[str, Any] = {name: shard_digests(shards) for name, shards in parts.items()}
    if not index:
        digests |= plain
    (directory / (f"{_FILE}-{index}" if index else _FILE)).write_text(json.dumps(digests))
