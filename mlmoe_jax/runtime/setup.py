"""JAX is set up as a config says: precision, types, devices, and compiled programs that are kept.

Compiled programs are in the cache folder, in JAX's persistent compilation cache: a program is compiled once for all
runs of a sweep, and for all processes that predict. Its key covers the program, the versions of JAX and XLA, the
options of the compiler, and the devices, of a CPU with all its features. A lock lets several processes use it at once.
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
MOST_KEPT = GIB
SHORTEST = 0.1  # seconds; programs that compile faster than this are not kept


def setup_jax(config: ConfigDict, devices: Sequence[jax.Device] | None = None, *, training: bool = True) -> Mesh:
    """Set the precision of matmuls, for the whole process, and return the mesh, see `make_mesh`.

    Types of the config that are `auto` are replaced by those for the platform of the devices, so that a run folder
    records them. Programs for the devices of this process are kept, see `keep_programs`.

    Args:
      config: the config of a run, which is changed; pass a copy of one that a caller still needs.
      devices: the devices of the mesh; by default all.
      training: check that `train.batch_size` divides over the devices and `train.accumulate`.

    Raises:
      UserError: the batch does not divide, or the mesh does not fit the devices.
    """
    jax.config.update("jax_default_matmul_precision", config.model.matmul_precision)
    if devices is None:
        keep_programs()
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
    """Return the types of matmuls and of frozen weights on a platform; "" = the one that JAX uses here.

    Matmuls in bfloat16 are several times as fast as in float32 on GPUs and TPUs, but not on most CPUs. They round
    frozen weights to bfloat16 anyway, so these are stored in it, unless they are evaluated in matmuls of another type.
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
def keep_programs() -> None:
    """Let JAX keep the programs that it compiles from now on, up to MOST_KEPT bytes; the oldest ones go first.

    Without effect if JAX has a cache already (JAX_COMPILATION_CACHE_DIR) or shall have none
    (JAX_ENABLE_COMPILATION_CACHE=false), and in a job of several processes on GPUs, which search for the fastest
    kernels together. If the folder cannot be written, one line says so.
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
        status(f"compiled programs are not kept for later runs: {folder} cannot be written ({error.strerror or error})")
        return
    jax.config.update("jax_compilation_cache_max_size", MOST_KEPT)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # JAX decides at its first program whether it has a cache


def programs_folder() -> Path:
    """Return the folder of compiled programs."""
    return cache_folder() / "programs"
