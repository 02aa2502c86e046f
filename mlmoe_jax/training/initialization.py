"""Find the initial values of a training.

They come from the checkpoint of the run folder, `config.init_from`, a pretrained backbone, or the seed.

`config.init_from` is one of these:

* a checkpoint of the authors' PyTorch code,
* a PEFT adapter,
* another run, in a folder or on the Hugging Face Hub. If the run has other labels, parameters that belong to a label
  are matched by the name of the label.

Parameters that `config.init_from` does not have keep their initial values, and their paths are printed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.adapters.catalog import prompts_class
from mlmoe_jax.models.build import Classifier
from mlmoe_jax.models.heads.catalog import head_class
from mlmoe_jax.models.params import ModelDef, Params, draw_missing
from mlmoe_jax.models.partition import axis_names, label_axes
from mlmoe_jax.pretrained.load import LoadReport, map_file
from mlmoe_jax.pretrained.official import CHECKPOINT_SUFFIXES, POSITION_TABLE, departures, load_official
from mlmoe_jax.pretrained.peft import PeftAdapter, fill_from_peft, is_peft, read_peft
from mlmoe_jax.runs.assemble import (
    Parts,
    assemble,
    fill_backbone,
    initial_model,
    model_builder,
    require_weights,
    split_model,
)
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.origin import Origin
from mlmoe_jax.runs.restore import has_checkpoint, parts_of_run, read_run, restored_values
from mlmoe_jax.runs.shared_model import run_folder
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.sharding import make_mesh
from mlmoe_jax.training.label_transfer import counterparts, report_transfer, transfer_parameters


# ---------------------------------------------------------------------------------------------------------- origins
def find_origin(config: ConfigDict, folder: RunFolder | None = None) -> Origin:
    """Return the origin of the initial values of a training. Errors are found here, before data and weights are read.

    The origin is the first of the following that exists:

    1. the newest undamaged checkpoint in `folder`,
    2. `config.init_from`,
    3. the pretrained backbone; the other values are random,
    4. random values.

    Raises UserError if the origin is missing or does not fit the config.
    """
    location = config.init_from
    if folder is not None and has_checkpoint(folder):
        return Resumed(config, folder)
    if not location:
        require_weights(config)
        return Origin(config)
    if location.endswith(CHECKPOINT_SUFFIXES) and not Path(location).is_dir():
        return OfficialFile(config, Path(location))
    if is_peft(Path(location)):
        return PeftFolder(config, read_peft(Path(location)))
    source = run_folder(location)
    if not source.path.is_dir():
        raise UserError(f"config.init_from is '{location}', which is neither a file of weights nor a run folder")
    return OtherRun(config, source)


@dataclass(frozen=True)
class RunOrigin(Origin):
    """A run in `folder`."""

    folder: RunFolder


@dataclass(frozen=True)
class Resumed(RunOrigin):
    """The training in `folder`, to be resumed. `parts` reads the frozen weights; other values are ShapeDtypeStructs."""

    resumes = True

    def parts(self, label_space: LabelSpace) -> Parts:
        return parts_of_run(self.folder, self.config, label_space)


@dataclass(frozen=True)
class OfficialFile(Origin):
    """A checkpoint of the authors' PyTorch code, the file `path`."""

    path: Path

    def __post_init__(self):
        if not self.path.exists():
            raise UserError(f"there is no weights file {self.path}")
        if head_class(self.config).needs_vectors and not self.config.model.head.graph.word_vectors:
            raise UserError(
                "config.init_from is a checkpoint of ML-GCN, which was trained with GloVe vectors; name the file with "
                "model.head.graph.word_vectors"
            )
        map_file(self.path, whole_model=True)

    def parts(self, label_space: LabelSpace) -> Parts:
        config, path = self.config, self.path
        build = model_builder(config, label_space)
        model = nnx.eval_shape(build)
        table = ModelDef.split(model)[1].get(POSITION_TABLE)
        masks = {name: getattr(model.prompts, name).get_value() for name in _set_masks(config)}
        report = load_official(model, path)
        only_head = not any(target.startswith("backbone/") for target in report.loaded)
        if only_head:
            fill_backbone(model, config)
        for name, shape in masks.items():
            getattr(model.prompts, name).set_value(shape)  # it gets the value of the config
        draw_missing(model, build)
        if report.sorted_labels:
            _reorder(model, label_space.names)
        self._report(report, only_head)
        parts = split_model(model, config)
        if not only_head:
            parts = replace(parts, unpublished=frozenset(parts.frozen))
        _require_same_table(parts, table)
        return parts

    def _report(self, report: LoadReport, only_head: bool) -> None:
        """Print which parameters were loaded, unused or missing, and what the authors' code computes differently."""
        path, missing = self.path, report.missing
        status(f"init_from {path}: {len(report.loaded)} parameters from the {report.layout} layout")
        if only_head:
            status(f"init_from {path}: only a head; the backbone is the pretrained {self.config.model.backbone.name}")
            missing = ()
        if report.unused:
            status(f"init_from {path}: not used: {', '.join(report.unused)}")
        if missing:
            status(f"init_from {path}: missing, initial value kept: {', '.join(missing)}")
        for difference in departures(self.config.model, report.layout):
            status(f"the authors' code computes something else: {difference}")


@dataclass(frozen=True)
class PeftFolder(Origin):
    """The pretrained backbone with a PEFT adapter."""

    adapter: PeftAdapter

    def __post_init__(self):
        require_weights(self.config)
        name, settings = self.adapter.name, self.adapter.settings
        configured = dict(self.config.model.adapters.get(name, {}))
        configured["targets"] = set(configured.get("targets", ()))
        stored = settings | {"targets": set(settings["targets"])}
        if other := [key for key, value in stored.items() if configured.get(key) != value]:
            texts = settings | {"targets": ",".join(settings["targets"])}
            keys = " ".join(f"--config.model.adapters.{name}.{key}={texts[key]}" for key in other)
            raise UserError(f"the adapter in {self.adapter.path} has other settings than the config; add {keys}")

    def parts(self, label_space: LabelSpace) -> Parts:
        model = initial_model(self.config, label_space)
        filled = fill_from_peft(model, self.adapter)
        status(f"init_from {self.adapter.path}: {len(filled)} parameters from PEFT")
        return split_model(model, self.config)


@dataclass(frozen=True)
class OtherRun(RunOrigin):
    """Another run in `folder`, possibly downloaded from the Hugging Face Hub. Its labels may differ."""

    def __post_init__(self):
        name, source_name = self.config.model.backbone.name, read_run(self.folder)[0].model.backbone.name
        if name != source_name:
            raise UserError(
                f"config.init_from={self.config.init_from} is a run on {source_name}, and this one is on {name}; both "
                "must have the same backbone"
            )

    def parts(self, label_space: LabelSpace) -> Parts:
        config, folder = self.config, self.folder
        source_config, source_space = read_run(folder)
        source = parts_of_run(folder, source_config, source_space)
        restored = restored_values(folder, source, make_mesh(config.mesh))
        published = self._published_paths(source, source_config)

        base = assemble(config, label_space, load_backbone=bool(published))
        match = counterparts(config, label_space, source_config, source_space, base.definition, source.definition)
        kept = published | {f"prompts/{name}" for name in _set_masks(config)}
        initial = base.values
        known = {**source.frozen, **restored.selected}
        transferred, skipped = transfer_parameters(_without(initial, kept), _without(known, kept), match)

        count, step = len(transferred) + len(published), restored.notes["step"]
        status(f"init_from {folder}: {count} of {len(initial)} parameters, as selected at step {step}")
        grouped = prompts_class(config).uses_groups and match.same_groups
        report_transfer(match, label_space, source_space, skipped, grouped=grouped)
        trainable, frozen, stats = (
            {path: transferred.get(path, value) for path, value in part.items()}
            for part in (base.trainable, base.frozen, base.stats)
        )
        unpublished = frozenset(frozen) - published
        parts = replace(base, trainable=trainable, frozen=frozen, stats=stats, unpublished=unpublished)
        _require_same_table(parts, base.trainable.get(POSITION_TABLE))
        return parts

    def _published_paths(self, source: Parts, source_config: ConfigDict) -> set[str]:
        """Return the paths of the frozen parameters that both runs take from the same published weights file."""
        weights, source_weights = self.config.model.backbone.weights, source_config.model.backbone.weights
        if weights not in ("auto", source_weights):
            status(f"model.backbone.weights={weights} is not read, because the backbone comes from {self.folder}")
        return set(source.frozen) - source.unpublished if weights == source_weights == "auto" else set()


# ----------------------------------------------------------------------------------------------------------- values
def _require_same_table(parts: Parts, table: Any) -> None:
    """Raise UserError if the position embedding is trainable and has another shape than `table`, the backbone's."""
    trained = parts.trainable.get(POSITION_TABLE)
    if trained is not None and trained.shape != table.shape:
        raise UserError(
            f"the position table of config.init_from has {trained.shape[1]} entries, and the table of the backbone has "
            f"{table.shape[1]}, so it cannot be trained; put (r'^backbone/pos_embed$', False) first in config.trainable"
        )


def _without(values: Params, paths: set[str]) -> Params:
    """Return a copy of `values` without the given paths."""
    return {path: value for path, value in values.items() if path not in paths}


def _reorder(model: Classifier, names: tuple[str, ...]) -> None:
    """Reorder the label axis of all parameters from the alphabetical order of the labels to the order of `names`."""
    row_of = {name: row for row, name in enumerate(sorted(names))}
    order = np.array([row_of[name] for name in names])
    if (order == np.arange(len(names))).all():
        return
    status("the labels of this checkpoint are in alphabetical order; they are matched by name")
    state = nnx.state(model, nnx.Param)
    moved = {}
    for path, variable in nnx.to_flat_state(state):
        if rows := label_axes(axis_names(variable)):
            value = functools.reduce(lambda v, axis: jnp.take(v, order, axis=axis), rows, variable.get_value())
            moved[path] = variable.replace(value)
    nnx.update(model, nnx.from_flat_state(moved))


def _set_masks(config: ConfigDict) -> tuple[str, ...]:
    """Return the names of the prompt masks whose values the config sets (`model.prompts.pruning` is "fixed")."""
    prompts = config.model.prompts
    masks = {"token_mask": prompts.kept_tokens, "segment_mask": prompts.kept_segments}
    return tuple(name for name, value in masks.items() if value) if prompts.pruning == "fixed" else ()
