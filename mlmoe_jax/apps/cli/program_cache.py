"""The cache of compiled programs: JAX's persistent compilation cache, in the cache folder.

A program is compiled once for all runs of a sweep, and for all processes that predict. The key in the cache covers the
program, the versions of JAX and XLA, the options of the compiler, and the devices, including the features of a CPU.
Several processes may use the cache at once.
"""

from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.files import GIB, cache_folder
from mlmoe_jax.runtime.progress import status

MOST_BYTES = GIB
SHORTEST = 0.1  # seconds; programs that compile faster than this are not cached


def cache_programs() -> None:
    """Enable JAX's persistent compilation cache, limited to MOST_BYTES on disk by removing the oldest programs.

    The call has no effect if JAX already has a cache (JAX_COMPILATION_CACHE_DIR), or if caching is off
    (JAX_ENABLE_COMPILATION_CACHE=false). It also has no effect in a multi-process job on GPUs, because the processes
    share autotuning results. If the folder of the cache cannot be written, a message is printed and nothing is cached.
    """
    import jax  # only modes that compute need it
    from jax.experimental.compilation_cache import compilation_cache

    together = distributed.process()[1] > 1 and jax.default_backend() == "gpu"
    if not jax.config.jax_enable_compilation_cache or jax.config.jax_compilation_cache_dir or together:
        return
    folder = cache_folder() / "programs"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # who can write to it can run code in this process
    except OSError as error:
        status(f"compiled programs are not cached: {folder} cannot be written ({error.strerror or error})")
        return
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # JAX decides at its first program whether it has a cache
