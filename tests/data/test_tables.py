import csv
import json
import tracemalloc

import numpy as np
import pytest
from helpers.tables import jsonl, lines, open_source, settings, write
from PIL import Image

from mlmoe_jax.apps.tools.predict_files import ResultRows
from mlmoe_jax.data.images import BadImage
from mlmoe_jax.data.sources.names import split_key
from mlmoe_jax.data.sources.open import open_split, open_splits
from mlmoe_jax.data.sources.rows import read_classes
from mlmoe_jax.data.usage import unused_input
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.predictor import LabeledImage
from mlmoe_jax.runtime.formats import read_cell_names
from mlmoe_jax.runtime.storage import OutputTarget


# -------------------------------------------------------------------------------------------------------- CSV, by name
def test_one_column_of_names(tmp_path):
    write(tmp_path, "train.csv", "image,labels\na.png,dog; cat\nsub/c.png,\nb.png,dog;;dog\n")
    split = open_source(settings(tmp_path), "train")
    assert split.name == "train"
    assert split.classes == ("cat", "dog")
    assert split.ids == ["a.png", "sub/c.png", "b.png"]
    assert split.labels.dtype == np.int8
    np.testing.assert_array_equal(split.labels, [[1, 1], [0, 0], [0, 1]])
    assert [image.shape[1] for image in split.images] == [1, 3, 2]


def test_other_columns_separators_paths_and_a_byte_order_mark(tmp_path, refusal):
    write(tmp_path, "tables/all train.csv", '\ufeff"photo", id ,tags\r\n\r\nc.png,5,"a, b|c"\r\n')
    keys = {"table": "tables/all {split}.csv", "images": "sub", "image_column": "photo", "label_column": "tags"}
    split = open_source(settings(tmp_path, separator="|", **keys), "train")
    assert refusal(open_source, settings(tmp_path, separator="", **keys), "train").startswith("data.separator is empty")
    assert split.classes == ("a, b", "c")
    assert split.ids == ["c.png"]
    assert split.images[0].shape[1] == 3


def test_rows_of_a_prediction_are_read_as_labels(tmp_path):
    """A predicted table, whose cells are guarded and whose names are escaped, is a table of labels."""
    names = ("=cmd|' /C calc'!A0", "a;b", "c\\d", "-2+3", "cat")
    for k, image in enumerate(("=1+1.png", "b.png")):
        Image.new("RGB", (k + 1, 2)).save(tmp_path / image)
    results = [
        LabeledImage("=1+1.png", names, dict.fromkeys(names, 0.9)),
        LabeledImage("b.png", ("a;b",), dict.fromkeys(names, 0.1)),
    ]
    ResultRows(names).write(OutputTarget(tmp_path / "train.csv", "csv"), results)
    with open(tmp_path / "train.csv", newline="") as file:
        assert not any(cell.startswith(("=", "+", "-", "@")) for row in csv.reader(file) for cell in row)
    split = open_source(settings(tmp_path), "train")
    assert split.classes == tuple(sorted(names))
    assert split.ids == ["=1+1.png", "b.png"]
    assert [image.shape[1] for image in split.images] == [1, 2]
    np.testing.assert_array_equal(split.labels, [[1] * 5, [name == "a;b" for name in sorted(names)]])


@pytest.mark.parametrize("name", ["x\ny", "x\ry", "x\x00y", "x\u2028y"])
def test_labels_with_line_breaks_are_refused(tmp_path, refusal, name):
    write(tmp_path, "train.jsonl", lines({"image": "a.png", "labels": ["ok", name]}))
    data = settings(tmp_path, name="jsonl", table="{split}.jsonl")
    sentence = refusal(open_split, data, "train")
    assert sentence.startswith(f"{tmp_path}/train.jsonl line 1 has the label {name!r}, with a line break or another ")


def test_one_image_folder_per_split(tmp_path):
    write(tmp_path, "sub.csv", "image,labels,split\nc.png,x,ignored\n")
    of_sub = open_source(settings(tmp_path, images="{split}"), "sub")
    assert of_sub.images[0].shape[1] == 3
    assert all(name.startswith("sub/") for name in of_sub.ids), "ids differ between splits with equal file names"


def test_absolute_paths_become_relative_to_the_image_folder(tmp_path, refusal):
    write(tmp_path, "train.csv", f"image,labels\n{tmp_path}/sub/c.png,x\na.png,y\n")
    split = open_source(settings(tmp_path), "train")
    assert split.ids == ["sub/c.png", "a.png"]
    assert split.images[0].shape[1] == 3
    sentence = refusal(open_source, settings(tmp_path, images="sub/.."), "train")
    assert sentence.startswith(
        f"{tmp_path}/train.csv lists {tmp_path}/sub/c.png, which is not below {tmp_path}/sub/..; "
    )
    write(tmp_path, "train.csv", f"image,labels\n{tmp_path}/sub/c.png,x\n")
    split = open_source(settings(tmp_path, images="/"), "train")
    assert split.ids == [f"{tmp_path}/sub/c.png".removeprefix("/")]
    assert split.images[0].shape[1] == 3


@pytest.mark.parametrize(
    ("cell", "names"),
    [
        ('["car", "dog"]', ["car", "dog"]),
        ("['car']", ["car"]),
        ("['car', \"dog's\"]", ["car", "dog's"]),
        ("['car' 'dog']", ["car", "dog"]),  # an array of NumPy
        ("['car'\n 'dog']", ["car", "dog"]),
        ("('car',)", ["car"]),
        ("{'dog', 'car'}", ["car", "dog"]),
        ('{"choices": ["car", "dog"]}', ["car", "dog"]),
        ('{"choices": "car"}', ["car"]),
        ("'car', 'dog'", ["car", "dog"]),
        ("'car;dog'", ["car", "dog"]),
        ('["rock \' \' roll", "a;b"]', ["rock ' ' roll", "a;b"]),
        *((empty, []) for empty in ("[]", "()", "{}", "set()")),
        *((name, [name]) for name in ("(other)", "car (red)", "'90s", "[car", "a'b'")),
    ],
)
def test_lists_in_cells_are_read(cell, names):
    if cell == "{}":
        with pytest.raises(ValueError, match="not a list"):
            read_cell_names(cell)
    else:
        assert read_cell_names(cell) == names


def test_a_label_in_two_unicode_forms_is_one_label(tmp_path):
    composed, decomposed = "\u00c9v\u00e9nement", "E\u0301ve\u0301nement"
    (tmp_path / "names.txt").write_text(f"{decomposed}\nx\n", encoding="utf-8")
    for name, text in (
        ("csv", f"image,labels\na.png,{composed};x\nb.png,{decomposed}\n"),
        (
            "jsonl",
            lines({"image": "a.png", "labels": [f" {composed} ", "x"]}, {"image": "b.png", "labels": [decomposed]}),
        ),
    ):
        write(tmp_path, f"train.{name}", text)
        data = settings(tmp_path, name=name, table=f"{{split}}.{name}")
        split = open_split(data, "train")
        assert split.classes == ("x", composed)
        assert split.labels.tolist() == [[1, 1], [0, 1]]
        assert unused_input(split.usage) == [
            f"{tmp_path}/train.{name} has labels in several spellings, which are merged: {composed}"
        ]
        assert open_split(data, "train", classes=(composed, "x")).labels.tolist() == [[1, 1], [1, 0]]
        data.classes = "names.txt"
        assert open_split(data, "train").classes == (composed, "x")
    (tmp_path / "tree.yaml").write_text(f"implies: {{{decomposed}: x}}", encoding="utf-8")
    (tmp_path / "fixed.csv").write_text(f"image,label,suggested,accept\nb.png,{decomposed},0,yes\n", encoding="utf-8")
    corrected = open_split(settings(tmp_path, tree="tree.yaml", corrections="fixed.csv"), "train")
    assert corrected.labels.tolist() == [[1, 1], [0, 0]]
    write(tmp_path, "train.csv", f"image,{decomposed}\na.png,1\n")
    assert open_split(settings(tmp_path, label_column=""), "train", classes=[composed]).labels.tolist() == [[1]]


def test_rows_of_an_image_are_merged(tmp_path):
    text = "image,labels,patient\nsub/../a.png,cat,p\n./a.png,dog,\nb.png,cat,q\nsub//c.png,,r\n"
    write(tmp_path, "train.csv", f"{text}sub\\c.png,,r\n{tmp_path}/a.png,cat,p\n")
    split = open_split(settings(tmp_path, group_column="patient"), "train")
    assert (split.ids, split.groups) == (["a.png", "b.png", "sub/c.png"], ["p", "q", "r"])
    assert split.labels.tolist() == [[1, 1], [1, 0], [0, 0]]
    assert [split.images.line(row) for row in range(3)] == [("train.csv", line) for line in (2, 4, 5)]
    (usage,) = split.usage
    assert (usage.given, usage.used, usage.merged) == (6, {"train": 3}, {"train": 3})
    assert usage.notes == ["lists images again in 3 rows (line 3, line 6, line 7), which are merged"]


def test_rows_of_an_image_that_fill_unknown_labels_are_merged(tmp_path):
    write(tmp_path, "train.csv", "image,cat,dog\na.png,True,\nb.png,false,1.0\na.png,,FALSE\n")
    split = open_split(settings(tmp_path, label_column=""), "train")
    assert (split.ids, split.labels.tolist()) == (["a.png", "b.png"], [[1, 0], [0, 1]])
    rows = ({"image": "a.png", "labels": labels} for labels in ({"cat": 1}, ["dog"], {"cow": 0}))
    write(tmp_path, "train.jsonl", lines(*rows))
    assert open_split(jsonl(tmp_path), "train").labels.tolist() == [[1, 0, 1]]  # cat, cow, dog


def test_lines_inside_of_quotes_are_said(tmp_path):
    text = 'image,note,labels\na.png,"nice,x\nb.png,nice",y\n\nsub/c.png,"two\nlines\n",z\n'
    write(tmp_path, "train.csv", text)
    split = open_split(settings(tmp_path), "train")
    assert [split.images.line(row) for row in range(2)] == [("train.csv", 2), ("train.csv", 5)]
    assert unused_input(split.usage) == [
        f"{tmp_path}/train.csv has 1 column that no key of the config names: note",
        f"{tmp_path}/train.csv has 3 lines inside of quotes (lines 2 to 3, lines 5 to 7), which belong to the cells "
        "of the line before; close the quotes if they are rows",
    ]


# --------------------------------------------------------------------------------------------------------------- JSONL
def test_labels_are_lists_or_objects_of_names(tmp_path):
    text = lines(
        {"image": "a.png", "labels": ["dog", "cat", "dog"]},
        {"image": "b.png", "labels": {"cat": 0, "dog": None, "cow": 1}},
        {"image": "sub/c.png", "labels": []},
    )
    write(tmp_path, "train.jsonl", "\ufeff" + text.replace("\n", "\n\n", 1))
    split = open_source(jsonl(tmp_path), "train")
    assert split.classes == ("cat", "cow", "dog")
    assert split.ids == ["a.png", "b.png", "sub/c.png"]
    np.testing.assert_array_equal(split.labels, [[1, 0, 1], [0, 1, -1], [0, 0, 0]])
    split = open_source(jsonl(tmp_path), "train", classes=["dog", "cow", "cat", "elk"])
    np.testing.assert_array_equal(split.labels, [[1, 0, 1, 0], [-1, 1, 0, -1], [0, 0, 0, 0]])
    write(tmp_path, "train.jsonl", lines({"file": "a.png", "tags": {"x": True, "y": 0.0}}))
    split = open_source(jsonl(tmp_path, image_column="file", label_column="tags"), "train")
    assert split.labels.tolist() == [[1, 0]]


@pytest.mark.parametrize(
    "text",
    [
        *('{"image": ', '{"image": "a.png"}', "[]", "5", '"a"', "[" * 100_000, '{"image": 5, "labels": []}'),
        *(
            f'{{"image": "b.png", "labels": {labels}}}'
            for labels in (
                '{"dog": 1, "dog": 0}',
                '[["dog"]]',
                "true",
                '{"dog": NaN}',
                '"dog"',
                "null",
                '[""]',
                '{"dog": 2}',
                '{"dog": "1"}',
                '{"dog": []}',
            )
        ),
    ],
)
def test_lines_of_another_form_are_refused(tmp_path, refusal, text):
    write(tmp_path, "train.jsonl", f'{{"image": "a.png", "labels": []}}\n{text}\n')
    sentence = refusal(open_source, jsonl(tmp_path), "train")
    assert sentence.startswith(f"{tmp_path}/train.jsonl line 2 should be a JSON object with a path under 'image', and ")


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        ([5], "5, which is no name; "),
        (["x", True], "True, which is no name; "),
        (["None"], "'None', which stands for no value; "),
        (["False"], "'False', which is the value of a label; "),
        ({"NaN": 1}, "'NaN', which stands for no value; "),
        (["['dog']"], "\"['dog']\", which looks like a list in JSON or Python, "),
        *(
            ([name], f"{name!r}, with a quote ")
            for name in ("\u201cdog", "dog\u201d", "\u201cdog\u201d", '"dog"', "'dog'")
        ),
    ],
)
def test_values_that_are_no_labels_are_refused(tmp_path, refusal, labels, problem):
    write(tmp_path, "train.jsonl", lines({"image": "a.png", "labels": ["x"]}, {"image": "b.png", "labels": labels}))
    sentence = refusal(open_split, jsonl(tmp_path), "train")
    assert sentence.startswith(f"{tmp_path}/train.jsonl line 2 has the label {problem}")


def test_names_with_quotes_inside_are_labels(tmp_path):
    names = ['5"', '"Big" cats', "dogs\u2019", "rock 'n' roll"]
    write(tmp_path, "train.jsonl", lines({"image": "a.png", "labels": names}))
    assert open_source(jsonl(tmp_path, bad_images="skip"), "train").classes == tuple(sorted(names))


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le"])
def test_files_in_another_encoding_are_refused(tmp_path, refusal, encoding):
    for name, text in (("csv", "image,labels\na.png,\u00e9\n"), ("jsonl", '{"image": "a.png", "labels": ["\u00e9"]}')):
        (tmp_path / f"train.{name}").write_text(text, encoding=encoding)
        sentence = refusal(open_source, settings(tmp_path, name=name, table=f"{{split}}.{name}"), "train")
        assert sentence == f"{tmp_path}/train.{name} is not UTF-8; save it as UTF-8, in Excel as CSV UTF-8"


# ------------------------------------------------------------------------------------------- CSV, one column per class
def test_one_column_per_class(tmp_path):
    write(tmp_path, "train.csv", "dog,image,cat\n1,a.png,0\n, b.png,1.0\n0.0,sub/c.png, \n".replace(", \n", ",\n"))
    split = open_source(settings(tmp_path, label_column=""), "train")
    assert split.classes == ("cat", "dog")
    assert split.ids == ["a.png", "b.png", "sub/c.png"]
    assert split.labels.dtype == np.int8
    np.testing.assert_array_equal(split.labels, [[0, 1], [1, -1], [-1, 0]])


def test_the_class_file_selects_columns(tmp_path, refusal):
    write(tmp_path, "train.csv", "image,width,dog,cat\na.png,640,1,0\n")
    (tmp_path / "names.txt").write_text("\ufeffdog\n\ncat \n", encoding="utf-8")
    split = open_source(settings(tmp_path, label_column="", classes="names.txt"), "train")
    assert split.classes == ("dog", "cat")
    assert split.labels.tolist() == [[1, 0]]
    sentence = refusal(open_source, settings(tmp_path, label_column=""), "train", classes=["dog", "cat"])
    assert sentence == (
        f"{tmp_path}/train.csv has the column 'width', which is not one of the 2 classes; remove it, or list the "
        "class columns in the file of data.classes"
    )
    sentence = refusal(open_source, settings(tmp_path, label_column=""), "train", classes=["dog", "cow"])
    assert sentence.startswith(
        f"{tmp_path}/train.csv has no column 'cow', which the list of classes names (columns: width, dog, cat); "
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("image\na.png\n", " has no column of a class; "),
        ("image,cat,dog,\na.png,1,1,1\n", " has a column without a name; "),  # as spreadsheets write it
        (",image,cat,dog\n1,a.png,1,1\n", " has a column without a name; "),  # the index of a table
        (
            "image,dog,cat\na.png,1,0\nb.png,1,yes\n",
            " line 3 has the cell 'yes' where 1, 0 or empty for unknown should be; ",
        ),
        (
            "image,dog,cat\na.png,1,0\na.png,1,1\n",
            " lists a.png in the lines 2 and 3 with two values of its label 'cat': 0 and 1; ",
        ),
        (
            "image,dog,cat\na.png,1,0\nb.png,1,-1\n",
            " line 3 has the cell '-1' where 1, 0 or empty for unknown should be; ",
        ),
    ],
)
def test_invalid_columns_of_classes_are_refused(tmp_path, refusal, text, error):
    write(tmp_path, "train.csv", text)
    sentence = refusal(open_source, settings(tmp_path, label_column=""), "train")
    assert sentence.startswith(f"{tmp_path}/train.csv{error}")


# -------------------------------------------------------------------------------------------------------------- splits
SPLIT_TABLES = {
    "csv": "image,split,labels\na.png,train,x\nb.png,test,y;z\nsub/c.png,train,z\n",
    "wide.csv": "image,split,x,y,z\na.png,train,1,0,0\nb.png,test,0,1,1\nsub/c.png,train,0,0,1\n",
    "jsonl": lines(
        {"image": "a.png", "split": "train", "labels": ["x"]},
        {"image": "b.png", "split": "test", "labels": ["y", "z"]},
        {"image": "sub/c.png", "split": "train", "labels": ["z"]},
    ),
}


@pytest.mark.parametrize("kind", SPLIT_TABLES)
def test_a_column_assigns_rows_to_splits(tmp_path, refusal, kind):
    write(tmp_path, f"all.{kind}", SPLIT_TABLES[kind])
    name = kind.rpartition(".")[2]
    data = settings(tmp_path, name=name, table=f"all.{kind}", label_column="" if "wide" in kind else "labels")
    train, test = open_source(data, "train"), open_source(data, "test")
    assert train.classes == test.classes == ("x", "y", "z")  # from the whole table
    assert (train.ids, test.ids) == (["a.png", "sub/c.png"], ["b.png"])
    assert train.labels.tolist() == [[1, 0, 0], [0, 0, 1]]
    assert test.labels.tolist() == [[0, 1, 1]]
    assert refusal(open_source, data, "val") == (
        f"{tmp_path}/all.{kind} lists no images of split val; its splits are test, train; rename them, "
        "or set data.train_split, data.val_split and data.test_splits"
    )


def test_a_table_without_splits_is_the_training_split(tmp_path, refusal):
    write(tmp_path, "all.csv", "image,labels\na.png,x\n")
    write(tmp_path, "all.jsonl", lines({"image": "a.png", "labels": ["x"]}))
    for name in ("csv", "jsonl"):
        data = settings(tmp_path, name=name, table=f"all.{name}", train_split="learn")
        assert open_source(data, "learn").name == "learn"
        assert refusal(open_source, data, "test") == (
            f"{tmp_path}/all.{name} has no splits, so all its images are in split learn and none in test; write one "
            "table per split and use {split} in data.table, or hold out images with data.val_fraction and clear "
            "data.test_splits"
        )


SPELLINGS = ["Train", "train ", "training", "val", "valid", "Validation", "", "extra", "extra"]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "Split.csv"])
def test_each_spelling_of_a_split_is_used_or_counted(tmp_path, kind):
    images = [f"{k}.png" for k in range(len(SPELLINGS))]
    rows = [{"image": image, "labels": ["x"], "split": split} for image, split in zip(images, SPELLINGS, strict=True)]
    for ordered in (rows, sorted(rows, key=lambda row: row["split"])):  # also with the row without a split first
        if kind == "jsonl":
            text = lines(*({key: value for key, value in row.items() if value} for row in ordered))
        else:
            header = f"image,labels,{' Split ' if 'Split' in kind else 'split'}"
            text = "\n".join([header, *(f"{row['image']},x,{row['split']}" for row in ordered)])
        write(tmp_path, f"t.{kind}", text, images)
        data = settings(tmp_path, name=kind.rpartition(".")[2], table=f"t.{kind}", test_splits=())
        splits = open_splits(data, ["val"])
        found = {name: sorted(split.ids) for name, split in splits.items()}
        assert found == {"train": images[:3], "val": images[3:6]}
        (sentence,) = unused_input(usage for split in splits.values() for usage in split.usage)
        assert sentence.startswith(f"{tmp_path}/t.{kind}: 3 of 9 rows are not used: ")
        assert "1 without a split (line " in sentence
        assert "2 of split 'extra', while the config uses train, val (line " in sentence


def test_another_split_in_the_file_of_a_split_is_said(tmp_path):
    write(tmp_path, "train.csv", "image,labels,split\na.png,x,Training\nb.png,x,test\n")
    split = open_split(settings(tmp_path), "train")
    assert len(split) == 2
    assert unused_input(split.usage) == [
        f"{tmp_path}/train.csv is the file of split train (data.table), so another split in 1 row (line 3: 'test') is "
        "ignored"
    ]


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("train", ["train", "Train", " TRAIN ", "training", "Training set", "trainset", "train-split", "trn"]),
        ("val", ["val", "valid", "Validation", "dev", "validation_set"]),
        ("test", ["test", "TEST", "testing", "test data"]),
        ("test_shift", ["test_shift", "Test-Shift"]),
        ("é", ["\u00e9", "e\u0301", "\u00c9"]),
    ],
)
def test_spellings_of_a_split_have_one_key(key, names):
    assert {split_key(name) for name in names} == {key}
    assert split_key("tests") != split_key("test")
    assert split_key("set") == "set"


# ------------------------------------------------------------------------------------------------------------- classes
def test_labels_that_are_not_classes_are_refused(tmp_path, refusal):
    write(tmp_path, "train.csv", "image,labels\na.png,dog\nb.png,dog;kat\nsub/c.png,kat;elk\n")
    (tmp_path / "names.txt").write_text("dog\ncat\n")
    sentence = refusal(open_source, settings(tmp_path, classes="names.txt"), "train")
    assert sentence == (
        f"{tmp_path}/train.csv line 3 has the label 'kat', which is not one of the 2 classes; did you mean 'cat'"
    )
    sentence = refusal(open_source, settings(tmp_path), "train", classes=["dog", "kat"])
    assert sentence == (
        f"{tmp_path}/train.csv line 4 has the label 'elk', which is not one of the 2 classes; correct it, or list "
        "all classes in data.classes"
    )
    split = open_source(settings(tmp_path), "train", classes=["kat", "elk", "dog", "cow"])
    np.testing.assert_array_equal(split.labels, [[0, 0, 1, 0], [1, 0, 1, 0], [1, 1, 0, 0]])


def test_a_table_without_labels_needs_known_classes(tmp_path, refusal):
    write(tmp_path, "train.csv", "image,labels\na.png,\nb.png,;\n")
    sentence = refusal(open_source, settings(tmp_path), "train")
    assert sentence.startswith(f"{tmp_path}/train.csv contains no labels, so the classes are unknown; ")
    assert open_source(settings(tmp_path), "train", classes=["x"]).labels.tolist() == [[0], [0]]


def test_class_files_have_one_name_per_line(tmp_path, refusal):
    path = tmp_path / "names.txt"
    path.write_text("b\n\n a \n")
    assert read_classes(path) == ("b", "a")
    path.write_text("b\na\nb\n")
    assert refusal(read_classes, path) == f"{path} names the class 'b' twice; write one class name per line"
    path.write_text(" \n")
    assert refusal(read_classes, path) == f"{path} contains no class names; write one class name per line"
    path.write_bytes(b"caf\xe9\n")
    assert refusal(read_classes, path).startswith(f"{path} is not UTF-8; ")
    path.unlink()
    assert refusal(read_classes, path) == f"cannot read {path}: No such file or directory"


# -------------------------------------------------------------------------------------------------------- wrong tables
def test_missing_tables_are_refused(tmp_path, refusal):
    assert refusal(open_source, settings(""), "train") == (
        "data.root is '', which is not a folder; set it to the folder of your images, with the table {split}.csv"
    )
    assert refusal(open_source, settings(tmp_path / "no"), "train").startswith(
        f"data.root is '{tmp_path}/no', which is not a folder; set it to"
    )
    sentence = refusal(open_source, settings(tmp_path), "train")
    assert sentence == (f"there is no {tmp_path}/train.csv for split train; correct data.table, which is {{split}}.csv")
    (tmp_path / "mine.xlsx").touch()
    assert refusal(open_source, settings(tmp_path, table="mine.xlsx"), "train") == (
        f"{tmp_path}/mine.xlsx is a spreadsheet, which is not read; save it as CSV UTF-8, comma delimited"
    )


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_images_know_their_line_in_the_table(tmp_path, kind):
    rows = [("a.png", "x", "train"), ("b.png", "y", "val"), ("c.png", "x", "train")]
    if kind == "csv":
        write(tmp_path, "t.csv", "image,labels,split\n\n" + "".join(f"{','.join(row)}\n" for row in rows))
    else:
        records = [json.dumps({"image": image, "labels": [name], "split": split}) for image, name, split in rows]
        write(tmp_path, "t.jsonl", "\n\n" + "\n".join(records))
    data = settings(tmp_path, table="t.csv") if kind == "csv" else jsonl(tmp_path, table="t.jsonl")
    images = open_source(data, "train").images
    assert [images.line(row) for row in range(2)] == [(f"t.{kind}", 3), (f"t.{kind}", 5)]
    assert images.take(np.array([1])).line(0) == (f"t.{kind}", 5)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", " is empty; write a line with the column names, then one line per image"),
        ("image,labels\n", " lists no images"),
        ("image,labels\n\n\n", " lists no images"),
        ("file,labels\na.png,x\n", " has no column 'image', which data.image_column names (columns: file, labels); "),
        (
            "image,tags\na.png,x\n",
            " has no column 'labels', which data.label_column (empty: a column per class) names (columns: image, "
            "tags); correct one of the two",
        ),
        ("image,labels,image\na.png,x,y\n", " has two columns 'image'; write a line with the column names"),
        ("image,labels\na.png,x,y\n", " line 2 has 3 cells, but there are 2 columns; "),
        ("image,labels\na.png\n", " line 2 has 1 cells, but there are 2 columns; "),
        ("image,labels\na.png,x\n,x\n", " line 3 has no image path"),
        ("image;labels\na.png;x\n", " has no column 'image', which data.image_column names (columns: image;labels); "),
        ('image,labels\na.png,"x\nb.png,y"\n', " line 2 has the label 'x\\nb.png,y', with a line break or "),
        ('image,labels\n"a.png,x\nb.png",y\n', " line 2 has a line break in the cell 'a.png,x\\nb.png'; close the "),
        (
            'image,split,labels\na.png,"train,x\nb.png,train",y\n',
            " line 2 has a line break in the cell 'train,x\\nb.png,",
        ),
        (
            "image,labels\na.png,x\na.png,\n",
            " lists a.png in the lines 2 and 3 with two values of its labels: some and none; ",
        ),
        ("image,labels\na.png,x\nb.png,N/A\n", " line 3 has the label 'N/A', which stands for no value; leave it "),
        *(
            (f"image,labels\na.png,{cell}\n", f" line 2 has the labels {cell[1:-1]!r}, a literal that ")
            for cell in ('"[car, dog]"', "\"{'car': 1}\"", '"[0, 1]"', "\"[['car']]\"", "\"array(['car'])\"")
        ),
        (
            f"image,labels\na.png,{'x' * 200_000}\n",
            " cannot be read from line 2 on: field larger than field limit (131072); close the quote",
        ),
    ],
)
def test_invalid_tables_are_refused(tmp_path, refusal, text, error):
    write(tmp_path, "train.csv", text)
    assert refusal(open_source, settings(tmp_path), "train").startswith(f"{tmp_path}/train.csv{error}")


# ---------------------------------------------------------------------------------------------------------------- size
def write_large(folder, images: int) -> None:
    """Write a table of `images` rows with 5 of 100 labels per row, without the images."""
    names = [f"class {k:02d}" for k in range(100)]
    chosen = np.random.RandomState(0).randint(100, size=(images, 5))
    with open(folder / "train.csv", "w") as file:
        file.write("image,labels\n")
        for row, columns in enumerate(chosen):
            file.write(f"{row % 1000:03d}/{row:07d}.jpg,{';'.join(names[k] for k in columns)}\n")


@pytest.mark.slow
def test_large_tables_take_little_memory(tmp_path):
    write_large(tmp_path, 100_000)
    tracemalloc.start()
    split = open_source(settings(tmp_path, bad_images="skip"), "train")
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(split) == 100_000
    assert len(split.classes) == 100
    assert kept < 30e6  # 10 MB of labels, and 9 MB of names with their containers
    assert peak < 60e6


def test_rows_whose_paths_no_file_can_have_are_skipped(tmp_path):
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "a.png")
    names = ["a.png", "a.png\0", "\ud800.png", "x" * 5000, "b/" * 3000]
    rows = [json.dumps({"image": name, "labels": ["x"]}) for name in names]
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    data = jsonl(tmp_path, table="t.jsonl")
    images = open_source(data, "train").images
    assert images.read(0).shape == (4, 4, 3)
    for row in range(1, len(names)):
        with pytest.raises(BadImage):
            images.read(row)
    with pytest.raises(UserError, match="4 of the 5 images of train have no file"):
        open_split(data, "train")
