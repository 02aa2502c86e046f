"""Batches from a split, built on Grain: the data position is a function of the step.

A batch is `image u8[B,H,W,3]`, `mask f32[B]` (0 = padding) and `id i32[B]`, the row of the split; in training
also `label f32[B,K]` in {0,1} and `label_mask f32[B,K]` (0 = unknown or ignored). If the features of the images are
cached, `cls f32[B,D]` and `patches f32[B,h,w,D]` replace `image`, as far as the head reads them.

The global data set is shuffled and repeated before a process takes its part. The global batch of a step and its order
therefore do not depend on the number of processes and workers, and training resumes at any step by slicing. The order
matters because augmentation draws random numbers by step and position in the global batch.
"""

from __future__ import annotations

import math
import mmap
import multiprocessing
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any, BinaryIO

import cloudpickle
import grain
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from mlmoe_jax.data.decoding import BadImage
from mlmoe_jax.data.image_reader import ImageReader
from mlmoe_jax.data.label_codes import UNKNOWN, targets
from mlmoe_jax.data.sampling import draw_rows
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime import distributed, workers
from mlmoe_jax.runtime.files import GIB
from mlmoe_jax.runtime.machine import cores

HostBatch = dict[str, np.ndarray]

MOST_THREADS = 4  # per process
MOST_WORKERS = 16  # processes, which deliver 20,000 photographs/s; no accelerator takes more
MOST_AHEAD = 2 * GIB  # of batches that are read ahead; each thread has one batch in work and one batch ready
FEATURE_THREADS = 2  # threads that copy stored features, which takes little time


class _Examples(grain.transforms.MapWithIndex):
    """A Grain transform from (step, rows of a global batch) to the examples of this process.

    It is pickled for worker processes without the split: if more than 64 kB were pickled for a worker that dies at its
    start, its parent would wait for ever. All workers map the file that `store` has written. A row at or beyond the
    size of the split is padding.
    """

    def __init__(self, split: Split, data_config, augment, seed: int, labels: bool, process: tuple[int, int]):
        self.split, self.seed, self.labels, self.process = split, seed, labels, process
        self.difficult, self.size = data_config.difficult_train, data_config.image_size
        self.reader = ImageReader.from_config(data_config, augment)
        self.repeat = data_config.repeat_factor if augment is not None else 0
        self._copy = -1  # the descriptor of the open file with a copy of the split

    def store(self, file: BinaryIO) -> None:
        """Write the split to an open file, before this transform is pickled."""
        cloudpickle.dump(self.split, file)
        file.flush()
        self._copy = file.fileno()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "split": None, "_copy": reduction.DupFd(self._copy)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        with open(state["_copy"].detach(), "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            vars(self).update(state, split=pickle.loads(data), _copy=-1)

    def map_with_index(self, index: int, element: np.ndarray) -> HostBatch:
        if (element < 0).all():  # skipped rows may be millions
            return {"id": element.astype(np.int32)}
        share, count = self.process
        size = len(element) // count
        element = draw_rows(element, index * len(element), self.split.labels, self.repeat, self.seed)
        examples = [
            self._read(int(element[position]), np.random.default_rng([self.seed, index, position]))
            for position in range(share * size, (share + 1) * size)
        ]
        batch = {name: np.stack([example[name] for example in examples]) for name in examples[0]}
        return {**batch, **self._read_labels(batch)} if self.labels else batch

    def _read(self, row: int, random: np.random.Generator) -> dict[str, Any]:
        row = row if row < len(self.split) else -1
        arrays = None if row < 0 else self._input(row, random)
        mask = np.float32(arrays is not None)
        return {**(arrays or self._no_input()), "mask": mask, "id": np.int32(row)}

    def _read_labels(self, batch: HostBatch) -> HostBatch:
        codes = np.full((len(batch["id"]), len(self.split.classes)), UNKNOWN, np.int8)
        is_read = batch["mask"] > 0
        codes[is_read] = self.split.labels[batch["id"][is_read]]
        positive, valid = targets(codes, self.difficult)
        return {"label": positive.astype(np.float32), "label_mask": valid.astype(np.float32)}

    def _input(self, row: int, random: np.random.Generator) -> HostBatch | None:
        """Return the model input of image `row`.

        If the image cannot be read, return None with data.bad_images=skip, otherwise raise BadImage.
        """
        if self.split.features is not None:
            if (features := self.split.features[row]) is None and not self.reader.skip:
                raise BadImage(f"{self.split.ids[row]} could not be read as an image when its features were computed")
            return features
        image = self.reader(self.split.images, row, random)
        return None if image is None else {"image": image}

    def _no_input(self) -> HostBatch:
        if self.split.features is not None:
            return self.split.features.blank()
        return {"image": np.zeros((self.size, self.size, 3), np.uint8)}


def steps_per_epoch(images: int, batch_size: int) -> int:
    """Return the steps per epoch, rounded down, but at least 1. A batch may contain images of two epochs."""
    return max(1, images // batch_size)


def build_loader(
    data_config: ConfigDict,
    split: Split,
    *,
    batch_size: int,
    augment: ConfigDict | None = None,
    seed: int = 0,
    first_step: int = 0,
    labels: bool = True,
    process: tuple[int, int] | None = None,
    rows: Sequence[int] | None = None,
) -> Iterator[HostBatch]:
    """Return an iterator over this process's part of every global batch of `batch_size` images.

    For training, images are shuffled, repeated without end, and augmented unless the split has cached features. For
    evaluation, each image is returned once, in order, and the last batch is padded. All processes get equally many
    batches. Padding has `mask` 0 and `id` −1.

    If an image cannot be read, the loader raises BadImage. With data.bad_images=skip, the example instead has `mask` 0
    and the `id` of the image, see `split.SkippedImages`.

    Args:
      data_config: `config.data`. If `threads` or `workers` is `auto`, `plan_readers` chooses it. The batches do not
        depend on `threads` and `workers`.
      augment: `config.augment` for training, None for evaluation.
      first_step: index of the first batch, from 0.
      labels: whether to add `label` and `label_mask`, which only training uses.
      process: (index of this process, number of processes); None means the result of `distributed.process`. ValueError
        if `batch_size` is not a multiple of the number of processes.
      rows: for evaluation, the rows to return, in this order, each read when it is needed; −1 is padding. None means
        all rows. Batches of padding alone are left out.
    """
    process = process or distributed.process()
    if batch_size % process[1]:
        raise ValueError(f"a global batch of {batch_size} does not split over {process[1]} processes")
    if augment is not None:
        source = _shuffled_rows(split, seed)
    elif rows is not None:
        source = grain.MapDataset.source(rows)
    else:
        source = grain.MapDataset.range(batch_size * math.ceil(len(split) / batch_size))
    examples = _Examples(split, data_config, augment, seed, labels, process)
    batches = source.batch(batch_size, drop_remainder=True).map_with_index(examples)[first_step:]
    readers = _choose_readers(split, data_config, batch_size // process[1])
    threads = grain.ReadOptions(num_threads=readers.threads, prefetch_buffer_size=2 * readers.threads)
    loader = batches.to_iter_dataset(threads)
    if readers.workers:
        flags.FLAGS.mark_as_parsed()  # Grain's workers inherit absl's flags, which are not parsed here
        loader = loader.mp_prefetch(grain.MultiprocessingOptions(num_workers=readers.workers), workers.follow_parent)
    read = _worker_batches(loader, examples) if readers.workers else iter(loader)
    return read if rows is None else filter(_has_images, read)


def _has_images(batch: HostBatch) -> bool:
    return bool((batch["id"] >= 0).any())


def _worker_batches(loader: grain.IterDataset, examples: _Examples) -> Iterator[HostBatch]:
    """Yield the batches of a loader with worker processes. Raises UserError if a worker dies."""
    others = multiprocessing.active_children()
    try:
        with tempfile.TemporaryFile() as file:  # without a name that a killed process would leave behind
            examples.store(file)
            yield from loader
    except RuntimeError as error:
        if "terminated unexpectedly" not in str(error):  # Grain has no type for it
            raise
        raise UserError(
            "a process that reads images has died, perhaps because memory ran out; lower data.workers and repeat the "
            "command"
        ) from error
    except KeyboardInterrupt:
        for worker in multiprocessing.active_children():  # Grain would wait for workers that read nothing
            if worker not in others and worker.name.startswith("grain"):
                worker.kill()
        raise


def _choose_readers(split: Split, data_config: ConfigDict, share: int) -> Readers:
    """Return the threads and worker processes that read `share` images of each batch.

    Cached features are read by threads of this process only, because they are in its memory.
    """
    if split.features is not None:
        return Readers(data_config.threads if data_config.threads > 0 else FEATURE_THREADS, 0)
    if not len(split):
        return Readers(1, 0)
    batch_bytes = share * 3 * data_config.image_size**2
    readers = plan_readers(
        data_config.threads, data_config.workers, batch_bytes=batch_bytes, decodes=split.images.are_decoded
    )
    return readers if not readers.workers or workers.can_start() else Readers(readers.threads, 0)


@dataclass(frozen=True)
class Readers:
    """The threads and worker processes that read images; without workers, the main process reads them.

    Four threads of one process keep four cores busy, because decoding releases Python's global lock and takes most of
    the time. Worker processes are started to use more cores, if images have to be decoded and the model runs on an
    accelerator. On a CPU, the training step needs these cores.
    """

    threads: int
    workers: int


def plan_readers(threads: int, workers: int, *, batch_bytes: int, decodes: bool) -> Readers:
    """Return the numbers of threads per process and of worker processes. A negative `threads` or `workers` means auto.

    Args:
      batch_bytes: size in bytes of the images of a batch in this process.
      decodes: whether images have to be decoded or rendered.
    """
    usable = cores()
    ahead = max(1, MOST_AHEAD // (2 * batch_bytes))  # threads in all processes together
    if threads < 0:
        share = usable if workers <= 0 else math.ceil(usable / workers)
        threads = max(1, min(MOST_THREADS, share, ahead))
    if workers < 0:
        workers = min(usable // threads, MOST_WORKERS, ahead // threads)
        if not (decodes and workers > 1 and usable > MOST_THREADS and _has_accelerator()):
            workers = 0
    return Readers(threads, workers)


def plan_for_few_images(threads: int, workers: int) -> dict[str, int]:
    """Return `threads` and `workers` of `config.data` for a prediction of few images.

    An automatic number of workers, which is negative, becomes 0.
    """
    return {"threads": threads if threads > 0 else min(cores(), 2 * MOST_THREADS), "workers": max(0, workers)}


def _has_accelerator() -> bool:
    import jax  # here, because worker processes import this module and need no JAX

    return jax.default_backend() != "cpu"


def rows_of_step(split: Split, *, batch_size: int, seed: int, step: int, repeat: float = 0.0) -> list[int]:
    """Return the rows of the images in the global training batch of `step`, in its order. The first step is 1.

    `repeat` is `data.repeat_factor`.
    """
    places = np.asarray(_shuffled_rows(split, seed).batch(batch_size, drop_remainder=True)[step - 1])
    return draw_rows(places, (step - 1) * batch_size, split.labels, repeat, seed).tolist()


def _shuffled_rows(split: Split, seed: int) -> grain.MapDataset:
    return grain.MapDataset.range(len(split)).seed(seed).shuffle().repeat()
