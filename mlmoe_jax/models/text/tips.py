"""The text towers of TIPSv2 (Cao et al., CVPR 2026; TIPS: Maninis et al., ICLR 2025).

A bidirectional transformer over at most 64 tokens, with fixed positions. The vector of a text is the mean of the
outputs at its tokens. It is compared with the first class token of an image: cos(image, text) / temperature.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from mlmoe_jax.models.backbones.vit_entries import VITS
from mlmoe_jax.models.layers.initializers import Dtype
from mlmoe_jax.models.layers.positions import sequence_positions
from mlmoe_jax.models.published import on_hub, on_server
from mlmoe_jax.models.text.entry import TextEntry, TokenFormat
from mlmoe_jax.models.text.tower import TextShape, TextTower


class TipsText(TextTower):
    """TIPSv2's text tower; see TextTower. Padding changes nothing."""

    def __init__(self, shape: TextShape, *, dtype: Dtype = None, rngs: nnx.Rngs):
        super().__init__(shape, dtype=dtype, rngs=rngs)
        del self.pos_embed

    def embed(self, tokens: jax.Array, valid: jax.Array) -> jax.Array:
        """Return the rows of the table, multiplied by √D as in training, plus fixed positions: f32[n,t,D]."""
        width = self.shape.width
        return self.token_embed[tokens] * math.sqrt(width) + sequence_positions(tokens.shape[1], width)

    def mask(self, valid: jax.Array) -> jax.Array:
        """Return bool[n,1,1,t]: every token attends to the tokens of its text, not to padding."""
        return valid[:, None, None, :]

    def pool(self, tokens: jax.Array, ids: jax.Array, valid: jax.Array) -> jax.Array:
        """Return the mean of the outputs at the tokens of each text, without padding; 0 for a text without tokens."""
        count = valid.sum(axis=1, keepdims=True)
        return tokens.sum(axis=1, where=valid[..., None]) / jnp.maximum(count, 1)


# Of the authors' zero-shot segmentation, from TCL (google-deepmind/tips, pytorch/TIPS_zeroshot_segmentation.ipynb).
TEMPLATES = (
    "itap of a {}.",
    "a bad photo of a {}.",
    "a origami {}.",
    "a photo of the large {}.",
    "a {} in a video game.",
    "art of the {}.",
    "a photo of the small {}.",
    "a photo of many {}.",
    "a photo of {}s.",
)
_FORMAT = TokenFormat(padding="<pad>", lower_case=True)
_TOKENIZER = on_hub("google/tipsv2-b14", "CC-BY-4.0", "tokenizer.model")  # of all sizes


def _entry(backbone: str, hidden: int, depth: int = 12) -> TextEntry:
    """Return the entry of the text tower of a backbone. The file of both towers on the Hub lacks the temperature."""
    vision = VITS[backbone]
    shape = TextShape(
        TipsText,
        width=vision.shape.width,
        depth=depth,
        heads=vision.shape.heads,
        hidden=hidden,
        length=64,
        vocabulary=32_000,
        mlp="relu",
        eps=1e-5,
        output=vision.shape.width,
    )
    weights = on_server(vision.weights.address.replace("_vision", "_text"), vision.weights.license)
    return TextEntry(shape, weights, _TOKENIZER, _FORMAT, TEMPLATES, contrast=True)


TIPS_TEXTS: dict[str, TextEntry] = {
    "tipsv2_vitb14": _entry("tipsv2_vitb14", 3072),
    "tipsv2_vitl14": _entry("tipsv2_vitl14", 4096),
    "tipsv2_so400m14": _entry("tipsv2_so400m14", 4304, depth=27),
    "tipsv2_vitg14": _entry("tipsv2_vitg14", 6144),
}
