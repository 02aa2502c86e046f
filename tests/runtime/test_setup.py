"""The devices and types of a run."""

import resource
from types import SimpleNamespace

import jax
import pytest

from mlmoe_jax.config import default_config
from mlmoe_jax.runtime.setup import dtypes, setup_jax


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
    assert dtypes(config, platform) == types


def test_setup_resolves_types_and_checks_the_batches(monkeypatch):
    config = default_config()
    assert setup_jax(config).size == len(jax.devices())
    assert config.model.dtype != "auto"
    monkeypatch.setattr(
        "mlmoe_jax.runtime.setup.make_mesh", lambda sizes, devices: SimpleNamespace(size=len(devices or "abc"))
    )
    config.train.batch_size, config.eval.batch_size = 9, 6
    assert setup_jax(config).size == 3
    assert setup_jax(config, jax.devices()[:1]).size == 1
    config.train.batch_size, config.eval.batch_size = 10, 7
    assert setup_jax(config, training=False).size == 3


def test_a_limit_of_addresses_is_said(monkeypatch, capsys):
    """XLA cannot say that it met the limit: it ends the process."""
    setup_jax(default_config(), training=False)
    assert "ulimit" not in capsys.readouterr().err
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (6 << 30, 6 << 30))
    setup_jax(default_config(), training=False)
    assert "`ulimit -v` limits the addresses of this process to 6.0 GiB" in capsys.readouterr().err
