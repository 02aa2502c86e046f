"""From a config to a model with its values, for training, evaluation and prediction alike."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.name_vectors import NameVectors
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.adapters.catalog import active_adapters
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.build import Classifier, backbone_shape, build_model
from mlmoe_jax.models.heads.catalog import head_class
from mlmoe_jax.models.params import (
    ModelDef,
    Params,
    draw_missing,
    fingerprint,
    named_variables,
    split_trainable,
)
from mlmoe_jax.models.partition import label_axes
from mlmoe_jax.pretrained.load import load_weights
from mlmoe_jax.pretrained.locate import backbone_file
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.setup import dtypes
from mlmoe_jax.runtime.sharding import LabelAxes

# Choice of model.backbone.normalization -> mean and standard deviation. `auto` takes the numbers of the backbone.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parts:
    """The structure of a model, and its values in three groups, each a flat dict, parameter path -> array.

    Attributes:
      trainable: parameters that the optimizer updates.
      frozen: parameters that nothing updates.
      stats: batch statistics, which the forward pass updates in training.
      unpublished: paths of the frozen parameters that are not in a published weights file.
    """

    definition: ModelDef = field(metadata={"static": True})
    trainable: Params
    frozen: Params
    stats: Params
    unpublished: frozenset[str] = field(metadata={"static": True})

    @property
    def learned(self) -> Params:
        """What training changes and a checkpoint has: the trainable parameters and the statistics."""
        return {**self.trainable, **self.stats}

    @property
    def values(self) -> Params:
        """All values of the model."""
        return {**self.learned, **self.frozen}

    @cached_property
    def fingerprint(self) -> str:
        """The hexadecimal sha256 of the frozen parameters; see `params.fingerprint`."""
        return fingerprint(self.frozen)


def label_axes_for(definition: ModelDef, num_labels: int, mesh: Mesh) -> LabelAxes | None:
    """Return which axis of each parameter is the label axis; None if no parameter is sharded over labels.

    Nothing is sharded over labels if `mesh` has no `expert` axis of size 2 or more.
    """
    if mesh.shape["expert"] == 1 or not definition.merge(definition.shapes()).head.by_label:
        return None
    axes = {path: places[0] for path, names in definition.axes().items() if (places := label_axes(names))}
    return LabelAxes(num_labels, axes)


def assemble(config: ConfigDict, label_space: LabelSpace, *, load_backbone: bool = True) -> Parts:
    """Return the initial model of a config, split into its structure, trainable and frozen parameters, and statistics.

    Without `load_backbone`, no pretrained weights are loaded: all values are drawn from `config.seed`.
    """
    return split_model(initial_model(config, label_space, load_backbone=load_backbone), config)


def initial_model(config: ConfigDict, label_space: LabelSpace, *, load_backbone: bool = True) -> Classifier:
    """Return the model of a config with its initial values. The arguments are described in `assemble`.

    The backbone has the pretrained weights that the config names, if any. All other values come from `config.seed`.
    """
    build = model_builder(config, label_space)
    model = nnx.eval_shape(build)
    if load_backbone:
        fill_backbone(model, config)
    draw_missing(model, build)
    if load_backbone and head_class(config).starts_from_names and label_space.name_vectors is not None:
        _require_fitting(label_space.name_vectors, model.backbone, config)
    return model


def backbone_fingerprint(backbone: nnx.Module) -> str:
    """Return the sha256 of all parameters of a backbone; see `params.fingerprint`."""
    return fingerprint({path: variable[...] for path, (_, variable) in named_variables(backbone, nnx.Param).items()})


def _require_fitting(vectors: NameVectors, backbone: nnx.Module, config: ConfigDict) -> None:
    """Raise UserError if the vectors of names were made for another backbone, or for other weights of the backbone."""
    name, source = config.model.backbone.name, config.model.head.names
    if vectors.backbone != name:
        raise UserError(
            f"{source} has vectors for {vectors.backbone}, and the backbone is {name}; encode the names again"
        )
    if vectors.fingerprint and vectors.fingerprint != backbone_fingerprint(backbone):
        raise UserError(f"{source} has vectors for other weights of {name} than these; encode the names again")


def model_builder(config: ConfigDict, label_space: LabelSpace) -> Callable[[], Classifier]:
    """Return a function () -> model that builds the model of a config. All values are drawn from `config.seed`."""
    return lambda: build_model(config, label_space, rngs=nnx.Rngs(config.seed))


def abstract_parts(config: ConfigDict, label_space: LabelSpace) -> Parts:
    """Return the result of `assemble` with ShapeDtypeStructs. No file is read, and no array is allocated."""
    return split_model(nnx.eval_shape(model_builder(config, label_space)), config)


def evaluated_definition(config: ConfigDict, parts: Parts, label_space: LabelSpace) -> ModelDef:
    """Return the structure of the model of a config for evaluation and prediction, with matmuls in `eval.dtype`.

    It has the parameter paths and shapes of `parts`, so the values in `parts` can be merged into it.
    """
    matmuls, _ = dtypes(config)
    if config.eval.dtype in ("same", matmuls):
        return parts.definition
    evaluated = copy.deepcopy(config)
    evaluated.model.dtype = config.eval.dtype
    return abstract_parts(evaluated, label_space).definition


def fill_backbone(model: Classifier, config: ConfigDict) -> None:
    """Load the pretrained weights that the config names into the backbone of `model`, if the config names any."""
    settings = config.model.backbone
    load_pretrained(model.backbone, settings.name, settings.weights)


def load_pretrained(backbone: nnx.Module, name: str, weights: str) -> None:
    """Load pretrained weights into a backbone, in place. Its name in the catalog is `name`.

    The value "auto" of `weights` stands for the published weights of `name`, "none" for nothing to load. Any other
    value is the path of a weights file.
    """
    if weights == "none":
        return
    report = load_weights(backbone, backbone_file(name, weights))
    source = f"backbone weights ({report.layout})"
    if report.unused and weights != "auto":  # of a published file, only expected tensors are unused
        status(f"{source}: {len(report.unused)} tensors were not used, such as {report.unused[0]}")
    if report.missing:
        status(f"{source}: {len(report.missing)} values were missing, such as {report.missing[0]}")


def require_weights(config: ConfigDict) -> None:
    """Raise UserError unless the pretrained weights of the config, downloaded if need be, fit the backbone."""
    settings = config.model.backbone
    if settings.weights == "none":
        return
    path = backbone_file(settings.name, settings.weights)
    if settings.weights != "auto":
        load_weights(nnx.eval_shape(lambda: backbone_shape(config).build(rngs=nnx.Rngs(0))), path)


def split_model(model: nnx.Module, config: ConfigDict) -> Parts:
    """Split a model into its structure, trainable parameters, frozen parameters and batch statistics.

    Its values may be abstract (ShapeDtypeStructs). If the config uses published weights, all frozen parameters of the
    backbone are assumed to have their published values. Raises UserError if no parameter is trainable.
    """
    definition, params, stats = ModelDef.split(model)
    trainable, frozen = split_trainable(params, trainable_rules(config))
    if not trainable:
        raise UserError("config.trainable freezes every parameter; leave at least the head trainable")
    published = config.model.backbone.weights == "auto"
    unpublished = frozenset(path for path in frozen if not (published and path.startswith("backbone/")))
    return Parts(definition, trainable, cast_frozen(frozen, config), stats, unpublished)


def cast_frozen(frozen: Mapping[str, Any], config: ConfigDict) -> Params:
    """Return the frozen parameters with the kernels of the backbone cast to `model.frozen_dtype`.

    Values are arrays or ShapeDtypeStructs. Other parameters keep their type: classifiers, gates and projections of
    prompts compute in float32. Casting kernels is harmless, because bfloat16 matmuls round them anyway.
    """
    _, dtype = dtypes(config)

    def cast(value: jax.Array) -> jax.Array:
        if value.dtype == dtype:
            return value  # `astype` would compile a program
        return value.update(dtype=dtype) if isinstance(value, jax.ShapeDtypeStruct) else value.astype(dtype)

    kernel = re.compile(r"backbone/.*/kernel")
    return {path: cast(value) if kernel.fullmatch(path) else value for path, value in frozen.items()}


def trainable_rules(config: ConfigDict) -> tuple:
    """Return the rules (regular expression, whether it trains) for parameter paths; the first match counts.

    The backbone, the adapters and the head have rules for parameters that are always frozen. These rules come first,
    followed by the rules in `config.trainable`.
    """
    backbone_rules = backbone_shape(config).frozen_rules(config.model.backbone.batch_norm)
    adapters = active_adapters(config).values()
    adapter_rules = [rule for adapter, settings in adapters for rule in adapter.frozen_rules(settings)]
    return (*backbone_rules, *adapter_rules, *head_class(config).frozen_rules(config), *config.trainable)


def preprocess_for(config: ConfigDict) -> Preprocess:
    """Return the preprocessing of a config; UserError if its backbone does not accept its image size."""
    entry = catalog.entry(config.model.backbone.name)
    if not entry.shape.fits(config.data.image_size):
        raise UserError(
            f"data.image_size is {config.data.image_size}, which is not a multiple of {config.model.backbone.name}'s "
            f"patch size {entry.shape.patch}"
        )
    mean, std = entry.normalization(config.model.backbone.normalization)
    return Preprocess(config.data.image_size, mean, std, config.eval.flips)
