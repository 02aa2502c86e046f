"""The text towers of SigLIP 2 (Tschannen et al., 2025; SigLIP: Zhai et al., ICCV 2023).

A bidirectional transformer over exactly 64 tokens. The vector of a text is the output at the last of them, which is
padding for most texts, after a linear layer.
"""

from __future__ import annotations

import jax

from mlmoe_jax.models.backbones.vit_entries import VITS
from mlmoe_jax.models.published import on_hub
from mlmoe_jax.models.text.entry import TextEntry, TokenFormat
from mlmoe_jax.models.text.tower import TextShape, TextTower


class SiglipText(TextTower):
    """SigLIP's text tower; see TextTower. The tokens must be padded to the length of the shape, as in training."""

    has_bias = True
    projection_bias = True

    def mask(self, valid: jax.Array) -> None:
        """Return None, no mask: every token attends to all tokens and to padding, as in the training of the towers."""
        return None

    def pool(self, tokens: jax.Array, ids: jax.Array, valid: jax.Array) -> jax.Array:
        """Return the output at the last token, after the linear layer. Raises ValueError unless t is 64."""
        if tokens.shape[1] != self.shape.length:
            raise ValueError(f"SigLIP reads {self.shape.length} tokens with padding, not {tokens.shape[1]}")
        return self.proj(tokens[:, -1])


_TEMPLATES = ("This is a photo of {}.",)  # of the authors' examples
_FORMAT = TokenFormat(padding="<pad>", end="<eos>", fixed=True, lower_case=True)
# All towers of SigLIP 2 have the tokens of Gemma.
_TOKENIZER = on_hub("google/siglip2-base-patch16-224", "Apache-2.0", "tokenizer.json")
_SIZES = {"vitb16": (768, 12, 12, 3072), "vitl16": (1024, 24, 16, 4096), "so400m14": (1152, 27, 16, 4304)}


def _entry(backbone: str) -> TextEntry:
    """Return the entry of the text tower in the file of a backbone."""
    vision = VITS[backbone]
    width, depth, heads, hidden = _SIZES[backbone.split("_")[1]]
    shape = TextShape(
        SiglipText,
        width=width,
        depth=depth,
        heads=heads,
        hidden=hidden,
        length=64,
        vocabulary=256_000,
        mlp="gelu_tanh",
        eps=1e-6,
        output=vision.shape.width,
    )
    return TextEntry(shape, vision.weights, _TOKENIZER, _FORMAT, _TEMPLATES, contrast=False)


SIGLIP_TEXTS: dict[str, TextEntry] = {name: _entry(name) for name in VITS if name.startswith("siglip2_")}
