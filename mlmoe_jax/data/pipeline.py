"""Batches from a split, on Grain: the data position is a function of the step.

Shuffling and repeating happen on the global data set, before a process takes its part: the global batch of a step is
the same, in the same order, for any number of processes, and training resumes at any step by slicing. (The order
matters: augmentation draws its numbers by the place in the global batch.)
"""

import math
from collections.abc import Iterator

import grain
import numpy as np

from mlmoe_jax.data.batch import targets
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.transforms import resize_square

Batch = dict[str, np.ndarray]


class _Examples:
    """rows -> a batch of their examples; rows beyond the split are padding."""

    def __init__(self, split: Split, image_size: int, difficult: str):
        self.split, self.image_size = split, image_size
        self.labels, self.label_mask = targets(split.labels, difficult)

    def __call__(self, rows: np.ndarray) -> Batch:
        examples = [self._read(int(row)) for row in rows]
        return {name: np.stack([example[name] for example in examples]) for name in examples[0]}

    def _read(self, row: int) -> Batch:
        if row >= len(self.split):
            nothing = np.zeros(len(self.split.classes), np.float32)
            image = np.zeros((self.image_size, self.image_size, 3), np.uint8)
            return self._example(image, nothing, nothing, 0.0, -1)
        image = resize_square(self.split.images[row], self.image_size)
        return self._example(image, self.labels[row], self.label_mask[row], 1.0, row)

    @staticmethod
    def _example(image, label, label_mask, mask: float, row: int) -> Batch:
        return {
            "image": image,
            "label": label,
            "label_mask": label_mask,
            "mask": np.float32(mask),
            "id": np.int32(row),
        }


def steps_per_epoch(images: int, batch_size: int) -> int:
    """Return the number of whole batches in an epoch; at least 1, since epochs run on into one another."""
    return max(1, images // batch_size)


def build_loader(
    data,
    split: Split,
    *,
    batch_size: int,
    training: bool,
    seed: int = 0,
    first_step: int = 0,
    process: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """Return this process's part of every global batch of `batch_size` images.

    data: `config.data`. training: shuffle and repeat for ever, starting with the batch of `first_step`; otherwise every
    image once, in order, the last batch padded with `mask` 0, with equal numbers of batches on every process.
    process: (index, count); `count` divides `batch_size`.
    """
    index, count = process
    if batch_size % count:
        raise ValueError(f"a global batch of {batch_size} does not split over {count} processes")
    if training:
        rows = grain.MapDataset.range(len(split)).seed(seed).shuffle().repeat()
    else:
        rows = grain.MapDataset.range(batch_size * math.ceil(len(split) / batch_size))
    size = batch_size // count
    examples = _Examples(split, data.image_size, data.difficult)
    batches = rows.batch(batch_size, drop_remainder=True)[first_step:].map(
        lambda whole: examples(whole[index * size : (index + 1) * size])
    )
    options = grain.ReadOptions(num_threads=data.threads, prefetch_buffer_size=2 * data.threads)
    return iter(batches.to_iter_dataset(options))
