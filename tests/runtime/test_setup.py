"""JAX is set up as a config says, and compiled programs are kept for later processes."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from mlmoe_jax.config import default_config
from mlmoe_jax.runtime import setup
from mlmoe_jax.runtime.setup import cache_programs, dtypes, setup_jax

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_default_matmul_precision",
)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A new cache folder, in a JAX that has no cache of compiled programs yet."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(setup, "SHORTEST", 0)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield tmp_path / "cache" / "programs"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def events():
    """The names of JAX's events."""
    seen: list[str] = []
    listen = lambda name, **_: seen.append(name.rpartition("/")[2])  # noqa: E731
    jax.monitoring.register_event_listener(listen)
    yield seen
    jax.monitoring.unregister_event_listener(listen)


def run_anew() -> np.ndarray:
    """Compile and run a program as a new process would."""
    jax.clear_caches()
    compilation_cache.reset_cache()

    def kept_program(x):
        return jnp.cumsum(x * 3)

    return np.asarray(jax.jit(kept_program)(np.arange(5.0, dtype=np.float32)))


def files(folder) -> list:
    return sorted(folder.glob("jit_kept_program-*-cache"))


def test_a_program_is_compiled_once_and_then_found(folder, events):
    jax.jit(lambda x: x + 1)(1)  # JAX decides at its first program whether it has a cache
    setup_jax(default_config())
    first = run_anew()
    assert len(files(folder)) == 1
    assert "cache_hits" not in events
    events.clear()
    np.testing.assert_array_equal(run_anew(), first)
    assert "cache_hits" in events
    assert "cache_misses" not in events
    assert jax.config.jax_compilation_cache_max_size == 2**30
    assert folder.stat().st_mode & 0o077 == 0  # others could make this process run their code


def test_the_size_is_limited_and_jax_may_keep_nothing(folder, monkeypatch):
    jax.config.update("jax_enable_compilation_cache", False)
    cache_programs()
    jax.config.update("jax_enable_compilation_cache", True)
    run_anew()
    assert not folder.exists()
    monkeypatch.setattr(setup, "MOST_BYTES", 100)
    cache_programs()
    with pytest.warns(UserWarning, match="exceeds the maximum cache size of 100 bytes"):
        run_anew()
    assert files(folder) == []


def test_a_cache_that_jax_has_already_is_left_alone_and_programs_for_other_devices_are_not_kept(folder, tmp_path):
    setup_jax(default_config(), jax.devices())
    assert not folder.exists()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    cache_programs()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_told_in_one_line(folder, capsys):
    folder.parent.write_text("a file, where the folder should be")
    cache_programs()
    assert capsys.readouterr().err == (
        f"compiled programs are not cached: {folder} cannot be written (Not a directory)\n"
    )
    assert run_anew().tolist() == [0, 3, 9, 18, 30]


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


def test_setup_sets_the_precision_and_checks_the_batches(refusal, monkeypatch):
    config, precision = default_config(), jax.config.jax_default_matmul_precision
    config.model.matmul_precision = "highest"
    try:
        mesh = setup_jax(config)
        assert mesh.size == len(jax.devices())
        assert jax.config.jax_default_matmul_precision == "highest"
        assert config.model.dtype != "auto"
    finally:
        jax.config.update("jax_default_matmul_precision", precision)
    config.model.matmul_precision = precision
    monkeypatch.setattr(
        "mlmoe_jax.runtime.setup.make_mesh", lambda sizes, devices: SimpleNamespace(size=len(devices or "abc"))
    )
    config.train.batch_size, config.eval.batch_size = 9, 6
    assert setup_jax(config).size == 3
    assert setup_jax(config, jax.devices()[:1]).size == 1
    config.train.batch_size, config.eval.batch_size = 10, 7
    sentence = "train.batch_size is 10, which does not split over 3 devices; 9 does: set --config.train.batch_size=9"
    assert refusal(setup_jax, config) == sentence
    assert setup_jax(config, training=False).size == 3
