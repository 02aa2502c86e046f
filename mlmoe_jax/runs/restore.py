"""From a run folder to a model with its values, and the metadata files that this needs."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict
from safetensors import SafetensorError
from safetensors.numpy import load, save

import mlmoe_jax.config as configuration
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.params import ModelDef, Params, fingerprint
from mlmoe_jax.runs import checkpoint
from mlmoe_jax.runs.assemble import Parts, assemble, cast_frozen, evaluated_definition, label_axes_for, preprocess_for
from mlmoe_jax.runs.folder import BACKBONE, CHECKPOINTS, CONFIG, FROZEN, LABEL_SPACE, LABELS, PREPROCESS, RunFolder
from mlmoe_jax.runs.thresholds import write_fixed
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.sharding import LabelAxes, place, setup_jax

_MAY_DIFFER = ("data", "eval", "metrics", "report", "mesh")  # sections that do not change a trained model


@dataclass(frozen=True)
class Run:
    """A trained model from a run folder, placed on a mesh."""

    config: ConfigDict
    label_space: LabelSpace
    preprocess: Preprocess
    definition: ModelDef
    values: Params
    frozen: Params
    mesh: Mesh
    label_axes: LabelAxes | None  # as in `place`
    step: int
    notes: dict[str, Any]


def require_same_frozen(folder: RunFolder, frozen: Params) -> None:
    """Raise UserError if the folder holds checkpoints of a run with other frozen weights."""
    if not ((folder / BACKBONE).exists() and (folder / CHECKPOINTS).exists()):
        return
    _require_fingerprint(folder, folder.read_json(BACKBONE), frozen)


def _require_fingerprint(folder: RunFolder, described: dict[str, Any], frozen: Params) -> None:
    if fingerprint(frozen) != described["fingerprint"]:
        raise UserError(
            f"the frozen weights of {described['name']} ({described['weights']}) are not those that {folder} was "
            "trained with; put the original file back, or train in another --workdir"
        )


def write_run_metadata(
    folder: RunFolder,
    config: ConfigDict,
    label_space: LabelSpace,
    preprocess: Preprocess,
    frozen: Params,
    unpublished: Collection[str],
) -> None:
    """Write the files that make a run folder self-contained.

    Frozen weights are among them if no published file has them; unpublished: see Parts.
    """
    folder.write_text(LABELS, "".join(f"{name}\n" for name in label_space.names))
    buffer = io.BytesIO()
    label_space.save(buffer)
    folder.write_bytes(LABEL_SPACE, buffer.getvalue())
    folder.write_json(PREPROCESS, asdict(preprocess))
    write_fixed(folder, label_space.names, config.eval.threshold)
    folder.write_json(
        BACKBONE,
        {
            "name": config.model.backbone.name,
            "weights": config.model.backbone.weights,
            "frozen_parameters": sum(value.size for value in frozen.values()),
            "fingerprint": fingerprint(frozen),
        },
    )
    kept = {"always": frozen, "auto": unpublished, "never": ()}[config.checkpoint.include_frozen]
    if kept:
        # safetensors' reader for numpy does not support bfloat16, which float32 represents exactly
        wide = {path: jax.device_get(frozen[path]).astype(np.float32) for path in sorted(kept)}
        folder.write_bytes(FROZEN, save(wide))
    elif not unpublished:
        (folder / FROZEN).unlink(missing_ok=True)  # left by a training that ended before its first checkpoint
    folder.write_text(CONFIG, configuration.to_json(config))


def open_run(folder: RunFolder, overrides: list[tuple[str, str]] = ()) -> Run:
    """Restore the selected values of a run from its folder and the published backbone, with products of `eval.dtype`.

    overrides: config keys that differ from the run's own; only keys that do not change the trained model are allowed.
    Raises UserError if the folder is not a run folder or has no checkpoint, or if the frozen weights have changed.
    """
    config, label_space = read_run(folder, overrides)
    stored = folder.read_json(PREPROCESS)
    image_size = preprocess_for(config).image_size
    preprocess = Preprocess(image_size, tuple(stored["mean"]), tuple(stored["std"]))

    mesh = setup_jax(config, training=False)
    parts = parts_of_run(folder, config, label_space)
    restored = selected_values(folder, parts, mesh)
    label_axes = label_axes_for(config, len(label_space.names), mesh)
    return Run(
        config=config,
        label_space=label_space,
        preprocess=preprocess,
        definition=evaluated_definition(config, parts, label_space),
        values=place(restored.selected, mesh, label_axes),
        frozen=place(parts.frozen, mesh, label_axes),
        mesh=mesh,
        label_axes=label_axes,
        step=restored.notes["step"],
        notes=restored.notes,
    )


def read_run(folder: RunFolder, overrides: Sequence[tuple[str, str]] = ()) -> tuple[ConfigDict, LabelSpace]:
    """Return the config of a run, with `overrides` as in `open_run`, and its label space.

    Raises UserError if the folder is not a run folder or its label space is damaged.
    """
    folder.require(CONFIG, LABEL_SPACE, PREPROCESS, BACKBONE, CHECKPOINTS)
    config = configuration.from_json(folder.read_text(CONFIG))
    for key, _ in overrides:
        if key.partition(".")[0] not in _MAY_DIFFER:
            raise UserError(
                f"--config.{key} cannot differ from the trained run's; keys under {', '.join(_MAY_DIFFER)} can"
            )
    configuration.apply_overrides(config, list(overrides))
    configuration.validate(config)
    try:
        return config, LabelSpace.load(io.BytesIO((folder / LABEL_SPACE).read_bytes()))
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{folder / LABEL_SPACE} is damaged: {error}") from error


def has_checkpoint(folder: RunFolder) -> bool:
    """Return whether the folder has a finished checkpoint, good or damaged."""
    # All processes must open the checkpoints together, but they may see a change in a shared folder at different times.
    if not distributed.broadcast_from_first((folder / BACKBONE).exists() and (folder / CHECKPOINTS).exists()):
        return False
    with checkpoint.open_manager(folder, writing=False) as manager:
        return distributed.broadcast_from_first(bool(manager.all_steps()))


def parts_of_run(folder: RunFolder, config: ConfigDict, label_space: LabelSpace) -> Parts:
    """Assemble a run's model with its frozen weights, from the folder or else from the published file.

    Trainable parameters have their initial values. Raises UserError if the frozen weights are not those that the run
    was trained with.
    """
    described, stored = folder.read_json(BACKBONE), {}
    if (folder / FROZEN).exists():
        try:
            stored = cast_frozen(dict(load((folder / FROZEN).read_bytes())), config)
        except SafetensorError as error:
            raise UserError(f"{folder / FROZEN} is damaged: {error}") from error
    elsewhere = described["frozen_parameters"] - sum(value.size for value in stored.values())
    parts = assemble(config, label_space, load_backbone=elsewhere > 0)
    parts = replace(parts, frozen={**parts.frozen, **stored}, unpublished=frozenset(stored))
    _require_fingerprint(folder, described, parts.frozen)
    return parts


def selected_values(folder: RunFolder, parts: Parts, mesh: Mesh) -> checkpoint.Restored:
    """Restore the selected values of a run, whose model is `parts`. Raises UserError if there are none yet."""
    values = place({**parts.trainable, **parts.stats}, mesh)
    with checkpoint.open_manager(folder, writing=False) as manager:
        restored = checkpoint.restore_newest(manager, selected=values)
    if restored is None:
        raise UserError(f"{folder} holds no finished checkpoint yet; rerun its training command to resume it")
    return restored
