import pytest

from mlmoe_jax.errors import UserError
from mlmoe_jax.models import rules

PATHS = ("backbone/blocks/3/attn/qkv/kernel", "head/co/gate/bias", "prompts/deep")


def test_first_match_wins_and_regex_is_searched_anywhere():
    ordered = [("gate/bias$", 1), ("head/", 2), (".*", 3)]
    assert [rules.first_match(ordered, path) for path in PATHS] == [3, 1, 3]
    assert rules.first_match(ordered[::-1], "head/co/gate/bias") == 3


def test_default_is_used_only_without_a_match():
    assert rules.first_match([("head/", None)], "head/co/gate/bias", 5) is None
    assert rules.first_match([("head/", 2)], "prompts/deep", None) is None
    assert rules.first_match([], "prompts/deep", 0.5) == 0.5
    with pytest.raises(UserError, match="prompts/deep"):
        rules.first_match([("head/", 2)], "prompts/deep")


def test_assign_returns_the_value_per_path():
    assert rules.assign([("^head/", False), ("", None)], PATHS) == dict(zip(PATHS, (None, False, None), strict=True))


def test_rules_may_be_lists_as_read_from_json():
    assert rules.assign([["head/", 2], [".*", 3]], PATHS) == dict(zip(PATHS, (3, 2, 3), strict=True))


def test_assign_lists_all_paths_without_a_rule():
    with pytest.raises(UserError) as caught:
        rules.assign([("head/", 2)], PATHS)
    assert [path in str(caught.value) for path in PATHS] == ["head/" not in path for path in PATHS]


def test_first_match_names_a_broken_regex():
    with pytest.raises(UserError, match="not a regular expression"):
        rules.first_match([("(", 1)], "head/co/gate/bias", 0)
