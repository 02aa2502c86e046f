"""Compiled programs are kept for later processes; where that fails, one line tells it and the work goes on."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from mlmoe_jax.config import default_config
from mlmoe_jax.runtime import programs
from mlmoe_jax.runtime.programs import keep_programs
from mlmoe_jax.runtime.sharding import setup_jax

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_default_matmul_precision",
)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A new cache folder, in a JAX that has no cache of compiled programs yet."""
    before, show = {name: getattr(jax.config, name) for name in SETTINGS}, warnings.showwarning
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(programs, "SHORTEST", 0)
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "cache" / "programs"
    warnings.showwarning = show
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
    config = default_config()
    setup_jax(config)
    first = run_anew()
    assert len(files(folder)) == 1
    assert "cache_hits" not in events
    events.clear()
    np.testing.assert_array_equal(run_anew(), first)
    assert "cache_hits" in events
    assert "cache_misses" not in events
    assert jax.config.jax_compilation_cache_max_size == config.compile.cache * 2**30
    assert folder.stat().st_mode & 0o077 == 0  # others could make this process run their code


def test_the_size_is_limited_and_0_keeps_nothing(folder):
    keep_programs(0)
    run_anew()
    assert not folder.exists()
    keep_programs(100 / 2**30)  # 100 bytes
    with pytest.warns(UserWarning, match="exceeds the maximum cache size of 100 bytes"):
        run_anew()
    assert files(folder) == []


def test_a_cache_that_jax_has_already_is_left_alone(folder, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    keep_programs(1)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert not folder.exists()


def test_programs_for_other_devices_are_not_kept(folder):
    setup_jax(default_config(), jax.devices())
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_told_in_one_line(folder, capsys):
    folder.parent.write_text("a file, where the folder should be")
    keep_programs(1)
    assert capsys.readouterr().err == (
        f"compiled programs are not kept for later runs: {folder} cannot be written (Not a directory)\n"
    )
    assert run_anew().tolist() == [0, 3, 9, 18, 30]


def test_a_damaged_program_is_compiled_again_and_replaced(folder, capsys):
    keep_programs(1)
    first = run_anew()
    [file] = files(folder)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])  # as a full disk leaves it
    np.testing.assert_array_equal(run_anew(), first)
    shown = capsys.readouterr().err
    assert shown.startswith(f"compiled programs in {folder} that cannot be read are compiled again (")
    assert shown.count("\n") == 1
    assert len(file.read_bytes()) > len(whole) // 2
    np.testing.assert_array_equal(run_anew(), first)
    assert not capsys.readouterr().err


def test_a_disk_that_fills_up_is_told_once_and_other_warnings_pass(folder, capsys, monkeypatch):
    passed: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: passed.append(str(message)))
    keep_programs(1)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for name in "ab":
            reason = "OSError: [Errno 28] No space left on device"
            warnings.warn(f"Error writing persistent compilation cache entry for 'jit_{name}': {reason}", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert capsys.readouterr().err == (
        f"compiled programs are not kept for later runs: {folder} cannot be written "
        "(OSError: [Errno 28] No space left on device)\n"
    )
    assert passed == ["something else"]
