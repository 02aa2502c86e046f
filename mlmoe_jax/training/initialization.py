"""The initial values of a run that starts from `config.init_from`.

`config.init_from` is a checkpoint of the authors' PyTorch code, or the folder of another run. Runs may have other
labels: what belongs to a label is matched by the label's name, and what has no counterpart keeps its initial value and
is listed.
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
from mlmoe_jax.models.build import Classifier, build_model
from mlmoe_jax.models.heads.catalog import head_of
from mlmoe_jax.models.params import ModelDef, Params
from mlmoe_jax.pretrained.official import CHECKPOINT_SUFFIXES, POSITION_TABLE, departures, load_official
from mlmoe_jax.runs.assemble import Parts, assemble, fill_backbone, split_model
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import parts_of_run, read_run, selected_values
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.sharding import make_mesh
from mlmoe_jax.training.label_transfer import carry_over, counterparts, say_labels


# ------------------------------------------------------------------------------------------------------- where from
def require_source(config: ConfigDict) -> None:
    """Raise UserError where `init_from` is nothing to start from, before anything is done that takes time."""
    given = config.init_from
    if _is_file(given):
        if not Path(given).exists():
            raise UserError(f"there is no weights file {given}")
        if head_of(config).needs_vectors and not config.model.head.graph.word_vectors:
            raise UserError(
                "config.init_from is a file of ML-GCN's, which was trained with GloVe vectors: name them with "
                "model.head.graph.word_vectors"
            )
    elif given and not RunFolder(given).path.is_dir():
        kinds = f"{', '.join(CHECKPOINT_SUFFIXES[:-1])} or {CHECKPOINT_SUFFIXES[-1]}"
        raise UserError(f"config.init_from is '{given}', which is neither a file in {kinds} nor a run folder")


def _is_file(given: str) -> bool:
    return given.endswith(CHECKPOINT_SUFFIXES) and not Path(given).is_dir()


def initial_parts(config: ConfigDict, label_space: LabelSpace) -> Parts:
    """Return the model of a config with the values of `config.init_from`, which has to be set.

    Raises UserError if `init_from` is nothing to start from, does not fit the model, or could not be found again.
    """
    given = config.init_from
    require_source(config)
    if _is_file(given):
        parts = _from_official(config, label_space, Path(given))
    else:
        parts = _from_run(config, label_space, RunFolder(given))
    if config.checkpoint.include_frozen == "never" and parts.unpublished:
        raise UserError(
            f"checkpoint.include_frozen=never would lose {len(parts.unpublished)} frozen parameters that only "
            f"config.init_from={given} has; leave it at auto"
        )
    return parts


def _from_official(config: ConfigDict, label_space: LabelSpace, path: Path) -> Parts:
    model = build_model(config, label_space, rngs=nnx.Rngs(config.seed))
    table = ModelDef.split(model)[1].get(POSITION_TABLE)
    native = None if table is None else table.shape
    kept = {name: getattr(model.prompts, name)[...] for name in _set_masks(config)}
    report = load_official(model, path, len(label_space.names))
    alone = not any(target.startswith("backbone/") for target in report.loaded)
    if alone:
        fill_backbone(model, config)
    if report.sorted_labels:
        _reorder(model, label_space.names)
    for name, value in kept.items():
        getattr(model.prompts, name)[...] = value
    status(f"init_from {path}: {len(report.loaded)} parameters from the {report.source} layout")
    if alone:
        status(f"init_from {path}: a head alone; the backbone is {config.model.backbone.name} as pretrained")
    for what, names in (
        ("not used", report.unused),
        ("not there, and left as it is", () if alone else report.missing),
    ):
        if names:
            status(f"init_from {path}: {what}: {', '.join(names)}")
    for difference in departures(config.model, report.source):
        status(f"the authors' code computes something else: {difference}")
    parts = split_model(model, config)
    if not alone:
        parts = replace(parts, unpublished=frozenset(parts.frozen))
    return _fixed_table(parts, native)


def _reorder(model: Classifier, names: tuple[str, ...]) -> None:
    """Move the rows of a head whose labels are in alphabetical order to where `names` has them."""
    place = {name: row for row, name in enumerate(sorted(names))}
    order = np.array([place[name] for name in names])
    if (order == np.arange(len(names))).all():
        return
    status("the labels of such a checkpoint are in alphabetical order, and are matched by their names")
    state = nnx.state(model, nnx.Param)
    moved = {}
    for where, variable in nnx.to_flat_state(state):
        if rows := model.head.rows_of("/".join(map(str, where))):
            value = functools.reduce(lambda v, axis: jnp.take(v, order, axis=axis), rows.axes, variable.get_value())
            moved[where] = variable.replace(value)
    nnx.update(model, nnx.from_flat_state(moved))


def _set_masks(config: ConfigDict) -> tuple[str, ...]:
    """Return the masks of prompts whose values the config itself gives, as the levels of pruning do."""
    prompts = config.model.prompts
    given = {"token_mask": prompts.kept_tokens, "segment_mask": prompts.kept_segments}
    return tuple(name for name, value in given.items() if value) if prompts.pruning == "fixed" else ()


def _fixed_table(parts: Parts, native: tuple[int, ...] | None) -> Parts:
    """Return `parts`; UserError where a position table for another grid than the backbone's own is to be trained."""
    table = parts.trainable.get(POSITION_TABLE)
    if table is not None and table.shape != native:
        raise UserError(
            f"config.init_from has a position table of {table.shape[1]} entries where the backbone has {native[1]}; it "
            "cannot be trained, so put (r'^backbone/pos_embed$', False) first in config.trainable"
        )
    return parts


# ------------------------------------------------------------------------------------------------------ another run
def _from_run(config: ConfigDict, label_space: LabelSpace, folder: RunFolder) -> Parts:
    their_config, their_space = read_run(folder)
    ours, theirs = config.model.backbone, their_config.model.backbone
    if ours.name != theirs.name:
        raise UserError(
            f"config.init_from={folder} is a run on {theirs.name}, and this one is on {ours.name}; both need the same "
            "backbone"
        )
    run = parts_of_run(folder, their_config, their_space)
    restored = selected_values(folder, run, make_mesh(config.mesh))
    published = set(run.frozen) - run.unpublished if ours.weights == theirs.weights == "auto" else set()
    if ours.weights not in ("auto", theirs.weights):
        status(f"model.backbone.weights={ours.weights} is not read, since the backbone comes from {folder}")

    base = assemble(config, label_space, load_backbone=bool(published))
    settled = published | {f"prompts/{name}" for name in _set_masks(config)}
    first, known = {**base.trainable, **base.frozen, **base.stats}, {**run.frozen, **restored.selected}
    match = counterparts(config, label_space, their_config, their_space)
    ours, theirs = ({path: v for path, v in each.items() if path not in settled} for each in (first, known))
    taken, left = carry_over(ours, theirs, match)
    step, count = restored.notes["step"], len(taken) + len(published)
    status(f"init_from {folder}: {count} of {len(first)} parameters, as selected at step {step}")
    say_labels(match, label_space, their_space, grouped=config.model.prompts.kind == "group" and match.same_groups)
    for reason, paths in left.items():
        status(f"not taken over, {reason}: {', '.join(sorted(paths))}")

    def filled(values: Params) -> Params:
        return {path: taken.get(path, value) for path, value in values.items()}

    frozen = filled(base.frozen)
    native = base.trainable.get(POSITION_TABLE)
    parts = Parts(base.definition, filled(base.trainable), frozen, filled(base.stats), frozenset(frozen) - published)
    return _fixed_table(parts, None if native is None else native.shape)
