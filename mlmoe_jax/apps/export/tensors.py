"""Export the values of a run as a file: with our parameter paths, or with the names of the authors' code."""

from __future__ import annotations

from pathlib import Path

from safetensors.numpy import save_file

from mlmoe_jax.apps.export.catalog import ALWAYS, AUTO, NEVER, Export, ExportTarget
from mlmoe_jax.apps.export.program import weights_of
from mlmoe_jax.errors import UserError
from mlmoe_jax.pretrained.official import departures, export_official, require_writable
from mlmoe_jax.runs.assemble import abstract_parts
from mlmoe_jax.runtime.formats import to_json
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import require_new, whole_file


def _new_file(output: str) -> Path:
    path = require_new(output)
    if path.suffix != ".safetensors":
        raise UserError(f"--output={output} should be a .safetensors file")
    return path


def _write_safetensors(export: Export) -> str:
    run = export.run
    frozen = {
        ALWAYS: lambda: None,
        AUTO: lambda: abstract_parts(run.config, run.label_space).unpublished,
        NEVER: frozenset,
    }[export.include_frozen]()
    weights = weights_of(run, frozen=frozen)
    with whole_file(export.path, alone=False) as partial:  # it may be in a run folder, whose lock another process has
        save_file(weights, partial, {"format": "mlmoe_jax", "description": to_json(export.description)})
    return f"{len(weights):,} tensors, {sum(value.nbytes for value in weights.values()) / 1e6:,.1f} MB"


def _state_dict(output: str) -> Path:
    require_writable(Path(output))
    return Path(output)


def _write_official(export: Export) -> str:
    source = export_official(export.run.model(), export.path)
    for difference in departures(export.run.config.model, source.name):
        status(f"the authors' code computes something else: {difference}")
    return f"in the {source.name} layout"


SAFETENSORS = ExportTarget(_write_safetensors, place=_new_file)
AUTHORS = ExportTarget(_write_official, place=_state_dict)
