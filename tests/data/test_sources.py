import os
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers.paths import REPOSITORY
from helpers.tables import data_settings as settings
from PIL import Image

from mlmoe_jax.apps.tools.pack import pack
from mlmoe_jax.config import default_config
from mlmoe_jax.data.pipeline import SkippedImages
from mlmoe_jax.data.sources.open import DATA_SETS, count_labels, find_root, open_split, open_splits, original_name
from mlmoe_jax.data.sources.source import Published

PUBLISHED = ("voc2007", "voc2012", "coco2014", "nuswide", "vg256", "vg500", "chestxray14", "chexpert")
KNOWN = (
    "digits, digits_single, synthetic, voc2007, voc2012, coco2014, nuswide, vg256, vg500, chestxray14, chexpert, csv, "
    "jsonl, folders, coco_json, label_studio, fiftyone, cvat, sidecar, wd_tagger, packed, tfds:NAME"
)


@pytest.fixture
def table(tmp_path):
    """A folder with 20 images in one table: image k has label a and, if k is odd, b."""
    lines = [f"{k}.png,{'a;b' if k % 2 else 'a'}" for k in range(20)]
    (tmp_path / "all.csv").write_text("\n".join(["image,labels", *lines]))
    for k in range(20):
        Image.new("RGB", (4, 4), (k, 0, 0)).save(tmp_path / f"{k}.png")
    return tmp_path


def test_a_packed_data_set_has_the_name_and_labels_of_its_source(tmp_path, monkeypatch):
    assert (original_name(settings("voc2012", "nowhere")), count_labels(settings("voc2012", "nowhere"))) == (
        "voc2012",
        20,
    )
    config = default_config()
    config.data.update({"name": "synthetic", "labels": 16, "train_split": "val", "val_split": "", "test_splits": ()})
    pack(config, str(tmp_path / "packed"))
    packed = settings("packed", tmp_path / "packed", train_split="val")
    others = {name: place for name, place in DATA_SETS.entries.items() if name != "synthetic"}
    monkeypatch.setattr(DATA_SETS, "entries", others)  # as if it was the source of another program
    assert (original_name(packed), count_labels(packed)) == ("synthetic", 16)


def test_labels_of_published_data_are_counted_without_their_files():
    assert [count_labels(settings(name, "nowhere")) for name in ("vg256", "vg500", "chexpert")] == [256, 500, 14]


def test_labels_of_own_images_are_counted_in_the_training_table(tmp_path):
    (tmp_path / "train.csv").write_text("image,labels\na.png,x;y\nb.png,z\n")
    assert count_labels(settings("csv", tmp_path, bad_images="skip")) == 3


@pytest.mark.parametrize("name", ["digits", "digits_single", "synthetic", *PUBLISHED])
def test_an_unknown_split_is_refused(name, refusal, tmp_path):
    assert refusal(open_split, settings(name, tmp_path), "nope").startswith(
        f"data set {name} has no split 'nope'; it has "
    )


def test_errors_for_unknown_names_list_known_ones(refusal):
    assert ", ".join(DATA_SETS) == KNOWN
    sentence = refusal(open_split, settings("coco14"), "train")
    assert sentence == "there is no data set 'coco14'; did you mean 'coco2014'?"
    sentence = refusal(open_split, settings("zzz"), "train")
    assert sentence == f"there is no data set 'zzz'; there are {KNOWN}"
    assert "did you mean 'digits'?" in refusal(open_split, settings("digits:x"), "train")


def test_all_splits_have_the_classes_of_the_training_split(table, refusal):
    for name, rows in {"train": ["0.png,b", "1.png,a"], "val": ["2.png,a"], "test": ["3.png,z"]}.items():
        (table / f"{name}.csv").write_text("\n".join(["image,labels", *rows]))
    data = settings("csv", table, table="{split}.csv")
    splits = open_splits(data, ("val", "", "train", "val"))
    assert list(splits) == ["train", "val"]
    assert splits["val"].classes == splits["train"].classes == ("a", "b")
    assert "label 'z'" in refusal(open_splits, data, ["test"])
    data.train_split = "nope"
    assert "for split nope" in refusal(open_splits, data, ["val"])


def test_a_part_of_the_training_split_is_held_out(table):
    data = settings("csv", table, table="all.csv", val_fraction=0.25)
    train, val = open_split(data, "train", seed=3), open_split(data, "val", seed=3)
    assert (train.name, val.name) == ("train", "val")
    assert 0 < len(val) < len(train)
    assert sorted([*train.ids, *val.ids]) == sorted(f"{k}.png" for k in range(20))
    for split in (train, val):
        for identifier, labels, image in zip(split.ids, split.labels, split.images, strict=True):
            k = int(identifier.removesuffix(".png"))
            assert labels.tolist() == [1, k % 2]
            assert image[0, 0, 0] == k
    assert open_split(data, "val", seed=4).ids == val.ids, "the same part for runs with other seeds"
    data.split_seed = 3
    other = open_split(data, "val").ids
    assert other != val.ids
    data.split_seed = -1
    assert open_split(data, "val", seed=3).ids == other


def test_a_fraction_that_leaves_no_training_image_is_refused(table, refusal):
    sentence = refusal(open_split, settings("csv", table, table="all.csv", val_fraction=1.0), "val")
    assert sentence.startswith("data.val_fraction=1.0 of 20 training images leaves none for training; ")


def test_classes_other_than_those_of_the_model_are_refused(table, refusal):
    assert open_split(settings("digits_single"), "val", classes=[str(digit) for digit in range(10)]).labels.any()
    sentence = refusal(open_split, settings("digits_single"), "val", classes=["a", "b"])
    assert sentence == (
        "split val of digits_single has the labels 0, 1, 2, 3, … (10), but the model was trained on a, b"
    )
    split = open_split(settings("csv", table, table="all.csv"), "train", classes=["c", "b", "a"])
    np.testing.assert_array_equal(split.labels[:2], [[0, 0, 1], [0, 1, 1]])
    (table / "names.txt").write_text("a\nb\n")
    sentence = refusal(
        open_split, settings("csv", table, table="all.csv", classes="names.txt"), "train", classes=["b", "a"]
    )
    assert sentence == "split train of csv has the labels a, b, but the model was trained on b, a"


def test_missing_images_are_refused_on_opening_unless_skipped(table, refusal):
    (table / "3.png").unlink()
    sentence = refusal(open_split, settings("csv", table, table="all.csv"), "train")
    assert sentence.startswith(f"1 of the 20 images of train have no file, the first is {table}/3.png; ")
    skip = settings("csv", table, table="all.csv", bad_images="skip")
    kept = open_split(skip, "train", keep_missing=True)
    assert (len(kept), kept.missing) == (20, None)
    split = open_split(skip, "train")
    assert list(split.ids) == [f"{k}.png" for k in range(20) if k != 3]
    np.testing.assert_array_equal(split.labels, np.delete(kept.labels, 3, axis=0))
    assert [image[0, 0, 0] for image in split.images] == [k for k in range(20) if k != 3]
    reason = f"cannot read {table}/3.png as an image: No such file or directory"
    assert SkippedImages(split).table() == [["train", "3.png", reason]]


def test_missing_images_do_not_change_which_images_are_held_out(table):
    data = settings("csv", table, table="all.csv", bad_images="skip", val_fraction=0.3, val_split="val")
    before = {name: set(open_split(data, name).ids) for name in ("train", "val")}
    for k in (0, 7, 8):
        (table / f"{k}.png").unlink()
    for name, ids in before.items():
        assert set(open_split(data, name).ids) == ids - {"0.png", "7.png", "8.png"}


def test_slow_libraries_are_imported_only_when_needed():
    slow = "{'sklearn', 'tensorflow_datasets', 'jax'}"
    code = f"import sys, mlmoe_jax.data.sources.open; sys.exit(bool({slow} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -------------------------------------------------------------------------------------------------- published data sets
BIRDS = Published("birds", "images and labels.txt", "https://example.org/birds", "birds")
HOW = (
    "birds needs images and labels.txt, published at https://example.org/birds: put it there, or set data.root to its "
    "folder (docs/datasets.md#birds shows how); --config=NAME:dataset=digits needs no files"
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working directory, without $MLMOE_DATA."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv("MLMOE_DATA", raising=False)
    return tmp_path


def test_a_folder_is_looked_for_in_order(place, monkeypatch):
    (place / "work" / "data" / "birds").mkdir(parents=True)
    assert str(BIRDS.folder()) == "data/birds"
    monkeypatch.setenv("MLMOE_DATA", "")
    assert str(BIRDS.folder()) == "data/birds"
    monkeypatch.setenv("MLMOE_DATA", str(place / "all"))
    (place / "all" / "birds").mkdir(parents=True)
    assert BIRDS.folder() == place / "all" / "birds"
    (place / "own").mkdir()
    assert BIRDS.folder(place / "own") == place / "own"
    monkeypatch.setenv("HOME", str(place))
    assert BIRDS.folder("~/own") == place / "own"
    monkeypatch.setenv("MLMOE_DATA", "~/all")
    assert BIRDS.folder() == place / "all" / "birds"


def test_where_nothing_is_one_sentence_says_all(place, monkeypatch, refusal):
    assert refusal(BIRDS.folder) == f"there is no folder data/birds; {HOW}"
    monkeypatch.setenv("MLMOE_DATA", "/mnt/all")
    assert refusal(BIRDS.folder) == f"there is no folder /mnt/all/birds; {HOW}"
    (place / "work" / "data" / "birds").mkdir(parents=True)
    assert refusal(BIRDS.folder, "typo") == f"there is no folder typo; {HOW}", "a root that is set is the only place"


def test_the_root_of_a_config(place):
    assert find_root(settings("csv", "~/anywhere")) == os.path.expanduser("~/anywhere")
    (place / "work" / "data" / "voc2007").mkdir(parents=True)
    assert find_root(settings("voc2007")) == "data/voc2007"


def test_the_published_data_sets_say_where_they_are_explained():
    published_of = {name: found for name in DATA_SETS if (found := DATA_SETS[name].published)}
    assert tuple(published_of) == PUBLISHED
    page = (REPOSITORY / "docs" / "datasets.md").read_text()
    sections = {re.sub(r"[^a-z0-9]+", "-", title.lower()) for title in re.findall(r"^## (.+)$", page, re.MULTILINE)}
    for name, published in published_of.items():
        assert published.name == name
        assert published.section in sections
        assert published.address in page
