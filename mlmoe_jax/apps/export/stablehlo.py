"""Export a run as a StableHLO program of JAX."""

from __future__ import annotations

from pathlib import Path

import jax
from jax import export
from safetensors.numpy import save_file

from mlmoe_jax.apps.export.program import image_shape, program_of, weights_of
from mlmoe_jax.runs.restore import Run
from mlmoe_jax.runtime.storage import whole_file

PLATFORMS = ("cpu", "cuda", "tpu")


def write_stablehlo(run: Run, folder: Path) -> None:
    """Write model.stablehlo, a program for any number of images on all PLATFORMS, and its weights beside it.

    The weights are arguments of the program, not constants in it, so it has less than 1 MB.
    """
    weights = weights_of(run)
    shapes = {path: jax.ShapeDtypeStruct(value.shape, value.dtype) for path, value in weights.items()}
    with jax.default_device("cpu"):  # so that it has no call of cuDNN, which other platforms do not know
        program = export.export(jax.jit(program_of(run)), platforms=PLATFORMS)(shapes, image_shape(run))
    (folder / "model.stablehlo").write_bytes(program.serialize())
    with whole_file(folder / "weights.safetensors") as partial:
        save_file(weights, partial)
