"""Catalog entry of the text tower that belongs to a backbone: architecture, files, tokens and templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.text.tower import TextShape


@dataclass(frozen=True)
class TokenFormat:
    """What a family does with a text before its tower reads it.

    Attributes:
      padding: the token that fills a row after its text.
      start: the token before a text; empty = none.
      end: the token after a text, which a text that is too long keeps; empty = none.
      fixed: whether every row is filled up to the length of the tower, which was trained to read padding. If not, rows
        are as long as the longest text.
      text: a key of `pretrained.tokenizers.TEXTS`, how the text is changed first.
    """

    padding: str
    start: str = ""
    end: str = ""
    fixed: bool = False
    text: str = "unchanged"


@dataclass(frozen=True)
class TextEntry:
    """The text tower that belongs to a backbone of the catalog.

    Attributes:
      shape: the architecture.
      file: the name of the weights file in the cache folder. For CLIP and SigLIP 2 it is the file of the backbone.
      address: the published location of the file.
      license: the license of the weights.
      tokenizer: the name of the tokenizer's file in the cache folder.
      tokenizer_address: the published location of this file.
      format: what happens to a text and to its tokens.
      templates: the default prompts, with {} for the name of a label.
      contrast: True if the towers were trained with a softmax over prompts, so that only differences between the
        similarities of prompts have a meaning. False if they were trained with a sigmoid per prompt.
    """

    shape: TextShape
    file: str
    address: str
    license: str
    tokenizer: str
    tokenizer_address: str
    format: TokenFormat
    templates: tuple[str, ...]
    contrast: bool


def beside(backbone: str, shape: TextShape, tokenizer: str, **settings: Any) -> TextEntry:
    """Return the entry of a text tower that is in the weights file of its backbone.

    Args:
      backbone: a name of the catalog of backbones.
      shape: the architecture.
      tokenizer: the repository on the Hugging Face Hub that has the tokenizer.
      **settings: the other attributes of TextEntry.
    """
    vision = catalog.entry(backbone)
    return TextEntry(
        shape,
        vision.file,
        vision.address,
        vision.license,
        f"{tokenizer.partition('/')[2]}/tokenizer.json",
        f"https://huggingface.co/{tokenizer}/resolve/main/tokenizer.json",
        **settings,
    )
