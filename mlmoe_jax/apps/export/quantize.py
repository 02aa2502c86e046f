"""Convert a run to ONNX with 16-bit floats or 8-bit integers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mlmoe_jax.apps.export import onnx
from mlmoe_jax.apps.export.targets import Export
from mlmoe_jax.apps.tools.image_list import find_images
from mlmoe_jax.data.image_reader import ImageReader
from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.restore import Run
from mlmoe_jax.runtime.progress import Progress

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

_BATCH = 8  # images at a time in the calibration
_EXTERNAL = 2**20  # tensors of at least this number of bytes are stored in model.onnx.data, as in the float32 format
# The types of layers that are quantized, and the types of activation functions that a quantized layer can include.
_LAYERS, _INCLUDED = ("Conv", "Gemm", "MatMul"), ("Clip", "Relu")


# ---------------------------------------------------------------------------------------------------------- the images
def calibration_images(run: Run, items: Sequence[str], count: int) -> list[np.ndarray]:
    """Return a random sample of at most `count` images, u8[H,W,3] each, with the image size of the model.

    The random seed is fixed, so every export has the same sample. Unreadable images are left out. `items` are files,
    folders and lists, as in image_list.py. If `items` is empty, the images of the training split are sampled. Raises
    UserError if the data set cannot be opened, or there are fewer than five readable images.
    """
    data = run.config.data.copy_and_resolve_references()
    data.bad_images = "skip"
    images = find_images(items).images if items else run.open_split(data.train_split, data).images
    reader, readable = ImageReader.from_config(data), list[np.ndarray]()
    for row in np.random.default_rng(0).permutation(len(images)):
        if len(readable) == count:
            break
        if (image := reader(images, int(row))) is not None:
            readable.append(image)
    if len(readable) < 5:
        raise UserError(f"the calibration has {len(readable)} readable images and needs at least 5")
    return readable


def parts(images: Sequence[np.ndarray]) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    """Return two parts of a sample: four fifths for the calibration, and a fifth to compare program and run."""
    at = 4 * len(images) // 5
    return images[:at], images[at:]


class _Batches:
    """A data reader of onnxruntime's quantizer: batches of images, with a progress bar."""

    def __init__(self, images: Sequence[np.ndarray]):
        firsts = range(0, len(images), _BATCH)
        self._batches = (np.stack(images[first : first + _BATCH]) for first in firsts)
        self._progress = Progress("measure ranges", len(firsts), _BATCH)

    def get_next(self) -> dict[str, np.ndarray] | None:
        if (batch := next(self._batches, None)) is None:
            return None
        self._progress.advance()
        return {"image": batch}

    def close(self) -> None:
        self._progress.close()


# -------------------------------------------------------------------------------------------------------- the programs
@contextmanager
def _program(job: Export) -> Iterator[Path]:
    """Write the float32 program to a temporary folder for this context, and yield the path of its model.onnx."""
    with tempfile.TemporaryDirectory(dir=job.path) as folder:
        onnx.TARGET.write(replace(job, path=Path(folder)))
        yield Path(folder, "model.onnx")


def _save(program: ModelProto, folder: Path) -> None:
    import onnx as library

    library.save_model(
        program, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=_EXTERNAL
    )


def _write_float16(job: Export) -> str:
    """Write model.onnx in float16, and return a few words for the message.

    The operations after the last matrix product or convolution of an output stay in float32, because small
    probabilities in float16 would be rounded to equal values or to zero.
    """
    import onnx as library
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    with _program(job) as path:
        single = library.load(path)
        after, read = [], set[str]()  # nodes that no product follows, and the tensors that the other nodes read
        for node in reversed(single.graph.node):
            if node.op_type in (*_LAYERS, "Einsum") or read.intersection(node.output):
                read.update(node.input)
            else:
                after.append(node.name)
        program = OnnxModel(convert_float_to_float16(single, keep_io_types=True, node_block_list=after))
        program.remove_cascaded_cast_nodes()  # between operations that stay in float32
        program.topological_sort()
        _save(program.model, job.path)
    return "floats of 16 bits"


def _write_int8(job: Export) -> str:
    """Write model.onnx with layers quantized to 8-bit integers, and return a few words for the message.

    The activation ranges are calibrated on `job.images`. Convolutions and matmuls with weights are quantized, with one
    scale per output channel. Products of two activations, attention weights, norms and logits stay in float32.
    """
    import onnx as library
    from onnxruntime.quantization import QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    images, _ = parts(job.images)
    with _program(job) as path:
        prepared, quantized = path.with_name("prepared.onnx"), path.with_name("quantized.onnx")
        # The quantizer knows neither a bias that is an addition, nor weights that are transposed by an operation.
        quant_pre_process(path, prepared, skip_symbolic_shape=True, save_as_external_data=True)
        program = library.load(prepared)
        layers = _layers(program.graph)
        with closing(_Batches(images)) as batches:
            quantize_static(
                program,
                quantized,
                batches,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                op_types_to_quantize=[*_LAYERS, *_INCLUDED],
                nodes_to_quantize=layers,
                extra_options={"OpTypesToExcludeOutputQuantization": ["Gemm", "MatMul"]},
            )
        _save(library.load(quantized), job.path)
    return f"integers of 8 bits, from {len(images):,} images"


def _layers(graph: GraphProto) -> list[str]:
    """Return the names of the nodes to quantize.

    Also reshape the bias of each Gemm node in `graph` to a vector, which the quantizer expects, and remove the stored
    shapes, which the quantizer infers again.
    """
    tensors, names = {tensor.name: tensor for tensor in graph.initializer}, []
    del graph.value_info[:]  # shapes, which the quantizer infers again
    for node in graph.node:
        weights, bias = (tensors.get(name) for name in (*node.input, "", "")[1:3])
        if node.op_type == "Gemm" and bias:
            del bias.dims[:-1]
        scalar = bias and not bias.dims
        # Kernels take weights of two axes, and of four axes for images.
        if node.op_type in _INCLUDED or (
            node.op_type in _LAYERS and weights and len(weights.dims) in (2, 4) and not scalar
        ):
            names.append(node.name)
    return names


FLOAT16 = replace(onnx.TARGET, write=_write_float16)
INT8 = replace(onnx.TARGET, write=_write_int8, calibrated=True)
