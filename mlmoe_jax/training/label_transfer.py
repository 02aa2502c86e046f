"""Parameters with a row per label, carried to a model with other labels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.models.params import Params
from mlmoe_jax.pretrained.official import POSITION_TABLE
from mlmoe_jax.runtime.progress import say


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
