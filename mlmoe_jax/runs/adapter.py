"""The values of a trained model in one file, for sharing: all that is not a published backbone.

A folder with such a file and the metadata of a run is opened like a run folder with checkpoints. The file holds float32
tensors by parameter path, and in its header the layout, the version that wrote it, and the origin of the values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import load, save

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.params import Params
from mlmoe_jax.runs.checkpoint import Restored, selected_of
from mlmoe_jax.runs.folder import ADAPTER, RunFolder
from mlmoe_jax.runtime.files import MOST_DATA
from mlmoe_jax.runtime.sharding import place
from mlmoe_jax.runtime.text import printable
from mlmoe_jax.runtime.version import __version__

LAYOUT = 1  # readers refuse all others
_ABOUT = "mlmoe_jax"  # the entry of the header


def write_adapter(folder: RunFolder, values: Params, notes: Mapping[str, Any]) -> None:
    """Write trained values; notes: those of their checkpoint, of which step, kind and split are kept."""
    tensors = {path: np.ascontiguousarray(jax.device_get(values[path]), np.float32) for path in sorted(values)}
    about = {"layout": LAYOUT, "version": __version__, "origin": selected_of(notes)}
    folder.write_bytes(ADAPTER, save(tensors, {_ABOUT: json.dumps(about)}))  # several entries have no fixed order


def restore_adapter(folder: RunFolder, like: Params, mesh: Mesh) -> Restored:
    """Read the values that `write_adapter` wrote, placed on a mesh.

    like: the values of the model that the folder describes. Raises UserError if the file is damaged, was written in
    another layout, or holds other tensors than the model.
    """
    with folder.reading(ADAPTER):
        content = folder.read_bytes(ADAPTER, MOST_DATA)
        try:
            tensors = load(content)
        except Exception as error:  # the library has its own, and OverflowError and others of numpy
            raise ValueError(str(error)) from error
        length = int.from_bytes(content[:8], "little")
        about = json.loads(json.loads(content[8 : 8 + length]).get("__metadata__", {})[_ABOUT])
        if about["layout"] != LAYOUT:
            raise UserError(
                f"{folder} was shared by mlmoe_jax {printable(str(about['version']), 40)}, whose layout this version, "
                f"{__version__}, does not read; update mlmoe_jax"
            )
        notes = selected_of(about["origin"])
        shapes = {path: value.shape for path, value in tensors.items()}
        expected = {path: value.shape for path, value in like.items()}
        if unfit := sorted(path for path in shapes | expected if shapes.get(path) != expected.get(path)):
            raise ValueError(f"{len(unfit)} tensors are not those of its config, such as {printable(unfit[0], 100)}")
    values = {path: tensors[path].astype(value.dtype) for path, value in like.items()}
    return Restored(notes["step"], notes["step"], place(values, mesh), notes)
