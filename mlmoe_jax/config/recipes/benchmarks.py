"""The benchmarks as the papers use them: splits, selection, and the decay of the moving average."""

from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError

# train split, test split, and the number of training images from which ML-VPT's code computes the decay of the EMA: it
# takes that of VOC 2007 for VOC 2012 too, and for VG256, by a mistake in a condition, the 5,994 of CUB-200.
_BENCHMARKS = {
    "voc2007": ("trainval", "test", 5_011),
    "voc2012": ("train", "val", 5_011),
    "coco2014": ("train", "val", 82_081),
    "nuswide": ("train", "test", 125_449),
    "vg256": ("train", "test", 5_994),
}


def ema_decay(images: int, *, batch_size: int = 128, epochs: float = 2, kept: float = 0.82) -> float:
    """Return the decay per step with which an EMA keeps the share `kept` of its past after some epochs.

    The defaults are those of ML-VPT's code: kept = decay^(epochs · steps), with the number of steps per epoch of
    `images` at a batch of 128 whatever the batch of the training is; at its 64, 82 % is kept after one epoch. Rounded
    to seven digits.
    """
    return round(kept ** (1 / (epochs * max(1, round(images / batch_size)))), 7)


def use_dataset(config: ConfigDict, name: str, root: str, resolution: int) -> None:
    """Set a data set and its splits; the benchmarks select weights on the test split, as their papers do.

    resolution: side of the images in pixels. Raises UserError for another name.
    """
    config.data.name, config.data.root, config.data.image_size = name, root, resolution
    if name == "digits":
        config.data.test_splits = ("test", "test_shift")
        config.report.samples = 16
        return
    if name == "synthetic":
        return
    if name not in _BENCHMARKS:
        raise UserError(f"dataset={name} is not one of digits, synthetic, {', '.join(_BENCHMARKS)}")
    train, test, images = _BENCHMARKS[name]
    config.data.train_split, config.data.val_split, config.data.test_splits = train, "", (test,)
    config.eval.select_on = "test"
    config.eval.batch_size = 64
    config.ema.decay = ema_decay(images)
    config.model.prompts.groups = "published"
