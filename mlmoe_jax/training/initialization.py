"""The initial values of a run that starts from `config.init_from`.

`config.init_from` is a checkpoint of the authors' PyTorch code, or another run, in a folder or shared on the hub. A run
may have other labels: parameters of a label are matched by its name, and parameters without a counterpart keep their
initial values and are listed.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.adapters.catalog import prompts_of
from mlmoe_jax.models.build import Classifier
from mlmoe_jax.models.heads.catalog import head_of
from mlmoe_jax.models.initial_values import draw_missing
from mlmoe_jax.models.params import ModelDef, Params
from mlmoe_jax.models.partition import axes_of, label_axes
from mlmoe_jax.pretrained.load import map_file
from mlmoe_jax.pretrained.official import CHECKPOINT_SUFFIXES, POSITION_TABLE, departures, load_official
from mlmoe_jax.runs.assemble import Parts, assemble, fill_backbone, model_builder, require_weights, split_model
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import parts_of_run, read_run, restored_values
from mlmoe_jax.runs.shared import run_folder
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.sharding import make_mesh
from mlmoe_jax.training.label_transfer import counterparts, report_labels, transfer_parameters


# ----------------------------------------------------------------------------------------------------------- source
def require_source(config: ConfigDict) -> None:
    """Raise UserError if a run cannot start from `config.init_from`, or from pretrained weights if that is empty.

    Called before anything that takes time.
    """
    given = config.init_from
    if not given:
        require_weights(config)
    elif _is_file(given):
        if not Path(given).exists():
            raise UserError(f"there is no weights file {given}")
        if head_of(config).needs_vectors and not config.model.head.graph.word_vectors:
            raise UserError(
                "config.init_from is a checkpoint of ML-GCN, which was trained with GloVe vectors: name them with "
                "model.head.graph.word_vectors"
            )
        map_file(Path(given), whole=True)
    elif not run_folder(given).path.is_dir():
        kinds = f"{', '.join(CHECKPOINT_SUFFIXES[:-1])} or {CHECKPOINT_SUFFIXES[-1]}"
        raise UserError(f"config.init_from is '{given}', which is neither a file in {kinds} nor a run folder")
    else:
        _require_same_backbone(config, read_run(run_folder(given))[0])


def _require_same_backbone(config: ConfigDict, theirs: ConfigDict) -> None:
    ours, theirs = config.model.backbone.name, theirs.model.backbone.name
    if ours != theirs:
        raise UserError(
            f"config.init_from={config.init_from} is a run on {theirs}, and this one is on {ours}; both must have the "
            "same backbone"
        )


def _is_file(given: str) -> bool:
    return given.endswith(CHECKPOINT_SUFFIXES) and not Path(given).is_dir()


def initial_parts(config: ConfigDict, label_space: LabelSpace) -> Parts:
    """Return the model of a config with the values of `config.init_from`, which must be set.

    Raises UserError if the source is neither a checkpoint nor a run folder, if it does not fit the model, or if
    `checkpoint.include_frozen=never` would lose frozen values that only the source has.
    """
    given = config.init_from
    require_source(config)
    if _is_file(given):
        parts = _from_official(config, label_space, Path(given))
    else:
        parts = _from_run(config, label_space, run_folder(given))
    if config.checkpoint.include_frozen == "never" and parts.unpublished:
        raise UserError(
            f"checkpoint.include_frozen=never would lose {len(parts.unpublished)} frozen parameters that only "
            f"config.init_from={given} has; leave it at auto"
        )
    return parts


def _from_official(config: ConfigDict, label_space: LabelSpace, path: Path) -> Parts:
    build = model_builder(config, label_space)
    model = nnx.eval_shape(build)
    table = ModelDef.split(model)[1].get(POSITION_TABLE)
    native = None if table is None else table.shape
    masks = {name: getattr(model.prompts, name).get_value() for name in _set_masks(config)}
    report = load_official(model, path, len(label_space.names))
    only_head = not any(target.startswith("backbone/") for target in report.loaded)
    if only_head:
        fill_backbone(model, config)
    for name, shape in masks.items():
        getattr(model.prompts, name).set_value(shape)  # so that it gets the value that the config gives
    draw_missing(model, build)
    if report.sorted_labels:
        _reorder(model, label_space.names)
    status(f"init_from {path}: {len(report.loaded)} parameters from the {report.source} layout")
    if only_head:
        status(f"init_from {path}: only a head; the backbone is the pretrained {config.model.backbone.name}")
    for what, names in (
        ("not used", report.unused),
        ("missing, initial value kept", () if only_head else report.missing),
    ):
        if names:
            status(f"init_from {path}: {what}: {', '.join(names)}")
    for difference in departures(config.model, report.source):
        status(f"the authors' code computes something else: {difference}")
    parts = split_model(model, config)
    if not only_head:
        parts = replace(parts, unpublished=frozenset(parts.frozen))
    return _fixed_table(parts, native)


def _reorder(model: Classifier, names: tuple[str, ...]) -> None:
    """Reorder the rows of a head from the alphabetical order of the labels to the order of `names`."""
    place = {name: row for row, name in enumerate(sorted(names))}
    order = np.array([place[name] for name in names])
    if (order == np.arange(len(names))).all():
        return
    status("the labels of this checkpoint are in alphabetical order; they are matched by name")
    state = nnx.state(model, nnx.Param)
    moved = {}
    for where, variable in nnx.to_flat_state(state):
        if rows := label_axes(axes_of(variable)):
            value = functools.reduce(lambda v, axis: jnp.take(v, order, axis=axis), rows, variable.get_value())
            moved[where] = variable.replace(value)
    nnx.update(model, nnx.from_flat_state(moved))


def _set_masks(config: ConfigDict) -> tuple[str, ...]:
    """Return the names of the prompt masks whose values the config gives, as the levels of pruning do."""
    prompts = config.model.prompts
    given = {"token_mask": prompts.kept_tokens, "segment_mask": prompts.kept_segments}
    return tuple(name for name, value in given.items() if value) if prompts.pruning == "fixed" else ()


def _fixed_table(parts: Parts, native: tuple[int, ...] | None) -> Parts:
    """Return `parts`; raise UserError if it trains a position table for another grid than the backbone's own."""
    table = parts.trainable.get(POSITION_TABLE)
    if table is not None and table.shape != native:
        raise UserError(
            f"config.init_from has a position table of {table.shape[1]} entries and the backbone one of {native[1]}; "
            "it cannot be trained, so put (r'^backbone/pos_embed$', False) first in config.trainable"
        )
    return parts


# ------------------------------------------------------------------------------------------------------ another run
def _from_run(config: ConfigDict, label_space: LabelSpace, folder: RunFolder) -> Parts:
    their_config, their_space = read_run(folder)
    ours, theirs = config.model.backbone, their_config.model.backbone
    _require_same_backbone(config, their_config)
    run = parts_of_run(folder, their_config, their_space)
    restored = restored_values(folder, run, make_mesh(config.mesh))
    published = set(run.frozen) - run.unpublished if ours.weights == theirs.weights == "auto" else set()
    if ours.weights not in ("auto", theirs.weights):
        status(f"model.backbone.weights={ours.weights} is not read, because the backbone comes from {folder}")

    base = assemble(config, label_space, load_backbone=bool(published))
    settled = published | {f"prompts/{name}" for name in _set_masks(config)}
    first, known = {**base.trainable, **base.frozen, **base.stats}, {**run.frozen, **restored.selected}
    match = counterparts(config, label_space, their_config, their_space, base.definition, run.definition)
    ours, theirs = ({path: v for path, v in each.items() if path not in settled} for each in (first, known))
    taken, left = transfer_parameters(ours, theirs, match)
    step, count = restored.notes["step"], len(taken) + len(published)
    status(f"init_from {folder}: {count} of {len(first)} parameters, as selected at step {step}")
    report_labels(match, label_space, their_space, grouped=prompts_of(config).uses_groups and match.same_groups)
    for reason, paths in left.items():
        status(f"not transferred, {reason}: {', '.join(sorted(paths))}")

    def filled(values: Params) -> Params:
        return {path: taken.get(path, value) for path, value in values.items()}

    frozen = filled(base.frozen)
    native = base.trainable.get(POSITION_TABLE)
    parts = Parts(base.definition, filled(base.trainable), frozen, filled(base.stats), frozenset(frozen) - published)
    return _fixed_table(parts, None if native is None else native.shape)
