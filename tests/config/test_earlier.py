"""Stored configs of earlier versions."""

import json

import pytest

from mlmoe_jax.config import from_json
from mlmoe_jax.config.earlier import STYLE_KEYS, STYLES


def stored(kind="query", **decoder):
    return json.dumps({"model": {"head": {"kind": kind, "decoder": {"width": 64, **decoder}}}})


@pytest.mark.parametrize("style", STYLES)
def test_the_keys_that_became_a_style_are_read(style, capsys):
    decoder = from_json(stored(**dict(zip(STYLE_KEYS, STYLES[style], strict=True)))).model.head.decoder
    assert (decoder.style, decoder.width) == (style, 64)
    assert from_json(stored(style=style)).model.head.decoder.style == style
    assert capsys.readouterr().err == ""


def test_what_cannot_be_read_as_the_same_model_is_refused(refusal):
    assert "use the version that trained the run" in refusal(from_json, stored(pre_norm=True))
    assert from_json(stored("linear", pre_norm=True)).model.head.decoder.style == "dr_moe"
    other = json.dumps({"model": {"prompts": {"segments": 8}}})
    assert "model.prompts.segments must be 16 in this version" in refusal(from_json, other)


def test_a_cache_in_memory_is_one_on_disk():
    assert from_json('{"data": {"cache": "ram"}}').data.cache == "disk"
