"""Transfer of parameters to a model with other labels, matched by label name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.models.params import ModelDef, Params
from mlmoe_jax.models.partition import LABEL, LABEL_GROUP, PROMPT, WORD_VECTOR, label_axes
from mlmoe_jax.models.registries import prompts_class
from mlmoe_jax.pretrained.official import POSITION_TABLE
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.progress import status

Axes = tuple[str | None, ...]


@dataclass(frozen=True)
class Counterparts:
    """How the parameters of two models correspond.

    Attributes:
      names, their_names: the labels of the two models.
      axes, their_axes: the names of the axes of their parameters by path, see `ModelDef.axes`.
      same_head: both heads are of one kind.
      same_groups: the prompts of both models have one group structure, or none.
      same_vectors: the common labels have the same word vectors.
    """

    names: tuple[str, ...]
    their_names: tuple[str, ...]
    axes: Mapping[str, Axes] = field(default_factory=dict)
    their_axes: Mapping[str, Axes] = field(default_factory=dict)
    same_head: bool = True
    same_groups: bool = True
    same_vectors: bool = True

    def axes_at(self, path: str) -> tuple[Axes, Axes]:
        """Return the names of the axes of a parameter in the two models."""
        return self.axes.get(path, ()), self.their_axes.get(path, ())


def counterparts(
    config: ConfigDict,
    space: LabelSpace,
    their_config: ConfigDict,
    their_space: LabelSpace,
    definition: ModelDef,
    their_definition: ModelDef,
) -> Counterparts:
    """Return how two models correspond, by their configs, label spaces and structures."""
    structures = [prompts_class(each).group_structure(each.model.prompts) for each in (config, their_config)]
    return Counterparts(
        space.names,
        their_space.names,
        definition.axes(),
        their_definition.axes(),
        same_head=config.model.head.kind == their_config.model.head.kind,
        same_groups=structures[0] == structures[1],
        same_vectors=_same_vectors(space, their_space),
    )


def _same_vectors(space: LabelSpace, their_space: LabelSpace) -> bool:
    """Return whether the common labels have the same word vectors; True if either space has none."""
    if space.vectors is None or their_space.vectors is None:
        return True
    theirs = dict(zip(their_space.names, their_space.vectors, strict=True))
    return all(
        np.shape(vector) == np.shape(theirs[name]) and np.allclose(vector, theirs[name], atol=1e-5)
        for name, vector in zip(space.names, space.vectors, strict=True)
        if name in theirs
    )


def transfer_parameters(ours: Params, theirs: Params, match: Counterparts) -> tuple[Params, dict[str, list[str]]]:
    """Transfer parameters between two models.

    Args:
      ours: {path: value} of the model to fill.
      theirs: {path: value} of the source.
      match: how the two models correspond.

    Returns:
      the new values of `ours`, in its types, and {reason: paths of either model that are not transferred}.
    """
    transferred, skipped = {}, {}
    for path, value in ours.items():
        names = sum(match.axes_at(path), ())
        if path not in theirs:
            reason = "missing in the source"
        elif not match.same_groups and (path.startswith("prompts/") or PROMPT in names):
            reason = "other groups of prompts"
        elif not match.same_vectors and WORD_VECTOR in names:
            reason = "other word vectors"
        elif path.startswith("head/") and not match.same_head and match.names != match.their_names:
            reason = "labels cannot be matched between these heads"
        else:
            mixed, reason = _transferred(path, value, theirs[path], match)
            if mixed is not None:
                transferred[path] = jnp.asarray(mixed, value.dtype)
                continue
        skipped.setdefault(reason, []).append(path)
    if unused := [path for path in theirs if path not in ours]:
        skipped["missing in this model"] = unused
    return transferred, skipped


def _transferred(path: str, ours: jax.Array, theirs: jax.Array, match: Counterparts) -> tuple[np.ndarray | None, str]:
    """Return the new value of one parameter, or None and the reason why it is not transferred."""
    theirs, names = np.asarray(distributed.to_host(theirs)), match.axes_at(path)
    by_label = any(name in (LABEL, LABEL_GROUP) for name in sum(names, ()))
    if not by_label or match.names == match.their_names:
        fits = ours.shape == theirs.shape or path == POSITION_TABLE
        return (theirs, "") if fits else (None, "another shape")
    axes, their_axes = (label_axes(each) for each in names)
    if axes != their_axes or LABEL_GROUP in sum(names, ()):
        return None, "without a row per label"
    further = ours.shape[axes[0]] - len(match.names)
    fits = further == theirs.shape[axes[0]] - len(match.their_names)
    if not fits or np.delete(ours.shape, axes).tolist() != np.delete(theirs.shape, axes).tolist():
        return None, "another shape"
    mine, other = _pairs(match, further)
    mixed = np.array(jax.device_get(ours))
    mixed[_block(mixed.shape, axes, mine)] = theirs[_block(theirs.shape, axes, other)]
    return mixed, ""


def _pairs(match: Counterparts, further: int) -> tuple[list[int], list[int]]:
    """Return the indices of the common labels in both models, then of the `further` entries after the labels."""
    place = {name: there for there, name in enumerate(match.their_names)}
    pairs = [(here, place[name]) for here, name in enumerate(match.names) if name in place]
    pairs += [(len(match.names) + extra, len(match.their_names) + extra) for extra in range(further)]
    return [here for here, _ in pairs], [there for _, there in pairs]


def _block(shape: Sequence[int], axes: Iterable[int], places: list[int]) -> tuple[np.ndarray, ...]:
    """Return the index of `places` along `axes`, and of all entries along any other axis."""
    axes = tuple(axes)
    return np.ix_(*(places if axis in axes else range(size) for axis, size in enumerate(shape)))


def report_labels(match: Counterparts, space: LabelSpace, their_space: LabelSpace, *, grouped: bool) -> None:
    """Print the labels that are matched, new and left out, and with `grouped` the labels whose group changes."""
    known = [name for name in match.names if name in set(match.their_names)]
    new = [name for name in match.names if name not in set(known)]
    left_out = [name for name in match.their_names if name not in set(known)]
    if match.names != match.their_names:
        status(
            f"labels matched by name: {', '.join(known) or 'none'}; new: {', '.join(new) or 'none'}; left out: "
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
        status(
            f"{len(moved)} of these labels change their groups ({', '.join(moved)}) and start with prompts that were "
            "trained for other labels; model.prompts.groups can name a file with the same groups"
        )
