"""Compiled programs are cached for later processes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from mlmoe_jax.apps.cli import program_cache
from mlmoe_jax.apps.cli.program_cache import cache_programs
from mlmoe_jax.main import main

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A new cache folder, in a JAX that has no cache of compiled programs yet."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(program_cache, "SHORTEST", 0)
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
    cache_programs()
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
    monkeypatch.setattr(program_cache, "MOST_BYTES", 100)
    cache_programs()
    with pytest.warns(UserWarning, match="exceeds the maximum cache size of 100 bytes"):
        run_anew()
    assert files(folder) == []


def test_a_cache_that_jax_has_already_is_left_alone(folder, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    cache_programs()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert not folder.exists()


@pytest.mark.parametrize("mode", ["eval", "report"])
def test_modes_that_compute_have_a_cache(folder, tmp_path, mode, capsys):
    assert main([f"--mode={mode}", f"--workdir={tmp_path / 'none'}"]) == 2
    assert folder.exists() == (mode == "eval")


def test_a_folder_that_cannot_be_written_is_told_in_one_line(folder, capsys):
    folder.parent.write_text("a file, where the folder should be")
    cache_programs()
    assert capsys.readouterr().err == (
        f"compiled programs are not cached: {folder} cannot be written (Not a directory)\n"
    )
    assert run_anew().tolist() == [0, 3, 9, 18, 30]
