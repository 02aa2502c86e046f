"""Every start of a training with its library versions and devices, since results can depend on them."""

import importlib.metadata
import platform
from datetime import UTC, datetime
from typing import Any

import jax
from jax.sharding import Mesh

from mlmoe_jax.runs.folder import STARTS, RunFolder
from mlmoe_jax.runtime.version import __version__

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "pillow")


def versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of the libraries that results depend on."""
    libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {"python": platform.python_version(), "mlmoe_jax": __version__, **libraries}


def record_start(folder: RunFolder, step: int, mesh: Mesh) -> None:
    """Add this start to `starts.json`: time, first step, versions, devices, processes and mesh.

    Raises UserError if the file is damaged.
    """
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
    """Return the starts of a run, oldest first; [] without the file. Raises UserError if the file is damaged."""
    if not (folder / STARTS).exists():
        return []
    with folder.reading(STARTS):
        starts = folder.read_json(STARTS, list)
        for start in starts:
            datetime.fromisoformat(start["time"])  # ValueError if it is no time
        return starts
