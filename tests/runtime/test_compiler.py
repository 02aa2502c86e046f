"""The options of programs, and what is known to be wrong in versions of JAX."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny import use_vit

from mlmoe_jax import load_config
from mlmoe_jax.runtime import compiler, setup
from mlmoe_jax.runtime.compiler import compiler_options, known_errors
from mlmoe_jax.runtime.sharding import make_mesh
from mlmoe_jax.training.build_steps import abstract_steps

VECTORS, YNNPACK = "xla_cpu_prefer_vector_width", "xla_cpu_experimental_ynn_fusion_type"


@pytest.fixture(autouse=True)
def no_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")


def test_only_programs_for_a_cpu_have_options():
    assert compiler_options("gpu", many_rows=True) == compiler_options("tpu") == {}
    assert compiler_options("cpu") == {VECTORS: 512}


def test_flags_of_the_user_stay(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--{VECTORS}=256 --{YNNPACK}=")
    assert compiler_options("cpu", many_rows=True) == {}


def test_the_steps_of_a_model_are_compiled_with_the_options(monkeypatch):
    use_vit(monkeypatch, patch=32)
    asked = []
    monkeypatch.setattr(compiler, "compiler_options", lambda *a, **k: asked.append((a, k)) or {VECTORS: 256})
    for module in ("mlmoe_jax.models.apply", "mlmoe_jax.training.step"):
        monkeypatch.setattr(f"{module}.compiler_options", compiler.compiler_options)
    config = load_config("linear_probe:dataset=digits")
    abstract_steps(config, make_mesh(config.mesh), 4)
    assert asked == [(("cpu",), {})] * 2, "training and evaluation"


@pytest.mark.parametrize("options", [{}, {"many_rows": True}])
def test_this_version_knows_the_options(options):
    program = jax.jit(lambda x: x @ x, compiler_options=compiler_options("cpu", **options))
    assert np.asarray(program(jnp.ones((8, 8), jnp.bfloat16)))[0, 0] == 8


def test_sums_with_many_rows_are_right():
    """Two sums that YNNPACK computes wrongly, the first in JAX 0.10.2, the second in all versions until 0.12.0.1."""
    options = compiler_options("cpu", many_rows=True)
    rows = np.random.default_rng(0).normal(size=(40_000, 3)).astype(np.float32)
    program = jax.jit(
        lambda rows: jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2))(rows), compiler_options=options
    )
    np.testing.assert_allclose(program(rows), (rows**2).sum(axis=1), rtol=1e-5)
    some = rows[:3600].reshape(5, 60, 36)
    program = jax.jit(lambda x: jnp.sum((x @ jnp.full((5, 36, 36), 0.37)) * x, axis=-1), compiler_options=options)
    np.testing.assert_allclose(program(some), 0.37 * some.sum(axis=-1) ** 2, rtol=1e-3, atol=1e-3)


# --------------------------------------------------------------------------------------------------------------- errors
GPU = SimpleNamespace(platform="gpu", compute_capability="9.0")


@pytest.mark.parametrize(
    ("version", "device", "named"),
    [
        ((0, 10, 2), GPU, ["39336", "40564"]),
        ((0, 11, 1), SimpleNamespace(platform="gpu", compute_capability="12.0"), ["39336", "40564", "39486"]),
        ((0, 11, 2), GPU, []),
        ((0, 12, 0, 1), GPU, []),
        ((0, 10, 2), SimpleNamespace(platform="cpu"), []),
    ],
)
def test_errors_of_a_version_on_a_device_are_named(monkeypatch, version, device, named):
    monkeypatch.setattr(jax, "__version_info__", version)
    said = known_errors(device)
    assert [number for number in ("39336", "40564", "39486") if number in said] == named
    assert bool(said) == bool(named)


def test_known_errors_are_logged_once(monkeypatch, caplog):
    setup._warn.cache_clear()
    monkeypatch.setattr(setup, "known_errors", lambda device: f"wrong on {device.platform}")
    config = load_config("linear_probe:dataset=digits")
    for _ in range(2):
        setup.setup_jax(config.copy_and_resolve_references())
    assert caplog.messages == ["wrong on cpu"]
