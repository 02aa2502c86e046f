"""The first values of a run: those of `config.init_from`, of the pretrained backbone, or drawn from the seed.

`config.init_from` is a checkpoint of the authors' PyTorch code, or the folder of another run. Runs may have other
labels: what belongs to a label is matched by the label's name, and what has no counterpart keeps its initial value and
is listed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.build import build_model
from mlmoe_jax.models.params import Params
from mlmoe_jax.pretrained.official import CHECKPOINT_SUFFIXES, POSITION_TABLE, departures, load_official
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import (
    Parts,
    assemble,
    fill_backbone,
    has_checkpoint,
    parts_of_run,
    read_run,
    selected_values,
    split_model,
)
from mlmoe_jax.runtime.progress import say
from mlmoe_jax.runtime.sharding import make_mesh


@dataclass(frozen=True)
class LabelRows:
    """Parameters (a regex) with an entry for every label along each of `axes`, and `further` entries behind them."""

    pattern: str
    axes: tuple[int, ...] = (0,)
    further: int = 0


# Where a kind of head keeps what belongs to a label. A parameter that is named here but has another size along the
# axis, such as the one row of a shared classifier, is laid out by something else.
LABEL_ROWS: dict[str, tuple[LabelRows, ...]] = {
    "linear": (
        LabelRows(r"^head/(patch_)?classifier/kernel$", (1,)),
        LabelRows(r"^head/(patch_)?classifier/bias$"),
    ),
    "group_experts": (
        LabelRows(r"^head/(co|dc)/gate/(kernel|bias)$", (1,)),
        LabelRows(r"^head/((co|dc)/)?classifier/(kernel|bias)$"),
    ),
    "group_linear": (LabelRows(r"^head/(co|dc)/(kernel|bias)$"),),
    "query": (LabelRows(r"^head/decoder/queries$"), LabelRows(r"^head/classifier/(kernel|bias)$")),
    "routed_experts": (
        LabelRows(r"^head/decoder/queries$"),
        LabelRows(r"^head/experts/task/"),
        LabelRows(r"^head/gates/(net/|free_logits$)"),
        LabelRows(r"^head/classifier/(kernel|bias)$"),
    ),
    "ml_gcn": (),  # its classifiers are made out of word vectors
    "add_gcn": (
        LabelRows(r"^head/map_classifier/kernel$", (1,)),
        LabelRows(r"^head/graph/static_graph/kernel$", (0, 1)),
        LabelRows(r"^head/graph/relation/kernel$", (1,)),
        LabelRows(r"^head/graph/relation/bias$"),
        LabelRows(r"^head/classifier/(kernel|bias)$"),
    ),
    "cnn_rnn": (LabelRows(r"^head/embedding$", further=2),),  # the end and the start of a sequence
}
# Layouts of the authors' code whose data sets list labels in alphabetical order.
SORTED_LABELS = ("add_gcn",)
# What is laid out by the groups of labels, where there are any.
GROUPED = r"^prompts/|^head/bank/|^head/(co|dc)/gate/"


@dataclass(frozen=True)
class Counterparts:
    """How the parameters of two models correspond.

    names, their_names: the labels of each. rows: where the head keeps what belongs to a label; None = the heads are of
    different kinds, or of one that LABEL_ROWS does not know. same_groups: prompts are made for groups of one structure,
    or for none. same_vectors: the labels that both have go by the same word vectors.
    """

    names: tuple[str, ...]
    their_names: tuple[str, ...]
    rows: tuple[LabelRows, ...] | None
    same_groups: bool = True
    same_vectors: bool = True


# ------------------------------------------------------------------------------------------------------- where from
def starting_parts(config: ConfigDict, label_space: LabelSpace, folder: RunFolder) -> Parts:
    """Return the model of a run as it stands before its checkpoint, if there is one, is restored.

    A run that goes on has its own frozen weights, and needs neither `init_from` nor, where it has stored them, anything
    else.
    """
    if has_checkpoint(folder):
        return parts_of_run(folder, config, label_space)
    return initial_parts(config, label_space)


def require_source(config: ConfigDict) -> None:
    """Raise UserError where `init_from` is nothing to start from, before anything is done that takes time."""
    given = config.init_from
    if _is_file(given):
        if not Path(given).exists():
            raise UserError(f"there is no weights file {given}")
    elif given and not RunFolder(given).path.is_dir():
        kinds = f"{', '.join(CHECKPOINT_SUFFIXES[:-1])} or {CHECKPOINT_SUFFIXES[-1]}"
        raise UserError(f"config.init_from is '{given}', which is neither a file in {kinds} nor a run folder")


def _is_file(given: str) -> bool:
    return given.endswith(CHECKPOINT_SUFFIXES) and not Path(given).is_dir()


def initial_parts(config: ConfigDict, label_space: LabelSpace) -> Parts:
    """Return the model of a config with its first values: (1) of `init_from`, (2) pretrained, (3) from the seed.

    Raises UserError where `init_from` is nothing to start from, does not fit the model, or could not be found again.
    """
    given = config.init_from
    if not given:
        return assemble(config, label_space)
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
    native = model.backbone.pos_embed.shape if hasattr(model.backbone, "pos_embed") else None
    kept = {name: getattr(model.prompts, name)[...] for name in _set_masks(config)}
    report = load_official(model, path, len(label_space.names))
    alone = not any(target.startswith("backbone/") for target in report.loaded)
    if alone:
        fill_backbone(model, config)
    if report.source in SORTED_LABELS:
        _reorder(model, label_space.names, LABEL_ROWS[config.model.head.kind])
    for name, value in kept.items():
        getattr(model.prompts, name)[...] = value
    say(f"init_from {path}: {len(report.loaded)} parameters from the {report.source} layout")
    if alone:
        say(f"init_from {path}: a head alone; the backbone is {config.model.backbone.name} as pretrained")
    for what, names in (
        ("not used", report.unused),
        ("not there, and left as it is", () if alone else report.missing),
    ):
        if names:
            say(f"init_from {path}: {what}: {', '.join(names)}")
    for difference in departures(config.model, report.source):
        say(f"the authors' code computes something else: {difference}")
    parts = split_model(model, config)
    if not alone:
        parts = replace(parts, unpublished=frozenset(parts.frozen))
    return _fixed_table(parts, native)


def _reorder(model: nnx.Module, names: tuple[str, ...], rows: tuple[LabelRows, ...]) -> None:
    """Move the rows of a head whose labels are in alphabetical order to where `names` has them."""
    place = {name: row for row, name in enumerate(sorted(names))}
    order = np.array([place[name] for name in names])
    if (order == np.arange(len(names))).all():
        return
    say("the labels of such a checkpoint are in alphabetical order, and are matched by their names")
    state = nnx.state(model, nnx.Param)
    moved = {}
    for where, variable in nnx.to_flat_state(state):
        for rule in rows:
            if re.search(rule.pattern, "/".join(map(str, where))):
                value = functools.reduce(lambda v, axis: jnp.take(v, order, axis=axis), rule.axes, variable.get_value())
                moved[where] = variable.replace(value)
    nnx.update(model, nnx.from_flat_state(moved))


def _set_masks(config: ConfigDict) -> tuple[str, ...]:
    """Return the masks of prompts whose values the config itself gives, as the levels of pruning do."""
    prompts = config.model.prompts
    given = {"token_mask": prompts.kept_tokens, "segment_mask": prompts.kept_segments}
    return tuple(name for name, value in given.items() if value) if prompts.masks == "fixed" else ()


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
        say(f"model.backbone.weights={ours.weights} is not read, since the backbone comes from {folder}")

    base = assemble(config, label_space, load_backbone=bool(published))
    settled = published | {f"prompts/{name}" for name in _set_masks(config)}
    first, known = {**base.trainable, **base.frozen, **base.stats}, {**run.frozen, **restored.selected}
    match = _counterparts(config, label_space, their_config, their_space)
    ours, theirs = ({path: v for path, v in each.items() if path not in settled} for each in (first, known))
    taken, left = carry_over(ours, theirs, match)
    step, count = restored.notes["step"], len(taken) + len(published)
    say(f"init_from {folder}: {count} of {len(first)} parameters, as selected at step {step}")
    _say_labels(match, label_space, their_space, grouped=config.model.prompts.kind == "group" and match.same_groups)
    for reason, paths in left.items():
        say(f"not taken over, {reason}: {', '.join(sorted(paths))}")

    def filled(values: Params) -> Params:
        return {path: taken.get(path, value) for path, value in values.items()}

    frozen = filled(base.frozen)
    native = base.trainable.get(POSITION_TABLE)
    parts = Parts(base.definition, filled(base.trainable), frozen, filled(base.stats), frozenset(frozen) - published)
    return _fixed_table(parts, None if native is None else native.shape)


def _counterparts(
    config: ConfigDict, space: LabelSpace, their_config: ConfigDict, their_space: LabelSpace
) -> Counterparts:
    kind, their_kind = config.model.head.kind, their_config.model.head.kind
    structures = [_group_structure(each.model.prompts) for each in (config, their_config)]
    rows = LABEL_ROWS.get(kind) if kind == their_kind else None
    same_vectors = _same_vectors(space, their_space)
    return Counterparts(space.names, their_space.names, rows, structures[0] == structures[1], same_vectors)


def _same_vectors(space: LabelSpace, their_space: LabelSpace) -> bool:
    """Return whether the labels that both have also have the same word vectors, if there are any."""
    if space.vectors is None or their_space.vectors is None:
        return True
    theirs = dict(zip(their_space.names, their_space.vectors, strict=True))
    return all(
        np.shape(vector) == np.shape(theirs[name]) and np.allclose(vector, theirs[name], atol=1e-5)
        for name, vector in zip(space.names, space.vectors, strict=True)
        if name in theirs
    )


def _group_structure(prompts: ConfigDict) -> tuple | None:
    return (prompts.sides, prompts.num_groups, prompts.per_group) if prompts.kind == "group" else None


def carry_over(ours: Params, theirs: Params, match: Counterparts) -> tuple[Params, dict[str, list[str]]]:
    """Return the values of `ours` that change, in its types, and by reason the paths on either side that do not meet.

    ours, theirs: {path: value} of two models, whose labels and groups correspond as `match` says.
    """
    taken, left = {}, {}
    for path, value in ours.items():
        if path not in theirs:
            reason = "there is none there"
        elif re.search(GROUPED, path) and not match.same_groups:
            reason = "other groups of prompts"
        elif re.search(r"^head/gc\d/", path) and not match.same_vectors:
            reason = "other word vectors"
        elif path.startswith("head/") and match.rows is None and match.names != match.their_names:
            reason = "labels cannot be matched between these heads"
        else:
            mixed, reason = _meet(path, value, theirs[path], match)
            if mixed is not None:
                taken[path] = jnp.asarray(mixed, value.dtype)
                continue
        left.setdefault(reason, []).append(path)
    if unused := [path for path in theirs if path not in ours]:
        left["there is none here"] = unused
    return taken, left


def _meet(path: str, ours: jax.Array, theirs: jax.Array, match: Counterparts) -> tuple[np.ndarray | None, str]:
    """Return what becomes of one parameter, or None and the reason."""
    rule = next((rule for rule in match.rows or () if re.search(rule.pattern, path)), None)
    theirs = np.asarray(jax.device_get(theirs))
    if rule is None or match.names == match.their_names:
        fits = ours.shape == theirs.shape or path == POSITION_TABLE
        return (theirs, "") if fits else (None, "another shape")
    sizes = [
        (values.shape[axis], len(names) + rule.further)
        for values, names in ((ours, match.names), (theirs, match.their_names))
        for axis in rule.axes
    ]
    if any(size != wanted for size, wanted in sizes):
        if ours.shape == theirs.shape and all(size == 1 for size, _ in sizes):  # all labels share it
            return theirs, ""
        return None, "not laid out label by label"
    if np.delete(ours.shape, rule.axes).tolist() != np.delete(theirs.shape, rule.axes).tolist():
        return None, "another shape"
    mine, other = _pairs(match, rule.further)
    mixed = np.array(jax.device_get(ours))
    mixed[_block(mixed.shape, rule.axes, mine)] = theirs[_block(theirs.shape, rule.axes, other)]
    return mixed, ""


def _pairs(match: Counterparts, further: int) -> tuple[list[int], list[int]]:
    """Return the places of the labels that both have, here and there, and of the entries behind the labels."""
    place = {name: there for there, name in enumerate(match.their_names)}
    pairs = [(here, place[name]) for here, name in enumerate(match.names) if name in place]
    pairs += [(len(match.names) + extra, len(match.their_names) + extra) for extra in range(further)]
    return [here for here, _ in pairs], [there for _, there in pairs]


def _block(shape: Sequence[int], axes: Iterable[int], places: list[int]) -> tuple[np.ndarray, ...]:
    """Return the index of `places` along each of `axes` and of everything along the others."""
    axes = tuple(axes)
    return np.ix_(*(places if axis in axes else range(size) for axis, size in enumerate(shape)))


def _say_labels(match: Counterparts, space: LabelSpace, their_space: LabelSpace, *, grouped: bool) -> None:
    """List which labels were known, which are new and which are left out; and those whose group is another one."""
    known = [name for name in match.names if name in set(match.their_names)]
    new = [name for name in match.names if name not in set(known)]
    left_out = [name for name in match.their_names if name not in set(known)]
    if match.names != match.their_names:
        say(
            f"labels matched by name: {', '.join(known) or 'none'}; new here: {', '.join(new) or 'none'}; left out: "
            f"{', '.join(left_out) or 'none'}"
        )
    if not grouped:
        return
    here, there = list(match.names), list(match.their_names)
    moved = [
        name
        for name in known
        if any(
            mine[here.index(name)] != other[there.index(name)]
            for mine, other in ((space.co_group, their_space.co_group), (space.dc_group, their_space.dc_group))
        )
    ]
    if moved:
        say(
            f"{len(moved)} of these labels are in other groups than there ({', '.join(moved)}), and start on prompts "
            "that were trained for others; model.prompts.groups can name a file with the same groups"
        )
