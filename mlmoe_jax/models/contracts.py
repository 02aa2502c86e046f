"""The contracts of backbones and heads, and the values that pass between backbone, prompts, head and loss.

A new head is a subclass of `Head` in a file of its own and a line in `heads/catalog.py`. A new backbone family is a
module with the interface of `Backbone`, its `BackboneShape`, and a line in `backbones/catalog.py`. `docs/extending.md`
has an example of each.

Shape letters: B batch, H W image, N patch tokens, D width, L blocks, P prompts per block, G groups per side,
M prompts (= experts) per group, K labels, E entries of a gate.
"""

from __future__ import annotations

import abc
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mlmoe_jax.models.macs import forward_macs

if TYPE_CHECKING:
    from mlmoe_jax.data.labels.space import LabelSpace

CLS, PROMPTS, PATCHES = "cls", "prompts", "patches"
LABELS = "labels"


@dataclass(frozen=True)
class Prompts:
    """What a prompt method hands to the ViT.

    tokens: f32[L or 1, 1 or B, P, D]. L sets: block i uses `tokens[i]` and forgets it afterwards (deep prompts). One
    set, and `carry`: the prompts enter the first block and travel on.
    mask: bool[P,P] numpy, True where a prompt (row) may attend to a prompt (column); None = everywhere.
    present: bool[P]; a prompt that is not present is as if it were not in the sequence; None = all are.
    key_value: f32[L, 1 or 2, m, D], further keys and values of every block after its projection; with 1, the keys are
    the values.
    carry: f32[L−1] in 0…1. What enters block i+1 is c·(prompts leaving block i) + (1 − c)·(prompts entering it).
    temperature: f32[L], divides the attention logits of every block.
    """

    tokens: jax.Array
    mask: np.ndarray | None = None
    present: jax.Array | None = None
    key_value: jax.Array | None = None
    carry: jax.Array | None = None
    temperature: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Features:
    """What a backbone returns; a field that was not in `read` is None and was not computed.

    cls: f32[B,D]. prompts: f32[B,P,D]. patches: f32[B,N,D], row-major over `grid` = (rows, columns).
    attention: see Prediction; of `cls` and `prompts`, if they are read and attention was asked for.
    """

    cls: jax.Array | None
    prompts: jax.Array | None
    patches: jax.Array | None
    grid: tuple[int, int] = field(metadata={"static": True})
    attention: dict[str, jax.Array] = field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prediction:
    """What every model returns.

    logits: f32[B,K], the logit of the reported probability.
    terms: further logits f32[B,K] that are supervised under their own names.
    gates: routing weights f32[B,K,E] (static gates: f32[1,K,E]).
    penalties: f32[B], a value per image to be added to the loss.
    attention: where tokens look, only if it was asked for: the weights f32[B,Q,N] with which each reads the N
    patches, the mean over heads. `cls` (Q = 1) and `prompts` (Q = P) are those of the backbone's last block, as far as
    the head reads them; `labels` (Q = K) those of the label queries in the last layer of a decoder, or of ADD-GCN's
    attention over the map. They are not scaled to the patches: a row sums to what patches get out of 1, and the rest
    went to other tokens (class token, registers, prompts).
    grid: (rows, columns) of the patches, row-major, with `attention`.
    """

    logits: jax.Array
    terms: dict[str, jax.Array] = field(default_factory=dict)
    gates: dict[str, jax.Array] = field(default_factory=dict)
    penalties: dict[str, jax.Array] = field(default_factory=dict)
    attention: dict[str, jax.Array] = field(default_factory=dict)
    grid: tuple[int, int] | None = field(default=None, metadata={"static": True})


# ------------------------------------------------------------------------------------------------------------ backbones
class Backbone(Protocol):
    """A feature extractor: an nnx module from images to the features that a head reads.

    Its parameters lie below `backbone/`. Whatever is not in `read` is not computed.
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

        read: which of `cls`, `prompts` and `patches` the head reads. norm: apply the final norm, if there is one, to
        them. return_attention: return `Features.attention` as well, if there is attention.
        Raises ValueError for features that it does not have, and for prompts that it cannot take.
        """


class BackboneShape(abc.ABC):
    """The architecture of a backbone: a frozen dataclass, one class per family, with a value per variant.

    It builds the backbone and answers all questions about the family, so that no other module knows the families.
    """

    width: int  # D, the channels of a feature
    patch: int  # the pixels between two patch tokens
    takes_prompts = False  # whether it can be given `Prompts`; then it has `depth` and `heads` as well

    @abc.abstractmethod
    def build(
        self, *, dtype: jnp.dtype | None = None, remat: bool = False, batch_norm: str = "frozen", rngs: nnx.Rngs
    ) -> Backbone:
        """Build the backbone with random weights.

        dtype: of matrix products; None = float32. remat: the backward pass computes each block again instead of keeping
        what is inside it. batch_norm: see layers.batch_norm; without effect if there is none.
        """

    def fits(self, side: int) -> bool:
        """Return whether images of `side` × `side` pixels can be encoded."""
        return side % self.patch == 0

    def frozen_rules(self, batch_norm: str) -> tuple[tuple[str, bool], ...]:
        """Return the rules to stand before those of `config.trainable`: what a setting freezes."""
        return ()

    def published_macs(self, side: int, prompts: nnx.Module | None) -> tuple[int, int, int]:
        """Return multiply-adds for one image of `side` × `side` pixels, and its number N of patch tokens.

        The first count is of layers as the prompt-tuning papers count them, the second of what a full count adds, see
        training.preflight.cost. Without other knowledge: all dot products and convolutions, and nothing more.
        """
        layers, features = forward_macs(lambda: self.build(rngs=nnx.Rngs(0)), (1, side, side, 3))
        return layers, 0, math.prod(features.grid)


# ---------------------------------------------------------------------------------------------------------------- heads
@dataclass(frozen=True)
class LabelRows:
    """Parameters with one entry per label along each of `axes`, in the order of the labels, and `further` behind them.

    pattern: a regular expression searched for in parameter paths (`head/classifier/kernel`). A parameter that matches
    but has another size along the axis is laid out by something else, such as the one row that all labels share.
    """

    pattern: str
    axes: tuple[int, ...] = (0,)
    further: int = 0


class Head(nnx.Module):
    """From features to the logits of K labels; the base of all heads, which says all that others may ask of one.

    A head overrides what differs from the values here. Nothing outside a head's file asks which kind of head it is.
    Its parameters lie below `head/`.
    """

    # ---- of the module; some heads set these per instance
    read: tuple[str, ...] = ()
    """The features it reads, of `cls`, `prompts` and `patches`."""
    by_label: bool = False
    """Whether labels are apart in it, so that it may be sharded by label. It then calls `partition.gathered` on all
    that its labels read, once, where it goes from images to labels. False if labels interact: it is replicated."""

    # ---- of the class
    label_rows: tuple[LabelRows, ...] = ()
    """Its parameters with an entry per label. They are carried to other labels by name, and sharded over them."""
    group_rows: str | None = None
    """A pattern of the parameters that are laid out by groups of labels; they fit groups of the same structure only."""
    vector_rows: str | None = None
    """A pattern of the parameters that were learned on the labels' word vectors; they fit the same vectors only."""
    needs_group_prompts: bool = False
    """Whether it reads the prompts of label groups, which only model.prompts.kind=group gives."""
    needs_vectors: bool = False
    """Whether it needs a word vector per label, `LabelSpace.vectors`."""
    unknown_labels: str = ""
    """What its training does with unknown labels, other than leaving them out of the loss; said as a warning."""

    @classmethod
    @abc.abstractmethod
    def from_config(
        cls, config: ConfigDict, width: int, space: LabelSpace, *, dtype: jnp.dtype | None, rngs: nnx.Rngs
    ) -> Self:
        """Build the head that `config.model` describes, with random weights.

        width: D of the backbone. space: the labels: names, groups, vectors, and their order and counts in training.
        Made-up labels have no counts and no vectors. dtype: of matrix products; None = float32.
        """

    @abc.abstractmethod
    def __call__(
        self, features: Features, *, labels: jax.Array | None = None, rngs: nnx.Rngs | None = None
    ) -> Prediction:
        """Classify; the features that are not in `read` are None.

        labels: f32[B,K], given in training only, for heads that learn from the labels themselves. rngs: for dropout.
        """

    @abc.abstractmethod
    def published_macs(self, tokens: int) -> tuple[int, int]:
        """Return the multiply-adds per image with N = `tokens` patches: of layers, and what a full count adds."""

    def attention(self, features: Features) -> dict[str, jax.Array]:
        """Return where each label looks, `labels` f32[B,K,N], see Prediction; {} of a head without attention."""
        return {}

    @classmethod
    def terms(cls, config: ConfigDict) -> tuple[str, ...]:
        """Return the logits that `config.loss.terms` may weigh: `logits`, and those of `Prediction.terms`.

        () of a head whose loss is in its penalties alone.
        """
        return ("logits",)

    @classmethod
    def gate_entries(cls, config: ConfigDict) -> dict[str, list[str]]:
        """Return the names of the E entries of every gate in `Prediction.gates`, gate -> names; {} without gates."""
        return {}

    @classmethod
    def frozen_rules(cls, config: ConfigDict) -> tuple[tuple[str, bool], ...]:
        """Return the rules to stand before those of `config.trainable`: what a setting freezes."""
        return ()

    @classmethod
    def mistakes(cls, config: ConfigDict) -> list[str]:
        """Return what does not fit together in a config with this head, one sentence without a full stop each."""
        return []

    @classmethod
    def warnings(cls, config: ConfigDict) -> list[str]:
        """Return what a valid config with this head does that is probably unintended, one sentence each."""
        return []

    @classmethod
    def rows_of(cls, path: str) -> LabelRows | None:
        """Return the first of `label_rows` for a parameter path, or None."""
        return next((rows for rows in cls.label_rows if re.search(rows.pattern, path)), None)
