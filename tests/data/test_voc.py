import shutil

import numpy as np
import pytest
from helpers.tables import data_settings
from PIL import Image

from mlmoe_jax.data.label_codes import DIFFICULT, NEGATIVE, POSITIVE
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.sources.voc import VOC_CLASSES

# name -> the classes that are present, the classes that are difficult
TRAIN = {
    "2008_000002": (["tvmonitor"], []),
    "2007_000033": (["aeroplane", "person"], ["car"]),
    "2008_000009": ([], []),
    "2008_000007": ([], ["boat"]),
}
VAL = {"2008_000003": (["train"], [])}


def write_lists(folder, split, table):
    main = folder / "ImageSets" / "Main"
    main.mkdir(parents=True, exist_ok=True)
    for name in VOC_CLASSES:
        lines = [
            f"{image} {' 1' if name in present else ' 0' if name in difficult else '-1'}\n"
            for image, (present, difficult) in table.items()
        ]
        (main / f"{name}_{split}.txt").write_text("".join(lines))


@pytest.fixture
def voc(tmp_path):
    folder = tmp_path / "data" / "VOCdevkit" / "VOC2012"
    write_lists(folder, "train", TRAIN)
    write_lists(folder, "val", VAL)
    write_lists(folder, "trainval", TRAIN | VAL)
    (folder / "JPEGImages").mkdir()
    for row, name in enumerate(TRAIN | VAL):
        Image.new("RGB", (20 + row, 10), (50 * row, 0, 0)).save(folder / "JPEGImages" / f"{name}.jpg")
    return folder


def open_voc(root, split, year=2012, **keys):
    return open_split(data_settings(f"voc{year}", root, **keys), split)


def row_of(split, name):
    return split.labels[split.ids.index(f"JPEGImages/{name}.jpg")]


def test_labels_order_and_images(voc):
    split = open_voc(voc, "train")
    assert split.name == "train"
    assert split.classes == VOC_CLASSES == tuple(sorted(VOC_CLASSES))
    assert len(VOC_CLASSES) == 20
    assert split.ids == ["JPEGImages/2007_000033.jpg", "JPEGImages/2008_000002.jpg"]
    assert split.labels.dtype == np.int8
    assert row_of(split, "2007_000033")[VOC_CLASSES.index("car")] == DIFFICULT
    assert row_of(split, "2007_000033")[VOC_CLASSES.index("person")] == POSITIVE
    assert (row_of(split, "2008_000002") == POSITIVE).sum() == 1
    assert (row_of(split, "2008_000002") == NEGATIVE).sum() == 19
    assert split.images[0].shape == (10, 21, 3)
    assert split.images[1].shape == (10, 20, 3)


def test_images_without_a_positive_label_are_dropped_unless_kept(voc):
    (voc / "JPEGImages" / "2008_000007.jpg").rename(kept_file := voc / "kept.jpg")
    assert len(open_voc(voc, "train")) == 2, "the files of the others are not needed"
    kept_file.rename(voc / "JPEGImages" / "2008_000007.jpg")
    kept = open_voc(voc, "train", keep_empty=True)
    assert len(kept) == 4
    assert kept.ids == sorted(kept.ids)
    assert (row_of(kept, "2008_000009") == NEGATIVE).all()
    assert row_of(kept, "2008_000007")[VOC_CLASSES.index("boat")] == DIFFICULT
    assert len(open_voc(voc, "trainval")) == 3


def test_images_with_only_difficult_labels_are_kept_where_these_count(voc):
    empty, difficult = "JPEGImages/2008_000009.jpg", "JPEGImages/2008_000007.jpg"
    for how, kept in (("negative", False), ("ignore", True), ("positive", True)):
        ids = open_voc(voc, "train", difficult_train=how).ids
        assert ((difficult in ids), empty in ids) == (kept, False)
        assert len(open_voc(voc, "trainval", difficult_train=how)) == 3, "trainval is not trained on"
        assert len(open_voc(voc, "trainval", difficult_eval=how)) == 3 + kept


def test_root_may_be_the_folder_its_parent_or_its_grandparent(voc, monkeypatch):
    expected = open_voc(voc, "val")
    for root in (voc.parent, voc.parent.parent, str(voc)):
        split = open_voc(root, "val")
        assert split.ids == expected.ids
        assert split.images.name(0) == expected.images.name(0)
    monkeypatch.chdir(voc)
    assert open_voc(".", "val").ids == expected.ids
    renamed = voc.rename(voc.with_name("pascal"))
    assert open_voc(renamed, "val").ids == expected.ids


def test_both_years_in_one_folder(voc):
    other = voc.with_name("VOC2007")
    write_lists(other, "test", {"000001": (["dog"], [])})
    (other / "JPEGImages").mkdir()
    shutil.copy(voc / "JPEGImages" / "2008_000002.jpg", other / "JPEGImages" / "000001.jpg")
    assert open_voc(voc.parent, "test", 2007).ids == ["JPEGImages/000001.jpg"]
    assert len(open_voc(voc.parent, "train")) == 2


def test_root_without_voc(voc, tmp_path, refusal):
    assert "no folder" in refusal(open_voc, tmp_path / "no", "train")
    (tmp_path / "else").mkdir()
    sentence = refusal(open_voc, tmp_path / "else", "train")
    assert sentence == (
        f"ImageSets/Main is not in {tmp_path}/else/VOCdevkit/VOC2012, {tmp_path}/else/VOC2012 or {tmp_path}/else; "
        "voc2012 needs VOCdevkit/VOC2012, published at http://host.robots.ox.ac.uk/pascal/VOC/voc2012/: put it there, "
        "or set data.root to its folder (docs/datasets.md#voc-2012 shows how); "
        "--config=NAME:dataset=digits needs no files"
    )
    # the other year's own folder must not pass for this one
    assert refusal(open_voc, voc, "train", 2007).startswith("ImageSets/Main is not in ")


@pytest.mark.parametrize("line", ["2008_000002", "2008_000002 2", "2008_000002 1 1", "", "\xff\xfe\x00"])
def test_malformed_lists_are_named(voc, refusal, line):
    path = voc / "ImageSets" / "Main" / "cow_train.txt"
    path.write_text(f"2007_000033  1\n\n{line}\n", encoding="latin-1")
    assert refusal(open_voc, voc, "train").startswith(f"{path} is damaged: ")


def test_an_empty_first_list_is_not_a_list_of_negative_images(voc, refusal):
    (voc / "ImageSets" / "Main" / "aeroplane_train.txt").write_text("")
    assert refusal(open_voc, voc, "train").startswith(f"{voc}/ImageSets/Main lists no images")


@pytest.mark.parametrize("table", [{"2008_000009": ([], [])}, {"2008_000007": ([], ["boat"])}])
def test_a_split_without_positive_labels(voc, refusal, table):
    write_lists(voc, "train", table)
    sentence = refusal(open_voc, voc, "train")
    assert sentence.startswith("no image of split train of voc2012 has a positive label; ")


def test_real_voc_labels_agree_with_the_official_ones(shared_data):
    with np.load(shared_data / "voc_labels.npz") as stored:
        official = {
            str(name): labels
            for name, labels in zip(stored["voc12_trainval_ids"], stored["voc12_trainval"], strict=True)
        }
        assert tuple(stored["classes"]) == VOC_CLASSES
    compared = 0
    for name, count in (("train", 600), ("val", 200)):
        split = open_voc(shared_data, name)
        assert len(split) == count
        for identifier, labels in zip(split.ids, split.labels, strict=True):
            image = identifier.removeprefix("JPEGImages/").removesuffix(".jpg")
            if image in official:  # the images of 2007 added for segmentation are in no official list
                marks = np.select([labels == POSITIVE, labels == DIFFICULT], [1, 0], default=-1)
                np.testing.assert_array_equal(marks, official[image])
                compared += 1
        assert split.images[count - 1].shape[2] == 3
    assert compared == 725
