"""The registry of the formats of `mlmoe export`. To add a format, write one module and add one line here.

This module does not import jax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmoe_jax.runtime.registry import Registry

if TYPE_CHECKING:
    import numpy as np

    from mlmoe_jax.runs.restore import Run

ALWAYS, AUTO = "always", "auto"  # of --include-frozen, beside never
PROBABILITY, FEATURES, MAP = "probability", "features", "map"  # of --outputs


@dataclass(frozen=True)
class Export:
    """An export in progress.

    Attributes:
      path: the file or folder to write.
      description: the content of model.json.
      include_frozen: for the format safetensors: which frozen weights to write, see `export_run`.
      images: u8[H,W,3] each, for `calibrated` formats: images to calibrate the activation ranges, and to compare the
        program with the run. See `quantize.parts`.
      outputs: the names of the outputs of a program, in their order.
    """

    run: Run
    path: Path
    description: Mapping[str, Any]
    include_frozen: str
    images: Sequence[np.ndarray] = ()
    outputs: Sequence[str] = (PROBABILITY,)


@dataclass(frozen=True)
class ExportTarget:
    """A format of `mlmoe export`.

    Attributes:
      write: function that writes the files of an export, and returns a few words for the line that `export_run` prints.
      load: function that loads an exported program: folder -> (images u8[B,H,W,3] -> {name: output}). The source of
        `load` is copied into load.py of the folder, so `load` imports all modules that it needs. None for a format
        without a program, which only stores tensors.
      files: file name -> its description in the README of the folder.
      install: the command in the README that installs the packages for `load`.
      place: function that returns the path of the value of --output. It raises UserError if the path cannot be written
        or a package is missing. None = `require_new`.
      needs: config key -> the only value that the format supports.
      calibrated: whether activation ranges are calibrated on images, so that the program only approximates the run.
    """

    write: Callable[[Export], str]
    load: Callable[[Path], Callable[[np.ndarray], dict[str, np.ndarray]]] | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    install: str = ""
    place: Callable[[str], Path] | None = None
    needs: Mapping[str, str] = field(default_factory=dict)
    calibrated: bool = False


OFFICIAL = "official"  # the format of a file without --format
TARGETS: Registry[ExportTarget] = Registry(
    "export format",
    {
        "stablehlo": "mlmoe_jax.apps.export.program:STABLEHLO",
        "onnx": "mlmoe_jax.apps.export.onnx:TARGET",
        "onnx_float16": "mlmoe_jax.apps.export.quantize:FLOAT16",
        "onnx_int8": "mlmoe_jax.apps.export.quantize:INT8",
        "safetensors": "mlmoe_jax.apps.export.program:SAFETENSORS",
        "peft": "mlmoe_jax.apps.export.program:PEFT",
        OFFICIAL: "mlmoe_jax.apps.export.program:AUTHORS",
    },
)
# (content of model.json, requirements, text of README.md) -> the further files of a folder, name -> text.
Template = Callable[[Mapping[str, Any], Sequence[str], str], dict[str, str]]
TEMPLATES: Registry[Template] = Registry(
    "template",
    {
        "mlflow": "mlmoe_jax.apps.export.templates:mlflow_files",
        "space": "mlmoe_jax.apps.export.templates:space_files",
    },
)
