"""From a config to a model."""

import contextlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mlmoe_jax.data.labels.graph import frequency_order, label_graph
from mlmoe_jax.data.labels.space import LabelSpace, synthetic_label_space
from mlmoe_jax.errors import UserError
from mlmoe_jax.models import partition
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.convnext import ConvNeXt, ConvNeXtShape
from mlmoe_jax.models.backbones.resnet import ResNet, ResNetShape
from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.contracts import PROMPTS, Prediction
from mlmoe_jax.models.heads.graph import ADDGCNHead, MLGCNHead
from mlmoe_jax.models.heads.group_experts import GroupExpertsHead
from mlmoe_jax.models.heads.group_linear import GroupLinearHead
from mlmoe_jax.models.heads.linear import LinearHead
from mlmoe_jax.models.heads.mlmoe import GroupTokenDecoder
from mlmoe_jax.models.heads.query import QueryHead
from mlmoe_jax.models.heads.routed_experts import RoutedExpertsHead
from mlmoe_jax.models.heads.sequence import CNNRNNHead
from mlmoe_jax.models.layers.constants import Constant
from mlmoe_jax.models.prompts import SIDES, DeepPrompts, PrunablePrompts, ShallowPrompts, prompt_groups, prompt_mask
from mlmoe_jax.models.query_decoder import QueryDecoder

BackboneShape = ViTShape | ResNetShape | ConvNeXtShape


class Classifier(nnx.Module):
    """A backbone, prompts if any, and a head."""

    def __init__(self, backbone: nnx.Module, prompts: nnx.Module | None, head: nnx.Module, *, final_norm: bool):
        self.backbone, self.prompts, self.head, self.final_norm = backbone, prompts, head, final_norm

    def __call__(
        self,
        image: jax.Array,
        *,
        labels: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
        explain: bool = False,
    ) -> Prediction:
        """Classify f32[B,H,W,3]. labels f32[B,K] and rngs are for models whose training needs them.

        explain: return `attention` and `grid` as well (see Prediction); for evaluation, where nothing is dropped out.
        """
        prompts = None if self.prompts is None else self.prompts(len(image), rngs=rngs)
        features = self.backbone(image, prompts, read=self.head.read, norm=self.final_norm, explain=explain)
        with contextlib.nullcontext() if self.head.by_label else partition.over(None):
            prediction = self.head(features, labels=labels, rngs=rngs)
            spread = jax.tree.map(partition.by_label, (prediction.logits, prediction.terms, prediction.gates))
            prediction = replace(prediction, **dict(zip(("logits", "terms", "gates"), spread, strict=True)))
            if not explain:
                return prediction
            of_labels = self.head.attention(features) if hasattr(self.head, "attention") else {}
        return replace(prediction, attention={**features.attention, **of_labels}, grid=features.grid)


def _linear(config, shape, space: LabelSpace, dtype, rngs: nnx.Rngs) -> nnx.Module:
    return LinearHead(shape.width, len(space.names), pool=config.model.head.pool, rngs=rngs)


def _group_of(config, space: LabelSpace) -> dict[str, np.ndarray]:
    """Return the group of every label on each side that the config has prompts for."""
    both = {"co": space.co_group, "dc": space.dc_group}
    return {name: both[name] for name in SIDES[config.model.prompts.sides]}


def _group_experts(config, shape, space: LabelSpace, dtype, rngs: nnx.Rngs) -> nnx.Module:
    head, prompts = config.model.head, config.model.prompts
    return GroupExpertsHead(
        shape.width,
        _group_of(config, space),
        groups=prompts.num_groups,
        per_group=prompts.per_group,
        gates_of=head.gates_of,
        hidden=head.expert_hidden,
        activation=head.activation,
        gate_bias=head.gate_bias,
        combine=head.combine,
        shared_classifier=head.shared_classifier,
        dtype=dtype,
        rngs=rngs,
    )


def _group_linear(config, shape, space: LabelSpace, dtype, rngs: nnx.Rngs) -> nnx.Module:
    return GroupLinearHead(
        shape.width,
        _group_of(config, space),
        groups=config.model.prompts.num_groups,
        per_group=config.model.prompts.per_group,
        combine=config.model.head.combine,
        rngs=rngs,
    )


def _decoder_settings(settings, channels: int, dtype, rngs: nnx.Rngs) -> dict[str, Any]:
    """Return the arguments of a QueryDecoder that `config.model.head.decoder` stands for."""
    given = {key: value for key, value in settings.items() if key != "queries"}
    given["width"] = settings.width or channels
    if settings.project == "auto":
        given["project"] = "none" if given["width"] == channels else "linear"
    return {**given, "dtype": dtype, "rngs": rngs}


def _query(config, shape, space: LabelSpace, dtype, rngs: nnx.Rngs) -> nnx.Module:
    settings, labels = config.model.head.decoder, len(space.names)
    queries = min(settings.queries or labels, labels)
    decoder = QueryDecoder(shape.width, queries, **_decoder_settings(settings, shape.width, dtype, rngs))
    # the initial values of Q2L's classifier, or those of ML-Decoder's, whose queries are fixed
    classifier = "grouped" if settings.fixed_queries or queries < labels else "per_label"
    return QueryHead(decoder, labels, classifier=classifier, rngs=rngs)


def _routed_experts(config, shape, space: LabelSpace, dtype, rngs: nnx.Rngs) -> nnx.Module:
    prompts, labels = config.model.prompts, len(space.names)
    settings = _decoder_settings(config.model.head.decoder, shape.width, dtype, rngs)
    if prompts.kind == "group":
        decoder = GroupTokenDecoder(
            shape.width, _group_of(config, space), groups=prompts.num_groups, per_group=prompts.per_group, **settings
        )
    else:
        decoder = QueryDecoder(shape.width, labels, **settings)
    return RoutedExpertsHead(decoder, settings["width"], labels, **config.model.head.routing, dtype=dtype, rngs=rngs)


def _ml_gcn(config, shape, space: LabelSpace, dtype, rngs: nnx.Rngs) -> nnx.Module:
    graph = config.model.head.graph
    adjacency = label_graph(
        space.counts, space.positives, threshold=graph.threshold, share=graph.share, transpose=graph.transpose
    )
    vectors = space.vectors
    if vectors is None:  # made-up labels, for which counts and vectors do not matter
        vectors = np.zeros((len(space.names), graph.vector_width), np.float32)
    return MLGCNHead(shape.width, Constant(vectors), Constant(adjacency), hidden=graph.hidden, dtype=dtype, rngs=rngs)


def _add_gcn(config, shape, space: LabelSpace, dtype, rngs: nnx.Rngs) -> nnx.Module:
    return ADDGCNHead(shape.width, len(space.names), hidden=config.model.head.graph.hidden, dtype=dtype, rngs=rngs)


def _cnn_rnn(config, shape, space: LabelSpace, dtype, rngs: nnx.Rngs) -> nnx.Module:
    order = frequency_order(space.positives)
    return CNNRNNHead(shape.width, order, **config.model.head.sequence, dtype=dtype, rngs=rngs)


HEADS = {
    "linear": _linear,
    "group_experts": _group_experts,
    "group_linear": _group_linear,
    "query": _query,
    "routed_experts": _routed_experts,
    "ml_gcn": _ml_gcn,
    "add_gcn": _add_gcn,
    "cnn_rnn": _cnn_rnn,
}


def build_prompts(settings, shape: ViTShape, *, rngs: nnx.Rngs) -> nnx.Module | None:
    """Build the prompts that `config.model.prompts` describes, or None for kind `none`."""
    if settings.kind == "none":
        return None
    place = (shape.depth, shape.width, shape.patch)
    common = {"count": settings.count, "project": settings.project, "dropout": settings.dropout, "rngs": rngs}
    if settings.kind == "group":
        group_of = prompt_groups(len(SIDES[settings.sides]), settings.num_groups, settings.per_group)
        common["count"] = len(group_of)
        return DeepPrompts(*place, mask=prompt_mask(settings.attention_mask, group_of), **common)
    if settings.kind == "deep":
        return DeepPrompts(*place, **common)
    if settings.kind == "shallow":
        gate_init = settings.gate_init if settings.gated else None
        return ShallowPrompts(*place, gate_init=gate_init, learn_temperature=settings.learn_temperature, **common)
    return PrunablePrompts(
        *place,
        key_values=settings.key_values,
        shared=settings.share_key_values,
        heads=shape.heads,
        segments=0 if settings.pruning == "none" else settings.segments,
        token_mask=_bits(settings.kept_tokens) if settings.kept_tokens else None,
        segment_mask=np.stack([_bits(row) for row in settings.kept_segments]) if settings.kept_segments else None,
        absent=settings.pruning == "fixed" and settings.pruned == "absent",
        **common,
    )


def _bits(text: str) -> np.ndarray:
    """Turn "1101" into f32[4]."""
    return np.array([float(digit) for digit in text], np.float32)


def backbone_shape(config) -> BackboneShape:
    """Return the architecture that `config.model.backbone.name` stands for."""
    return catalog.entry(config.model.backbone.name).shape


def reads_final_norm(settings, *, prompts: bool) -> bool:
    """Return whether features are read after the backbone's last norm; `settings` is `config.model.backbone`.

    prompts: whether prompts are among them: ML-VPT's code reads those of some backbones before it, and VPT's takes the
    class token after it for all.
    """
    chosen = {"yes": True, "no": False}
    return chosen.get(settings.final_norm, not prompts or catalog.entry(settings.name).final_norm)


def build_backbone(
    shape: BackboneShape, *, dtype=None, remat: bool = False, batch_norm: str = "frozen", rngs: nnx.Rngs
) -> nnx.Module:
    """Build a backbone with random weights."""
    if isinstance(shape, ResNetShape):
        return ResNet(shape, dtype=dtype, batch_norm=batch_norm, remat=remat, rngs=rngs)
    kind = ConvNeXt if isinstance(shape, ConvNeXtShape) else ViT
    return kind(shape, dtype=dtype, remat=remat, rngs=rngs)


def build_model(config, label_space: LabelSpace, *, rngs: nnx.Rngs) -> Classifier:
    """Build the model that a config describes for K = len(label_space.names) labels, with random weights."""
    settings = config.model
    dtype = None if settings.dtype == "float32" else jnp.dtype(settings.dtype)
    shape = backbone_shape(config)
    if settings.prompts.kind != "none" and not isinstance(shape, ViTShape):
        raise UserError(f"model.prompts.kind={settings.prompts.kind} needs a ViT, and {settings.backbone.name} is none")
    prompts = build_prompts(settings.prompts, shape, rngs=rngs)
    backbone = build_backbone(
        shape, dtype=dtype, remat=settings.remat, batch_norm=settings.backbone.batch_norm, rngs=rngs
    )
    head = HEADS[settings.head.kind](config, shape, label_space, dtype, rngs)
    return Classifier(
        backbone, prompts, head, final_norm=reads_final_norm(settings.backbone, prompts=PROMPTS in head.read)
    )


def label_axes_of_head(config, labels: int) -> dict[str, int]:
    """Return which axis of a parameter counts the K = `labels` labels, path -> axis, of a head sharded by label.

    It is the axis that grows by one for one label more; no table can fall behind the models then. Empty where the head
    is not sharded by label.
    """

    def head_of(count: int) -> nnx.Module:
        space = synthetic_label_space(count, config.model.prompts.num_groups)
        build = HEADS[config.model.head.kind]
        return nnx.eval_shape(lambda: build(config, backbone_shape(config), space, None, nnx.Rngs(0)))

    head, larger = head_of(labels), head_of(labels + 1)
    if not head.by_label:
        return {}
    grown = dict(nnx.to_flat_state(nnx.state(larger, nnx.Param)))
    return {
        "/".join(("head", *map(str, path))): axis
        for path, value in nnx.to_flat_state(nnx.state(head, nnx.Param))
        for axis, size in enumerate(value.shape)
        if size == labels and grown[path].shape[axis] == labels + 1
    }
