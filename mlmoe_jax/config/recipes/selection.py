"""What a training selects on: the test split and the metric of a paper, or held-out training images.

Every config of a method takes `selection=published`, the default, or `selection=honest`. `preset=honest` is short for
the default preset with `selection=honest`.
"""

from collections.abc import Sequence

from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError

PUBLISHED, HONEST = SELECTIONS = ("published", "honest")
OPTION = {"selection": ""}  # for `parse_arg`; "" = published, or honest if the preset says so


def read_selection(options: ConfigDict, presets: Sequence[str]) -> None:
    """Replace `preset=honest` by the first of `presets` and `selection=honest`.

    Raises UserError for other values, and for a preset and a selection that contradict each other.
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


def use_selection(config: ConfigDict, selection: str) -> None:
    """Apply `selection` to a config with a data set.

    published: leave what the data set has set. honest: select weights and fit thresholds on validation images, and read
    the test splits once, at the end; a data set without a validation split holds out a tenth of its training images,
    the same for all seeds.
    """
    if selection != HONEST:
        return
    data = config.data
    if not data.val_split:
        data.val_split, data.val_fraction = "held_out", 0.1
    config.eval.select_on = "val"
    config.thresholds.at_end = True


def evaluate_like(config: ConfigDict, evaluator: str, *, metric: str = "mAP") -> None:
    """Select by the metric of a paper, and add the metrics of its own evaluator, a choice of `metrics.preset`."""
    config.metrics.preset, config.eval.select_metric = evaluator, metric
