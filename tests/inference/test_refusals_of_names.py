"""Vectors of label names that do not belong to a model."""

import contextlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny
from helpers.name_vectors import drawn_vectors
from helpers.refusals import Refusal, each
from helpers.runs import CLASSES, published_config
from helpers.text_towers import use_twin

from mlmoe_jax.data.labels.name_vectors import LabelName
from mlmoe_jax.data.labels.space import label_space_of
from mlmoe_jax.inference.by_names import names_origin
from mlmoe_jax.inference.text_encoder import encode_names, vectors_for
from mlmoe_jax.runs.assemble import assemble

VECTORS = drawn_vectors(CLASSES, 8)


def of_config(name: str, *says: str, **changes) -> Refusal:
    """A config whose vectors cannot be read."""
    config = published_config(model__head__kind="cosine", **changes)
    return Refusal(name, None, lambda _: vectors_for(config), *says)


def of_vectors(name: str, *says: str, **fields) -> Refusal:
    """Vectors with other attributes, for the backbone `tiny`."""

    @contextlib.contextmanager
    def make(at: Path):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLMOE_CACHE", str(at / "cache"))
            tiny.write_cache(at / "cache")
            tiny.use(patch)
            yield published_config(model__head__kind="cosine", model__head__names="v.safetensors")

    space = label_space_of(replace(VECTORS, **fields))
    return Refusal(name, make, lambda config: assemble(config, space), "v.safetensors has vectors for ", *says)


def of_names(name: str, *says: str, labels=("sea", "cat"), templates=(), kind="clip_gelu", **options) -> Refusal:
    """Two names that a small image-text model encodes; the text after a tab describes a name."""

    @contextlib.contextmanager
    def make(at: Path):
        with pytest.MonkeyPatch.context() as patch:
            yield use_twin(patch, at / "cache", kind)

    given = [LabelName(name, tuple(descriptions)) for name, *descriptions in (label.split("\t") for label in labels)]
    return Refusal(name, make, lambda backbone: encode_names(backbone, given, templates, **options), *says)


def of_key(name: str, *says: str) -> Refusal:
    """A key that asks for canonical texts, and vectors."""

    def make(at: Path) -> str:
        replace(VECTORS, backbone="siglip2_vitb16_224").write(at / "v.safetensors")
        return str(at / "v.safetensors")

    key = {"model.backbone.canonical_texts": True}
    return Refusal(name, make, lambda file: names_origin(file, overrides=key).label_space, *says)


REFUSALS = [
    of_config("no file of names", "model.head.kind=cosine starts from the vectors of the label names"),
    of_config("a missing file", "cannot read v.safetensors", model__head__names="v.safetensors"),
    of_vectors("vectors of another backbone", "dinov2, and the backbone is tiny; encode", backbone="dinov2"),
    of_names("a name of 300 words", "has more than the 77 tokens that the text tower", labels=("sea", "dog " * 300)),
    of_names("a template without a name", "the template 'a photo' has no {}", templates=["a {}", "a photo"]),
    of_names("random weights", "random weights of openclip_vitb16_laion2b have no text tower", weights="none"),
    of_names("other weights", "cannot read no.safetensors: No such file", weights="no.safetensors"),
    of_names(
        "names that differ in capitals",
        "the names 'Dog' and 'dog' have equal tokens for openclip_vitb16_laion2b",
        labels=("cat", "Dog", "dog"),
    ),
    of_names(
        "descriptions that differ in capitals",
        "the names 'crane' and 'bird' have equal tokens for siglip2_vitb16_224",
        labels=("crane\ta bird\tA crane", "bird\ta Crane\tA Bird"),
        kind="siglip2",
    ),
    of_names(
        "names that differ in punctuation",
        "the names 'C++' and 'C#' have equal tokens",
        labels=("C++", "C#"),
        kind="siglip2",
        canonical_texts=True,
    ),
    of_key(
        "canonical texts of vectors",
        "model.backbone.canonical_texts has no effect on ",
        "v.safetensors, whose names are encoded",
    ),
    of_vectors(
        "a width of other features",
        "features of 17 numbers, as tiny has them, and tiny has 8; encode",
        vectors=np.ones((len(CLASSES), 17), np.float32),
        background=np.zeros(17, np.float32),
    ),
    of_vectors(
        "a projection of other features",
        "features of 7 numbers, as tiny has them, and tiny has 8; encode",
        projection=np.ones((7, 8), np.float32),
    ),
    of_vectors("vectors of other weights", "other weights of tiny than these; encode", fingerprint="ab"),
]


@each(REFUSALS)
def test_refusals(case, tmp_path):
    case.check(tmp_path)
