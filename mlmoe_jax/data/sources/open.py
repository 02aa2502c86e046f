"""Open splits of any data set by its name; a new data set takes one file and one line in `SOURCES`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.held_out import RULES
from mlmoe_jax.data.sources.source import Source
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.registry import Registry
from mlmoe_jax.runtime.text import some

# name -> what opens it; also the choices of the config key data.name.
SOURCES: Registry[Source] = Registry(
    "data set",
    {
        "digits": "mlmoe_jax.data.sources.digits:SCENES_SOURCE",
        "digits_single": "mlmoe_jax.data.sources.digits:SINGLES_SOURCE",
        "synthetic": "mlmoe_jax.data.sources.synthetic:SYNTHETIC",
        "voc2007": "mlmoe_jax.data.sources.voc:VOC2007",
        "voc2012": "mlmoe_jax.data.sources.voc:VOC2012",
        "coco2014": "mlmoe_jax.data.sources.coco:COCO2014",
        "nuswide": "mlmoe_jax.data.sources.nuswide:NUSWIDE",
        "vg256": "mlmoe_jax.data.sources.visual_genome:VG256",
        "vg500": "mlmoe_jax.data.sources.visual_genome:VG500",
        "csv": "mlmoe_jax.data.sources.tables:TABLE",
        "jsonl": "mlmoe_jax.data.sources.tables:TABLE",
        "folders": "mlmoe_jax.data.sources.folders:FOLDERS",
        "coco_json": "mlmoe_jax.data.sources.coco:COCO_JSON",
        "packed": "mlmoe_jax.data.sources.packed:PACKED",
        "tfds:NAME": "mlmoe_jax.data.sources.tfds:TFDS",
    },
)


def source_named(name: str) -> Source:
    """Return the source of `data.name`; UserError with the nearest name if there is none."""
    return SOURCES[name]


def root_of(data_config: ConfigDict) -> str:
    """Return the folder of the data set of `config.data`: for a published one as `Published.folder` finds it.

    Raises UserError if a published data set has none.
    """
    published = source_named(data_config.name).published
    return str(published.folder(data_config.root)) if published else data_config.root


def open_split(
    data_config: ConfigDict,
    split: str,
    *,
    classes: Sequence[str] | None = None,
    seed: int = 0,
    keep_missing: bool = False,
) -> Split:
    """Open a split of the data set `data.name`.

    data_config: `config.data`. classes: the ordered class names of the model, which are those of the training split. A
    source without fixed classes uses them to read its labels; the classes of other sources must be equal to them.
    seed: draws the `data.val_fraction` of the training split that is used as `data.val_split` if `data.split_seed` is
    -1; the rest remains the training split. With data.bad_images=skip, images without a file are left out
    (`Split.missing`), after the drawing, so that it does not depend on them; keep_missing: they stay.
    Raises UserError for a name that is not in SOURCES, for other classes, and for the errors of the source.
    """
    in_part = data_config.val_fraction and split in (data_config.train_split, data_config.val_split)
    opened = source_named(data_config.name).open(data_config, data_config.train_split if in_part else split, classes)
    if classes is not None and tuple(classes) != opened.classes:
        raise UserError(
            f"split {split} of {data_config.name} has the labels {some(opened.classes, 4)}, but the model was trained "
            f"on {some(classes, 4)}"
        )
    opened = _hold_out(opened, split, data_config, seed) if in_part else opened
    return opened.without_missing() if data_config.bad_images == "skip" and not keep_missing else opened


def open_splits(
    data_config: ConfigDict,
    names: Iterable[str],
    *,
    seed: int = 0,
    keep_missing: bool = False,
    refused: Callable[[UserError], None] | None = None,
) -> dict[str, Split]:
    """Open the training split and the splits `names` with its classes; return name -> split, the training split first.

    names: repeated and empty names are ignored. keep_missing: as in `open_split`. refused: a function that
    takes the error of a split that cannot be opened, which is then left out; if it is None, the error is raised.
    Raises UserError if the training split cannot be opened.
    """
    options = {"seed": seed, "keep_missing": keep_missing}
    train = open_split(data_config, data_config.train_split, **options)
    splits = {data_config.train_split: train}
    for name in dict.fromkeys(names):
        if name in ("", *splits):
            continue
        try:
            splits[name] = open_split(data_config, name, classes=train.classes, **options)
        except UserError as error:
            if refused is None:
                raise
            refused(error)
    return splits


def original_name(data_config: ConfigDict) -> str:
    """Return the name of the data set of `config.data`: `data.name`, or for packed data the name of its source."""
    original = source_named(data_config.name).original
    return original(data_config) if original else data_config.name


def count_labels(data_config: ConfigDict) -> int:
    """Return the number of labels of the data set of `config.data`, which is opened only if necessary."""
    name = original_name(data_config)  # may be unknown: packed data does not need its original source
    labels = SOURCES[name].labels if name in SOURCES else None
    return labels(data_config) if labels else len(open_split(data_config, data_config.train_split).classes)


def _hold_out(whole: Split, split: str, data_config: ConfigDict, seed: int) -> Split:
    fraction = data_config.val_fraction
    count = round(fraction * len(whole))
    if not 0 < count < len(whole):
        raise UserError(
            f"data.val_fraction={fraction} of {len(whole)} training images leaves {count} for validation and "
            f"{len(whole) - count} for training"
        )
    seed = seed if data_config.split_seed < 0 else data_config.split_seed
    rows = RULES[data_config.split_rule](whole.labels, count, seed)
    if split != data_config.val_split:
        rows = np.setdiff1d(np.arange(len(whole)), rows)
    return whole.take(rows, name=split)
