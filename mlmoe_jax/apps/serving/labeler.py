"""From encoded images to predictions: decoding, and a model that is compiled in advance for a few batch sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from mlmoe_jax.data.image_reader import ImageReader
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.explain import make_explain_step
from mlmoe_jax.inference.predictor import SIZES_PER_DEVICE, Predictor, fitting_size
from mlmoe_jax.models.apply import make_eval_step
from mlmoe_jax.models.outputs import Prediction
from mlmoe_jax.models.registries import head_class
from mlmoe_jax.runtime.memory import shortage_explained
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.sharding import shard_batch

LABELED, EXPLAINED = "labeled", "explained"  # kinds of batches: without and with attention
# Batch sizes per device; attention maps of many labels are large.
BATCH_SIZES = {LABELED: SIZES_PER_DEVICE, EXPLAINED: SIZES_PER_DEVICE[:2]}
_REPEATS, _SECONDS = 3, 0.5  # a batch is timed at most this often, and not again after this time


def first_batch_sizes(seconds: Mapping[int, float]) -> list[int]:
    """Return for 0…N images the number of images in the first batch; N is the largest size.

    A batch is padded to one of the sizes, which take `seconds` (size -> seconds). The images are split into batches
    with the shortest total time. On a CPU, five images are faster as 4 and 1 than padded to 16.
    """
    first, total = [0], [0.0]
    for images in range(1, max(seconds) + 1):
        options = [(cost + total[max(0, images - size)], -size) for size, cost in seconds.items()]
        least, size = min(options)
        first.append(min(images, -size))
        total.append(least)
    return first


@dataclass(frozen=True)
class RequestLimits:
    """The largest request: its number of images, its MiB, and millions of pixels of an image."""

    images: int = 32
    megabytes: int = 16
    megapixels: float = 50.0


class Labeler:
    """The model of a predictor, for batches of decoded images.

    `sizes` maps kinds to increasing batch sizes, `gate_entries` gates to the names of entries; `limits` are of
    requests, and `name` is the name of the model in the Open Inference Protocol.
    """

    def __init__(self, predictor: Predictor, limits: RequestLimits = RequestLimits()):
        run = predictor.run
        self.predictor, self.limits, self._run = predictor, limits, run
        self.name = run.config.serve.name
        self.gate_entries = head_class(run.config).gate_entries(run.config)
        parts = (run.definition, run.preprocess, run.mesh, run.label_axes)
        self._steps = {LABELED: make_eval_step(*parts, gates=True), EXPLAINED: make_explain_step(*parts)}
        self.sizes = {kind: tuple(size * run.mesh.size for size in sizes) for kind, sizes in BATCH_SIZES.items()}
        self._batch_sizes = {kind: first_batch_sizes(dict.fromkeys(sizes, 1.0)) for kind, sizes in self.sizes.items()}
        reader, most_pixels = ImageReader.from_config(run.config.data), int(limits.megapixels * 1e6)
        self._reader = replace(reader, decoding=replace(reader.decoding, most_pixels=most_pixels))

    def compile(self, stopping: Callable[[], bool] = lambda: False) -> None:
        """Compile and time every program of `label`, until `stopping` returns True.

        Raises UserError if the scores are not finite or memory is short.
        """
        side = self._run.preprocess.image_size
        blank = np.zeros((side, side, 3), np.uint8)
        for kind, sizes in self.sizes.items():
            seconds: dict[int, float] = {}
            for size in sizes:
                if stopping():
                    return
                with shortage_explained("label on a device with more memory"):
                    outputs = self.label([blank] * size, kind)
                if not np.isfinite(outputs[0].logits).all():
                    raise UserError("the model returns non-finite scores: its training has diverged; train it again")
                seconds[size] = self._time([blank] * size, kind)
            self._batch_sizes[kind] = first_batch_sizes(seconds)
            each = ", ".join(f"{cost:.3f} s for {size}" for size, cost in seconds.items())
            status(f"batches of {kind} images take {each}")

    def _time(self, images: Sequence[np.ndarray], kind: str) -> float:
        """Return the shortest time of a few batches in seconds, because other programs may use the machine."""
        times: list[float] = []
        while len(times) < _REPEATS and sum(times) < _SECONDS:
            started = time.perf_counter()
            self.label(images, kind)
            times.append(time.perf_counter() - started)
        return min(times)

    def next_batch_size(self, waiting: int, kind: str) -> int:
        """Return the number of waiting images in the next batch with which all are labeled soonest."""
        return self._batch_sizes[kind][min(waiting, self.sizes[kind][-1])]

    def read(self, content: bytes, name: str) -> np.ndarray:
        """Decode an encoded image to the input of the model, u8[H,W,3]. `name` is for the error, BadImage."""
        return self._reader.encoded(content, name)

    def label(self, images: Sequence[np.ndarray], kind: str) -> list[Prediction]:
        """Apply the model to at most the largest number of images of a kind, u8[H,W,3] each.

        Returns the logits, the gates, and with EXPLAINED the attention and grid of each image, without the axis B.
        """
        size = fitting_size(len(images), self.sizes[kind])
        stacked = np.zeros((size, *images[0].shape), np.uint8)
        stacked[: len(images)] = images
        mask = (np.arange(size) < len(images)).astype(np.float32)
        batch = shard_batch({"image": stacked, "mask": mask, "id": np.arange(size, dtype=np.int32)}, self._run.mesh)
        output = self._steps[kind](self._run.values, self._run.frozen, batch)
        batch = output["prediction"] if kind == EXPLAINED else Prediction(output["logits"], gates=output["gates"])
        batch = jax.device_get(replace(batch, terms={}, penalties={}))
        return [_image_output(batch, row) for row in range(len(images))]

    def describe(self) -> dict[str, Any]:
        """Return labels with thresholds (null = never), names of gate entries, and the image size, as JSON values."""
        thresholds = [None if value == float("inf") else value for value in self.predictor.thresholds.tolist()]
        pairs = zip(self.predictor.names, thresholds, strict=True)
        labels = [{"name": name, "threshold": threshold} for name, threshold in pairs]
        return {"labels": labels, "gates": self.gate_entries, "image_size": self._run.preprocess.image_size}


def _image_output(batch: Prediction, row: int) -> Prediction:
    """Return the part of one image; static gates have one row."""
    return jax.tree.map(lambda values: values[row % len(values)], batch)
