"""The text towers of CLIP (Radford et al., ICML 2021) and OpenCLIP (Cherti et al., CVPR 2023).

A causal transformer over at most 77 tokens. The vector of a text is the output at its end token, projected. The feature
of an image is projected too, by a matrix that is stored beside both towers.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mlmoe_jax.models.backbones.vit_entries import VITS
from mlmoe_jax.models.layers.initializers import Dtype
from mlmoe_jax.models.text.entry import TextEntry, TokenFormat, beside
from mlmoe_jax.models.text.tower import Similarity, TextShape, TextTower


@dataclass(frozen=True)
class ClipTextShape(TextShape):
    """The architecture of CLIP's text tower.

    Attributes:
      output: E, the width of the vectors of texts and of projected images.
      image_width: the width of the backbone's feature.
    """

    output: int
    image_width: int

    def build(self, *, dtype: Dtype = None, rngs: nnx.Rngs) -> ClipText:
        return ClipText(self, dtype=dtype, rngs=rngs)


class ClipText(TextTower):
    """CLIP's text tower; see TextTower."""

    def __init__(self, shape: ClipTextShape, *, dtype: Dtype = None, rngs: nnx.Rngs):
        similarity = Similarity(bias=False, projection=(shape.image_width, shape.output))
        super().__init__(shape, similarity, dtype=dtype, rngs=rngs)
        self.proj = nnx.Linear(shape.width, shape.output, use_bias=False, dtype=dtype, rngs=rngs)

    def mask(self, valid: jax.Array) -> np.ndarray:
        """Return bool[t,t], True for a token and those before it. Padding comes last, so no token of a text sees it."""
        length = valid.shape[1]
        return np.tril(np.ones((length, length), bool))

    def pool(self, tokens: jax.Array, ids: jax.Array, valid: jax.Array) -> jax.Array:
        """Return the projected output at the first end token, the token with the largest number of the vocabulary."""
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
_TOKENIZER = "openai/clip-vit-base-patch32"


def _entry(backbone: str, width: int, heads: int) -> TextEntry:
    """Return the entry of the text tower in the file of a backbone; vectors are as wide as the tower."""
    vision = VITS[backbone].shape
    shape = ClipTextShape(
        width=width,
        depth=12,
        heads=heads,
        hidden=4 * width,
        length=77,
        vocabulary=49408,
        mlp=vision.mlp,
        eps=1e-5,
        output=width,
        image_width=vision.width,
    )
    return beside(backbone, shape, _TOKENIZER, format=_FORMAT, templates=_TEMPLATES, contrast=True)


CLIP_TEXTS: dict[str, TextEntry] = {
    "clip_vitb16": _entry("clip_vitb16", 512, 8),
    "clip_vitl14": _entry("clip_vitl14", 768, 12),
    "clip_vitl14_336": _entry("clip_vitl14_336", 768, 12),
    "openclip_vitb16_laion2b": _entry("openclip_vitb16_laion2b", 512, 8),
    "openclip_vitl14_laion2b": _entry("openclip_vitl14_laion2b", 768, 12),
    "openclip_vitb16_datacomp": _entry("openclip_vitb16_datacomp", 512, 8),
    "openclip_vitl14_datacomp": _entry("openclip_vitl14_datacomp", 768, 12),
}
