"""Build a model from a config."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.errors import UserError
from mlmoe_jax.models import partition
from mlmoe_jax.models.adapters.catalog import ADAPTERS, describe_adapters, prompts_class
from mlmoe_jax.models.attributes import NO_SOFTMAX, AttributeSoftmax
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.contracts import Adapter, Backbone, BackboneShape, Head
from mlmoe_jax.models.heads.catalog import head_class
from mlmoe_jax.models.layers.deltas import Delta, Deltas, LayerCall
from mlmoe_jax.models.layers.dispatch import use_kernels
from mlmoe_jax.models.macs import forward_macs
from mlmoe_jax.models.outputs import CLS, LABELS, MEAN, PATCHES, PROMPTS, QUARTERS, Features, Prediction
from mlmoe_jax.runtime.setup import dtypes


class Classifier(nnx.Module):
    """A model: a backbone, optional prompts and other adapters, and a head.

    `precision` is a value of `jax.default_matmul_precision`, and `kernels` is a value of `config.model.kernels`.
    `final_norm` is whether the final norm of the backbone is applied to the features that the head reads. `softmax` is
    applied to the logits of the head.
    """

    def __init__(
        self,
        backbone: Backbone,
        prompts: Adapter,
        head: Head,
        *,
        final_norm: bool,
        precision: str,
        kernels: str = "auto",
        adapters: Mapping[str, Adapter] = MappingProxyType({}),
        softmax: AttributeSoftmax = NO_SOFTMAX,
    ):
        self.backbone = backbone
        self.prompts = prompts
        self.head = head
        self.final_norm = final_norm
        self.precision = precision
        self.kernels = kernels
        self.adapters = nnx.Dict(adapters)
        self.softmax = softmax

    def __call__(
        self,
        image: jax.Array,
        *,
        labels: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Prediction:
        """Classify images f32[B,H,W,3].

        Args:
          labels: f32[B,K], for models whose training reads the labels.
          rngs: for dropout in training.
          return_attention: also return `attention`, `grid`, `features` and `map` (see Prediction); only for evaluation,
            without dropout.
        """
        features = self.encode(image, rngs=rngs, return_attention=return_attention)
        return self.classify(features, labels=labels, rngs=rngs, return_attention=return_attention)

    def encode(self, image: jax.Array, *, rngs: nnx.Rngs | None = None, return_attention: bool = False) -> Features:
        """Return the features that the head reads (`head.read`) for images f32[B,H,W,3]."""
        batch, quartered = image.shape[0], QUARTERS in self.head.read
        with self._computing():
            image = image_and_quarters(image) if quartered else image
            adapters = (self.prompts, *self.adapters.values())
            prompts = [adapter(image.shape[0], rngs=rngs) for adapter in adapters]
            prompts = [value for value in prompts if value is not None]
            if len(prompts) > 1:
                raise ValueError("only one adapter of a model can give prompts")
            deltas = sum_deltas([adapter.deltas(rngs=rngs) for adapter in adapters])
            features = self.backbone(
                image,
                prompts[0] if prompts else None,
                read=[name for name in self.head.read if name != QUARTERS],
                norm=self.final_norm,
                return_attention=return_attention,
                **({"deltas": deltas} if deltas else {}),
            )
        return gather_quarters(features, batch) if quartered else features

    def classify(
        self,
        features: Features,
        *,
        labels: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Prediction:
        """Classify the features that `encode` returns."""
        with self._computing(), partition.shard_head(self.head):
            prediction = self.head(features, labels=labels, rngs=rngs)
            logits = {"logits": prediction.logits, "terms": prediction.terms}
            parts = {**jax.tree.map(self.softmax, logits), "gates": prediction.gates}
            prediction = replace(prediction, **jax.tree.map(partition.shard_labels, parts))
            if not return_attention:
                return prediction
            attention = {**features.attention, **self.head.attention(features)}
            labels = attention[LABELS] if LABELS in attention else self._activate(features.cells)
        label_map = None if labels is None else labels.reshape(*labels.shape[:2], *features.grid)
        explained = {"grid": features.grid, "features": features.pooled(), "map": label_map}
        return replace(prediction, attention=attention, **explained)

    def _activate(self, cells: Mapping[str, jax.Array]) -> jax.Array | None:
        """Return the logits f32[B,K,N] of the head for each patch alone, from `Features.cells`.

        None if the head reads features that are not defined for one patch.
        """
        if not set(self.head.read) <= set(cells):
            return None
        parts = {name: cell.reshape(-1, cell.shape[-1]) for name, cell in cells.items()}
        patches = parts[PATCHES][:, None] if PATCHES in parts else None
        logits = self.head(Features(parts.get(CLS), None, patches, (1, 1), mean=parts.get(MEAN))).logits
        count = cells[self.head.read[0]].shape[1]
        return logits.reshape(-1, count, logits.shape[-1]).swapaxes(1, 2)

    def published_macs(self, side: int) -> tuple[int, int, int]:
        """Return multiply-adds for one image of `side` × `side` pixels, as publications count them.

        Returns:
          (first count, second count, multiply-adds of norms) for the whole model. The counts are as in
          `BackboneShape.published_macs`; norms are a part of the first count.
        """
        shape = self.backbone.shape
        layers, extra, patches = shape.published_macs(side, self.prompts)
        tokens = shape.tokens(side, self.prompts)
        layers += sum(adapter.macs(tokens) for adapter in (self.prompts, *self.adapters.values()))
        head = self.head.published_macs(patches, self._head_macs(side))
        images = 5 if QUARTERS in self.head.read else 1
        norms = images * shape.norm_macs(side, self.prompts) + self.head.norm_macs(patches)
        return images * layers + head[0], images * extra + head[1], norms

    def _head_macs(self, side: int) -> int:
        structure, state = nnx.split(self)
        image = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
        with jax.default_device("cpu"):  # on an NVIDIA GPU, no matmul of cuDNN's attention is seen
            features = jax.eval_shape(lambda state, image: nnx.merge(structure, state).encode(image), state, image)
            return forward_macs(self.head, features)[0]

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Trace with the precision and the kernels of the model."""
        with jax.default_matmul_precision(self.precision), use_kernels(self.kernels):
            yield


def image_and_quarters(image: Float[Array, "b h w c"]) -> Float[Array, "n h w c"]:
    """Return each image, followed by its four quarters, linearly resized to the size of the image: n = 5 b."""
    batch, height, width, channels = image.shape
    down, across = height // 2, width // 2
    quarters = image[:, : 2 * down, : 2 * across].reshape(batch, 2, down, 2, across, channels).swapaxes(2, 3)
    shape = (batch, 4, height, width, channels)
    quarters = jax.image.resize(quarters.reshape(batch, 4, down, across, channels), shape, "linear")
    return jnp.concatenate([image[:, None], quarters], axis=1).reshape(-1, *image.shape[1:])


def gather_quarters(features: Features, batch: int) -> Features:
    """Return the features of `batch` images, with `quarters`, from the features of `image_and_quarters`."""
    split = jax.tree.map(lambda x: x.reshape(batch, 5, *x.shape[1:]), features)
    return replace(jax.tree.map(lambda x: x[:, 0], split), quarters=split.cls[:, 1:])


def sum_deltas(deltas: Sequence[Deltas]) -> Deltas:
    """Return {layer path: sum of the deltas of all adapters for this layer}."""
    terms_by_path: dict[str, list[Delta]] = {}
    for adapter in deltas:
        for path, delta in adapter.items():
            terms_by_path.setdefault(path, []).append(delta)
    return {path: functools.partial(_sum, terms) for path, terms in terms_by_path.items()}


def _sum(deltas: Sequence[Delta], call: LayerCall) -> jax.Array:
    return functools.reduce(jnp.add, [delta(call) for delta in deltas])


def backbone_shape(config: ConfigDict) -> BackboneShape:
    """Return the architecture of `config.model.backbone.name`."""
    return catalog.entry(config.model.backbone.name).shape


def reads_final_norm(backbone: str, *, prompts: bool) -> bool:
    """Return whether a head reads features after the final norm of a backbone; `prompts`: whether it reads prompts.

    ML-VPT's code reads the prompts of some backbones before the final norm. VPT's code reads the class token after the
    final norm for all backbones.
    """
    return not prompts or catalog.entry(backbone).final_norm


def build_model(config: ConfigDict, label_space: LabelSpace, *, rngs: nnx.Rngs) -> Classifier:
    """Build the model of a config for a label space, with random weights.

    Raises UserError if the config has prompts or other adapters, and the backbone is not a ViT.
    """
    settings = config.model
    matmul_dtype, _ = dtypes(config)
    dtype = None if matmul_dtype == "float32" else jnp.dtype(matmul_dtype)
    shape = backbone_shape(config)
    if (names := describe_adapters(config)) and not shape.takes_adapters:
        raise UserError(f"the backbone of {names} must be a ViT, and {settings.backbone.name} is not one")
    options = {"dtype": dtype, "rngs": rngs}
    prompts = prompts_class(config).from_config(settings.prompts, shape, **options)
    backbone = shape.build(dtype=dtype, remat=settings.remat, batch_norm=settings.backbone.batch_norm, rngs=rngs)
    head = head_class(config).from_config(config, shape.width, label_space, dtype=dtype, rngs=rngs)
    adapters = {name: ADAPTERS[name].from_config(keys, shape, **options) for name, keys in settings.adapters.items()}
    final_norm = reads_final_norm(settings.backbone.name, prompts=PROMPTS in head.read)
    return Classifier(
        backbone,
        prompts,
        head,
        final_norm=final_norm,
        precision=settings.matmul_precision,
        kernels=settings.kernels,
        adapters=adapters,
        softmax=AttributeSoftmax.of(label_space.tree.attributes, len(label_space.names)),
    )
