"""What the recipes share: the benchmarks as the papers use them, selection, and settings that follow others."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict, FieldReference

from mlmoe_jax.errors import UserError

# ----------------------------------------------------------------------------------------------------------- data sets
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


def train_on_digits(config: ConfigDict, *, rate: float) -> None:
    """Set the training that all methods share on `digits`."""
    config.optim.learning_rate = rate
    config.train.epochs, config.eval.every_epochs, config.ema.decay = 8, 2, 0.99
    config.model.prompts.num_groups = 3


# ----------------------------------------------------------------------------------------------------------- selection
# Every config of a method takes `selection=published`, the default, or `selection=honest`: the test split and metric
# of a paper, or held-out training images. `preset=honest` is short for the default preset with `selection=honest`.
PUBLISHED, HONEST = SELECTIONS = ("published", "honest")
OPTION = {"selection": ""}  # for `parse_arg`; "" = published, or honest if the preset says so


def apply_selection(config: ConfigDict, options: ConfigDict, presets: Sequence[str]) -> None:
    """Apply the option `selection` to a config with a data set, and replace `preset=honest` by the first of `presets`.

    published: leave what the data set has set. honest: select weights and fit thresholds on validation images, and read
    the test splits once, at the end; a data set without a validation split holds out a tenth of its training images,
    the same for all seeds. Raises UserError for other values, and for a preset and a selection that contradict each
    other.
    """
    given = options.selection
    options.selection = given or (HONEST if options.preset == HONEST else PUBLISHED)
    for name, known in (("preset", (*presets, HONEST)), ("selection", SELECTIONS)):
        if options[name] not in known:
            raise UserError(f"{name}={options[name]} is not one of {', '.join(known)}")
    if options.preset == HONEST:
        if given == PUBLISHED:
            raise UserError("preset=honest means selection=honest; leave selection=published out")
        options.preset = presets[0]
    if options.selection == HONEST:
        if not config.data.val_split:
            config.data.val_split, config.data.val_fraction = "held_out", 0.1
        config.eval.select_on = "val"
        config.thresholds.at_end = True


def evaluate_like(config: ConfigDict, evaluator: str, *, metric: str = "mAP") -> None:
    """Select by the metric of a paper, and add the metrics of its own evaluator, a choice of `metrics.preset`."""
    config.metrics.preset, config.eval.select_metric = evaluator, metric


# ----------------------------------------------------------------------------------------------------------- following
class _Computation(NamedTuple):
    """An operation in the form in which FieldReference calls it: `fn` of its own value and of the values of `args`."""

    fn: Callable[..., Any]
    args: list[FieldReference]


def follow(config: ConfigDict, key: str, compute: Callable[..., Any], *others: str) -> None:
    """Let the dotted `key` of a whole config be `compute` of the values of the keys `others`, until `key` is set.

    A published setting may depend on another one, as the learning rate on the backbone. As a number it would stay
    behind if a flag, a sweep or a line of Python changed the other setting. Here it is a lazy reference of
    ml_collections: it is computed whenever it is read, and run folders store the value.
    """
    followed = [section.get_ref(leaf) for section, leaf in (_place(config, other) for other in others)]
    value = compute(*(reference.get() for reference in followed))
    section, leaf = _place(config, key)
    section[leaf] = FieldReference(value, op=_Computation(lambda _, *values: compute(*values), followed))


def _place(config: ConfigDict, key: str) -> tuple[ConfigDict, str]:
    *parents, leaf = key.split(".")
    for name in parents:
        config = config[name]
    return config, leaf
