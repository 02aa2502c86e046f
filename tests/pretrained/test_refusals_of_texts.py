"""Backbones without texts, and files of tokenizers and text towers that are damaged or of another model."""

import contextlib
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers.paths import PARITY
from helpers.refusals import CUT, GONE, Refusal, damaged, each
from helpers.tensor_files import write
from helpers.text_towers import arrays_of, small_entry, tokenizer_file
from helpers.twins import below

from mlmoe_jax.models.text.catalog import TEXT_CATALOG, text_entry
from mlmoe_jax.pretrained.locate import locate
from mlmoe_jax.pretrained.text_towers import load_text_tower
from mlmoe_jax.pretrained.tokenizers import open_tokenizer
from tools.parity import tips

NAMES = {"clip": "clip_gelu", "siglip2": "siglip2"}


# ------------------------------------------------------------------------------------------------------------ backbones
def without_a_cache(backbone: str, file: str, *says: str) -> Refusal:
    """The `weights` or the `tokenizer` of a backbone's text tower, in no cache, without a network."""

    @contextlib.contextmanager
    def make(at):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLMOE_CACHE", str(at))
            patch.setenv("MLMOE_OFFLINE", "1")
            yield getattr(text_entry(backbone), file)

    return Refusal(f"{file} of {backbone}", make, locate, *says)


NO_TEXTS = "the backbone dinov2_vitb14 was trained without texts, so it has no vectors of names; there are {}"
NO_TEXTS = NO_TEXTS.format(", ".join(TEXT_CATALOG))


# ----------------------------------------------------------------------------------------------------------- tokenizers
def open_as(kind: str):
    return lambda path: open_tokenizer(path, small_entry(NAMES[kind]))


def copied(kind: str, name: str = "tokenizer.json"):
    """Write the tokenizer of a twin."""

    def make(at):
        (at / name).write_bytes(tokenizer_file(kind).read_bytes())
        return at / name

    return make


def of_damage(name: str, how, says: str, file: str = "tokenizer.json") -> Refusal:
    return damaged(f"{file} {name}", copied("clip", file), file, how, open_as("clip"), says)


def without_the_extra(package: str, file: str) -> Refusal:
    @contextlib.contextmanager
    def make(at):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            yield copied("clip", file)(at)

    says = f'labels by name need the package {package}; in the folder with pyproject.toml, run pip install -e ".[text]"'
    return Refusal(f"no {package}", make, open_as("clip"), says)


def open_large(path):
    entry = small_entry("clip_gelu")
    return open_tokenizer(path, replace(entry, shape=replace(entry.shape, vocabulary=49_408)))


ANOTHER = "{at}/tokenizer.json is the tokenizer of another model: "


# --------------------------------------------------------------------------------------------------------------- towers
def load_as(name: str, **settings):
    """Load the file into the tower of a twin, perhaps of other sizes."""
    shape = replace(small_entry(name).shape, **settings)
    return lambda path: load_text_tower(shape, path, arrays_of(name)["tokens"])


def of_tensors(name: str, twin: str, change, call, *says: str) -> Refusal:
    """The file of a twin with changed tensors."""
    return Refusal(
        name, lambda at: write(at / "model.safetensors", change(below(arrays_of(twin), "weights/"))), call, *says
    )


def tips_file(change):
    """Write the file of a twin of TIPSv2 with changed tensors, as on the Hub."""
    tensors = below(np.load(PARITY / "tips.npz"), "gelu/weights/")
    return lambda at: write(at / "model.safetensors", {key: np.asarray(x) for key, x in change(tensors).items()})


def load_tips(path):
    shape = replace(text_entry("tipsv2_vitb14").shape, **tips.TEXT, vocabulary=tips.VOCABULARY)
    return load_text_tower(shape, path, np.arange(6).reshape(2, 3))


def without(pattern: str):
    return lambda tensors: {key: x for key, x in tensors.items() if pattern not in key}


def not_finite(tensors):
    table = tensors["text_model.embeddings.token_embedding.weight"].copy()
    table[-1] = np.nan
    return tensors | {"text_model.embeddings.token_embedding.weight": table}


REFUSALS = [
    Refusal("a backbone without texts", None, lambda _: text_entry("dinov2_vitb14"), NO_TEXTS),
    Refusal(
        "a name like a backbone",
        None,
        lambda _: text_entry("clip_vitb61"),
        "there is no backbone 'clip_vitb61' for model.backbone.name; did you mean 'clip_vitb16'?",
    ),
    without_a_cache(
        "siglip2_vitb16_384",
        "tokenizer",
        "tokenizer.json is not in {at}/siglip2-base-patch16-224 ",
        "put a copy of the file at {at}/siglip2-base-patch16-224/tokenizer.json",
    ),
    without_a_cache(
        "clip_vitb16",
        "weights",
        "because MLMOE_OFFLINE is set; ",
        "put a copy of the file at {at}/vit_base_patch16_clip_224.openai/open_clip_model.safetensors",
    ),
    of_damage("cut", CUT, "{at}/tokenizer.json is damaged: "),
    of_damage("missing", GONE, "cannot read {at}/tokenizer.json: No such file or directory"),
    of_damage("of another kind", lambda content: content, "{at}/tokenizer.model is damaged: ", "tokenizer.model"),
    without_the_extra("tokenizers", "tokenizer.json"),
    without_the_extra("sentencepiece", "tokenizer.model"),
    Refusal("CLIP's tokens for SigLIP", copied("clip"), open_as("siglip2"), ANOTHER + "it has no token <eos>"),
    Refusal("SigLIP's for CLIP", copied("siglip2"), open_as("clip"), ANOTHER + "it has no token <|startoftext|>"),
    Refusal("a small tokenizer", copied("clip"), open_large, ANOTHER + "it has 700 tokens instead of 49408"),
    of_tensors(
        "a file without a text tower",
        "siglip2",
        without("text_model"),
        load_as("siglip2"),
        "{at}/model.safetensors has no text tower of a known layout; its first tensors are logit_bias, logit_scale, ",
    ),
    of_tensors(
        "CLIP's file for SigLIP",
        "clip_gelu",
        dict,
        load_as("siglip2"),
        "{at}/model.safetensors (hugging_face_clip_text layout) does not fit the model: no tensor for proj/bias",
    ),
    of_tensors(
        "another vocabulary",
        "siglip2",
        dict,
        load_as("siglip2", vocabulary=256_000),
        "{at}/model.safetensors has a table of tokens of shape (700, 16), which should have 256000 rows",
    ),
    of_tensors(
        "another length",
        "clip_gelu",
        dict,
        load_as("clip_gelu", length=64),
        "does not fit the model: pos_embed has shape (77, 16) instead of (64, 16)",
    ),
    of_tensors(
        "tensors that nobody knows",
        "siglip2",
        lambda tensors: tensors | {"text_model.more": np.ones(2, np.float32)},
        load_as("siglip2"),
        "does not fit the model: tensor text_model.more is unknown",
    ),
    of_tensors(
        "no projection of images",
        "clip_gelu",
        without("visual_projection"),
        load_as("clip_gelu"),
        "does not fit the model: no tensor for similarity/projection",
    ),
    of_tensors(
        "numbers that are not finite",
        "clip_gelu",
        not_finite,
        load_as("clip_gelu"),
        "tensor text_model.embeddings.token_embedding.weight in {at}/model.safetensors has non-finite numbers",
    ),
    Refusal(
        "TIPSv2 of the Hub, without its temperature",
        tips_file(without("temperature")),
        load_tips,
        "{at}/model.safetensors (tips_hub_text layout) does not fit the model: no tensor for similarity/scale",
    ),
    Refusal(
        "the vision tower of TIPSv2",
        tips_file(without("text_encoder")),
        load_tips,
        "{at}/model.safetensors has no text tower of a known layout; its first tensors are temperature, ",
    ),
    without_a_cache(
        "tipsv2_vitb14",
        "weights",
        "because MLMOE_OFFLINE is set; ",
        "put a copy of the file at {at}/tips_v2_oss_b14_text.npz",
    ),
]


@each(REFUSALS)
def test_refusals(case, tmp_path):
    case.check(tmp_path)
