"""Data sets as the papers use them, selection of weights, and config keys that are functions of other keys."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict, FieldReference

from mlmoe_jax.config.defaults import default_config
from mlmoe_jax.config.loading import parse_arg
from mlmoe_jax.data.sources import catalog
from mlmoe_jax.data.sources.own_layout import TABLE, find_layout
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.keys import ChoiceKey, IntegerKey, TextKey

# ----------------------------------------------------------------------------------------------------------- data sets
# Train split, test split, and the number of training images from which ML-VPT's code computes the decay of the EMA. The
# code uses the number of VOC 2007 for VOC 2012 too, and, by a mistake in a condition, the 5,994 of CUB-200 for VG256.
_BENCHMARKS = {
    "voc2007": ("trainval", "test", 5_011),
    "voc2012": ("train", "val", 5_011),
    "coco2014": ("train", "val", 82_081),
    "nuswide": ("train", "test", 125_449),
    "vg256": ("train", "test", 5_994),
}
OWN = "own"
DATA_SETS = ("digits", "synthetic", *_BENCHMARKS, OWN)
TABLE_OPTIONS = {
    "table": TextKey(
        "", "CSV or .jsonl file in root; if empty, labels.csv, or else metadata.csv, Parquet or tar files."
    ),
    "label_column": TextKey("labels", "Column of the labels; empty for a table with one column per class."),
}


def ema_decay(images: int) -> float:
    """Return the decay per step of an exponential moving average (EMA), as in ML-VPT's code, rounded to 7 digits.

    `images` is the number of training images. The decay solves decay^(2 · images/128) = 0.82: after two epochs with
    batches of 128 images, the initial average has the weight 82 %. The decay does not depend on the batch size of the
    training. ML-VPT's batches have 64 images, so the weight is 82 % after one epoch.
    """
    return round(0.82 ** (1 / (2 * max(1, round(images / 128)))), 7)


class _DataSetKey(ChoiceKey):
    """A key whose value is a name in DATA_SETS."""

    def hint(self, value: Any) -> str:
        if value in catalog.DATA_SETS:
            return f"; dataset={OWN} with --config.data.name={value} reads it"
        return super().hint(value)


def use_own_images(config: ConfigDict, options: ConfigDict) -> None:
    """Set a folder of images and their labels, in place. No image is held out.

    `options` has a value for `root` and for each of TABLE_OPTIONS. `data.name` follows the suffix of `data.table`,
    unless the labels are not in a table.
    """
    data = config.data
    data.root = options.root
    layout = find_layout(options.root) if options.root and not options.table else {}
    data.update({"table": options.table or TABLE, **layout})
    if options.label_column != TABLE_OPTIONS["label_column"].default:
        data.label_column = options.label_column
    found = layout.get("name")
    follow(
        config,
        "data.name",
        lambda table: found if found and table == TABLE else "jsonl" if table.endswith(".jsonl") else "csv",
        "data.table",
    )
    data.test_splits = ()
    data.bad_images = "skip"  # unreadable images are left out and listed in the run folder


def use_dataset(config: ConfigDict, options: ConfigDict, resolution: int) -> None:
    """Set the data set `options.dataset` (a name in DATA_SETS), its splits and the image size in pixels, in place.

    `options` also has the folder `root` and TABLE_OPTIONS. On a benchmark, weights are selected on the test split, as
    in its paper. The decay of moving averages grows on images of one's own only, for which no paper prescribes it.
    Raises UserError if an option is given that the data set does not read.
    """
    name, root = options.dataset, options.root
    config.data.image_size, config.ema.warmup = resolution, name == OWN
    if name == OWN:
        use_own_images(config, options)
        config.data.val_fraction = 0.1
        config.model.prompts.num_groups = 2  # at most the number of labels
        return
    if root and name not in _BENCHMARKS:
        raise UserError(f"dataset={name} has no files, so root={root} has no effect; leave one of them out")
    for option, key in TABLE_OPTIONS.items():
        if options[option] != key.default:
            raise UserError(f"{option} is for dataset={OWN} and has no effect on dataset={name}; leave it out")
    config.data.name, config.data.root = name, root
    if name == "digits":
        config.data.test_splits = ("test", "test_shift")
        config.report.samples = 16
        return
    if name == "synthetic":
        return
    train, test, images = _BENCHMARKS[name]
    config.data.train_split, config.data.val_split, config.data.test_splits = train, "", (test,)
    config.data.exif = "ignore"  # as the published codes open images
    config.eval.select_on = "test"
    config.eval.batch_size = 64
    config.ema.decay = ema_decay(images)
    config.model.prompts.groups = "published"


def method_config(
    arg: str,
    *,
    dataset: str,
    backbone: str,
    resolution: int,
    presets: Mapping[str, str],
    backbones: Mapping[str, str] | None = None,
    **further: Any,
) -> tuple[ConfigDict, ConfigDict]:
    """Return a config with a data set, a backbone and a metric to select weights, and the options parsed from `arg`.

    Args:
      arg: text with the options `dataset`, `root`, those in TABLE_OPTIONS, `resolution`, `backbone`, `preset`,
        `selection` (the splits and the metric that select weights), and the options in `further`.
      dataset: default data set.
      backbone: default backbone; on `digits` it is vit_digits.
      resolution: default side of the images in pixels; on `digits` it is 64.
      presets: the presets of the method: name -> meaning. The first one is the default.
      backbones: the values of the option `backbone`: name -> meaning. By default, any text.
      **further: name of a further option -> its key.

    Raises:
      UserError: an option or a value is unknown.
    """
    options = parse_arg(
        arg,
        dataset=_DataSetKey(
            dataset,
            "Data set; digits and synthetic have no files, own is a table of your images (docs/datasets.md).",
            choices=DATA_SETS,
        ),
        root=TextKey("", "Folder of the data set; if empty, $MLMOE_DATA/NAME or data/NAME."),
        **TABLE_OPTIONS,
        resolution=IntegerKey(0, f"Side of the images; 0 is {resolution}, on digits 64.", unit="pixels", least=0),
        backbone=_backbone_option(backbone, backbones),
        **selection_options(presets),
        **further,
    )
    digits = options.dataset == "digits"
    options.backbone = options.backbone or ("vit_digits" if digits else backbone)
    config = default_config()
    use_dataset(config, options, options.resolution or (64 if digits else resolution))
    apply_selection(config, options, next(iter(presets)))
    config.model.backbone.name = options.backbone
    return config, options


def _backbone_option(default: str, backbones: Mapping[str, str] | None) -> TextKey:
    otherwise = f"if empty, {default}, on digits vit_digits"
    if backbones:
        return ChoiceKey("", f"Weights of the backbone; {otherwise}.", choices=backbones)
    return TextKey("", f"Backbone, a value of model.backbone.name; {otherwise}.")


def train_on_digits(config: ConfigDict, *, rate: float) -> None:
    """Set the training recipe that all methods share on the data set `digits`, with the learning rate `rate`."""
    config.optim.learning_rate = rate
    config.train.epochs, config.eval.every_epochs, config.ema.decay = 8, 2, 0.99
    config.model.prompts.num_groups = 3


# ----------------------------------------------------------------------------------------------------------- selection
# Every config of a method takes `selection=published`, the default, or `selection=held_out`: the test split and metric
# of a paper, or held-out training images. `preset=held_out` is short for the default preset with `selection=held_out`.
HELD_OUT = "held_out"


def selection_options(presets: Mapping[str, str]) -> dict[str, ChoiceKey]:
    """Return the options `preset` and `selection` for `parse_arg`: option name -> key.

    `presets` maps the names of the presets to their meanings. The first one is the default.
    """
    default = next(iter(presets))
    further = {HELD_OUT: f"{default} with selection={HELD_OUT}"}
    return {
        "preset": ChoiceKey(default, "Published settings, where sources differ.", choices={**presets, **further}),
        "selection": ChoiceKey(
            "",  # if it is not given
            "Images that select weights, and fit thresholds; if empty, published.",
            choices={
                "published": "on benchmarks the test split, as in the papers",
                HELD_OUT: "the validation split, or a tenth of the training images if there is none",
            },
        ),
    }


def apply_selection(config: ConfigDict, options: ConfigDict, default_preset: str) -> None:
    """Apply the options `preset` and `selection` to a config whose data set is set, in place.

    `selection=published` keeps the settings of the data set.

    `selection=held_out` selects weights and fits thresholds on validation images. The test splits are evaluated once,
    at the end. If the data set has no validation split, a tenth of its training images is held out. The choice of these
    images does not depend on the seed. In `options`, `preset=held_out` becomes `default_preset` with
    `selection=held_out`.

    Raises UserError if the two options contradict each other.
    """
    if options.preset == HELD_OUT:
        if options.selection == "published":
            raise UserError("preset=held_out contradicts selection=published; leave one of them out")
        options.preset, options.selection = default_preset, HELD_OUT
    if options.selection == HELD_OUT:
        if not config.data.val_split:
            config.data.val_split, config.data.val_fraction = "held_out", 0.1
            config.data.join_twins = False  # as in the published splits
        config.eval.select_on = "val"
        config.thresholds.at_end = True


def evaluate_like(config: ConfigDict, evaluator: str, *, metric: str = "mAP") -> None:
    """Set the metrics of a paper's evaluator (`metrics.preset`), and select weights by `metric`; in place."""
    config.metrics.preset, config.eval.select_metric = evaluator, metric


# ------------------------------------------------------------------------------------------ settings that follow others
class _Computation(NamedTuple):
    """An operation of a FieldReference: calls `fn` with the value of the reference, then the values of `args`."""

    fn: Callable[..., Any]
    args: list[FieldReference]


def follow(config: ConfigDict, key: str, compute: Callable[..., Any], *sources: str) -> None:
    """Define a config key as a function of other keys, until the key itself is set. The config is modified.

    A published setting may depend on another setting: for example, the learning rate depends on the backbone. The key
    becomes a lazy reference (`FieldReference` of ml_collections), which is evaluated at each access. So it follows
    later changes of the other keys by a flag, a sweep or Python code. Run folders store the value.

    Args:
      key: the dotted key to set.
      compute: function from the values of `sources` to the value of `key`.
      *sources: the dotted keys that `key` depends on.
    """
    references = [section.get_ref(leaf) for section, leaf in (_section_and_leaf(config, source) for source in sources)]
    value = compute(*(reference.get() for reference in references))
    section, leaf = _section_and_leaf(config, key)
    section[leaf] = FieldReference(value, op=_Computation(lambda _, *values: compute(*values), references))


def _section_and_leaf(config: ConfigDict, key: str) -> tuple[ConfigDict, str]:
    *parents, leaf = key.split(".")
    for name in parents:
        config = config[name]
    return config, leaf
