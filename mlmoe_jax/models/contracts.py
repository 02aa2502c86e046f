"""The interfaces of backbones, adapters and heads. Their outputs are in `outputs.py`.

A new head or adapter is a subclass of `Head` or `Adapter` in a new file, and a line in `registries.py`. A new backbone
family is a module with the interface of `Backbone`, its `BackboneShape`, and a line in `backbones/catalog.py`.
`docs/extending.md` has an example of each.

Shape letters: B batch, H W image, N patch tokens, D width, K labels.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, Self

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
    """A feature extractor: an nnx module from images to the features that a head reads.

    Its parameter paths begin with `backbone/`. Features that are not in `read` are not computed.
    """

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
        """Encode f32[B,H,W,3].

        A backbone whose shape has `takes_adapters` also takes `deltas: Deltas`, terms that are added to the outputs of
        its layers.

        Args:
          image: f32[B,H,W,3], normalized.
          prompts: tokens that are added in the blocks; None for none.
          read: which of `cls`, `prompts`, `patches` and `mean` the head reads.
          norm: apply the final norm to these features, if the backbone has a final norm.
          return_attention: also return `Features.attention`, if the backbone has attention.

        Raises:
          ValueError: the backbone lacks a feature or does not take prompts.
        """
        ...


class Layer(NamedTuple):
    """A linear layer or a norm that takes deltas.

    Attributes:
      inputs: number of inputs.
      outputs: number of outputs.
      bias: whether it has a bias.
      in_block: whether each block has such a layer. If False, the backbone has one of them outside the blocks.
    """

    inputs: int
    outputs: int
    bias: bool = True
    in_block: bool = True


class BackboneShape(abc.ABC):
    """The architecture of a backbone: one frozen dataclass per family, one instance per variant.

    It has all properties of the family, so that no other module depends on the family.
    """

    width: int  # D, the channels of a feature
    patch: int  # the pixels between two patch tokens
    takes_adapters = False  # whether the backbone accepts `Prompts` and `Deltas`; the next four are needed only then
    tokens: Callable[[int, nnx.Module | None], int]  # (side of the image, prompts) -> the number of tokens in a block
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
          dtype: type of the matmuls; None = float32.
          remat: recompute each block in the backward pass instead of storing its activations.
          batch_norm: see layers.batch_norm; ignored if the backbone has no batch normalization.
          rngs: for the weights.
        """

    def layer_paths(self, layer: str) -> list[str]:
        """Return the paths of a layer of `layers`, the keys of `Deltas`: one per block, or one outside the blocks."""
        return [layer_path(index, layer) for index in range(self.depth)] if self.layers[layer].in_block else [layer]

    def fits(self, side: int) -> bool:
        """Return whether images of `side` × `side` pixels can be encoded."""
        return self.any_size or side % self.patch == 0

    def frozen_rules(self, batch_norm: str) -> tuple[tuple[str, bool], ...]:
        """Return rules (regex of paths, False) that freeze parameters; they precede `config.trainable`."""
        return (self.batch_norm_rule,) if self.batch_norm_rule and batch_norm == "frozen" else ()

    def published_macs(self, side: int, prompts: nnx.Module | None) -> tuple[int, int, int]:
        """Return two counts of multiply-adds for one image of `side` × `side` pixels, and its number N of patch tokens.

        The first count covers the layers that the prompt-tuning papers count, the second count all other layers; see
        training.preflight.cost. By default, the first count has all dot products and convolutions.
        """
        image = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
        layers, features = forward_macs(nnx.eval_shape(lambda: self.build(rngs=nnx.Rngs(0))), image)
        return layers, 0, math.prod(features.grid)

    def norm_macs(self, side: int, prompts: nnx.Module | None) -> int:
        """Return the part of norms in the first count of `published_macs`; 0 by default."""
        return 0


# ------------------------------------------------------------------------------------------------------------- adapters
class Setting(NamedTuple):
    """A key that an adapter declares in its own file.

    Attributes:
      default: the default value, which also determines the type.
      doc: one sentence.
      least: lower limit of a number, or None.
      most: upper limit of a number, or None.
    """

    default: bool | int | float | str | tuple[str, ...]
    doc: str
    least: float | None = None
    most: float | None = None


class Adapter(nnx.Module):
    """The base class of all adapters, which change the features of a frozen backbone, such as prompts and LoRA.

    A subclass overrides the attributes and methods whose defaults do not fit. No other module depends on the kind of an
    adapter. `model.prompts.kind` selects one adapter, whose parameter paths begin with `prompts/`. Each entry of
    `model.adapters` adds an adapter, with paths below `adapters/NAME/`.
    """

    settings: ClassVar[Mapping[str, Setting]] = {}
    """The keys of `model.adapters.NAME`, at least one; {} for the kinds of prompts, whose keys are `model.prompts`."""
    changes_features: bool = True
    """Whether the features of the backbone change; False only for `none`."""
    uses_groups: bool = False
    """Whether the prompts belong to label groups."""
    prunable: bool = False
    """Whether --mode=prune can prune the prompts."""
    merges: bool = False
    """Whether the deltas can be merged into the weights of the layers.

    The delta of a linear layer must be an affine function of its input, and the delta of a norm of its output.
    """

    @classmethod
    def from_config(cls, settings: ConfigDict, shape: BackboneShape, *, dtype: Dtype, rngs: nnx.Rngs) -> Self | None:
        """Build the adapter for a backbone, with initial values. The default passes all arguments to the constructor.

        Args:
          settings: the section of the adapter in a config, `model.prompts` or `model.adapters.NAME`.
          shape: the architecture of a backbone with `takes_adapters`.
          dtype: type of the matmuls; None = float32.
          rngs: for initial values.

        Returns:
          The adapter; None if it changes nothing.
        """
        return cls(settings, shape, dtype=dtype, rngs=rngs)

    def __call__(self, batch: int, *, rngs: nnx.Rngs | None = None) -> Prompts | None:
        """Return the prompts for `batch` images, or None. Only one adapter of a model returns prompts.

        Args:
          batch: number of images.
          rngs: for dropout in training.
        """
        return None

    def deltas(self, *, rngs: nnx.Rngs | None = None) -> Deltas:
        """Return the terms that are added to the outputs of layers, by layer path; {} for none.

        Args:
          rngs: for dropout in training.
        """
        return NO_DELTAS

    def macs(self, tokens: int) -> int:
        """Return the multiply-adds per image of the adapter's own layers, with `tokens` tokens in each block."""
        return 0

    @classmethod
    def key(cls) -> str:
        """Return the name of the section of the adapter in `model.adapters`, by default of the class."""
        return cls.__name__.lower()

    @classmethod
    def describe(cls, settings: ConfigDict) -> str:
        """Return a description of the adapter for the report and the model card."""
        return cls.__name__

    @classmethod
    def group_structure(cls, settings: ConfigDict) -> tuple | None:
        """Return the settings in which two models must agree to exchange group prompts; None without groups."""
        return None

    @classmethod
    def frozen_rules(cls, settings: ConfigDict) -> tuple[tuple[str, bool], ...]:
        """Return rules (regex of paths, False) that freeze parameters; they precede `config.trainable`."""
        return ()

    @classmethod
    def mistakes(cls, settings: ConfigDict) -> list[str]:
        """Return the errors in the settings, one sentence without a final period each."""
        return []


# ---------------------------------------------------------------------------------------------------------------- heads
class Head(nnx.Module):
    """The base class of all heads: a head maps features to the logits of K labels.

    A subclass overrides the attributes and methods whose defaults do not fit. No other module depends on the kind of a
    head. Its parameter paths begin with `head/`. Parameters with an entry per label name their axes (`partition.axes`).
    """

    # ---- of the module; some heads set these per instance
    read: tuple[str, ...] = ()
    """The features that the head reads: any of `cls`, `prompts`, `patches` and `mean`."""
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
    batch_statistics: bool = False
    """Whether the head normalizes by statistics of the training batch, which therefore must not contain blanks."""
    unknown_labels: str = ""
    """A warning about the treatment of unknown labels in training, if they are not only excluded from the loss."""

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: ConfigDict, width: int, space: LabelSpace, *, dtype: Dtype, rngs: nnx.Rngs) -> Self:
        """Build the head of a config, with random weights.

        Args:
          config: the whole config.
          width: D of the backbone.
          space: names, groups, word vectors, order and training counts of the labels. Synthetic labels have no counts
            and vectors.
          dtype: type of the matmuls; None = float32.
          rngs: for the weights.
        """

    @abc.abstractmethod
    def __call__(
        self, features: Features, *, labels: jax.Array | None = None, rngs: nnx.Rngs | None = None
    ) -> Prediction:
        """Classify images.

        Args:
          features: the features in `read`. All other features are None.
          labels: f32[B,K] in training, for heads that use them as an input.
          rngs: for dropout.
        """

    def published_macs(self, tokens: int) -> tuple[int, int] | None:
        """Return two counts of multiply-adds per image with N = `tokens` patches, as in `BackboneShape.published_macs`.

        None, the default: all dot products and convolutions are counted in the program of the head.
        """
        return None

    def norm_macs(self, tokens: int) -> int:
        """Return the part of norms in the first count of `published_macs`."""
        return 0

    def attention(self, features: Features) -> dict[str, jax.Array]:
        """Return the attention of each label, `labels` f32[B,K,N], see Prediction; {} if the head has no attention."""
        return {}

    @classmethod
    def terms(cls, config: ConfigDict) -> tuple[str, ...]:
        """Return the possible keys of `config.loss.terms`: `logits` and the keys of `Prediction.terms`.

        () if the loss of the head consists of penalties only.
        """
        return ("logits",)

    @classmethod
    def gate_entries(cls, config: ConfigDict) -> dict[str, list[str]]:
        """Return the names of the E entries of each gate in `Prediction.gates`; {} without gates."""
        return {}

    @classmethod
    def frozen_rules(cls, config: ConfigDict) -> tuple[tuple[str, bool], ...]:
        """Return rules (regex of paths, False) that freeze parameters; they precede `config.trainable`."""
        return ()

    @classmethod
    def mistakes(cls, config: ConfigDict) -> list[str]:
        """Return the errors in a config with this head, one sentence without a final period each."""
        return []

    @classmethod
    def warnings(cls, config: ConfigDict) -> list[str]:
        """Return warnings about settings of a valid config that are probably unintended, one sentence each."""
        return []
