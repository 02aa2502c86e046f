"""From a run folder to a model with its values, and the metadata files for this."""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict
from safetensors.numpy import load, save

import mlmoe_jax.config as configuration
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.data.prepare import Batch, Preprocess
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.apply import PlacedModel, make_eval_step
from mlmoe_jax.models.build import Classifier
from mlmoe_jax.models.consistency import Scores
from mlmoe_jax.models.params import ModelDef, Params, draw_missing
from mlmoe_jax.runs import checkpoint
from mlmoe_jax.runs.assemble import (
    Parts,
    cast_frozen,
    evaluated_definition,
    fill_backbone,
    label_axes_for,
    model_builder,
    preprocess_for,
    split_model,
)
from mlmoe_jax.runs.decisions import write_fixed
from mlmoe_jax.runs.folder import (
    BACKBONE,
    CHECKPOINTS,
    CONFIG,
    FROZEN,
    LABEL_SPACE,
    LABELS,
    PREPROCESS,
    RunFolder,
    read_config,
    read_label_space,
)
from mlmoe_jax.runs.shared_model import learned_rules, require_usual_size, restore_adapter
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.keys import KeyValues
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.setup import setup_jax
from mlmoe_jax.runtime.sharding import abstract_shards, remove_padding, shard_tree, unpad

_logger = logging.getLogger(__name__)

BEST, LATEST, RAW = "best", "latest", "raw"  # checkpoints by name


@dataclass(frozen=True)
class Run(PlacedModel):
    """A trained model from a run folder, placed on a mesh, with the structure for evaluation.

    Attributes:
      config: the config, with the overrides of `open_run`.
      values: path -> array, the trained parameters and the batch statistics.
      frozen: path -> array, the frozen parameters.
      own: whether `config` says which data are the run's. It does not if the model may be somebody else's.
      notes: the notes of the checkpoint, and the entry `outdated`, whether the newest checkpoint was damaged.
      scores: function from logits to the reported probabilities.
    """

    config: ConfigDict
    label_space: LabelSpace
    values: Params
    frozen: Params
    notes: Mapping[str, Any]
    scores: Scores = field(default_factory=Scores)
    own: bool = True

    @property
    def outdated(self) -> bool:
        """Whether the values come from an older checkpoint, because the newest checkpoint is damaged."""
        return self.notes.get("outdated", False)

    @property
    def step(self) -> int:
        """The training step at which the values were selected."""
        return self.notes["step"]

    def eval_step(self, *returns: str) -> Callable[[Params, Params, Batch], dict[str, Any]]:
        """Return the jitted step of the model, step(values, frozen, batch), see `apply.make_eval_step`."""
        return make_eval_step(self, returns=returns)

    def open_split(self, name: str, data_config: ConfigDict | None = None) -> Split:
        """Open a split with the labels and the tree of the run.

        `data_config` replaces `config.data`. Raises UserError if neither says which data to open.
        """
        if data_config is None and not self.own:
            raise UserError("a shared model names no data: give the section `data` of a config of your own")
        space = self.label_space
        return open_split(
            data_config or self.config.data, name, classes=space.names, tree=space.tree, seed=self.config.seed
        )

    def weights(self, *, frozen: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Return parameter path -> value in float32, which represents the values of every dtype of a run exactly.

        Of the frozen values, only those at the paths `frozen` are included; None = all.
        """
        included = {path: value for path, value in self.frozen.items() if frozen is None or path in frozen}
        values = jax.device_get(remove_padding({**self.values, **included}, self.label_axes))
        return {path: np.ascontiguousarray(values[path], np.float32) for path in sorted(values)}

    def model(self) -> Classifier:
        """Return the model with its values as a Flax NNX module, in evaluation mode."""
        return cast(Classifier, self.definition.merge(unpad(self.everything, self.mesh, self.label_axes)))

    @property
    def everything(self) -> Params:
        """All values of the model, as they are placed on the mesh."""
        return {**self.values, **self.frozen}


def require_same_frozen(folder: RunFolder, parts: Parts) -> None:
    """Raise UserError if the run folder has checkpoints with other frozen parameters than `parts`."""
    if (folder / BACKBONE).exists() and (folder / CHECKPOINTS).exists():
        _require_fingerprint(folder, parts)


def _require_fingerprint(folder: RunFolder, parts: Parts) -> None:
    keys = ("name", "weights", "fingerprint")
    name, weights, expected = folder.read_json(BACKBONE, lambda stored: [stored[key] for key in keys])
    if parts.fingerprint != expected:
        raise UserError(
            f"the frozen weights of {name} ({weights}) differ from the weights that {folder} was trained with; put the "
            "original file back, or train in another --workdir"
        )


def read_preprocess(folder: RunFolder, config: ConfigDict) -> Preprocess:
    """Return the preprocessing of a run by a config, which may change the image size, with the stored mean and std."""
    preprocess = preprocess_for(config)

    def convert(stored: dict[str, Any]) -> Preprocess:
        (red, green, blue), (r, g, b) = (map(float, stored[name]) for name in ("mean", "std"))
        if not (np.isfinite([red, green, blue]).all() and 0 < min(r, g, b) <= max(r, g, b) < np.inf):
            raise ValueError("its mean should be finite, and its std above 0")
        return replace(preprocess, mean=(red, green, blue), std=(r, g, b))

    return folder.read_json(PREPROCESS, convert)


def write_run_metadata(
    folder: RunFolder, config: ConfigDict, label_space: LabelSpace, preprocess: Preprocess, parts: Parts
) -> None:
    """Write the files that make a run folder self-contained, except for its checkpoints.

    They are the label names, the label space, the preprocessing, thresholds, a description of the backbone, the frozen
    parameters that are not in a published weights file, and the config, which is written last.
    """
    frozen, unpublished = parts.frozen, parts.unpublished
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
            "fingerprint": parts.fingerprint,
        },
    )
    if unpublished:
        # safetensors' reader for numpy does not support bfloat16, which float32 represents exactly
        wide = {path: jax.device_get(frozen[path]).astype(np.float32) for path in sorted(unpublished)}
        folder.write_bytes(FROZEN, save(wide))
    else:
        (folder / FROZEN).unlink(missing_ok=True)  # left by a training that ended before its first checkpoint
    folder.write_text(CONFIG, configuration.to_json(_with_absolute_root(config)))


def _with_absolute_root(config: ConfigDict) -> ConfigDict:
    """Return a copy whose `data.root` is the same folder for a command that runs in another folder."""
    stored = config.copy_and_resolve_references()
    if stored.data.root and "://" not in stored.data.root:
        stored.data.root = os.path.abspath(os.path.expanduser(stored.data.root))
    return stored


def open_run(folder: RunFolder, overrides: KeyValues = (), *, which: str = BEST, own: bool = False) -> Run:
    """Restore a trained model from a run folder, with matmuls in `eval.dtype`.

    Published backbone weights are read from their own file. If the newest checkpoint is damaged, the preceding
    checkpoint is used, and the run is `outdated`.

    Args:
      overrides: pairs (dotted key, text) that replace keys of the run's config. Only keys that do not change the
        trained model are allowed.
      which: "best": the values that training selected. "latest": the values of the newest checkpoint, moving averages
        if the run has them. "raw": its values without averaging. A step, such as "200": the values that were selected
        when the checkpoint of this step was saved.
      own: as in `read_run`.

    Raises:
      UserError: the folder is not a run folder, it has no such checkpoint, or the frozen weights have changed.
    """
    if which not in (BEST, LATEST, RAW) and not re.fullmatch("[0-9]{1,18}", which):
        raise UserError(f"--checkpoint={which} is not {BEST}, {LATEST}, {RAW} or the step of a checkpoint")
    status(f"restoring {folder}")
    config, label_space = read_run(folder, overrides, own=own)
    preprocess = read_preprocess(folder, config)

    mesh = setup_jax(config, training=False)
    parts = parts_of_run(folder, config, label_space)
    restored = restored_values(folder, parts, mesh, which)
    if outdated := restored.step < restored.newest:
        _logger.warning(
            f"checkpoint {restored.newest} is damaged, so checkpoint {restored.step} is used; "
            f"--checkpoint={restored.step} uses it without this warning"
        )
    label_axes = label_axes_for(parts.definition, len(label_space.names), mesh)
    return Run(
        config=config,
        label_space=label_space,
        preprocess=preprocess,
        definition=evaluated_definition(config, parts, label_space),
        values=shard_tree(restored.selected, mesh, label_axes),
        frozen=shard_tree(parts.frozen, mesh, label_axes),
        mesh=mesh,
        label_axes=label_axes,
        notes={**restored.notes, "outdated": outdated},
        own=own or not folder.is_shared,
    )


def read_run(folder: RunFolder, overrides: KeyValues = (), *, own: bool = False) -> tuple[ConfigDict, LabelSpace]:
    """Return the config, with overrides as in `open_run`, and the label space of a run.

    The config of a shared model may be hostile. Unless it is the user's `own`, it decides only the model and its
    preprocessing, see `config.trusted`. What trains follows from the stored values in any case.

    Raises UserError if the folder is not a run folder, an override is not allowed, or the label space is damaged.
    """
    folder.require_model(LABEL_SPACE, PREPROCESS, BACKBONE)
    config = read_config(folder)
    if folder.is_shared:
        config = config if own else configuration.trusted(config)
        if not own and all(key != "data.image_size" for key, _ in overrides):
            require_usual_size(config)
        config.trainable = learned_rules(folder)
    configuration.require_changeable(overrides)
    configuration.apply_overrides(config, overrides)
    configuration.validate(config)
    space = read_label_space(folder)
    groups = max(1, config.model.prompts.num_groups)
    if max(*space.co_group, *space.dc_group) >= groups:
        raise UserError(
            f"{folder / LABEL_SPACE} is damaged: its groups should be below {groups}, the number in {CONFIG}"
        )
    return config, space


def has_checkpoint(folder: RunFolder) -> bool:
    """Return whether the run folder has a completely written checkpoint, which may be damaged."""
    # All processes must open the checkpoints together, but may see a change of a shared folder at different times.
    if not distributed.broadcast_from_first((folder / BACKBONE).exists() and (folder / CHECKPOINTS).exists()):
        return False
    with checkpoint.open_manager(folder, writing=False) as manager:
        return distributed.broadcast_from_first(bool(manager.all_steps()))


def parts_of_run(folder: RunFolder, config: ConfigDict, label_space: LabelSpace) -> Parts:
    """Return the model of a run with its frozen parameters.

    Frozen parameters are read from the run folder, or from the published weights file if the folder does not have them.
    The trainable parameters and the batch statistics, which are in checkpoints, are ShapeDtypeStructs. Raises UserError
    if the frozen parameters differ from those with which the run was trained.
    """
    stored: Params = {}
    if (folder / FROZEN).exists():
        with folder.reading(FROZEN):
            stored = cast_frozen(load(folder.read_bytes(FROZEN)), config)
    build = model_builder(config, label_space)
    model = nnx.eval_shape(build)
    parts = split_model(model, config)
    if elsewhere := parts.frozen.keys() - stored.keys():
        if folder.is_shared and (lacking := elsewhere & parts.unpublished):
            raise UserError(f"{folder} is damaged: it lacks weights that are not published, such as {min(lacking)}")
        fill_backbone(model, config)
        draw_missing(model, build, drawable=elsewhere)
        _, values, _ = ModelDef.split(model)
        stored = cast_frozen({path: values[path] for path in elsewhere}, config) | stored
    frozen = {path: stored[path] for path in parts.frozen}
    parts = replace(parts, frozen=frozen, unpublished=frozenset(stored) - elsewhere)
    _require_fingerprint(folder, parts)
    return parts


def restored_values(folder: RunFolder, parts: Parts, mesh: Mesh, which: str = BEST) -> checkpoint.Restored:
    """Restore the trained parameters and batch statistics of a run from a checkpoint or from a shared model.

    The shapes are those of `parts`. In the result, `selected` has the values, path -> array. The checkpoint `which` is
    described in `open_run`. Raises UserError if there are no such values.
    """
    if folder.is_shared:
        if which != BEST:
            raise UserError(f"{folder} is a shared model, which has the selected values only; leave --checkpoint out")
        return restore_adapter(folder, parts.learned, mesh)
    if which in (LATEST, RAW):
        return _restore_latest(folder, parts, mesh, averaged=which == LATEST and bool(read_config(folder).ema.decay))
    return _restore_items(folder, mesh, {"selected": parts.learned}, None if which == BEST else int(which))


def _restore_latest(folder: RunFolder, parts: Parts, mesh: Mesh, *, averaged: bool) -> checkpoint.Restored:
    fields = {"ema": parts.learned} if averaged else {"trainable": parts.trainable, "stats": parts.stats}
    restored = _restore_items(folder, mesh, {"state": fields})
    merged = {path: value for part in restored.state.values() for path, value in part.items()}
    notes = {**restored.notes, "step": restored.step, "kind": "ema" if averaged else "raw", "split": ""}
    return replace(restored, selected=merged, notes=notes)


def _restore_items(
    folder: RunFolder, mesh: Mesh, items: dict[str, Any], step: int | None = None
) -> checkpoint.Restored:
    with checkpoint.open_manager(folder, writing=False) as manager:
        restored = checkpoint.restore(manager, **abstract_shards(items, mesh), step=step)
    if restored is None:
        raise UserError(f"{folder} holds no finished checkpoint yet; rerun its training command to resume it")
    return restored
