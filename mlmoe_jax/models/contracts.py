"""The interfaces of backbones, adapters and heads. Their outputs are in `outputs.py`.

A new head or adapter is a subclass of `Head` or `Adapter` in a new file, and an entry in `heads/catalog.py` or
`adapters/catalog.py`. A new backbone family is a module with the interface of `Backbone`, its `BackboneShape`, and a
line in `backbones/catalog.py`. `docs/extending.md` has an example of each.

Shape letters: B batch, H W image, N patch tokens, D width, K labels.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from mlmoe_jax.models.layers.deltas import NO_DELTAS, Deltas, layer_path
from mlmoe_jax.models.layers.initializers import Dtype
from mlmoe_jax.models.macs import forward_macs
from mlmoe_jax.models.outputs import CLS, Features, Prediction, Prompts

if TYPE_CHECKING:
    from mlmoe_jax.data.labels.space import LabelSpace


# ------------------------------------------------------------------------------------------------------------ backbones
class Backbone(Protocol):
    """A feature extractor: an nnx module that maps images to the features that a head reads, at paths `backbone/…`."""

    shape: BackboneShape

    def __call__(
        self,
        image: jax.Array,
        prompts: Prompts | None = None,
        *,
        read: Collection[str] = (CLS,),
        norm: bool = True,
        return_attention: bool = False,
    ) -> Features:
        """Return the features of images.

        A backbone with `shape.takes_adapters` has a further argument `deltas: Deltas`, the terms that adapters add to
        the outputs of its layers. Features that are not in `read` are not computed.

        Args:
          image: f32[B,H,W,3], normalized.
          prompts: prompt tokens for the blocks; None = no prompts.
          read: the features to return, any of `cls`, `prompts`, `patches` and `mean`.
          norm: whether to apply the final norm to the features, if the backbone has one.
          return_attention: also return `Features.attention`, if the backbone has attention.

        Raises:
          ValueError: the backbone lacks a feature in `read`, or does not take prompts.
        """
        ...


class Layer(NamedTuple):
    """A linear layer or a norm that takes deltas: one in each block, or one outside the blocks if not `in_block`."""

    inputs: int
    outputs: int
    bias: bool = True
    in_block: bool = True


class BackboneShape(abc.ABC):
    """The architecture of a backbone: one frozen dataclass per family, one instance per variant.

    Other modules read the properties of a backbone only through this interface, so they do not depend on the family.
    """

    width: int  # D, the channels of a feature
    patch: int  # the pixels between two patch tokens
    takes_adapters = False  # whether the backbone accepts `Prompts` and `Deltas`; the next three are needed only then
    depth: int  # the number of blocks
    heads: int  # of the attention of a block
    layers: Mapping[str, Layer]  # the linear layers and norms that take deltas, by name
    any_size = False  # whether padding lets the backbone encode images of any size, not only multiples of `patch`
    # Freezes scale and bias of batch normalization, if any: weight decay would change them without a gradient.
    batch_norm_rule: ClassVar[tuple[str, bool] | None] = None

    @abc.abstractmethod
    def build(
        self, *, dtype: Dtype = None, remat: bool = False, batch_norm: str = "frozen", rngs: nnx.Rngs
    ) -> Backbone:
        """Build the backbone with random weights.

        Args:
          remat: recompute each block in the backward pass instead of storing its activations.
          batch_norm: see layers.batch_norm; ignored if the backbone has no batch normalization.
        """

    def layer_paths(self, layer: str) -> list[str]:
        """Return the paths in `Deltas` of a key of `layers`: one per block, or one for a layer outside the blocks."""
        return [layer_path(index, layer) for index in range(self.depth)] if self.layers[layer].in_block else [layer]

    def fits(self, side: int) -> bool:
        """Return whether images of `side` × `side` pixels can be encoded."""
        return self.any_size or side % self.patch == 0

    def frozen_rules(self, batch_norm: str) -> tuple[tuple[str, bool], ...]:
        """Return rules (regex of paths, False) that freeze parameters; they precede `config.trainable`."""
        return (self.batch_norm_rule,) if self.batch_norm_rule and batch_norm == "frozen" else ()

    def tokens(self, side: int, prompts: Adapter) -> int:
        """Return the number of tokens in a block, for images of `side` × `side` pixels; 0 without such blocks."""
        return 0

    def published_macs(self, side: int, prompts: Adapter) -> tuple[int, int, int]:
        """Return (first count, second count, number of patch tokens N) for one image of `side` × `side` pixels.

        The counts are multiply-adds. The first covers the layers that the prompt-tuning papers include in their
        numbers, by default all dot products, convolutions and norms. The second covers all other layers, by default 0;
        see apps.tools.preflight.cost.
        """
        image = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
        layers, features = forward_macs(nnx.eval_shape(lambda: self.build(rngs=nnx.Rngs(0))), image)
        return layers + self.norm_macs(side, prompts), 0, math.prod(features.grid)

    def norm_macs(self, side: int, prompts: Adapter) -> int:
        """Return the multiply-adds of norms, which are a part of the first count of `published_macs`; 0 by default."""
        return 0


# ------------------------------------------------------------------------------------------------------------- adapters
class Adapter(nnx.Module):
    """The base class of all adapters, such as prompts and LoRA, which change the features of a frozen backbone.

    A subclass overrides the attributes and methods whose defaults do not fit. No other module depends on the kind of an
    adapter. `model.prompts.kind` selects one adapter, whose parameter paths begin with `prompts/`. Each entry of
    `model.adapters` adds an adapter, with paths below `adapters/NAME/`.
    """

    count: int = 0
    """The number of prompts in a block."""
    key_values: int = 0
    """The number of additional keys and values in a block."""
    changes_features: bool = True
    """Whether the features of the backbone change; False only for `none`."""
    uses_groups: bool = False
    """Whether the prompts belong to label groups."""
    prunable: bool = False
    """Whether mlmoe prune can prune the prompts."""
    merges: bool = False
    """Whether the deltas can be merged into the weights of the layers.

    The delta of a linear layer must be an affine function of its input, and the delta of a norm of its output.
    """

    def __init__(self, settings: ConfigDict, shape: BackboneShape, *, dtype: Dtype, rngs: nnx.Rngs):
        """Create no parameters. A subclass that overrides `from_config` may have a constructor with other arguments."""

    @classmethod
    def from_config(cls, settings: ConfigDict, shape: BackboneShape, *, dtype: Dtype, rngs: nnx.Rngs) -> Self:
        """Build the adapter for a backbone, with initial values.

        `settings` is `model.prompts` or `model.adapters.NAME`, and the backbone `takes_adapters`. By default, all
        arguments are passed to the constructor.
        """
        return cls(settings, shape, dtype=dtype, rngs=rngs)

    def __call__(self, batch: int, *, rngs: nnx.Rngs | None = None) -> Prompts | None:
        """Return the prompts for `batch` images, or None. Only one adapter of a model returns prompts."""
        return None

    def deltas(self, *, rngs: nnx.Rngs | None = None) -> Deltas:
        """Return the terms that are added to the outputs of layers, {layer path: delta}; {} if there are none."""
        return NO_DELTAS

    def macs(self, tokens: int) -> int:
        """Return the multiply-adds per image that the adapter adds, for `tokens` tokens in a block; 0 by default."""
        return 0

    @classmethod
    def describe(cls, settings: ConfigDict) -> str:
        """Return a description of the adapter for the report and the model card."""
        return cls.__name__

    @classmethod
    def group_structure(cls, settings: ConfigDict) -> tuple | None:
        """Return the settings that two models must share for a transfer of their group prompts; None without groups."""
        return None

    @classmethod
    def frozen_rules(cls, settings: ConfigDict) -> tuple[tuple[str, bool], ...]:
        """Return rules (regex of paths, False) that freeze parameters; they precede `config.trainable`."""
        return ()

    @classmethod
    def mistakes(cls, settings: ConfigDict) -> list[str]:
        """Return error messages for invalid settings. Each is one sentence without a final period; [] = valid."""
        return []


# ---------------------------------------------------------------------------------------------------------------- heads
class Head(nnx.Module):
    """The base class of all heads: a head maps features to the logits of K labels.

    A subclass overrides the attributes and methods whose defaults do not fit. No other module depends on the kind of a
    head. Its parameter paths begin with `head/`. Parameters with an entry per label name their axes (`partition.axes`).
    """

    # ---- of the module; some heads set these per instance
    read: tuple[str, ...] = ()
    """The features that the head reads: any of `cls`, `prompts`, `patches` and `mean`; `quarters` beside `cls`."""
    by_label: bool = False
    """Whether labels are computed independently, so that the head can be sharded by label.

    If True, the head calls `partition.shard_images` once on the inputs of its labels. False if labels interact: the
    head is replicated.
    """

    # ---- of the class
    needs_group_prompts: bool = False
    """Whether the head reads the prompts of label groups."""
    uses_groups: bool = False
    """Whether the head uses the label group of each prompt."""
    needs_vectors: bool = False
    """Whether the head needs a word vector per label, `LabelSpace.vectors`."""
    starts_from_names: bool = False
    """Whether the vectors of the names give the initial classifiers, in the space of the features of the backbone."""
    batch_statistics: bool = False
    """Whether the head normalizes by statistics of the training batch, which therefore must not contain blanks."""
    unknown_labels: str = ""
    """A warning about the treatment of unknown labels in training, if they are not only excluded from the loss."""

    def __init__(self, width: int, labels: int, **options: Any):
        """Create no parameters. A subclass that overrides `from_config` may have a constructor with other arguments."""

    @classmethod
    def mixes_labels(cls, config: ConfigDict) -> bool:
        """Return whether the score of a label depends on which other labels there are; False by default."""
        return False

    @classmethod
    def from_config(cls, config: ConfigDict, width: int, space: LabelSpace, *, dtype: Dtype, rngs: nnx.Rngs) -> Self:
        """Build the head of a config, with random weights: by default `cls(width, K, **options, rngs=rngs)`.

        Args:
          config: the whole config.
          width: D of the backbone.
          space: names, groups, word vectors, order and training counts of the labels. Synthetic labels have no counts
            and no vectors.
          dtype: type of the matmuls; None = float32.
        """
        return cls(width, len(space.names), **cls.options(config.model.head, dtype), rngs=rngs)

    @classmethod
    def options(cls, head: ConfigDict, dtype: Dtype) -> dict[str, Any]:
        """Return the keyword arguments of the constructor that follow from `config.model.head` and `dtype`."""
        return {}

    @abc.abstractmethod
    def __call__(
        self, features: Features, *, labels: jax.Array | None = None, rngs: nnx.Rngs | None = None
    ) -> Prediction:
        """Classify images.

        Args:
          features: the output of the backbone. All features that are not in the class attribute `read` are None.
          labels: f32[B,K] in training, for heads whose training reads the labels; None in evaluation.
          rngs: for dropout in training.
        """

    def published_macs(self, tokens: int, counted: int) -> tuple[int, int]:
        """Return (first count, second count) of multiply-adds per image, as in `BackboneShape.published_macs`.

        `tokens` is the number of patches N. `counted`, by default the first count, is the number in all dot products
        and convolutions of the head, which excludes norms.
        """
        return counted, 0

    def norm_macs(self, tokens: int) -> int:
        """Return the multiply-adds of norms, which are a part of the first count of `published_macs`; 0 by default."""
        return 0

    def attention(self, features: Features) -> dict[str, jax.Array]:
        """Return {`labels`: f32[B,K,N]}, the attention of labels over patches, see Prediction; {} if there is none."""
        return {}

    @classmethod
    def terms(cls, config: ConfigDict) -> tuple[str, ...]:
        """Return the possible keys of `config.loss.terms`: "logits" and the keys of `Prediction.terms`.

        It is () if the loss of the head consists only of `Prediction.penalties`.
        """
        return ("logits",)

    @classmethod
    def gate_entries(cls, config: ConfigDict) -> dict[str, list[str]]:
        """Return {key of `Prediction.gates`: names of its E entries (experts)}; {} without gates."""
        return {}

    @classmethod
    def frozen_rules(cls, config: ConfigDict) -> tuple[tuple[str, bool], ...]:
        """Return rules (regex of paths, False) that freeze parameters; they precede `config.trainable`."""
        return ()

    @classmethod
    def mistakes(cls, config: ConfigDict) -> list[str]:
        """Return errors in a config with this head. Each is one sentence without a final period; [] = valid."""
        return []

    @classmethod
    def warnings(cls, config: ConfigDict) -> list[str]:
        """Return warnings about settings of a valid config that are probably unintended, one sentence each."""
        return []
