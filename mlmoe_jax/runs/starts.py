"""The starts of a training, with the versions and devices of each."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import platform
from datetime import UTC, datetime
from typing import Any

import jax
from jax.sharding import Mesh

from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.folder import STARTS, RunFolder
from mlmoe_jax.runtime.version import __version__

_logger = logging.getLogger(__name__)

# Libraries whose versions are recorded at every start, since results can depend on them.
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "pillow")


def versions() -> dict[str, str]:
    """Return the versions of Python, this package and the libraries that results depend on."""
    libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {"python": platform.python_version(), "mlmoe_jax": __version__, **libraries}


def record_start(folder: RunFolder, step: int, mesh: Mesh) -> None:
    """Append a start of the training to starts.json. A damaged file is replaced.

    The entry has the keys `time`, `step` (the number of steps that were done before; 0 for a new run), `versions`,
    `device`, `devices`, `processes` and `mesh`.
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
    """Return the starts that `record_start` wrote, oldest first; [] if the file is missing, or damaged (logged)."""
    if not (folder / STARTS).exists():
        return []
    try:
        with folder.reading(STARTS):
            return list(json.loads(folder.read_text(STARTS)))
    except UserError as error:
        _logger.warning(error)  # neither training nor a report depends on it
        return []
