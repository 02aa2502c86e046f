"""The values that pass between backbone, prompts, head and loss.

Shape letters: B batch, H W image, N patch tokens, D width, L blocks, P prompts a block, G groups a side,
M prompts (= experts) a group, K labels, E entries of a gate.
"""

from dataclasses import dataclass, field

import jax
import numpy as np

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
    attention: see Prediction; of `cls` and `prompts`, where they are read and explaining was asked for.
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
    penalties: f32[B], a value an image to be added to the loss.
    attention: where tokens look, only if explaining was asked for: the weights f32[B,Q,N] with which each reads the N
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
