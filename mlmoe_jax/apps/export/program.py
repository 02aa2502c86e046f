"""Export a run as a StableHLO program, or export its values as files of tensors.

The program is a function of weights and images, which includes the preprocessing and returns probabilities and, on
request, features and maps. Depending on the format, the tensors in the files have the names of this package (parameter
paths), of the authors' code, or of PEFT.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from safetensors.numpy import save_file

from mlmoe_jax.apps.export.targets import ALWAYS, AUTO, MAP, PROBABILITY, Export, ExportTarget
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.apply import apply_model
from mlmoe_jax.models.params import Params
from mlmoe_jax.pretrained.official import departures, export_official, require_writable
from mlmoe_jax.pretrained.peft import write_peft
from mlmoe_jax.runs.assemble import abstract_parts
from mlmoe_jax.runs.restore import Run
from mlmoe_jax.runtime.formats import dump_json
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import atomic_file

_PLATFORMS = ("cpu", "cuda", "tpu")
# A larger difference of a probability means that a program is wrong; rounding to 16 bits differs by less.
_WRONG = 1e-2
Program = Callable[[np.ndarray], Mapping[str, Any]]  # images u8[B,H,W,3] -> {output: f32[B,…]}


def program_of(run: Run, outputs: Sequence[str] = (PROBABILITY,)) -> Callable[[Params, jax.Array], dict]:
    """Return a function (weights, images u8[B,H,W,3]) -> {output: f32[B,…]}, for weights as in `Run.weights`.

    `outputs` are PROBABILITY, [B,K], and FEATURES and MAP, `features` and `map` of Prediction. The function raises
    UserError if the model has no map.
    """
    explained, placed = set(outputs) != {PROBABILITY}, replace(run, mesh=None)

    def label(weights: Params, image: jax.Array) -> dict[str, jax.Array]:
        prediction, _ = apply_model(placed, weights, {"image": image}, return_attention=explained)
        return _select(run, vars(prediction), outputs)

    return label


def _select(run: Run, prediction: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
    """Return the outputs f32[B,…] by name, of the fields of a prediction."""
    if MAP in outputs and prediction[MAP] is None:
        raise UserError(f"the head {run.config.model.head.kind} has no map of the labels; leave map out of --outputs")
    values = {**prediction, PROBABILITY: run.scores(prediction["logits"].astype(np.float32))}
    return {name: values[name].astype(np.float32) for name in outputs}


def image_shape(run: Run) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of the images, u8[B,H,W,3], with a symbolic dimension B."""
    size = run.preprocess.image_size
    (batch,) = export.symbolic_shape("B")
    return jax.ShapeDtypeStruct((batch, size, size, 3), np.uint8)


def outputs_of(run: Run, pixels: np.ndarray, outputs: Sequence[str] = (PROBABILITY,)) -> dict[str, np.ndarray]:
    """Return what a run computes for images u8[N,H,W,3] of its image size, {output: f32[N,…]}; see `program_of`."""
    step = run.eval_step(*({*outputs} - {PROBABILITY}))
    devices, found = run.mesh.size, list[dict[str, np.ndarray]]()
    size = devices * min(8, math.ceil(len(pixels) / devices))
    for first in range(0, len(pixels), size):
        rows = np.arange(first, first + size, dtype=np.int32) % len(pixels)  # the first images fill the last batch
        batch = {"image": pixels[rows], "id": rows, "mask": np.ones(size, np.float32)}
        found.append(_select(run, jax.device_get(step(run.values, run.frozen, batch)), outputs))
    return {name: np.concatenate([part[name] for part in found])[: len(pixels)] for name in outputs}


def require_equal(run: Run, program: Program, outputs: Sequence[str] = (PROBABILITY,)) -> str:
    """Compare the outputs of an exported program with the outputs of the run, on random images.

    Return text with the largest absolute differences, of features and maps relative to their largest value.
    Raises UserError if a difference exceeds _WRONG.
    """
    size, images = run.preprocess.image_size, 2 * run.mesh.size
    pixels = np.random.default_rng(0).integers(0, 256, (images, size, size, 3)).astype(np.uint8)
    found, texts = program(pixels), []
    for name, expected in outputs_of(run, pixels, outputs).items():
        difference = float(np.abs(found[name] - expected).max())
        if name != PROBABILITY:
            difference /= float(np.abs(expected).max()) or 1
        if not difference <= _WRONG:
            raise UserError(f"{name} of the program differs from the run by {difference:.2g}, so it was not written")
        texts.append(f"{name} {difference:.1e}")
    return f"largest difference of {', '.join(texts)}"


# -------------------------------------------------------------------------------------------------------- StableHLO
def _write(job: Export) -> str:
    """Write model.stablehlo and weights.safetensors, and return a few words for the message.

    The program accepts any number of images and runs on all _PLATFORMS. The weights are arguments of the program, not
    constants in it, so the file of the program has less than 1 MB.
    """
    weights, program = job.run.weights(), program_of(job.run, job.outputs)
    shapes = {path: jax.ShapeDtypeStruct(value.shape, value.dtype) for path, value in weights.items()}
    with jax.default_device("cpu"):  # without calls of cuDNN, which other platforms lack
        exported = export.export(jax.jit(program), platforms=_PLATFORMS)(shapes, image_shape(job.run))
    (job.path / "model.stablehlo").write_bytes(exported.serialize())
    with atomic_file(job.path / "weights.safetensors") as partial:
        save_file(weights, partial)
    return f"for {', '.join(_PLATFORMS)}"


def _load(folder: Path) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    import jax
    from jax import export
    from safetensors.numpy import load_file

    program = jax.jit(export.deserialize(bytearray((folder / "model.stablehlo").read_bytes())).call)
    weights = jax.device_put(load_file(folder / "weights.safetensors"))
    return lambda images: {name: np.asarray(value) for name, value in program(weights, images).items()}


STABLEHLO = ExportTarget(
    _write,
    _load,
    files={
        "model.stablehlo": f"the program, a serialized `jax.export.Exported` for {', '.join(_PLATFORMS)}",
        "weights.safetensors": "its weights in float32, by parameter path",
    },
    install=f'pip install "jax>={jax.__version__}" flatbuffers safetensors numpy pillow',
)


# ---------------------------------------------------------------------------------------------------------- values
def _write_safetensors(job: Export) -> str:
    run, frozen = job.run, None if job.include_frozen == ALWAYS else frozenset()
    if job.include_frozen == AUTO:
        frozen = abstract_parts(run.config, run.label_space).unpublished
    weights = run.weights(frozen=frozen)
    with atomic_file(job.path) as partial:
        save_file(weights, partial, {"format": "mlmoe_jax", "description": dump_json(job.description)})
    return f"{len(weights):,} tensors, {sum(value.nbytes for value in weights.values()) / 1e6:,.1f} MB"


def _state_dict(output: str) -> Path:
    require_writable(Path(output))
    return Path(output)


def _write_official(job: Export) -> str:
    source = export_official(job.run.model(), job.path)
    for difference in departures(job.run.config.model, source.name):
        status(f"the authors' code computes something else: {difference}")
    return f"in the {source.name} layout"


def _write_peft(job: Export) -> str:
    tensors, classifier = write_peft(job.path, job.run.model(), job.run.config)
    what = "with its classifier" if classifier else "without the head, which transformers lacks"
    return f"{tensors} tensors, {what}"


PEFT = ExportTarget(_write_peft)
SAFETENSORS = ExportTarget(_write_safetensors)
AUTHORS = ExportTarget(_write_official, place=_state_dict)
