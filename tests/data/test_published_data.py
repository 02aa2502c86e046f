"""What a split of each published data set has: its images, their order, their labels and their folders."""

import json

import numpy as np
import pytest
from helpers.published_data import (
    WRITE,
    coco_file,
    objects_of,
    write_chestxray14,
    write_chexpert,
    write_genome,
    write_nuswide,
    write_voc,
)
from helpers.tables import listed, opened, widths

from mlmoe_jax.data.label_codes import DIFFICULT, POSITIVE
from mlmoe_jax.data.sources.chest import FINDINGS, OBSERVATIONS
from mlmoe_jax.data.sources.nuswide import CONCEPTS
from mlmoe_jax.data.sources.source import Published
from mlmoe_jax.data.sources.visual_genome import ADJECTIVES, CATEGORY_FILE, find_category
from mlmoe_jax.data.sources.voc import VOC_CLASSES

PATH = "{}/patient{:05}/study1/view1_frontal.jpg"


def unknown(*known: str) -> str:
    return ", ".join(f"?{name}" for name in OBSERVATIONS if name not in known)


# data set, split: classes, images with a positive label (COCO sorts by number as text), images without, widths of all
SPLITS = {
    ("voc2012", "train"): (
        VOC_CLASSES,
        ["JPEGImages/2007_000033.jpg: aeroplane, ~car, person", "JPEGImages/2008_000002.jpg: tvmonitor"],
        ["JPEGImages/2008_000007.jpg: ~boat", "JPEGImages/2008_000009.jpg:"],
        [2, 1, 4, 3],
    ),
    ("coco2014", "train"): (
        ("person", "bottle", "stop sign"),
        [
            f"train2014/{coco_file('train', 100)}: person, stop sign",  # a crowd counts
            f"train2014/{coco_file('train', 30)}: bottle",
            f"train2014/{coco_file('train', 9)}: stop sign",
        ],
        [f"train2014/{coco_file('train', 2000)}:"],
        [3, 4, 1, 2],
    ),
    ("coco2014", "val"): (
        ("person", "bottle", "stop sign"),
        [f"val2014/{coco_file('val', 42)}: person"],
        [],
        [1],
    ),
    ("nuswide", "train"): (
        CONCEPTS,
        ["Flickr/actor/0001_1.jpg: clouds, sky", "Flickr/zoo/0003_3.jpg: zebra"],
        ["Flickr/actor/0002_2.jpg:"],
        [1, 2, 3],
    ),
    ("nuswide", "test"): (CONCEPTS, ["Flickr/zoo/0004_4.jpg: airport"], [], [1]),
    ("vg500", "train"): (
        tuple(map(str, range(500))),
        ["VG_100K/3.jpg: 0, 499", "VG_100K/25.jpg: 7"],
        ["VG_100K/2.jpg:"],
        [3, 16, 2],
    ),
    ("vg500", "test"): (tuple(map(str, range(500))), ["VG_100K/4.jpg: 1"], [], [4]),
    ("chestxray14", "train"): (FINDINGS, ["0.png: Mass, Hernia", "1.png:", "3.png: Pleural_Thickening"], [], [1, 2, 4]),
    ("chestxray14", "test"): (FINDINGS, ["2.png: Effusion"], [], [3]),
    # An uncertain or an empty cell is unknown; No Finding denies all diseases, and a disease denies it.
    ("chexpert", "train"): (
        OBSERVATIONS,
        [
            f"{PATH.format('train', 0)}: No Finding, Support Devices",
            f"{PATH.format('train', 1)}: {unknown('No Finding', 'Consolidation').replace('?Lung Op', 'Lung Op')}",
            f"{PATH.format('train', 2)}: {unknown('Support Devices')}",
        ],
        [],
        [1, 2, 3],
    ),
    ("chexpert", "valid"): (OBSERVATIONS, [f"{PATH.format('valid', 0)}: Support Devices"], [], [1]),
}


@pytest.mark.parametrize(("name", "name_of_split"), SPLITS)
def test_a_split_has_the_published_classes_images_and_labels(tmp_path, name, name_of_split):
    classes, images, empty, wide = SPLITS[name, name_of_split]
    WRITE[name](tmp_path)
    split = opened(name, tmp_path, name_of_split)
    assert (split.name, split.classes) == (name_of_split, classes)
    assert listed(split) == images
    kept = opened(name, tmp_path, name_of_split, keep_empty=True)
    assert set(listed(kept)) == {*images, *empty}
    assert widths(kept) == wide


# ------------------------------------------------------------------------------------------------------------------ VOC
@pytest.fixture
def voc(tmp_path):
    write_voc(tmp_path)
    return tmp_path / "VOCdevkit/VOC2012"


def test_the_files_of_images_that_are_dropped_are_not_needed(voc):
    (voc / "JPEGImages/2008_000007.jpg").unlink()
    assert len(opened("voc2012", voc, "train")) == 2


def test_images_with_only_difficult_labels_are_kept_where_these_count(voc):
    for how, kept in (("negative", False), ("ignore", True), ("positive", True)):
        images = listed(opened("voc2012", voc, "train", difficult_train=how))
        assert ("JPEGImages/2008_000007.jpg: ~boat" in images, len(images)) == (kept, 2 + kept)
        assert len(opened("voc2012", voc, "trainval", difficult_train=how)) == 3, "trainval is not trained on"
        assert len(opened("voc2012", voc, "trainval", difficult_eval=how)) == 3 + kept


def test_root_may_be_the_folder_its_parent_or_its_grandparent(voc, monkeypatch):
    expected = opened("voc2012", voc, "val")
    for root in (voc.parent, voc.parent.parent, str(voc)):
        split = opened("voc2012", root, "val")
        assert (split.ids, split.images.name(0)) == (expected.ids, expected.images.name(0))
    monkeypatch.chdir(voc)
    assert opened("voc2012", ".", "val").ids == expected.ids
    renamed = voc.rename(voc.with_name("pascal"))
    assert opened("voc2012", renamed, "val").ids == expected.ids


def test_both_years_in_one_folder(voc, tmp_path):
    write_voc(tmp_path, {"test": {"000001": "dog"}}, 2007)
    assert listed(opened("voc2007", voc.parent, "test")) == ["JPEGImages/000001.jpg: dog"]
    assert len(opened("voc2012", voc.parent, "train")) == 2


def test_real_coco_labels_agree_with_the_official_ones(shared_data):
    with np.load(shared_data / "coco14_labels.npz") as stored:
        official = dict(zip(stored["image_id"].tolist(), stored["labels"], strict=True))
        classes = tuple(stored["classes"])
    for name, count in (("train", 110), ("val", 50)):
        split = opened("coco2014", shared_data / "coco", name)
        assert len(split) == count
        assert split.classes == classes
        numbers = [int(identifier[-16:-4]) for identifier in split.ids]
        assert numbers == sorted(numbers, key=str)
        np.testing.assert_array_equal(split.labels, [official[number] for number in numbers])
        assert split.images.read(0).shape[2] == 3


def test_real_voc_labels_agree_with_the_official_ones(shared_data):
    with np.load(shared_data / "voc_labels.npz") as stored:
        official = {
            str(name): labels
            for name, labels in zip(stored["voc12_trainval_ids"], stored["voc12_trainval"], strict=True)
        }
        assert tuple(stored["classes"]) == VOC_CLASSES
    compared = 0
    for name, count in (("train", 600), ("val", 200)):
        split = opened("voc2012", shared_data, name)
        assert len(split) == count
        for identifier, labels in zip(split.ids, split.labels, strict=True):
            image = identifier.removeprefix("JPEGImages/").removesuffix(".jpg")
            if image in official:  # the images of 2007 added for segmentation are in no official list
                marks = np.select([labels == POSITIVE, labels == DIFFICULT], [1, 0], default=-1)
                np.testing.assert_array_equal(marks, official[image])
                compared += 1
        assert split.images.read(count - 1).shape[2] == 3
    assert compared == 725


# ------------------------------------------------------------------------------------------------------------- NUS-WIDE
def test_labels_are_in_one_file_or_in_one_per_concept(tmp_path):
    write_nuswide(tmp_path, merged=False)
    separate = listed(opened("nuswide", tmp_path))
    assert separate == ["Flickr/actor/0001_1.jpg: clouds, sky", "Flickr/zoo/0003_3.jpg: zebra"]
    write_nuswide(tmp_path)
    (tmp_path / "Groundtruth/TrainTestLabels/Labels_sky_Train.txt").write_text("0\n0\n0\n")
    assert listed(opened("nuswide", tmp_path)) == separate, "the one file takes precedence"


# -------------------------------------------------------------------------------------------------------- Visual Genome
CLASSES = list(json.loads(CATEGORY_FILE.read_text()))
OF_NAME = {name: k for k, names in enumerate(json.loads(CATEGORY_FILE.read_text()).values()) for name in names}


@pytest.fixture
def genome(tmp_path):
    write_genome(tmp_path)
    return tmp_path


# -------------------------------------------------------------------------------------------------------- find_category
@pytest.mark.parametrize(
    ("name", "category"),
    [
        (" Woman. ", "person"),
        ("woman .", "person"),
        ("large brown shirt", "shirt"),
        ("purple shirt", "shirt"),  # a different name, as purple is not an attribute
        ("striped tall man", None),
        ("man large", None),
        ("", None),
    ],
)
def test_names_of_objects(name, category):
    k = find_category(name, OF_NAME)
    assert (None if k is None else CLASSES[k]) == category


def test_a_name_in_two_categories_belongs_to_the_later_one():
    lists = json.loads(CATEGORY_FILE.read_text())
    assert len(lists) == 256
    assert sum(map(len, lists.values())) == 766
    assert len(OF_NAME) == 764
    for name in ("grass field", "grassy field"):
        assert OF_NAME[name] == max(k for k, names in enumerate(lists.values()) if name in names)
    assert len(ADJECTIVES) == 19
    assert [*CLASSES[:3], CLASSES[-1]] == ["person", "tie", "shirt", "zoo"]


# -------------------------------------------------------------------------------------------------------------- vg256
def test_vg256_is_a_fixed_permutation_of_the_images_with_a_label(genome):
    numbers = [*range(2, 12), *range(21, 31)]
    order = np.random.RandomState(1).permutation(20)
    for name, rows in (("train", order[:14]), ("test", order[14:])):
        split, expected = opened("vg256", genome, name), [numbers[row] for row in sorted(rows)]
        assert (split.name, split.classes) == (name, tuple(CLASSES))
        assert listed(split) == [f"VG_100K/{n}.jpg: {'person, tie' if n % 2 else 'person'}" for n in expected]
        assert widths(split) == [n if n < 20 else n - 9 for n in expected]


def test_vg256_reads_the_objects_once_and_again_when_they_change(genome, monkeypatch):
    first = opened("vg256", genome, "train")
    monkeypatch.setattr(Published, "read", lambda *args: pytest.fail("read again"))
    assert len(opened("vg256", genome, "test")) == 6
    monkeypatch.undo()
    dogs = [{"image_id": k, "objects": objects_of("dog")} for k in (2, 3)]
    (genome / "objects_v1_2.json").write_text(json.dumps(dogs))
    assert len(first) == 14
    assert listed(opened("vg256", genome, "test"))[0].endswith(": dog")


def test_vg256_with_the_second_folder_merged_into_the_first(genome):
    before = opened("vg256", genome, "train")
    wide = widths(before)
    for file in (genome / "VG_100K_2").iterdir():
        file.rename(genome / "VG_100K" / file.name)
    (genome / "VG_100K_2").rmdir()
    after = opened("vg256", genome, "train")
    assert (after.ids, widths(after)) == (before.ids, wide)


def test_vg500_has_names_from_a_file_and_merges_repeated_lines(genome):
    (genome / "names.txt").write_text("\n".join(f"thing {k}" for k in range(500)))
    assert opened("vg500", genome, "train", classes="names.txt").classes[7] == "thing 7"
    with (genome / "train_list_500.txt").open("a") as file:
        file.write("3.jpg\n")
    notes = opened("vg500", genome, "train").usage[0].notes
    assert notes == ["lists images again in 1 row (VG_100K/3.jpg), which are merged"]


# ------------------------------------------------------------------------------------------------------- chest X-rays
def test_the_tables_may_be_in_the_root_or_in_the_folder_of_the_archive(tmp_path):
    write_chexpert(tmp_path)
    train, inside = (opened("chexpert", root) for root in (tmp_path, tmp_path / "CheXpert-v1.0-small"))
    assert inside.ids == train.ids


def test_the_images_of_a_patient_are_a_group(tmp_path):
    write_chestxray14(tmp_path)
    write_chexpert(tmp_path)
    assert opened("chestxray14", tmp_path, "all").groups == ["1", "1", "2", "3"]
    of_stanford = opened("chexpert", tmp_path)
    assert of_stanford.groups == ["patient00000", "patient00001", "patient00002"]
