"""Conversion between the authors' checkpoints and run folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.export.run import ALWAYS, SAFETENSORS, export_run
from mlmoe_jax.data.pipeline import steps_per_epoch
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.errors import DONE, UserError
from mlmoe_jax.pretrained.official import CHECKPOINT_SUFFIXES, departures, export_official, require_writable
from mlmoe_jax.runs import checkpoint
from mlmoe_jax.runs.assemble import preprocess_for
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import (
    BEST,
    has_checkpoint,
    parts_of_run,
    read_run,
    require_name,
    restored_values,
    write_run_metadata,
)
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.setup import setup_jax
from mlmoe_jax.runtime.sharding import make_mesh, place
from mlmoe_jax.training.initialization import initial_parts, require_source
from mlmoe_jax.training.selection import Selection
from mlmoe_jax.training.setup import build_steps, label_space_for


def import_run(config: ConfigDict, folder: RunFolder) -> None:
    """Convert `config.init_from` into a run folder without training, for evaluation, prediction and export.

    Labels, their order and their groups are those of the training split; no image is read. The folder gets a checkpoint
    of step 0, from which training can resume. Raises UserError if `init_from` is empty or the folder already holds a
    run, and as `initial_parts` does.
    """
    configuration.validate(config)
    if not config.init_from:
        raise UserError(
            "--mode=import needs --config.init_from=FILE, a checkpoint of the authors' code, or a run folder"
        )
    if has_checkpoint(folder):
        raise UserError(f"{folder} already holds a run; choose another --workdir")
    require_source(config)
    folder.require_place()
    preprocess = preprocess_for(config)
    split = open_split(config.data, config.data.train_split, seed=config.seed)
    label_space = label_space_for(config, split)
    mesh = setup_jax(config)
    parts = initial_parts(config, label_space)
    total_steps = config.train.epochs * steps_per_epoch(len(split), config.train.batch_size)
    steps = build_steps(config, parts, preprocess, mesh, split.labels, total_steps=total_steps)
    state = place(steps.initial_state(parts), mesh)  # without padding, so the checkpoint does not depend on the mesh
    selection = Selection(state.ema, config.eval.select_metric, kind="imported")
    with folder.writing_by_first():
        if distributed.is_first():
            write_run_metadata(folder, config, label_space, preprocess, state.frozen, parts.unpublished)
        with checkpoint.open_manager(folder, keep=config.checkpoint.keep) as manager:
            notes = {**selection.notes(), "skipped": []}
            checkpoint.save(manager, 0, state.replace(frozen={}), selection.values, notes)


def export(
    folder: RunFolder,
    output: str,
    kind: str | None,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    checkpoint: str = BEST,
    include_frozen: str = ALWAYS,
) -> int:
    """Export a run in the format `kind`: stablehlo, onnx, safetensors or official; return the exit code.

    Without a format, an output with the suffix of a checkpoint is official. The other arguments and errors are those of
    `export_run` in `inference.export.run`, and of `export_official_run`.
    """
    kind = kind or ("official" if output.endswith(CHECKPOINT_SUFFIXES) else None)
    if kind is None:
        raise UserError(f"--output={output} needs --format=stablehlo, onnx, safetensors or official")
    if kind != SAFETENSORS and include_frozen != ALWAYS:
        raise UserError(f"--include-frozen is for --format=safetensors; leave it out of --format={kind}")
    if kind == "official":
        print(export_official_run(folder, output, overrides, which=checkpoint))
        return DONE
    return export_run(folder, output, kind, overrides, checkpoint=checkpoint, include_frozen=include_frozen)


def export_official_run(
    folder: RunFolder, output: str | Path, overrides: Sequence[tuple[str, str]] = (), *, which: str = BEST
) -> str:
    """Write values of a run as a state dict with the names of the authors' code; return a summary line.

    output: a .safetensors or .npz file. overrides, which: as in `open_run`. Raises UserError for another suffix, a
    folder that cannot be opened, and a model for which no official layout exists.
    """
    output = Path(output)
    require_writable(output)
    require_name(which)
    config, label_space = read_run(folder, overrides)
    parts = parts_of_run(folder, config, label_space)
    restored = restored_values(folder, parts, make_mesh(config.mesh), which)
    source = export_official(parts.definition.merge(restored.selected, parts.frozen), output)
    for difference in departures(config.model, source.name):
        status(f"the authors' code computes something else: {difference}")
    kind, step = restored.notes.get("kind", "selected"), restored.notes["step"]
    return f"{kind} weights of step {step} in the {source.name} layout; written to {output}"
