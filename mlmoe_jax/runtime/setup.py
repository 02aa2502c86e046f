"""Set up the devices and types of a run from its config."""

from __future__ import annotations

import functools
import logging
import resource
from collections.abc import Sequence

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.compiler import known_errors
from mlmoe_jax.runtime.files import GIB, cache_folder
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.sharding import find_devices, make_mesh
from mlmoe_jax.runtime.storage import remove_leftovers

AUTO = "auto"
_logger = logging.getLogger(__name__)


def setup_jax(config: ConfigDict, devices: Sequence[jax.Device] | None = None, *, training: bool = True) -> Mesh:
    """Build the device mesh of a run, see `make_mesh`, and replace dtypes `auto` in the config.

    The temporary files of killed processes in the cache are removed first. A dtype `auto` is replaced by the default of
    the platform, so that the run folder records the dtype in use. With `training`, `require_whole_batch` is called.

    Raises:
      UserError: as `require_whole_batch` or `make_mesh`.
    """
    remove_leftovers(cache_folder(), below=True)
    _say_limit_of_memory()
    mesh = make_mesh(config.mesh, devices)
    first = (find_devices() if devices is None else devices)[0]
    _warn(known_errors(first))
    config.model.dtype, config.model.frozen_dtype = dtypes(config, first.platform)
    if training:
        require_whole_batch(config, mesh.size)
    return mesh


@functools.cache
def _warn(errors: str) -> None:
    """Log the sentence of `known_errors` once."""
    if errors:
        _logger.warning(errors)


def _say_limit_of_memory() -> None:
    """Say that the address space is limited. XLA ends the process without a reason if it needs more."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        status(
            f"`ulimit -v` limits the addresses of this process to {limit / GIB:.1f} GiB; if it ends without a reason, "
            "raise the limit"
        )


def require_whole_batch(config: ConfigDict, devices: int) -> None:
    """Raise UserError unless `train.batch_size` is a multiple of the number of devices times `train.accumulate`."""
    size, parts = config.train.batch_size, devices * config.train.accumulate
    if size % parts:
        near = max(1, round(size / parts)) * parts
        raise UserError(
            f"train.batch_size is {size}, which is not a multiple of {parts}, the devices times train.accumulate; set "
            f"--config.train.batch_size={near}"
        )


# --------------------------------------------------------------------------------------------------------------- types
def dtypes(config: ConfigDict, platform: str = "") -> tuple[str, str]:
    """Return (dtype of matmuls, dtype of frozen weights), the defaults for a platform.

    `platform` is a JAX platform; "" means the default platform of this process. Matmuls in bfloat16 are several times
    as fast as in float32 on GPUs and TPUs, but not on most CPUs. Matmuls in bfloat16 round frozen weights anyway, so
    frozen weights are stored in bfloat16, unless evaluation uses another dtype.
    """
    model = config.model
    matmuls = model.dtype
    if matmuls == AUTO:
        matmuls = "float32" if (platform or find_devices()[0].platform) == "cpu" else "bfloat16"
    if model.frozen_dtype != AUTO:
        return matmuls, model.frozen_dtype
    rounded = matmuls == "bfloat16" and config.eval.dtype in ("same", "bfloat16")
    return matmuls, "bfloat16" if rounded else "float32"
