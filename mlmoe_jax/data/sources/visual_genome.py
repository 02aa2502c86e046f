"""Visual Genome as a multi-label data set: the 256 categories of MLC-PAT and ML-VPT, or the 500 of SSGRL.

    VG_100K/1.jpg, VG_100K_2/107898.jpg     # both data sets; VG_100K_2 may also be merged into VG_100K
    objects_v1_2.json or objects.json       # vg256: [{"image_id": 1, "objects": [{"names": ["tree"], …}, …]}, …]

vg256: an image has a category if the first name of one of its objects is among the object names of the category
(mlmoe_jax/data/files/vg256_categories.json; a name in two categories belongs to the later category). Images without any
category are left out. Images with a category are sorted by number and split by a fixed permutation, 70 % train and 30 %
test.

    train_list_500.txt, test_list_500.txt     # vg500: a file name per line
    vg_category_500_labels_index.json         # vg500: {"1.jpg": [0, 17, …], …}, indices of 500 labels

vg500: of SSGRL's files, only the counts are known to us, 82,904 train and 10,000 test images. Convert other files to
the names and the layout above. The files have no label names. The labels are "0" to "499", unless `data.classes` is a
file of 500 names.
"""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.labels.name_vectors import read_classes
from mlmoe_jax.data.sources.rows import ImageRow, Listing, select_split
from mlmoe_jax.data.sources.source import DataSource, Published, find_in_folders
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained

ADDRESS = "https://homes.cs.washington.edu/~ranjay/visualgenome/api.html"
CATEGORY_FILE = Path(__file__).parents[1] / "files" / "vg256_categories.json"
OBJECTS = ("objects_v1_2.json", "objects.json")
IMAGE_FOLDERS = ("VG_100K_2", "VG_100K")
TEST_SHARE = 0.3
# Removed from the start of a name if all words but the last are adjectives: "large brown dog" is a dog.
COLORS = ("white", "black", "blue", "green", "red", "brown", "yellow", "silver", "orange", "gray", "grey", "pink")
ADJECTIVES = frozenset((*COLORS, "small", "large", "wooden", "metal", "tall", "long", "dark"))

LABELS_500 = 500
INDEX_500 = "vg_category_500_labels_index.json"

PUBLISHED_256 = Published("vg256", "VG_100K and objects_v1_2.json", ADDRESS, "visual-genome-256")
PUBLISHED_500 = Published(
    "vg500", f"VG_100K, train_list_500.txt, test_list_500.txt and {INDEX_500}", ADDRESS, "visual-genome-500"
)


# ------------------------------------------------------------------------------------------------------------ vg256
def open_vg256(data_config: ConfigDict, split: str) -> Split:
    """Open the split train or test of vg256. Images are sorted by number, and ids are paths such as VG_100K/1.jpg.

    Raises UserError if `data.keep_empty` is set, because the published split contains only images with a label.
    """
    if data_config.keep_empty:
        raise UserError(
            "data.keep_empty cannot be used with vg256, which is a split of the images with a label; clear it"
        )
    folder = PUBLISHED_256.folder(data_config.root)
    path = next((folder / name for name in OBJECTS if (folder / name).is_file()), None)
    if path is None:
        raise PUBLISHED_256.missing(f"there is neither {OBJECTS[0]} nor {OBJECTS[1]} in {folder}")
    state = path.stat()
    with damage_explained(path):
        images = _read_objects(path, state.st_size, state.st_mtime_ns)
    order = np.random.RandomState(1).permutation(len(images))
    first_of_test = len(order) - round(TEST_SHARE * len(order))
    drawn = np.sort(order[:first_of_test] if split == "train" else order[first_of_test:])
    labels = [(f"{images[row][0]}.jpg", images[row][1]) for row in drawn]
    return _make_split(labels, Listing(path, split, folder), tuple(_read_categories()))


def find_category(name: str, categories: Mapping[str, str]) -> str | None:
    """Return the category of an object name, or None. `categories` has lower-case object names."""
    name = name.lower().strip().removesuffix(".").rstrip()
    *leading, last = name.split() or [""]
    if leading and ADJECTIVES.issuperset(leading):
        name = last
    return categories.get(name)


def _read_categories() -> dict[str, list[str]]:
    return json.loads(CATEGORY_FILE.read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=1)  # all splits come from the same 400 MB of text
def _read_objects(path: Path, size: int, modified: int) -> list[tuple[int, set[str]]]:
    """Return (image number, categories) for each image that has a category, sorted by image number.

    `size` and `modified`, the modification time, are part of the cache key, so that a changed file is read again.
    """
    category_by_name = {name: category for category, names in _read_categories().items() for name in names}

    def shrink(record: dict):
        # Called for each JSON object, inner objects first, so that the objects are never in memory all at once.
        if "objects" in record:
            return int(record["image_id"]), set(filter(None, record["objects"]))
        names = record.get("names")
        return find_category(names[0], category_by_name) if names else None

    images = json.loads(PUBLISHED_256.read(path), object_hook=shrink)
    return sorted((number, categories) for number, categories in images if categories)


# ------------------------------------------------------------------------------------------------------------ vg500
def open_vg500(data_config: ConfigDict, split: str) -> Split:
    """Open the split train or test of vg500, in the order of the list. Ids are paths such as VG_100K/1.jpg."""
    folder, names = PUBLISHED_500.folder(data_config.root), data_config.classes
    classes = read_classes(folder / names) if names else tuple(map(str, range(LABELS_500)))
    if len(classes) != LABELS_500:
        raise UserError(
            f"{folder / names} lists {len(classes)} labels, but vg500 has {LABELS_500}; correct data.classes"
        )
    list_path, index_path = folder / f"{split}_list_500.txt", folder / INDEX_500
    files = [line.rpartition("/")[2] for line in PUBLISHED_500.lines(list_path)]
    with damage_explained(index_path):
        numbers_of, name_of = json.loads(PUBLISHED_500.read(index_path)), dict(enumerate(classes))
        labels = [(file, map(name_of.__getitem__, numbers_of[file])) for file in files]
        return _make_split(labels, Listing(list_path, split, folder), classes)


# ------------------------------------------------------------------------------------------------------------- both
def _make_split(labels: Iterable[tuple[str, Iterable[str]]], listing: Listing, classes: Sequence[str]) -> Split:
    """Return a split of images in VG_100K or VG_100K_2. All ids begin with VG_100K.

    `labels` are pairs of a file name and its classes.
    """
    rows = (ImageRow(f"{IMAGE_FOLDERS[-1]}/{file}", dict.fromkeys(names, POSITIVE)) for file, names in labels)
    return find_in_folders(select_split(rows, listing, classes), IMAGE_FOLDERS)


VG256 = DataSource(open_vg256, splits=("train", "test"), labels=256, published=PUBLISHED_256)
VG500 = DataSource(
    open_vg500,
    splits=("train", "test"),
    drops_empty=True,
    labels=LABELS_500,
    published=PUBLISHED_500,
)
