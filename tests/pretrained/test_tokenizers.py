"""Tokens of a thousand texts against transformers, and what a tokenizer must not do."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import sentencepiece
from helpers.text_towers import ARRAYS, small_entry, tokenizer_file

from mlmoe_jax.models.text.catalog import text_entry
from mlmoe_jax.models.text.entry import TokenFormat
from mlmoe_jax.pretrained.locate import locate
from mlmoe_jax.pretrained.tokenizers import canonical, open_tokenizer
from tools.parity import text_towers as twins

KINDS = {"clip": "clip_gelu", "siglip2": "siglip2"}
STRINGS = twins.strings()


def opened(kind: str, path=None, **settings):
    entry = small_entry(KINDS[kind])
    return open_tokenizer(path or tokenizer_file(kind), replace(entry, format=replace(entry.format, **settings)))


def stored(kind: str, key: str) -> np.ndarray:
    return ARRAYS[f"{kind}/strings/{key}"]


def changed_file(folder, kind: str, **changes):
    """The file of a tokenizer with other entries."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(tokenizer_file(kind).read_text()) | changes))
    return path


# ------------------------------------------------------------------------------------------------- against transformers
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(kind):
    """Accents, emoji, CJK, blanks, punctuation and long texts."""
    tokens, valid = opened(kind).encode(STRINGS)
    assert tokens.shape == (1000, twins.LENGTHS[kind])
    np.testing.assert_array_equal(tokens, stored(kind, "tokens"))
    np.testing.assert_array_equal(valid, stored(kind, "valid"))


@pytest.mark.parametrize("kind", KINDS)
def test_rules_of_the_file_for_length_and_special_tokens_are_not_used(tmp_path, kind):
    """Published files differ in them. The family decides."""
    path = changed_file(
        tmp_path,
        kind,
        truncation={"direction": "Left", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 9},
            "direction": "Left",
            "pad_to_multiple_of": None,
            "pad_id": 5,
            "pad_type_id": 0,
            "pad_token": "x",
        },
        post_processor=None,
    )
    np.testing.assert_array_equal(opened(kind, path).encode(STRINGS)[0], stored(kind, "tokens"))


# ---------------------------------------------------------------------------------------------------------------- traps
def test_siglip_pads_to_64_tokens_and_not_to_the_longest_text():
    tokens, valid = opened("siglip2").encode(["cat", "a dog"])
    assert tokens.shape == (2, 64)
    assert valid.sum(1).max() < 10
    assert not tokens[~valid].any()  # <pad> is 0


def test_clip_pads_to_the_longest_text_as_no_text_sees_padding():
    tokens, valid = opened("clip").encode(["cat", "a dog"])
    assert tokens.shape[1] == valid.sum(1).max() < 10
    assert (tokens[~valid] == twins.VOCABULARY - 1).all()


def test_siglip_is_given_lower_case_by_a_file_that_does_not_know_it(tmp_path):
    """The published tokenizer.json of SigLIP 2 is Gemma's, which keeps capitals."""
    gemma = changed_file(
        tmp_path, "siglip2", normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    )
    np.testing.assert_array_equal(opened("siglip2", gemma).encode(STRINGS)[0], stored("siglip2", "tokens"))
    others = opened("siglip2", gemma, lower_case=False).encode(STRINGS)[0]
    assert (others != stored("siglip2", "tokens")).any(1).sum() > 500


def test_a_name_of_a_special_token_in_capitals_is_text(tmp_path):
    tokenizer = opened("siglip2")
    texts = ["a <EOS>", "a <eos>"]
    assert (tokenizer.encode(texts)[0] == 1).sum(1).tolist() == [1, 2]  # one ends the text


def test_punctuation_is_read():
    tokens, _ = opened("siglip2").encode(["C++", "c++", "C", "a dog", "a dog."])
    assert len({tuple(row) for row in tokens.tolist()}) == 4


@pytest.mark.parametrize(
    ("text", "kept", "expected"),
    [
        ("This is a {photo} of {}.", "{}", "this is a photo of {}"),
        ("traffic_light", ",", "traffic light"),
        ("T-shirt,  (red)\n\tXL!", ",", "tshirt, red xl"),
        ("  ", ",", ""),
        ("C++", ",", "c"),
        ("¿Qué? «Ärger» …", ",", "¿qué «ärger» …"),  # only ASCII's punctuation, as in big_vision
        ("ΣΊΣΥΦΟΣ", ",", "σίσυφος"),
    ],
)
def test_canonical(text, kept, expected):
    assert canonical(text, kept) == expected == twins_canonical(text, kept)


def twins_canonical(text: str, kept: str) -> str:
    """big_vision's `_canonicalize`, mark by mark; a letter stands for what is kept."""
    text = text.replace(kept, "Я")
    for mark in "!\"#$%&'()*+,-./:;<=>?@[\\]^`{|}~":
        text = text.replace(mark, "")
    text = text.replace("Я", kept).replace("_", " ").lower()
    return " ".join(text.split())


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_of_more_tokens_than_the_tower_reads_is_cut(kind):
    tokenizer = opened(kind)
    cut = np.array([tokenizer.is_cut(text) for text in STRINGS])
    entry = small_entry(KINDS[kind])
    longer = open_tokenizer(tokenizer_file(kind), replace(entry, shape=replace(entry.shape, length=2000)))
    np.testing.assert_array_equal(cut, longer.encode(STRINGS)[1].sum(1) > twins.LENGTHS[kind])
    for text in exactly_full(longer, twins.LENGTHS[kind]):
        assert not tokenizer.is_cut(text)
        assert tokenizer.is_cut(f"{text}7")


def exactly_full(tokenizer, length: int) -> list[str]:
    """Return texts of `length` tokens, start and end included."""
    texts = ["7" * count for count in range(length)]
    found = [text for text in texts if tokenizer.encode([text])[1].sum() == length]
    assert found
    return found


# -------------------------------------------------------------------------------------------------------- sentencepiece
@pytest.fixture(scope="module")
def model() -> bytes:
    """A small model of sentencepiece with <pad> as token 0."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in STRINGS if text.strip() and len(text) < 99]),
        model_writer=written,
        vocab_size=500,
        model_type="bpe",
        byte_fallback=True,
        **{"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "minloglevel": 2},
    )
    return written.getvalue()


def test_tokens_of_sentencepiece(tmp_path, model):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model)
    entry = small_entry("siglip2")
    shape = replace(entry.shape, vocabulary=500)
    tokenizer = open_tokenizer(path, replace(entry, shape=shape, format=TokenFormat(padding="<pad>")))
    tokens, valid = tokenizer.encode(STRINGS)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    for row, mask, text in zip(tokens, valid, STRINGS, strict=True):
        expected = reference.encode(text)[:64]
        assert row[mask].tolist() == expected
        assert not row[~mask].any()


# --------------------------------------------------------------------------------------------------------------- places
def test_files_in_the_cache_are_found(tmp_path, monkeypatch):
    """All towers of a family read the same tokenizer; the weights are those of the backbone."""
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path))
    for file in ("clip-vit-base-patch32/tokenizer.json", "siglip2-large-patch16-256/model.safetensors"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_bytes(b"x")
    tokenizers = {text_entry(name).tokenizer for name in ("clip_vitl14", "openclip_vitb16_laion2b")}
    assert [locate(file) for file in tokenizers] == [tmp_path / "clip-vit-base-patch32/tokenizer.json"]
    weights = text_entry("siglip2_vitl16_256").weights
    assert locate(weights) == tmp_path / "siglip2-large-patch16-256/model.safetensors"
