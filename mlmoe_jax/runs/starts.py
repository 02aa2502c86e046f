"""The starts of a training, with the versions and devices of each."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from datetime import UTC, datetime
from typing import Any

import jax
from jax.sharding import Mesh

from mlmoe_jax.runs.folder import STARTS, RunFolder
from mlmoe_jax.runtime.version import __version__

# Libraries whose versions are recorded at every start, since results can depend on them.
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "pillow")


def versions() -> dict[str, str]:
    """Return the versions of Python, this package and the libraries that results depend on."""
    libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {"python": platform.python_version(), "mlmoe_jax": __version__, **libraries}


def record_start(folder: RunFolder, step: int, mesh: Mesh) -> None:
    """Append to `starts.json`: time, first step, versions, devices, processes and mesh."""
    start = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": step,
        "versions": versions(),
        "device": mesh.devices.flat[0].device_kind,
        "devices": mesh.size,
        "processes": jax.process_count(),
        "mesh": dict(mesh.shape),
    }
    folder.write_json(STARTS, [*read_starts(folder), start])


def read_starts(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the starts of a run, oldest first; [] without the file."""
    if not (folder / STARTS).exists():
        return []
    with folder.reading(STARTS):
        return json.loads(folder.read_text(STARTS))
