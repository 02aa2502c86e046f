"""Label decoded images with a model that is compiled in advance for a few batch sizes."""

import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from mlmoe_jax.inference.predictor import SIZES_PER_DEVICE, Predictor, fitting_size, require_finite_logits
from mlmoe_jax.models.heads.catalog import head_class
from mlmoe_jax.models.outputs import Prediction
from mlmoe_jax.runtime.memory import shortage_explained
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.sharding import shard_batch

LABELED, EXPLAINED = "labeled", "explained"  # kinds of batches: without and with attention
# Batch sizes per device; attention maps of many labels are large.
BATCH_SIZES = {LABELED: SIZES_PER_DEVICE, EXPLAINED: SIZES_PER_DEVICE[:2]}
_REPEATS, _SECONDS = 3, 0.5  # a batch size is timed at most 3 times, and for about half a second in total


def first_batch_sizes(seconds: Mapping[int, float]) -> list[int]:
    """Return a list whose entry n is the number of images in the first batch if n images wait, for n = 0, …, N.

    The images are split into batches so that the total time is as short as possible. A batch is padded to one of the
    compiled batch sizes, of which N is the largest. `seconds` maps each compiled batch size to the measured seconds per
    batch. The returned numbers do not count padding. For example, on a CPU, two batches of 4 and 1 images are faster
    than one batch of 5 images that is padded to 16.
    """
    first, total = [0], [0.0]
    for images in range(1, max(seconds) + 1):
        options = [(cost + total[max(0, images - size)], -size) for size, cost in seconds.items()]
        least, size = min(options)
        first.append(min(images, -size))
        total.append(least)
    return first


class Labeler:
    """The model of a predictor, compiled for batches of decoded images.

    There are two kinds of batches: LABELED (without attention maps) and EXPLAINED (with attention maps).

    `gate_entries` maps the name of a gate to the names of its entries, and `sizes` a kind of batch to the compiled
    batch sizes, in increasing order.
    """

    def __init__(self, predictor: Predictor):
        run = predictor.run
        self.predictor, self._run = predictor, run
        self.gate_entries = head_class(run.config).gate_entries(run.config)
        self._steps = {LABELED: run.eval_step("gates"), EXPLAINED: run.eval_step("gates", "attention", "grid")}
        self.sizes = {kind: tuple(size * run.mesh.size for size in sizes) for kind, sizes in BATCH_SIZES.items()}
        self._batch_sizes: dict[str, list[int]] = {}  # of the compiled kinds

    def compile(self, stopping: Callable[[], bool] = lambda: False) -> None:
        """Compile and time `label` for each kind and size of batch. Return early if `stopping` returns True.

        Raises UserError if the scores are not finite, or the device has too little memory.
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
                require_finite_logits(outputs[0].logits)
                seconds[size] = self._time([blank] * size, kind)
            self._batch_sizes[kind] = first_batch_sizes(seconds)
            each = ", ".join(f"{cost:.3f} s for {size}" for size, cost in seconds.items())
            status(f"batches of {kind} images take {each}")

    def _time(self, images: Sequence[np.ndarray], kind: str) -> float:
        """Return the seconds of one batch: the minimum of a few measurements, as other programs may use the machine."""
        times: list[float] = []
        while len(times) < _REPEATS and sum(times) < _SECONDS:
            started = time.perf_counter()
            self.label(images, kind)
            times.append(time.perf_counter() - started)
        return min(times)

    def next_batch_size(self, waiting: int, kind: str) -> int:
        """Return the size of the next batch that minimizes the time until all waiting images are labeled."""
        return self._batch_sizes[kind][min(waiting, self.sizes[kind][-1])]

    def label(self, images: Sequence[np.ndarray], kind: str) -> list[Prediction]:
        """Apply the model to one batch of images, u8[H,W,3] each; at most as many as the largest of `sizes[kind]`.

        Returns one prediction per image, without the batch axis: the logits, the gates and, for the kind EXPLAINED
        instead of LABELED, the attention maps and the grid of patches.
        """
        size = fitting_size(len(images), self.sizes[kind])
        stacked = np.zeros((size, *images[0].shape), np.uint8)
        stacked[: len(images)] = images
        mask = (np.arange(size) < len(images)).astype(np.float32)
        batch = shard_batch({"image": stacked, "mask": mask, "id": np.arange(size, dtype=np.int32)}, self._run.mesh)
        output = jax.device_get(self._steps[kind](self._run.values, self._run.frozen, batch))
        grid = tuple(map(int, output.get("grid", ())))
        batch = Prediction(output["logits"], gates=output["gates"], attention=output.get("attention", {}), grid=grid)
        # static gates have one row, which is used for all images
        return [jax.tree.map(lambda values, row=row: values[row % len(values)], batch) for row in range(len(images))]
