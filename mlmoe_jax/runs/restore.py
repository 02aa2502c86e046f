"""From a config, or from a run folder, to a model with its values: what training, evaluation and prediction share."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict
from safetensors import SafetensorError
from safetensors.numpy import load, save

from mlmoe_jax.runs import checkpoint
from mlmoe_jax.runtime import distributed
from mlmoe_jax import config as configuration
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.backbones.resnet import FROZEN_BATCH_NORM, ResNetShape
from mlmoe_jax.models.build import Classifier, backbone_shape, build_model, label_axes_of_head
from mlmoe_jax.models.heads.query import FIXED_QUERIES
from mlmoe_jax.models.prompts import PRUNING_MASKS
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.pretrained.load import load_weights
from mlmoe_jax.runs.folder import BACKBONE, CHECKPOINTS, CONFIG, FROZEN, LABEL_SPACE, LABELS, PREPROCESS, RunFolder
from mlmoe_jax.runtime.sharding import LabelAxes, make_mesh, place
from mlmoe_jax.models.params import ModelDef, Params, fingerprint, split_trainable
from mlmoe_jax.training.step import Preprocess
from mlmoe_jax.evaluation.thresholds import write_fixed
from mlmoe_jax.runtime.progress import say

_MAY_DIFFER = ("data", "eval", "metrics", "report", "mesh")  # sections that do not change what a trained model is


@dataclass(frozen=True)
class Parts:
    """A model's structure and its values, split by who changes them.

    unpublished: the paths of the frozen values that no published file holds.
    """

    definition: ModelDef
    trainable: Params
    frozen: Params
    stats: Params
    unpublished: frozenset[str]


@dataclass(frozen=True)
class Run:
    """A trained model as its run folder holds it, placed on a mesh."""

    config: ConfigDict
    label_space: LabelSpace
    preprocess: Preprocess
    definition: ModelDef
    values: Params
    frozen: Params
    mesh: Mesh
    labels: LabelAxes | None  # how the values lie over the mesh
    step: int
    notes: dict[str, Any]


def start_jax(config: ConfigDict, *, training: bool = True) -> Mesh:
    """Set what JAX must know before its first computation, and return the mesh.

    training: `train.batch_size` has to split over the devices and `train.accumulate` (`eval.batch_size` is that of one
    device). Raises UserError where it does not, or the mesh does not fit the devices.
    """
    jax.config.update("jax_default_matmul_precision", config.model.matmul_precision)
    mesh = make_mesh(config.mesh)
    if training:
        require_whole_batch(config, mesh.size)
    return mesh


def require_whole_batch(config: ConfigDict, devices: int) -> None:
    """Raise UserError unless a training batch splits into equal parts for every device and every accumulation."""
    size, parts = config.train.batch_size, config.train.accumulate
    if size % (devices * parts):
        near = max(1, round(size / devices / parts)) * devices * parts
        over = " and ".join(
            f"{count} {what}" for count, what in ((devices, "devices"), (parts, "accumulations")) if count > 1
        )
        raise UserError(
            f"train.batch_size is {size}, which does not split over {over}; {near} does: set "
            f"--config.train.batch_size={near}"
        )


def label_axes(config: ConfigDict, labels: int, mesh: Mesh) -> LabelAxes | None:
    """Return which parameters of a config's model lie over the mesh by their K = `labels` labels; None = none do."""
    axes = label_axes_of_head(config, labels) if mesh.shape["expert"] > 1 else {}
    return LabelAxes(labels, axes) if axes else None


def assemble(config: ConfigDict, label_space: LabelSpace, *, load_backbone: bool = True) -> Parts:
    """Build the model of a config with its pretrained backbone, if it names one; the rest is drawn from the seed."""
    model = build_model(config, label_space, rngs=nnx.Rngs(config.seed))
    if load_backbone:
        fill_backbone(model, config)
    return split_model(model, config)


def fill_backbone(model: Classifier, config: ConfigDict) -> None:
    """Give a model the pretrained backbone that its config names, if it names one."""
    weights = config.model.backbone.weights
    if weights == "none":
        return
    report = load_weights(model.backbone, config.model.backbone.name if weights == "auto" else weights)
    for what, names in (("tensors were not used", report.unused), ("values were not there", report.missing)):
        if names:
            say(f"backbone weights ({report.source}): {len(names)} {what}, such as {names[0]}")


def split_model(model: nnx.Module, config: ConfigDict) -> Parts:
    """Split the values of a model as the config says; a published backbone is taken to be what the publisher gives."""
    definition, params, stats = ModelDef.split(model)
    trainable, frozen = split_trainable(params, trainable_rules(config))
    if not trainable:
        raise UserError("config.trainable freezes every parameter; leave at least the head trainable")
    return Parts(definition, trainable, as_kept(frozen, config), stats, _unpublished(frozen, config))


def _unpublished(frozen: Params, config: ConfigDict) -> frozenset[str]:
    published = config.model.backbone.weights == "auto"
    return frozenset(path for path in frozen if not (published and path.startswith("backbone/")))


def as_kept(frozen: Params, config: ConfigDict) -> Params:
    """Return frozen weights in the type they are kept in: only kernels change, which bfloat16 products round anyway."""
    dtype = config.model.frozen_dtype
    return {path: v.astype(dtype) if path.endswith("/kernel") else v for path, v in frozen.items()}


def trainable_rules(config: ConfigDict) -> tuple:
    """Return `config.trainable`, before it what the settings of the parts freeze."""
    frozen = []
    if isinstance(backbone_shape(config), ResNetShape) and config.model.backbone.batch_norm == "frozen":
        frozen.append(FROZEN_BATCH_NORM)  # no gradient reaches them, but weight decay would
    if config.model.prompts.masks == "fixed":
        frozen.append(PRUNING_MASKS)
    if config.model.head.decoder.fixed_queries:
        frozen.append(FIXED_QUERIES)
    return (*frozen, *config.trainable)


def preprocess_for(config: ConfigDict) -> Preprocess:
    """Return the preprocessing that the config's backbone expects, at the config's image size."""
    entry = catalog.entry(config.model.backbone.name)
    if not isinstance(entry.shape, ResNetShape) and config.data.image_size % entry.shape.patch:
        raise UserError(
            f"data.image_size is {config.data.image_size}, no multiple of {config.model.backbone.name}'s patch size "
            f"{entry.shape.patch}"
        )
    if config.model.backbone.normalization == "imagenet":
        return Preprocess(config.data.image_size, catalog.IMAGENET_MEAN, catalog.IMAGENET_STD)
    return Preprocess(config.data.image_size, entry.mean, entry.std)


def require_same_frozen(folder: RunFolder, frozen: Params) -> None:
    """Raise UserError where the folder holds checkpoints of a run with other frozen weights."""
    if not ((folder / BACKBONE).exists() and (folder / CHECKPOINTS).exists()):
        return
    _require_fingerprint(folder, folder.read_json(BACKBONE), frozen)


def _require_fingerprint(folder: RunFolder, described: dict[str, Any], frozen: Params) -> None:
    if fingerprint(frozen) != described["fingerprint"]:
        raise UserError(
            f"the frozen weights of {described['name']} ({described['weights']}) are not those that {folder} was "
            "trained with; put the original file back, or train in another --workdir"
        )


def describe_run(
    folder: RunFolder,
    config: ConfigDict,
    label_space: LabelSpace,
    preprocess: Preprocess,
    frozen: Params,
    unpublished: Collection[str] | None = None,
) -> None:
    """Write what makes a run folder self-contained; frozen weights too where no published file has them.

    unpublished: see Parts; None = what the config says of a model that `assemble` made.
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
    auto = _unpublished(frozen, config) if unpublished is None else unpublished
    kept = {"always": frozen, "auto": auto, "never": ()}[config.checkpoint.include_frozen]
    if kept:
        # numpy's reader of safetensors knows no bfloat16; float32 holds it exactly
        wide = {path: jax.device_get(frozen[path]).astype(np.float32) for path in sorted(kept)}
        folder.write_bytes(FROZEN, save(wide))
    elif not auto:
        (folder / FROZEN).unlink(missing_ok=True)  # that of a training which ended before its first checkpoint
    folder.write_text(CONFIG, configuration.to_json(config))


def open_run(folder: RunFolder, overrides: list[tuple[str, str]] = ()) -> Run:
    """Restore the selected values of a run folder, with nothing but the folder (and the published backbone).

    overrides: config keys that differ from the run's own; those of what was trained cannot.
    Raises UserError for a folder that is no run, holds no checkpoint, or whose frozen weights have changed.
    """
    config, label_space = read_run(folder, overrides)
    stored = folder.read_json(PREPROCESS)
    image_size = preprocess_for(config).image_size
    preprocess = Preprocess(image_size, tuple(stored["mean"]), tuple(stored["std"]))

    mesh = start_jax(config, training=False)
    parts = parts_of_run(folder, config, label_space)
    restored = selected_values(folder, parts, mesh)
    labels = label_axes(config, len(label_space.names), mesh)
    return Run(
        config,
        label_space,
        preprocess,
        parts.definition,
        place(restored.selected, mesh, labels),
        place(parts.frozen, mesh, labels),
        mesh,
        labels,
        restored.notes["step"],
        restored.notes,
    )


def read_run(folder: RunFolder, overrides: Sequence[tuple[str, str]] = ()) -> tuple[ConfigDict, LabelSpace]:
    """Return the config of a run, with `overrides` as in `open_run`, and its labels; UserError for no run."""
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
    """Return whether a finished checkpoint lies in the folder, good or damaged."""
    # Opening checkpoints is a common act of all processes, and a shared folder does not look the same to all at once.
    if not distributed.broadcast_from_first((folder / BACKBONE).exists() and (folder / CHECKPOINTS).exists()):
        return False
    with checkpoint.open_manager(folder, writing=False) as manager:
        return distributed.broadcast_from_first(bool(manager.all_steps()))


def parts_of_run(folder: RunFolder, config: ConfigDict, label_space: LabelSpace) -> Parts:
    """Assemble a run's model with its frozen weights, those in the folder and for the rest the published ones.

    What trains has its first values. Raises UserError where the weights are not those that the run was trained with.
    """
    described, stored = folder.read_json(BACKBONE), {}
    if (folder / FROZEN).exists():
        try:
            stored = as_kept(dict(load((folder / FROZEN).read_bytes())), config)
        except SafetensorError as error:
            raise UserError(f"{folder / FROZEN} is damaged: {error}") from error
    elsewhere = described["frozen_parameters"] - sum(value.size for value in stored.values())
    parts = assemble(config, label_space, load_backbone=elsewhere > 0)
    parts = replace(parts, frozen={**parts.frozen, **stored}, unpublished=frozenset(stored))
    _require_fingerprint(folder, described, parts.frozen)
    return parts


def selected_values(folder: RunFolder, parts: Parts, mesh: Mesh) -> checkpoint.Restored:
    """Restore the values that a run selected; UserError where it has none yet. `parts` is its model."""
    values = place({**parts.trainable, **parts.stats}, mesh)
    with checkpoint.open_manager(folder, writing=False) as manager:
        restored = checkpoint.restore_newest(manager, selected=values)
    if restored is None:
        raise UserError(f"{folder} holds no finished checkpoint yet; let its training go on")
    return restored
