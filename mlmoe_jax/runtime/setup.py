"""Set up the devices and types of a run from its config."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.sharding import make_mesh

AUTO = "auto"


def setup_jax(config: ConfigDict, devices: Sequence[jax.Device] | None = None, *, training: bool = True) -> Mesh:
    """Return the mesh, see `make_mesh`, and resolve the types of the config.

    A type that is `auto` is replaced by the type for the platform of the devices, so that a run folder records it.

    Args:
      config: the config of a run. It is changed.
      devices: the devices of the mesh; by default all.
      training: check that `train.batch_size` is a multiple of the number of devices times `train.accumulate`.

    Raises:
      UserError: the batch size is not a multiple, or the mesh does not fit the devices.
    """
    mesh = make_mesh(config.mesh, devices)
    platform = (jax.devices() if devices is None else devices)[0].platform
    config.model.dtype, config.model.frozen_dtype = dtypes(config, platform)
    if training:
        require_whole_batch(config, mesh.size)
    return mesh


def require_whole_batch(config: ConfigDict, devices: int) -> None:
    """Raise UserError unless a training batch splits into equal parts for all devices and accumulations."""
    size, parts = config.train.batch_size, devices * config.train.accumulate
    if size % parts:
        near = max(1, round(size / parts)) * parts
        raise UserError(
            f"train.batch_size is {size}, which is not a multiple of {parts}, the devices times train.accumulate; set "
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
