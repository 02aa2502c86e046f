"""Catalog entry of the text tower that belongs to a backbone: architecture, files, tokens and templates."""

from __future__ import annotations

from dataclasses import dataclass

from mlmoe_jax.models.published import PublishedFile
from mlmoe_jax.models.text.tower import TextShape


@dataclass(frozen=True)
class TokenFormat:
    """What a family does with a text before its tower reads it."""

    padding: str  # the token that fills a row after its text
    start: str = ""  # the token before a text; empty = none
    end: str = ""  # the token after a text, which a text that is too long keeps; empty = none
    # Whether every row is filled up to the length of the tower, which was trained to read padding. If not, rows are as
    # long as the longest text.
    fixed: bool = False
    lower_case: bool = False  # whether letters are converted to lower case first


@dataclass(frozen=True)
class TextEntry:
    """The text tower that belongs to a backbone of the catalog."""

    shape: TextShape
    weights: PublishedFile  # the published weights. For CLIP and SigLIP 2, they are in the file of the backbone.
    tokenizer: PublishedFile
    format: TokenFormat  # what happens to a text and to its tokens
    templates: tuple[str, ...]  # the default prompts, with {} for the name of a label
    # True if the towers were trained with a softmax over prompts, so that only differences between the similarities of
    # prompts have a meaning. False if they were trained with a sigmoid per prompt.
    contrast: bool
