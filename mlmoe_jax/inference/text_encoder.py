"""From the names of labels to their vectors, by the text tower that was trained with a backbone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float32
from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.config.loading import Overrides, override_pairs
from mlmoe_jax.config.table import keys_read
from mlmoe_jax.data.labels.name_vectors import (
    LabelName,
    NameVectors,
    is_vectors_file,
    mean_direction,
    read_label_names,
    read_name_vectors,
    require_vectors_file,
)
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.models.text.catalog import text_entry
from mlmoe_jax.models.text.tower import Similarity
from mlmoe_jax.pretrained.locate import backbone_file, locate
from mlmoe_jax.pretrained.text_towers import load_text_tower
from mlmoe_jax.pretrained.tokenizers import canonical, open_tokenizer
from mlmoe_jax.runs.assemble import backbone_fingerprint, load_pretrained
from mlmoe_jax.runtime.compiler import compiler_options
from mlmoe_jax.runtime.files import file_sha256
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.sharding import find_devices
from mlmoe_jax.runtime.text import printable, quantity

TEXTS_PER_CALL = 32  # texts per call of the tower
# The place of a name in a template, with the words that make no sense without it: "a photo of the {}" is "a photo".
_PLACE = re.compile(r"\s*(\bof\s+)?(\b(an?|the)\s+)?\{\}\w*")


def vectors_for(config: ConfigDict, known: NameVectors | None = None) -> NameVectors | None:
    """Return the vectors of the label names in the file `model.head.names`; None if this key is "".

    If the file is a list of names, the names are encoded with the default templates of the backbone. `known` are the
    vectors in the file, if it has been read. Raises UserError if the file cannot be read, if it has vectors and the
    config asks for canonical texts, or if the key is "" and the head is `cosine`.
    """
    file, backbone = config.model.head.names, config.model.backbone
    if not file:
        if config.model.head.kind == "cosine":
            raise UserError(
                "model.head.kind=cosine starts from the vectors of the label names; set model.head.names to their file"
            )
        return None
    if is_vectors_file(file):
        if backbone.canonical_texts:
            raise UserError(
                f"model.backbone.canonical_texts has no effect on {file}, whose names are encoded; leave it out, or "
                "encode the names with it"
            )
        vectors = known or read_name_vectors(file)
    else:
        options = {"weights": backbone.weights, "canonical_texts": backbone.canonical_texts}
        vectors = encode_names(backbone.name, read_label_names(file), **options)
        vectors = replace(vectors, sha256=file_sha256(file))
    status(f"{file}: vectors of {quantity(len(vectors.names), 'name')}, sha256 {vectors.sha256[:12]}")
    return vectors


def encode_file(
    names: str, output: str, backbone: str, templates: Sequence[str] = (), overrides: Overrides = ()
) -> NameVectors:
    """Write the vectors of a list of label names to the file `output`, and return them; see `encode_names`.

    `overrides` are config keys that the stage `encode` reads. Raises UserError if a key has no effect, the list cannot
    be read, or `output` cannot be written.
    """
    pairs = override_pairs(overrides)
    for key in configuration.find_unread(pairs, ("encode",)):
        known = ", ".join(keys_read("encode"))
        raise UserError(f"--config.{key} has no effect in mlmoe encode, which reads {known} alone")
    settings = configuration.apply_overrides(configuration.default_config(), pairs).model.backbone
    require_vectors_file(output)
    options = {"weights": settings.weights, "canonical_texts": settings.canonical_texts}
    vectors = encode_names(backbone, read_label_names(names), templates, **options)
    vectors.write(output)
    return vectors


def encode_names(
    backbone: str,
    labels: Sequence[LabelName],
    templates: Sequence[str] = (),
    *,
    weights: str = "auto",
    canonical_texts: bool = False,
) -> NameVectors:
    """Return the vectors of label names.

    The vector of a label is the normalized mean of the normalized vectors of its texts. These are the templates, each
    with the name in place of {}, or the descriptions of the label, if it has some.

    Args:
      backbone: the name of a backbone with a text tower.
      templates: texts with {} for a name. Empty: the templates of the family.
      weights: the value of `model.backbone.weights`. If it is a path, and both towers are published in one file, the
        text tower is read from this path too.
      canonical_texts: whether templates, names and descriptions are converted by `canonical`.

    Raises:
      UserError: the backbone has no text tower, the tower or its tokenizer is missing or belongs to another model, a
        template has no {}, a text has more tokens than the tower reads, or two labels have equal tokens.
    """
    entry = text_entry(backbone)
    templates = _list_templates(templates or entry.templates, canonical_texts)
    groups = _texts_of(labels, templates, canonical_texts, background=entry.contrast)
    tokens, valid = tokenize(backbone, [text for group in groups for text in group])
    ends = np.cumsum([len(group) for group in groups])[:-1]
    _require_different(labels, np.split(tokens, ends), backbone)
    encoded, similarity = encode_tokens(backbone, tokens, valid, weights)
    vectors = np.stack([mean_direction(part) for part in np.split(encoded, ends)])
    return NameVectors(
        names=tuple(label.name for label in labels),
        vectors=vectors[: len(labels)],
        background=vectors[-1] if entry.contrast else np.zeros_like(vectors[0]),
        backbone=backbone,
        templates=templates,
        descriptions=tuple(label.descriptions for label in labels),
        fingerprint=_fingerprint(backbone, weights),
        **_comparison(similarity),
    )


def _list_templates(templates: Sequence[str], canonical_texts: bool) -> tuple[str, ...]:
    for template in templates:
        if "{}" not in template:
            raise UserError(f"the template '{template}' has no {{}} for the name of a label; add it")
    return tuple(canonical(template, "{}") for template in templates) if canonical_texts else tuple(templates)


def _texts_of(
    labels: Sequence[LabelName], templates: Sequence[str], canonical_texts: bool, *, background: bool
) -> list[list[str]]:
    """Return the texts of each label; with `background`, also the templates without a name."""
    groups = []
    for label in labels:
        name, *described = [canonical(x, ",") if canonical_texts else x for x in (label.name, *label.descriptions)]
        groups.append(described or [template.replace("{}", name) for template in templates])
    if background:
        groups.append([_PLACE.sub("", template).strip() for template in templates])
    return groups


def _require_different(labels: Sequence[LabelName], tokens: Sequence[np.ndarray], backbone: str) -> None:
    """Raise UserError if all texts of two labels have equal tokens; `tokens` has the rows i32[n,t] of each label."""
    owners: dict[bytes, str] = {}
    for label, rows in zip(labels, tokens, strict=False):
        other = owners.setdefault(np.unique(rows, axis=0).tobytes(), label.name)
        if other != label.name:
            pair = f"'{printable(other, 60)}' and '{printable(label.name, 60)}'"
            raise UserError(
                f"the names {pair} have equal tokens for {backbone}, so their scores would be equal; remove one, or "
                "describe it after a tab"
            )


def _comparison(similarity: Similarity) -> dict[str, Any]:
    """Return the scale, the bias and the projection of a `Similarity`, as keyword arguments of `NameVectors`."""
    bias, projection = similarity.bias, similarity.projection
    return {
        "scale": float(similarity.scale[...]),
        "bias": 0.0 if bias is None else float(bias[...]),
        "projection": None if projection is None else np.asarray(projection[...]),
    }


def tokenize(backbone: str, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens i32[n,t] of texts, and bool[n,t], False for padding; UserError if a text has too many."""
    entry = text_entry(backbone)
    tokenizer = open_tokenizer(locate(entry.tokenizer), entry)
    if too_long := next(filter(tokenizer.is_cut, texts), ""):
        raise UserError(
            f"the text '{printable(too_long, 60)}' has more than the {tokenizer.length} tokens that the text tower of "
            f"{backbone} reads; shorten it"
        )
    return tokenizer.encode(texts)


def encode_tokens(
    backbone: str, tokens: np.ndarray, valid: np.ndarray, weights: str
) -> tuple[Float32[np.ndarray, "n e"], Similarity]:
    """Return the vectors f32[n,e] of texts, not normalized, and the parameters for their comparison with images.

    `tokens` and `valid` are results of `tokenize`. `encode_names` describes `backbone`, `weights` and the errors.
    """
    count = len(tokens)
    status(f"encoding {quantity(count, 'text')} by the text tower of {backbone}")
    tower, tokens = load_text_tower(text_entry(backbone).shape, _find_tower(backbone, weights), tokens)
    definition, values, _ = ModelDef.split(tower)
    options = compiler_options(find_devices()[0].platform)
    encode = jax.jit(lambda values, *given: definition.merge(values)(*given), compiler_options=options)
    vectors = []
    with jax.default_matmul_precision("highest"):
        for start in range(0, count, TEXTS_PER_CALL):
            rows = np.arange(start, start + TEXTS_PER_CALL) % count  # the last batch is filled up
            vectors.append(np.asarray(encode(values, tokens[rows], valid[rows]), np.float32))
    return np.concatenate(vectors)[:count], tower.similarity


def _find_tower(backbone: str, weights: str) -> Path:
    """Return the file with the text tower of a backbone. UserError if `weights` is "none".

    Some families publish both towers in one file. Then `weights`, if it is a path, is also the file of the text tower.
    """
    if weights == "none":
        raise UserError(f"random weights of {backbone} have no text tower; leave out model.backbone.weights=none")
    tower = text_entry(backbone).weights
    return backbone_file(backbone, weights) if tower == catalog.entry(backbone).weights else locate(tower)


def _fingerprint(name: str, weights: str) -> str:
    """Return the sha256 of all parameters of the backbone `name` with the values in `weights`."""
    backbone = nnx.eval_shape(lambda: catalog.entry(name).shape.build(rngs=nnx.Rngs(0)))
    load_pretrained(backbone, name, weights)
    return backbone_fingerprint(backbone)
