"""The benchmarks as the papers use them: splits, selection, the decay of the moving average."""

from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError

# (train, test) splits and the EMA decay a step that the authors' code ends up with on a data set of this size
_BENCHMARKS = {
    "voc2007": ("trainval", "test", 0.9974590),
    "voc2012": ("train", "val", 0.9974590),
    "coco2014": ("train", "val", 0.9998452),
    "nuswide": ("train", "test", 0.9998988),
    "vg256": ("train", "test", 0.9978910),
}


def use_dataset(config: ConfigDict, name: str, root: str, resolution: int) -> None:
    """Set a data set and its splits; the benchmarks select on test, as their papers do.

    Raises UserError for a name without settings here.
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
