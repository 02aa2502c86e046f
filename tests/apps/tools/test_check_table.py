"""Planted mistakes in a table of one's own images are named with their lines, counts and corrections."""

import json

import numpy as np
import pytest
from helpers.packing import config_of, smooth_image
from helpers.parquet_files import images, png, write
from helpers.tars import write_tar
from PIL import Image

from mlmoe_jax.apps.tools.check import check_data
from mlmoe_jax.apps.tools.check_table import doubtful_labels, image_places
from mlmoe_jax.data.images import ArrayImages, ImageFiles
from mlmoe_jax.data.split import Split

DOGS, CATS = 40, 15


def split_of(labels: dict[str, list[int]], images: int, lines=()) -> Split:
    """A split with these rows for each label."""
    codes = np.zeros((images, len(labels)), np.int8)
    for k, rows in enumerate(labels.values()):
        codes[rows, k] = 1
    names = [f"{row}.jpg" for row in range(images)]
    return Split("train", tuple(labels), codes, names, ImageFiles("photos", names, "labels.csv", lines))


def warnings(*names_and_counts, separator=";"):
    """What is said about labels with a number of images each, of 100 images."""
    labels = {name: list(range(count)) for name, count in names_and_counts}
    return doubtful_labels([split_of(labels, 100)], separator)


# ------------------------------------------------------------------------------------------------------- a whole table
@pytest.fixture
def table(tmp_path):
    """A function that writes images and `labels.csv`, rows of (image, labels), and returns the report."""

    def check(rows, **data):
        (tmp_path / "images").mkdir(exist_ok=True)
        for row, (image, _) in enumerate(rows):
            if not image.startswith("gone/"):
                smooth_image(32, 32, row).save(tmp_path / image)
        text = "".join(f'{image},"{labels}"\n' for image, labels in rows)
        (tmp_path / "labels.csv").write_text(f"image,labels\n{text}")
        return check_data(config_of(tmp_path, "csv", table="labels.csv", **{"val_split": ""} | data))

    return check


def planted() -> list[tuple[str, str]]:
    labels = ["dog"] * DOGS + ["cat"] * CATS + ["Dog", "dgo", "dgo", "cat, dog", "polar_bear", "polar bear", "zebra"]
    return [(f"images/{row:02d}.png", f"{name};photo") for row, name in enumerate([*labels, "polar bear"])]


def test_every_planted_mistake_is_named_with_its_lines_and_its_correction(table, tmp_path):
    rows = planted()
    last = len(rows)
    for row in range(0, last, 2):
        rows[row] = (rows[row][0].replace("images/", "gone/"), rows[row][1])
    (tmp_path / "images").mkdir()
    Image.new("RGB", (1, 1)).save(tmp_path / "images" / "e\u0301.png")
    report = table(rows)
    assert report["warnings"] == [
        f"in no split: 1 image beside those that are in one ({tmp_path}/images/e\u0301.png)",
        "split train has only positive images of 1 of its 9 classes, which cannot be learned: photo",
        "label 'Dog' (1 image: labels.csv line 57) differs from 'dog' only in case, spaces, hyphens, "
        "underscores or .0; write 'dog' there if they are the same",
        "label 'polar_bear' (1 image: labels.csv line 61) differs from 'polar bear' only in case, spaces, "
        "hyphens, underscores or .0; write 'polar bear' there if they are the same",
        "1 label made of several names separated by ',' instead of ';': 'cat, dog' (1 image: labels.csv line 60); "
        "write ';' there, or set data.separator if all of the table has ','",
        "label 'dgo' (2 images: labels.csv lines 58, 59) may be a misspelling of 'dog'; write 'dog' there if it is",
        "1 label with one image, too few to train and evaluate: 'zebra' (1 image: labels.csv line 63); add images, "
        "or remove the label",
    ]
    assert report["problems"] == [
        f"{(last + 1) // 2} of the {last} images of split train cannot be found (labels.csv lines "
        f"2, 4, 6, 8, 10, 12, 14, 16, … ({(last + 1) // 2})): "
        f"put {tmp_path}/gone/00.png there, or correct data.root, data.images or the paths in the table"
    ]


def test_several_names_in_one_label_are_told_of_containers_too(tmp_path):
    labels = ["dog", "cat", "cat,dog"]
    members = [
        (f"{k}.{kind}", content)
        for k, label in enumerate(labels)
        for kind, content in (("png", png(k)), ("cls", label))
    ]
    write_tar(tmp_path / "train.tar", members)
    write(tmp_path / "train.parquet", {"image": images(3), "labels": labels})
    for name in ("webdataset", "parquet"):
        report = check_data(config_of(tmp_path, name, val_split=""))
        assert [said for said in report["warnings"] if "made of several names separated by ',' instead of ';'" in said]


def test_images_that_annotations_do_not_list_are_told(tmp_path):
    for row in range(3):
        smooth_image(32, 32, row).save(tmp_path / f"{row}.png")
    images = [{"id": row, "file_name": f"{row}.png"} for row in range(2)]
    marks = [{"image_id": 0, "category_id": 1}]
    content = {"images": images, "categories": [{"id": 1, "name": "x"}], "annotations": marks}
    (tmp_path / "train.json").write_text(json.dumps(content))
    report = check_data(config_of(tmp_path, "coco_json", table="{split}.json", val_split=""))
    assert f"in no split: 1 image beside those that are in one ({tmp_path}/2.png)" in report["warnings"]


def test_a_table_without_mistakes_has_no_warnings(table):
    rows = [(f"images/{row:02d}.png", name) for row, name in enumerate(["cat;dog", "car", "cat", "dog", "", "cow"] * 6)]
    report = table(rows)
    assert report["warnings"] == report["problems"] == []


def test_lines_count_also_in_a_part_that_is_held_out(table):
    report = table(planted()[:-1], val_split="val", val_fraction=0.2)
    assert any("'dgo' (2 images: labels.csv lines 58, 59)" in sentence for sentence in report["warnings"])


# -------------------------------------------------------------------------------------------------------------- labels
@pytest.mark.parametrize(
    ("wrong", "right"),
    [("dgo", "dog"), ("dogs", "dog"), ("horsse", "horse"), ("elephnt", "elephant"), ("elephent", "elephant")],
)
def test_typing_errors_of_rare_labels_are_told(wrong, right):
    (sentence,) = warnings((wrong, 2), (right, 40))
    assert sentence.startswith(f"label '{wrong}' (2 images: 0.jpg, 1.jpg) may be a misspelling of '{right}'")
    assert warnings((wrong, 3), (right, 40)) == warnings((wrong, 2), (right, 9)) == [], "only rare beside frequent"


@pytest.mark.parametrize(
    ("one", "other"),
    [("car", "cat"), ("boat", "goat"), ("mouse", "house"), ("room 1", "room 2"), ("size 10", "size 01"), ("c", "c++")],
)
def test_names_that_are_two_words_are_not_misspelt(one, other):
    assert warnings((one, 2), (other, 40)) == []


def test_numbers_of_other_programs_are_variants():
    (sentence,) = warnings(("3", 5), ("3.0", 4), ("3.5", 4))
    assert sentence.startswith("label '3.0' (4 images: ")


@pytest.mark.parametrize(
    ("labels", "separator", "said"),
    [
        *(
            (
                [f"cat{mark}dog", "cat", f"dog{mark}cow", f"cow{mark}cat"],
                ";",
                f"3 labels made of several names separated by {mark.strip(' ')!r} inst",
            )
            for mark in (", ", "|", "/", " + ")
        ),
        (["cat;dog", "cat", "dog"], ",", "separated by ';' instead of ','"),
        (["cat/dog", "cat", "dog"], None, ""),  # one column per class
        (["cat|dog", "cat"], "", "separated by '|': 'cat|dog'"),
        (["cat, dog", "cat"], ";", "separated by ',' instead of ';': 'cat, dog'"),
        (["cat/dog", "cat"], ";", ""),  # a slash needs two labels, as it also joins levels
        (["cat dog", "cat", "dog"], ";", "1 label made of several names separated by ' ' instead of ';': 'cat dog' "),
        (["street light", "street", "light", *(f"cat{k}" for k in range(9))], ";", ""),
        (["either/or", "inside, small room", "inside, hall"], ";", ""),
    ],
)
def test_names_of_other_names_are_told_for_each_separator(labels, separator, said):
    found = warnings(*((name, 5) for name in labels), separator=separator)
    assert bool(found) == bool(said)
    assert said in "".join(found[:1])


# -------------------------------------------------------------------------------------------------------------- places
def test_places_are_lines_or_ids():
    listed, other = split_of({"x": [0]}, 9, lines=range(2, 11)), split_of({"x": [0]}, 9)
    assert image_places([(listed, 3)]) == "labels.csv line 5"
    assert image_places((listed, row) for row in (8, 1, 2, 3, 4, 5)) == "labels.csv lines 3, 4, 5, 6, 7, 10"
    assert image_places([(listed, 0), (other, 4)]) == "labels.csv line 2 and 4.jpg"
    arrays = Split("train", ("x",), np.ones((1, 1), np.int8), ["a"], ArrayImages(np.zeros((1, 2, 2, 3), np.uint8)))
    assert image_places([(arrays, 0)]) == "a"
