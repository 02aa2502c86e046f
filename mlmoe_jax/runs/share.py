"""Write the values of a run as a shared model."""

from __future__ import annotations

import mlmoe_jax.config as configuration
from mlmoe_jax.runs.decisions import read_thresholds, write_thresholds
from mlmoe_jax.runs.folder import THRESHOLDS, RunFolder
from mlmoe_jax.runs.restore import parts_of_run, read_preprocess, read_run, restored_values, write_run_metadata
from mlmoe_jax.runs.shared_model import write_adapter
from mlmoe_jax.runtime.sharding import make_mesh
from mlmoe_jax.runtime.storage import edit_note


def write_shared_model(folder: RunFolder, target: RunFolder) -> bool:
    """Write the values of the selected step of a run, and their metadata, to the existing folder `target`.

    Returns True if the newest checkpoint of the run is damaged and an older checkpoint was used. Raises UserError under
    the conditions of `open_run`.
    """
    config, space = read_run(folder, own=True)
    parts = parts_of_run(folder, config, space)
    restored = restored_values(folder, parts, make_mesh(config.mesh))
    thresholds, preprocess = read_thresholds(folder), read_preprocess(folder, config)
    write_adapter(target, restored.selected, restored.notes)
    write_run_metadata(target, configuration.portable(config), space, preprocess, parts)
    write_thresholds(target, thresholds)
    edit_note(target / THRESHOLDS).unlink()
    return restored.step < restored.newest
