"""The text towers of CLIP (Radford et al., ICML 2021) and OpenCLIP (Cherti et al., CVPR 2023).

A causal transformer over at most 77 tokens. The vector of a text is the output at its end token, projected. The feature
of an image is projected too, by a matrix that is stored beside both towers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mlmoe_jax.models.backbones.vit_entries import VITS
from mlmoe_jax.models.published import on_hub
from mlmoe_jax.models.text.entry import TextEntry, TokenFormat
from mlmoe_jax.models.text.tower import TextShape, TextTower


class ClipText(TextTower):
    """CLIP's text tower; see TextTower."""

    projection_bias = False

    def mask(self, valid: jax.Array) -> np.ndarray:
        """Return bool[t,t], the causal mask. Padding comes last, so no token of a text attends to padding."""
        length = valid.shape[1]
        return np.tril(np.ones((length, length), bool))

    def pool(self, tokens: jax.Array, ids: jax.Array, valid: jax.Array) -> jax.Array:
        """Return the projected output at the first end token. Its number is the largest in the vocabulary."""
        end = jnp.argmax(ids, axis=1)
        pooled = jnp.take_along_axis(tokens, end[:, None, None], axis=1)[:, 0]
        return self.proj(pooled)


# The seven of the authors' notebook, which together are about as good as all eighty of ImageNet (openai/CLIP,
# notebooks/Prompt_Engineering_for_ImageNet.ipynb).
_TEMPLATES = (
    "itap of a {}.",
    "a bad photo of the {}.",
    "a origami {}.",
    "a photo of the large {}.",
    "a {} in a video game.",
    "art of the {}.",
    "a photo of the small {}.",
)
# Tokens as in transformers. OpenCLIP pads with 0, which no text sees, and first repairs broken Unicode (ftfy) and
# HTML's character references.
_FORMAT = TokenFormat(padding="<|endoftext|>", start="<|startoftext|>", end="<|endoftext|>")
_TOKENIZER = on_hub("openai/clip-vit-base-patch32", "MIT", "tokenizer.json")
_SIZES = {"vitb16": (512, 8), "vitl14": (768, 12)}  # width, heads


def _entry(backbone: str) -> TextEntry:
    """Return the entry of the text tower in the file of a backbone; vectors are as wide as the tower."""
    vision = VITS[backbone]
    width, heads = _SIZES[backbone.split("_")[1]]
    shape = TextShape(
        ClipText,
        width=width,
        depth=12,
        heads=heads,
        hidden=4 * width,
        length=77,
        vocabulary=49408,
        mlp=vision.shape.mlp,
        eps=1e-5,
        output=width,
        image_width=vision.shape.width,
    )
    return TextEntry(shape, vision.weights, _TOKENIZER, _FORMAT, _TEMPLATES, contrast=True)


CLIP_TEXTS: dict[str, TextEntry] = {name: _entry(name) for name in VITS if "clip_" in name}
