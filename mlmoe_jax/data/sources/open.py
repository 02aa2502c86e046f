"""Open splits of any data set by its name. A new data set needs one file and one line in `SOURCES`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np
from ml_collections import ConfigDict
from numpy.typing import NDArray

from mlmoe_jax.data.groups import draw_groups
from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.label_tree import INDEPENDENT, LabelTree, read_tree
from mlmoe_jax.data.sources.formats import FORMATS
from mlmoe_jax.data.sources.source import Source
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.registry import Registry
from mlmoe_jax.runtime.text import some

Rows = NDArray[np.int64]

# name -> source; the names are the choices of the config key data.name.
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
        "chestxray14": "mlmoe_jax.data.sources.chest:CHESTXRAY14",
        "chexpert": "mlmoe_jax.data.sources.chest:CHEXPERT",
        "csv": "mlmoe_jax.data.sources.tables:TABLE",
        "jsonl": "mlmoe_jax.data.sources.tables:TABLE",
        "folders": "mlmoe_jax.data.sources.folders:FOLDERS",
        "coco_json": "mlmoe_jax.data.sources.coco:COCO_JSON",
        **dict.fromkeys(FORMATS, "mlmoe_jax.data.sources.labeling:LABELING_TOOL"),
        "packed": "mlmoe_jax.data.sources.packed:PACKED",
        "tfds:NAME": "mlmoe_jax.data.sources.tfds:TFDS",
    },
)


def root_of(data_config: ConfigDict) -> str:
    """Return the folder of the data set of `config.data`; UserError if a published data set has no folder."""
    published = SOURCES[data_config.name].published
    return str(published.folder(data_config.root)) if published else os.path.expanduser(data_config.root)


def read_label_tree(data_config: ConfigDict, names: Sequence[str]) -> LabelTree:
    """Read `data.tree` for the labels `names`; independent labels if the key is empty."""
    if not data_config.tree:
        return INDEPENDENT
    return read_tree(place_of(data_config, data_config.tree), names)


def place_of(data_config: ConfigDict, name: str) -> str:
    """Return the path or address of a file, which may be relative to the folder of the data set."""
    name = os.path.expanduser(name)
    return name if "://" in name else os.path.join(root_of(data_config), name)


def open_split(
    data_config: ConfigDict,
    split: str,
    *,
    classes: Sequence[str] | None = None,
    tree: LabelTree | None = None,
    seed: int = 0,
    keep_missing: bool = False,
) -> Split:
    """Open a split of the data set `data.name`.

    The training split gets the labels of `data.corrections`, and labels are closed under `data.tree`, before images are
    held out. With data.bad_images=skip, images without a file are left out (`Split.missing`) afterwards, so that the
    held-out images do not depend on missing files.

    Args:
      data_config: `config.data`.
      split: name of the split.
      classes: the ordered class names of the training split. A source without fixed classes uses them to read its
        labels. The classes of other sources must be equal to them.
      tree: the tree of the labels; None reads `data.tree`.
      seed: seed that holds out `data.val_fraction` of the training split as `data.val_split` if `data.split_seed` is
        -1.
      keep_missing: whether images without a file stay in the split.

    Raises:
      UserError: the name is not in SOURCES, the classes differ, an image has no file with data.bad_images=error, or the
        source raises it.
    """
    in_part = data_config.val_fraction and split in (data_config.train_split, data_config.val_split)
    whole = SOURCES[data_config.name].open(data_config, data_config.train_split if in_part else split, classes)
    if classes is not None and tuple(classes) != whole.classes:
        raise UserError(
            f"split {split} of {data_config.name} has the labels {some(whole.classes, 4)}, but the model was trained "
            f"on {some(classes, 4)}"
        )
    if data_config.group_column and whole.groups is None:
        raise UserError(
            f"data.group_column={data_config.group_column} is a column of tables (csv, jsonl), and the data set "
            f"{data_config.name} has no groups; clear it, or for packed data pack the table again with this key"
        )
    if data_config.corrections and whole.name == data_config.train_split:
        from mlmoe_jax.data.sources.corrections import corrected  # here, because the config imports this module

        whole = corrected(whole, place_of(data_config, data_config.corrections))
    whole = whole.close_labels(read_label_tree(data_config, whole.classes) if tree is None else tree)
    skip = data_config.bad_images == "skip"
    if not skip and len(missing := whole.images.missing()):
        raise UserError(
            f"{len(missing):,} of the {len(whole):,} images of {whole.name} have no file, the first is "
            f"{whole.images.name(missing[0])}; unpack the images there, or leave such images out with "
            "data.bad_images=skip"
        )
    result = _hold_out(whole, split, data_config, seed) if in_part else whole
    return result.without_missing() if skip and not keep_missing else result


def open_splits(
    data_config: ConfigDict, names: Iterable[str], *, seed: int = 0, keep_missing: bool = False
) -> dict[str, Split]:
    """Open the training split and other splits with its classes. Return name -> split, the training split first.

    Args:
      data_config: `config.data`.
      names: names of the other splits; repeated and empty names are ignored.
      seed: as in `open_split`.
      keep_missing: as in `open_split`.
    """
    options = {"seed": seed, "keep_missing": keep_missing}
    train = open_split(data_config, data_config.train_split, **options)
    splits = {data_config.train_split: train}
    for name in filter(None, names):
        if name not in splits:
            splits[name] = open_split(data_config, name, classes=train.classes, tree=train.tree, **options)
    return splits


def original_name(data_config: ConfigDict) -> str:
    """Return the name of the data set: `data.name`, or for packed data the name of its source."""
    original = SOURCES[data_config.name].original
    return original(data_config) if original else data_config.name


def count_labels(data_config: ConfigDict) -> int:
    """Return the number of labels of the data set, which is opened only if necessary."""
    name = original_name(data_config)  # may be unknown, because packed data does not need its original source
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
    rows = draw_stratified(whole.labels, count, seed, whole.group_numbers)
    if not len(rows):
        raise UserError(
            f"all {len(whole):,} training images are one group, which cannot be in two parts; correct or clear "
            "data.group_column"
        )
    if split != data_config.val_split:
        rows = np.setdiff1d(np.arange(len(whole)), rows)
    return whole.take(rows, name=split)


# ------------------------------------------------------------------------------- the images held out for validation
def draw_stratified(labels: NDArray[np.int8], count: int, seed: int, groups: Rows | None = None) -> Rows:
    """Draw `count` of N images so that each label has about the same fraction of its images in both parts.

    A label with two images or more gets at least one in each part. If the parts are too small for this, the rarest
    labels come first. This is the iterative stratification of K. Sechidis, G. Tsoumakas and I. Vlahavas ("On the
    stratification of multi-label data", ECML PKDD 2011) with parts of exact size.

    Args:
      labels: label codes i8[N,K]. Only POSITIVE counts.
      count: number of images to draw.
      seed: seed of the order of the images.
      groups: number of each image's group; whole groups are then drawn, see `groups.draw_groups`.

    Returns:
      The rows i64[count], increasing. With groups, their number is about `count`.
    """
    if groups is not None:
        return draw_groups(labels, groups, count, seed)
    from scipy.sparse import csr_array  # here, because the config imports this module

    by_image = csr_array(labels == POSITIVE)
    images = by_image.shape[0]
    order = np.random.RandomState(seed).permutation(images)
    by_label = by_image[order].tocsc()
    remaining = np.diff(by_label.indptr).astype(np.int64)  # images of each label that are in no part yet
    # The images that each label lacks in the held-out part and in the rest, times N so that they are integers.
    least = np.minimum(remaining // 2, 1) * images
    share = np.clip(remaining * count, least, remaining * images - least)
    lacking = [share.tolist(), (remaining * images - share).tolist()]
    capacity = [count, images - count]
    part = np.full(images, -1)

    def put(image: int, into: int) -> None:
        part[image] = into
        capacity[into] -= 1
        for label in by_image.indices[by_image.indptr[image] : by_image.indptr[image + 1]]:
            lacking[into][label] -= images
            remaining[label] -= 1

    while remaining.any():
        rarest = int(np.where(remaining > 0, remaining, images + 1).argmin())
        for image in order[by_label.indices[by_label.indptr[rarest] : by_label.indptr[rarest + 1]]]:
            if part[image] < 0:
                need = [(lacking[into][rarest], capacity[into]) for into in (0, 1)]
                put(image, int(not capacity[0] or (capacity[1] > 0 and need[1] >= need[0])))
    unlabeled = order[part[order] < 0]
    part[unlabeled[: capacity[0]]] = 0
    return np.flatnonzero(part == 0)
