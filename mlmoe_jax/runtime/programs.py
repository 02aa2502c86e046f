"""Compiled programs that are kept for later processes, in the cache folder.

This sets up JAX's persistent compilation cache, so a program is compiled once for all runs of a sweep, and for all
processes that predict. Its key covers the program, the versions of JAX and XLA, the options of the compiler, and the
devices, of a CPU with all its features. A lock lets several processes use it at once.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.files import cache_folder
from mlmoe_jax.runtime.memory import GIB
from mlmoe_jax.runtime.progress import status

FOLDER = "programs"
SHORTEST = 0.1  # seconds; to compile a program in less is faster than to look after its file
_TROUBLE = "persistent compilation cache entry for '"  # in the warnings of JAX, followed by the name of the program


def keep_programs(size: float) -> None:
    """Let JAX keep the programs that it compiles from now on, at most `size` GiB; the oldest ones go first.

    Without effect if `size` is 0, if JAX has a cache already (JAX_COMPILATION_CACHE_DIR), and in a job of several
    processes on GPUs, which compile together. A folder that cannot be written is told in one line, and nothing is kept.
    """
    together = distributed.process()[1] > 1 and jax.default_backend() == "gpu"  # they share the search for fast kernels
    if not size or jax.config.jax_compilation_cache_dir or together:
        return
    folder = cache_folder() / FOLDER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # who can write to it can run code in this process
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(2**20))
    except OSError as error:
        status(f"compiled programs are not kept for later runs: {folder} cannot be written ({error.strerror or error})")
        return
    jax.config.update("jax_compilation_cache_max_size", int(size * GIB))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # JAX decides at its first program whether it has a cache
    warnings.showwarning = _without_trouble(folder, warnings.showwarning)


def _without_trouble(folder: Path, show: Callable[..., None]) -> Callable[..., None]:
    """Return a `warnings.showwarning` that tells JAX's warnings about the cache in one line, and removes damaged files.

    JAX compiles a program that it cannot read, and would leave a file in place that a full disk has cut short.
    """
    told: set[str] = set()

    def shown(message: Warning | str, *where, **options) -> None:
        failure, found, rest = str(message).partition(_TROUBLE)
        if not found:
            show(message, *where, **options)
            return
        name, _, reason = rest.partition("': ")
        if failure.startswith("Error reading"):
            text = f"compiled programs in {folder} that cannot be read are compiled again"
            for damaged in folder.glob(f"{name}-*"):
                damaged.unlink(missing_ok=True)
        else:
            text = f"compiled programs are not kept for later runs: {folder} cannot be written"
        if text not in told:
            told.add(text)
            status(f"{text} ({reason.splitlines()[0]})")

    return shown
