"""The location of the cache folder."""

from pathlib import Path

from mlmoe_jax.runtime.files import cache_folder


def test_the_cache_folder_is_chosen_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.setenv("MLMOE_CACHE", "")
    assert cache_folder() == tmp_path / "xdg" / "mlmoe_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert cache_folder() == tmp_path / "home" / ".cache" / "mlmoe_jax"
