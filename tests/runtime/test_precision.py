"""The types that a config means by `auto`."""

import pytest

from mlmoe_jax.config import default_config
from mlmoe_jax.runtime import precision


@pytest.mark.parametrize(
    ("platform", "settings", "types"),
    [
        ("cpu", {}, ("float32", "float32")),
        ("gpu", {}, ("bfloat16", "bfloat16")),
        ("tpu", {}, ("bfloat16", "bfloat16")),
        ("tpu", {"model.dtype": "float32"}, ("float32", "float32")),
        ("cpu", {"model.dtype": "bfloat16"}, ("bfloat16", "bfloat16")),
        ("gpu", {"eval.dtype": "float16"}, ("bfloat16", "float32")),
        ("gpu", {"model.frozen_dtype": "float32"}, ("bfloat16", "float32")),
    ],
)
def test_types_by_platform(platform, settings, types):
    config = default_config()
    config.update_from_flattened_dict(settings)
    assert precision.types(config, platform) == types
    precision.settle(config, platform)
    assert (config.model.dtype, config.model.frozen_dtype) == types


def test_a_stored_config_replaces_only_auto():
    config, stored = default_config(), default_config()
    stored.model.dtype, stored.model.frozen_dtype = "bfloat16", "float32"
    config.model.frozen_dtype = "bfloat16"
    config.update_from_flattened_dict(precision.kept(config, stored))
    assert (config.model.dtype, config.model.frozen_dtype) == ("bfloat16", "bfloat16")
