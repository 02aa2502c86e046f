"""Transfer parameters from a trained model (the source) to a model with other labels. Labels are matched by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.models.adapters.catalog import prompts_class
from mlmoe_jax.models.params import ModelDef, Params
from mlmoe_jax.models.partition import LABEL, LABEL_GROUP, PROMPT, WORD_VECTOR, label_axes
from mlmoe_jax.pretrained.official import POSITION_TABLE
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.progress import status

Axes = tuple[str | None, ...]


@dataclass(frozen=True)
class Counterparts:
    """The correspondence between the parameters of a model and the parameters of a source model."""

    names: tuple[str, ...]  # the labels of the model
    source_names: tuple[str, ...]  # the labels of the source
    # Path of a parameter of the model -> names of its axes, see `ModelDef.axes`
    axes: Mapping[str, Axes] = field(default_factory=dict)
    # Path of a parameter of the source -> names of its axes
    source_axes: Mapping[str, Axes] = field(default_factory=dict)
    same_head: bool = True  # whether both models have the same kind of head
    same_groups: bool = True  # whether the prompts of both models have equal group structures, or both have no groups
    same_vectors: bool = True  # whether the labels that both models have use equal word vectors

    @property
    def same_labels(self) -> bool:
        """Whether both models have the same labels in the same order."""
        return self.names == self.source_names

    @property
    def common(self) -> list[str]:
        """The labels that both models have, in the order of the model."""
        source_names = set(self.source_names)
        return [name for name in self.names if name in source_names]

    def axes_at(self, path: str) -> tuple[Axes, Axes]:
        """Return (names of the axes in the model, names of the axes in the source) of the parameter at `path`."""
        return self.axes.get(path, ()), self.source_axes.get(path, ())


def counterparts(
    config: ConfigDict,
    space: LabelSpace,
    source_config: ConfigDict,
    source_space: LabelSpace,
    definition: ModelDef,
    source_definition: ModelDef,
) -> Counterparts:
    """Return the correspondence between the parameters of two models."""
    structures = [prompts_class(each).group_structure(each.model.prompts) for each in (config, source_config)]
    return Counterparts(
        space.names,
        source_space.names,
        definition.axes(),
        source_definition.axes(),
        same_head=config.model.head.kind == source_config.model.head.kind,
        same_groups=structures[0] == structures[1],
        same_vectors=_same_vectors(space, source_space),
    )


def _same_vectors(space: LabelSpace, source_space: LabelSpace) -> bool:
    """Return whether the labels in both label spaces have equal word vectors; True if one space has no word vectors."""
    vectors, source_vectors = space.vectors_by_name(), source_space.vectors_by_name()
    return all(
        np.shape(vector) == np.shape(source_vectors[name]) and np.allclose(vector, source_vectors[name], atol=1e-5)
        for name, vector in vectors.items()
        if name in source_vectors
    )


def transfer_parameters(
    initial: Params, source: Params, match: Counterparts
) -> tuple[dict[str, jax.Array], dict[str, list[str]]]:
    """Transfer the values of a source model to another model, where parameters correspond.

    Returns:
      transferred: path -> new value, with the dtype of the initial value. Rows of labels that the source does not have
        keep their initial values.
      skipped: reason -> paths of the parameters, of both models, that are not transferred.
    """
    transferred, skipped = {}, {}
    for path, value in initial.items():
        reason = _mismatch(path, source, match)
        if not reason:
            mixed, reason = _transferred(path, value, source[path], match)
        if reason:
            skipped.setdefault(reason, []).append(path)
        else:
            transferred[path] = jnp.asarray(mixed, value.dtype)
    if unused := [path for path in source if path not in initial]:
        skipped["missing in this model"] = unused
    return transferred, skipped


def _mismatch(path: str, source: Params, match: Counterparts) -> str:
    """Return why a parameter cannot be transferred from the source; "" if it can. `_transferred` compares shapes."""
    names = sum(match.axes_at(path), ())
    if path not in source:
        return "missing in the source"
    if not match.same_groups and (path.startswith("prompts/") or PROMPT in names):
        return "other groups of prompts"
    if not match.same_vectors and WORD_VECTOR in names:
        return "other word vectors"
    if path.startswith("head/") and not match.same_head and not match.same_labels:
        return "labels cannot be matched between these heads"
    return ""


def _transferred(path: str, initial: jax.Array, value: jax.Array, match: Counterparts) -> tuple[np.ndarray | None, str]:
    """Return (new value, "") of a parameter if it is transferred, otherwise (None, the reason why it is not)."""
    value = np.asarray(distributed.to_host(value))
    names, source_names = match.axes_at(path)
    has_labels = any(name in (LABEL, LABEL_GROUP) for name in names + source_names)
    if not has_labels or match.same_labels:
        fits = initial.shape == value.shape or path == POSITION_TABLE
        return (value, "") if fits else (None, "another shape")
    axes = label_axes(names)
    if axes != label_axes(source_names) or LABEL_GROUP in names + source_names:
        return None, "without a row per label"
    further = initial.shape[axes[0]] - len(match.names)
    same_number = further == value.shape[axes[0]] - len(match.source_names)
    if not same_number or np.delete(initial.shape, axes).tolist() != np.delete(value.shape, axes).tolist():
        return None, "another shape"
    rows, source_rows = (_rows(names, match.common, further) for names in (match.names, match.source_names))
    mixed = np.array(jax.device_get(initial))
    mixed[_block(mixed.shape, axes, rows)] = value[_block(value.shape, axes, source_rows)]
    return mixed, ""


def _rows(names: Sequence[str], common: Sequence[str], further: int) -> list[int]:
    """Return the indices of the rows `common` in a parameter with rows `names`, then of the `further` last rows."""
    row_of = {name: row for row, name in enumerate(names)}
    return [*(row_of[name] for name in common), *range(len(names), len(names) + further)]


def _block(shape: Sequence[int], axes: Iterable[int], rows: list[int]) -> tuple[np.ndarray, ...]:
    """Return an index (see `np.ix_`) that selects `rows` along each of `axes`, and all entries along the other axes."""
    axes = tuple(axes)
    return np.ix_(*(rows if axis in axes else range(size) for axis, size in enumerate(shape)))


def report_transfer(
    match: Counterparts,
    space: LabelSpace,
    source_space: LabelSpace,
    skipped: Mapping[str, Sequence[str]],
    *,
    grouped: bool,
) -> None:
    """Print which labels are matched, and the paths in `skipped` that are not transferred, by reason.

    If both models are `grouped` in the same structure of prompts, labels that change their group are printed too.
    """
    common = match.common
    if not match.same_labels:
        known = set(common)
        lists = {
            "labels matched by name": common,
            "new": [name for name in match.names if name not in known],
            "left out": [name for name in match.source_names if name not in known],
        }
        status("; ".join(f"{text}: {', '.join(names) or 'none'}" for text, names in lists.items()))
    groups, source_groups = _groups_by_label(space), _groups_by_label(source_space)
    if moved := [name for name in common if grouped and groups[name] != source_groups[name]]:
        status(
            f"{len(moved)} of these labels change their groups ({', '.join(moved)}) and start with prompts that were "
            "trained for other labels; model.prompts.groups can name a file with the same groups"
        )
    for reason, paths in skipped.items():
        status(f"not transferred, {reason}: {', '.join(sorted(paths))}")


def _groups_by_label(space: LabelSpace) -> dict[str, tuple[int, int]]:
    """Return label -> (co-occurrence group, discriminative group)."""
    return dict(zip(space.names, zip(space.co_group.tolist(), space.dc_group.tolist(), strict=True), strict=True))
