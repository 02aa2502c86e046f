"""The benchmarks as the papers use them: splits, selection, and the decay of the moving average."""

from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError

# train split, test split, and the EMA decay per step that results from the authors' code for this number of images
_BENCHMARKS = {
    "voc2007": ("trainval", "test", 0.9974590),
    "voc2012": ("train", "val", 0.9974590),
    "coco2014": ("train", "val", 0.9998452),
    "nuswide": ("train", "test", 0.9998988),
    "vg256": ("train", "test", 0.9978910),
}


def use_dataset(config: ConfigDict, name: str, root: str, resolution: int) -> None:
    """Set a data set and its splits; the benchmarks select weights on the test split, as their papers do.

    resolution: side of the images in pixels. Raises UserError for another name.
    """
    config.data.name, config.data.root, config.data.image_size = name, root, resolution
    if name == "digits":
        config.data.test_splits = ("test", "test_shift")
        return
    if name == "synthetic":
        return
    if name not in _BENCHMARKS:
        raise UserError(f"dataset={name} is not one of digits, synthetic, {', '.join(_BENCHMARKS)}")
    train, test, decay = _BENCHMARKS[name]
    config.data.train_split, config.data.val_split, config.data.test_splits = train, "", (test,)
    config.eval.select_on = "test"
    config.eval.batch_size = 64
    config.ema.decay = decay
    config.model.prompts.groups = "published"
