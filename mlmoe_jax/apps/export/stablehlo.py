"""Export a run as a StableHLO program of JAX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax import export
from safetensors.numpy import save_file

from mlmoe_jax.apps.export.catalog import Export, ExportTarget
from mlmoe_jax.apps.export.program import image_shape, program_of, weights_of
from mlmoe_jax.runtime.storage import whole_file

_PLATFORMS = ("cpu", "cuda", "tpu")


def _write(job: Export) -> str:
    """Write model.stablehlo, a program for any number of images on all platforms, and its weights beside it.

    The weights are arguments of the program, not constants in it, so it has less than 1 MB.
    """
    weights = weights_of(job.run)
    shapes = {path: jax.ShapeDtypeStruct(value.shape, value.dtype) for path, value in weights.items()}
    with jax.default_device("cpu"):  # so that it has no call of cuDNN, which other platforms do not know
        program = export.export(jax.jit(program_of(job.run)), platforms=_PLATFORMS)(shapes, image_shape(job.run))
    (job.path / "model.stablehlo").write_bytes(program.serialize())
    with whole_file(job.path / "weights.safetensors") as partial:
        save_file(weights, partial)
    return f"for {', '.join(_PLATFORMS)}"


def _load(folder: Path) -> Callable[[np.ndarray], np.ndarray]:
    import jax
    from jax import export
    from safetensors.numpy import load_file

    program = jax.jit(export.deserialize(bytearray((folder / "model.stablehlo").read_bytes())).call)
    weights = jax.device_put(load_file(folder / "weights.safetensors"))
    return lambda images: np.asarray(program(weights, images))


TARGET = ExportTarget(
    _write,
    _load,
    files={
        "model.stablehlo": f"the program, a serialized `jax.export.Exported` for {', '.join(_PLATFORMS)}",
        "weights.safetensors": "its weights in float32, by parameter path",
    },
    install=f'pip install "jax>={jax.__version__}" flatbuffers safetensors numpy pillow',
    about={"platforms": list(_PLATFORMS)},
)
