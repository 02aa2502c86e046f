"""Where images and labels come from: one module a data set, opened by name."""

import difflib
from collections.abc import Sequence

import numpy as np

from mlmoe_jax.data.sources.coco import open_coco
from mlmoe_jax.data.sources.coco_json import open_coco_json
from mlmoe_jax.data.sources.folders import open_folders
from mlmoe_jax.data.sources.nuswide import open_nuswide
from mlmoe_jax.data.sources.synthetic import open_synthetic
from mlmoe_jax.data.sources.tables import open_table
from mlmoe_jax.data.sources.visual_genome import open_vg256, open_vg500
from mlmoe_jax.data.sources.voc import open_voc
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError

LABELS_OF = {"voc2007": 20, "voc2012": 20, "coco2014": 80, "nuswide": 81, "vg256": 256, "vg500": 500}
PUBLISHED = tuple(LABELS_OF)
OWN = ("csv", "jsonl", "folders", "coco_json", "packed")
NAMES = ("digits", "digits_single", "synthetic", *PUBLISHED, *OWN, "tfds:NAME")


def open_split(data, split: str, *, classes: Sequence[str] | None = None, seed: int = 0) -> Split:
    """Open a split of the data set `data.name`, `data` being `config.data`.

    classes: the names, in order, that the model knows: those of the training split, once there are any. A source whose
    classes come from its labels reads them by these; any other must have the same.
    seed: draws `data.val_fraction` of the training split, which then is `data.val_split`, and leaves the rest for it.
    Raises UserError for a name that is not among NAMES, other classes, and whatever the source raises.
    """
    held_out = data.val_fraction and split in (data.train_split, data.val_split)
    opened = _open(data, data.train_split if held_out else split, classes)
    if classes is not None and tuple(classes) != opened.classes:
        raise UserError(
            f"split {split} of {data.name} has the labels {_some(opened.classes)}, but the model was trained on "
            f"{_some(classes)}"
        )
    return _hold_out(opened, split, data, seed) if held_out else opened


def original_name(data) -> str:
    """Return the name of the data set that `config.data` stands for: `data.name`, or what was packed under it."""
    if data.name != "packed":
        return data.name
    from mlmoe_jax.data.sources.packed import source_of

    return source_of(data.root)


def count_labels(data) -> int:
    """Return how many labels the data set of `config.data` has; only one of the user's own is opened to find out."""
    name = original_name(data)
    if name in ("digits", "digits_single"):
        return 10
    if name == "synthetic":
        return data.labels
    return LABELS_OF.get(name) or len(open_split(data, data.train_split).classes)


def _open(data, split: str, classes: Sequence[str] | None) -> Split:
    match data.name:
        case "digits" | "digits_single":
            # scikit-learn takes longer to import than all the rest
            from mlmoe_jax.data.sources.digits import open_scenes, open_single

            return open_scenes(split) if data.name == "digits" else open_single(split)
        case "synthetic":
            return open_synthetic(data.labels, split)
        case "csv" | "jsonl":
            return open_table(data, split, classes=classes)
        case "coco_json":
            return open_coco_json(data, split, classes=classes)
        case "folders":
            return open_folders(data, split, classes=classes)
        case "packed":
            from mlmoe_jax.data.sources.packed import open_packed

            return open_packed(data.root, split)
        case name if name.startswith("tfds:"):
            # TFDS takes longer to import than all the rest
            from mlmoe_jax.data.sources.tfds import open_tfds

            return open_tfds(data.root, name.removeprefix("tfds:"), split, keep_empty=data.keep_empty)
        case name if name in PUBLISHED:
            return _open_published(data, split)
    close = difflib.get_close_matches(data.name, NAMES, n=1)
    hint = f"did you mean '{close[0]}'" if close else "set data.name to one of them"
    raise UserError(f"there is no data set '{data.name}' among {', '.join(NAMES)}; {hint}")


def _open_published(data, split: str) -> Split:
    how = {"keep_empty": data.keep_empty, "check": data.bad_images == "error"}
    match data.name:
        case "voc2007" | "voc2012":
            return open_voc(data.root, int(data.name[3:]), split, **how)
        case "coco2014":
            return open_coco(data.root, split, **how)
        case "nuswide":
            return open_nuswide(data.root, split, **how)
        case "vg256":
            return open_vg256(data.root, split, **how)
        case _:
            return open_vg500(data.root, split, names=data.classes, **how)


def _hold_out(whole: Split, split: str, data, seed: int) -> Split:
    count = round(data.val_fraction * len(whole))
    if not 0 < count < len(whole):
        raise UserError(
            f"data.val_fraction={data.val_fraction} of {len(whole)} training images leaves {count} for validation and "
            f"{len(whole) - count} for training"
        )
    order = np.random.RandomState(seed).permutation(len(whole))
    return whole.take(np.sort(order[:count] if split == data.val_split else order[count:]), name=split)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f", … ({len(names)})" if len(names) > 4 else "")
