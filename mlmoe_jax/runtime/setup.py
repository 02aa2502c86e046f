"""Set up JAX from a config: precision, types, devices, and the cache of compiled programs.

Compiled programs are in the cache folder, in JAX's persistent compilation cache. A program is compiled once for all
runs of a sweep, and for all processes that predict. Its key covers the program, the versions of JAX and XLA, the
options of the compiler, and the devices, including the features of a CPU. Several processes may use the cache at once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.files import GIB, cache_folder
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.sharding import make_mesh

AUTO = "auto"
MOST_BYTES = GIB
SHORTEST = 0.1  # seconds; programs that compile faster than this are not cached


def setup_jax(config: ConfigDict, devices: Sequence[jax.Device] | None = None, *, training: bool = True) -> Mesh:
    """Set the precision of matmuls, for the whole process, and return the mesh, see `make_mesh`.

    Types that are `auto` are replaced by the types for the platform of the devices, so that a run folder
    records them. Programs for the devices of this process are cached, see `cache_programs`.

    Args:
      config: the config of a run. It is changed.
      devices: the devices of the mesh; by default all.
      training: check that `train.batch_size` is a multiple of the number of devices times `train.accumulate`.

    Raises:
      UserError: the batch size is not a multiple, or the mesh does not fit the devices.
    """
    jax.config.update("jax_default_matmul_precision", config.model.matmul_precision)
    if devices is None:
        cache_programs()
    mesh = make_mesh(config.mesh, devices)
    platform = (jax.devices() if devices is None else devices)[0].platform
    config.model.dtype, config.model.frozen_dtype = dtypes(config, platform)
    if training:
        require_whole_batch(config, mesh.size)
    return mesh


def require_whole_batch(config: ConfigDict, devices: int) -> None:
    """Raise UserError unless a training batch splits into equal parts for all devices and accumulations."""
    size, parts = config.train.batch_size, config.train.accumulate
    if size % (devices * parts):
        near = max(1, round(size / devices / parts)) * devices * parts
        over = " and ".join(
            f"{count} {what}" for count, what in ((devices, "devices"), (parts, "accumulations")) if count > 1
        )
        raise UserError(
            f"train.batch_size is {size}, which does not split over {over}; {near} does: set "
            f"--config.train.batch_size={near}"
        )


# --------------------------------------------------------------------------------------------------------------- types
def dtypes(config: ConfigDict, platform: str = "") -> tuple[str, str]:
    """Return the types of matmuls and of frozen weights on a platform; "" = the platform of JAX in this process.

    Matmuls in bfloat16 are several times as fast as in float32 on GPUs and TPUs, but not on most CPUs. They round
    frozen weights to bfloat16 anyway, so frozen weights are stored in bfloat16, unless evaluation uses another type.
    """
    model = config.model
    matmuls = model.dtype
    if matmuls == AUTO:
        matmuls = "float32" if (platform or jax.default_backend()) == "cpu" else "bfloat16"
    if model.frozen_dtype != AUTO:
        return matmuls, model.frozen_dtype
    rounded = matmuls == "bfloat16" and config.eval.dtype in ("same", "bfloat16")
    return matmuls, "bfloat16" if rounded else "float32"


# ---------------------------------------------------------------------------------------------------- compiled programs
def cache_programs() -> None:
    """Let JAX cache the programs that it compiles from now on, up to MOST_BYTES; the oldest programs are removed first.

    Without effect if JAX has a cache already (JAX_COMPILATION_CACHE_DIR), if caching is off
    (JAX_ENABLE_COMPILATION_CACHE=false), and in a job of several processes on GPUs, whose autotuning is shared.
    If the folder cannot be written, one line says so.
    """
    together = distributed.process()[1] > 1 and jax.default_backend() == "gpu"
    if not jax.config.jax_enable_compilation_cache or jax.config.jax_compilation_cache_dir or together:
        return
    folder = programs_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # who can write to it can run code in this process
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(2**20))
    except OSError as error:
        status(f"compiled programs are not cached: {folder} cannot be written ({error.strerror or error})")
        return
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # JAX decides at its first program whether it has a cache


def programs_folder() -> Path:
    """Return the folder of compiled programs."""
    return cache_folder() / "programs"
