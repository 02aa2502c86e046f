"""Tables of images and labels: what is read, how rows are merged, and what is said of the rest."""

import csv
import tracemalloc

import numpy as np
import pytest
from helpers.tables import lines, listed, opened, settings, widths, write, write_images
from PIL import Image

from mlmoe_jax.apps.tools.image_list import find_images
from mlmoe_jax.apps.tools.result_rows import ResultRows
from mlmoe_jax.data.images import ImageNames
from mlmoe_jax.data.names import split_key
from mlmoe_jax.data.sources.open import open_split, open_splits
from mlmoe_jax.data.usage import Usage, join_usages, unused_input
from mlmoe_jax.inference.predictor import LabeledImage
from mlmoe_jax.runtime.formats import read_cell_names
from mlmoe_jax.runtime.storage import OutputTarget

OBJECTS = lines(
    {"image": "a.png", "labels": ["dog", "cat", "dog"]},
    {"image": "b.png", "labels": {"cat": 0, "dog": None, "cow": 1}},
    {"image": "sub/c.png", "labels": []},
)
CODES = {"label_column": ""}
OTHER_NAMES = {"images": "sub", "image_column": "photo", "label_column": "tags", "separator": "|"}

# text, keys of `data`, classes of the model; classes, images and labels
READ = {
    "names in a column": (
        "image,labels\na.png,dog; cat\nsub/c.png,\nb.png,dog;;dog\n",
        {},
        None,
        ("cat", "dog"),
        ["a.png: cat, dog", "sub/c.png:", "b.png: dog"],
    ),
    "other columns, separators and folders, and a byte order mark": (
        '\ufeff"photo", id ,tags\r\n\r\nc.png,5,"a, b|c"\r\n',
        OTHER_NAMES,
        None,
        ("a, b", "c"),
        ["c.png: a, b, c"],
    ),
    "classes of the model": (
        "image,labels\na.png,dog\nb.png,dog;kat\nsub/c.png,kat;elk\n",
        {},
        ("kat", "elk", "dog", "cow"),
        ("kat", "elk", "dog", "cow"),
        ["a.png: dog", "b.png: kat, dog", "sub/c.png: kat, elk"],
    ),
    "no labels": ("image,labels\na.png,\nb.png,;\n", {}, ("x",), ("x",), ["a.png:", "b.png:"]),
    "a column per class": (
        "dog,image,cat\n1,a.png,0\n, b.png,1.0\n0.0,sub/c.png,\n",
        CODES,
        None,
        ("cat", "dog"),
        ["a.png: dog", "b.png: cat, ?dog", "sub/c.png: ?cat"],
    ),
    "a file of classes": (
        "image,width,dog,cat\na.png,640,1,0\n",
        {**CODES, "classes": "names.txt"},
        None,
        ("dog", "cat"),
        ["a.png: dog"],
    ),
    "lists and objects of names": (
        "\ufeff" + OBJECTS.replace("\n", "\n\n", 1),
        {"name": "jsonl"},
        None,
        ("cat", "cow", "dog"),
        ["a.png: cat, dog", "b.png: cow, ?dog", "sub/c.png:"],
    ),
    "objects and classes of the model": (
        OBJECTS,
        {"name": "jsonl"},
        ("dog", "cow", "cat", "elk"),
        ("dog", "cow", "cat", "elk"),
        ["a.png: dog, cat", "b.png: ?dog, cow, ?elk", "sub/c.png:"],
    ),
    "other keys": (
        lines({"photo": "c.png", "tags": {"x": True, "y": 0.0}}),
        {"name": "jsonl", **OTHER_NAMES},
        None,
        ("x", "y"),
        ["c.png: x"],
    ),
    "names with quotes inside": (
        lines({"image": "a.png", "labels": ['5"', '"Big" cats', "dogs\u2019", "rock 'n' roll"]}),
        {"name": "jsonl"},
        None,
        ('"Big" cats', '5"', "dogs\u2019", "rock 'n' roll"),
        ['a.png: "Big" cats, 5", dogs\u2019, rock \'n\' roll'],
    ),
    "rows of an image that fill unknown labels": (
        "image,cat,dog\na.png,True,\nb.png,false,1.0\na.png,,FALSE\n",
        CODES,
        None,
        ("cat", "dog"),
        ["a.png: cat", "b.png: dog"],
    ),
    "a column in another Unicode form than the class": (
        "image,e\u0301\na.png,1\n",
        CODES,
        ("\u00e9",),
        ("\u00e9",),
        ["a.png: \u00e9"],
    ),
    "lists and objects of an image": (
        lines(*({"image": "a.png", "labels": labels} for labels in ({"cat": 1}, ["dog"], {"cow": 0}))),
        {"name": "jsonl"},
        None,
        ("cat", "cow", "dog"),
        ["a.png: cat, dog"],
    ),
}


@pytest.mark.parametrize("case", READ)
def test_a_table_is_read(tmp_path, case):
    text, keys, given, classes, images = READ[case]
    (tmp_path / "names.txt").write_text("\ufeffdog\n\ncat \n", encoding="utf-8")
    write(tmp_path, "tables/all train", text)
    split = open_split(settings(tmp_path, table="tables/all {split}", **keys), "train", classes=given)
    assert (split.name, split.classes) == ("train", classes)
    assert listed(split) == images
    assert widths(split) == ["abc".index(name[-5]) + 1 for name in split.ids]


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
    split = opened("csv", tmp_path)
    assert split.classes == tuple(sorted(names))
    assert listed(split) == [f"=1+1.png: {', '.join(sorted(names))}", "b.png: a;b"]


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
        *((empty, []) for empty in ("[]", "()", "set()")),
        *((name, [name]) for name in ("(other)", "car (red)", "'90s", "[car", "a'b'")),
    ],
)
def test_lists_in_cells_are_read(cell, names):
    assert read_cell_names(cell) == names


# --------------------------------------------------------------------------------------------------------------- paths
def test_ids_of_one_image_folder_per_split_differ_between_splits(tmp_path):
    write(tmp_path, "sub.csv", "image,labels,split\nc.png,x,ignored\n")
    split = open_split(settings(tmp_path, images="{split}"), "sub")
    assert (split.ids, widths(split)) == (["sub/c.png"], [3])


def test_absolute_paths_become_relative_to_the_image_folder(tmp_path):
    write(tmp_path, "train.csv", "image,labels\n{at}/sub/c.png,x\na.png,y\n")
    split = opened("csv", tmp_path)
    assert (split.ids, widths(split)) == (["sub/c.png", "a.png"], [3, 1])
    write(tmp_path, "train.csv", "image,labels\n{at}/sub/c.png,x\n")
    split = opened("csv", tmp_path, images="/")
    assert (split.ids, widths(split)) == ([f"{tmp_path}/sub/c.png".removeprefix("/")], [3])


@pytest.mark.parametrize(
    ("place", "images", "start"),
    [
        (".", "photos", "photos/"),
        (".", "./photos/", "photos/"),
        ("photos", ".", ""),
        ("photos/sub", "../../photos", "../../photos/"),
        ("photos/sub", "..", "../"),
        ("..", "{at.name}/photos", "{at.name}/photos/"),
        (".", "{at}/photos", ""),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_predictions_are_a_table_wherever_they_were_made(tmp_path, monkeypatch, place, images, start, suffix):
    write_images(tmp_path / "photos", ["a.png", "b.png", "sub/c.png"])
    monkeypatch.chdir(tmp_path / place)
    paths = list(ImageNames(find_images([images.format(at=tmp_path)]).images))
    results = [LabeledImage(path, ("x",), {"x": 0.9}) for path in paths]
    ResultRows(("x",)).write(OutputTarget(tmp_path / "photos" / f"train.{suffix}", suffix), results)
    monkeypatch.chdir("/")
    split = opened(suffix, tmp_path / "photos", table=f"{{split}}.{suffix}")
    assert (split.ids, widths(split)) == (["a.png", "b.png", "sub/c.png"], [1, 2, 3])
    said = [sentence for sentence in unused_input(split.usage) if "before them" in sentence]
    start = start.format(at=tmp_path)
    examples = ", ".join(start + image for image in split.ids)
    place = f"{tmp_path}/photos/train.{suffix}"
    left_out = f"names 3 images with the path of {tmp_path}/photos before them, which is left out"
    assert said == ([f"{place} {left_out} ({examples})"] if start else [])


def test_a_folder_is_left_out_only_if_that_finds_the_image(tmp_path):
    folder = tmp_path / "photos"
    write(folder, "train.csv", "image,labels\nphotos/a.png,x\nphotos/b.png,x\nb.png,y\n", ["b.png", "photos/b.png"])
    split = open_split(settings(folder, bad_images="skip"), "train", keep_missing=True)
    assert split.ids == ["photos/a.png", "photos/b.png", "b.png"]
    assert unused_input(split.usage) == []


@pytest.mark.parametrize(("name", "line"), [("csv", 3), ("jsonl", 2)])
def test_a_prediction_of_an_unreadable_image_is_no_label(name, line, tmp_path):
    write_images(tmp_path, ["a.png", "b.png"])
    results = [LabeledImage("a.png", ("x",), {"x": 0.9}), LabeledImage("b.png", error="it is damaged")]
    ResultRows(("x",)).write(OutputTarget(tmp_path / f"train.{name}", name), results)
    split = opened(name, tmp_path, table=f"{{split}}.{name}")
    assert listed(split) == ["a.png: x"]
    assert f"1 without labels (line {line})" in unused_input(split.usage)[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("csv", "image,labels,error,split\nb.png,,damaged,val\na.png,x,,train\nsub/c.png,x,,val\n"),
        (
            "jsonl",
            lines(
                {"image": "b.png", "error": "damaged", "split": "val"},
                {"image": "a.png", "labels": ["x"], "split": "train"},
                {"image": "sub/c.png", "labels": ["x"], "split": "val"},
            ),
        ),
    ],
)
def test_a_row_with_an_error_keeps_its_split(name, text, tmp_path):
    write(tmp_path, f"t.{name}", text)
    splits = open_splits(settings(tmp_path, name=name, table=f"t.{name}"), ["val"], seed=0)
    assert {name: listed(split) for name, split in splits.items()} == {"train": ["a.png: x"], "val": ["sub/c.png: x"]}
    (sentence, *_) = unused_input(splits["train"].usage)
    assert sentence.endswith(f"1 of 3 rows is not used: 1 without labels (line {2 if name == 'csv' else 1})")


# ---------------------------------------------------------------------------------------------------------------- rows
@pytest.mark.parametrize("name", ["csv", "jsonl"])
def test_a_label_in_two_unicode_forms_is_one_label(tmp_path, name):
    composed, decomposed = "\u00c9v\u00e9nement", "E\u0301ve\u0301nement"
    rows = {"image": "a.png", "labels": [f" {composed} ", "x"]}, {"image": "b.png", "labels": [decomposed]}
    text = lines(*rows) if name == "jsonl" else f"image,labels\na.png, {composed} ;x\nb.png,{decomposed}\n"
    write(tmp_path, f"train.{name}", text)
    for file, content in (
        ("names.txt", f"{decomposed}\nx\n"),
        ("tree.yaml", f"implies: {{{decomposed}: x}}"),
        ("fixed.csv", f"image,label,suggested,accept\nb.png,{decomposed},0,yes\n"),
    ):
        write(tmp_path, file, content)
    data = settings(tmp_path, name=name, table=f"{{split}}.{name}")
    split = open_split(data, "train")
    assert (split.classes, listed(split)) == (("x", composed), [f"a.png: x, {composed}", f"b.png: {composed}"])
    assert unused_input(split.usage) == [
        f"{tmp_path}/train.{name} has labels in several spellings, which are merged: {composed}"
    ]
    data.update({"classes": "names.txt", "tree": "tree.yaml", "corrections": "fixed.csv"})
    assert listed(open_split(data, "train")) == [f"a.png: {composed}, x", "b.png:"]


def test_rows_of_an_image_are_merged(tmp_path):
    text = "image,labels,patient\nsub/../a.png,cat,p\n./a.png,dog,\nb.png,cat,q\nsub//c.png,,r\nsub\\c.png,,r\n"
    write(tmp_path, "train.csv", f"{text}{{at}}/a.png,cat,p\n")
    split = opened("csv", tmp_path, group_column="patient")
    assert listed(split) == ["a.png: cat, dog", "b.png: cat", "sub/c.png:"]
    assert split.groups == ["p", "q", "r"]
    assert [split.images.line(row) for row in range(3)] == [("train.csv", line) for line in (2, 4, 5)]
    (usage,) = split.usage
    assert (usage.given, usage.used, usage.merged) == (6, {"train": 3}, {"train": 3})
    assert usage.notes == ["lists images again in 3 rows (line 3, line 6, line 7), which are merged"]


def test_lines_inside_of_quotes_are_said(tmp_path):
    text = 'image,note,labels\na.png,"nice,x\nb.png,nice",y\n\nsub/c.png,"two\nlines\n",z\n'
    write(tmp_path, "train.csv", text)
    split = opened("csv", tmp_path)
    assert [split.images.line(row) for row in range(2)] == [("train.csv", 2), ("train.csv", 5)]
    assert unused_input(split.usage) == [
        f"{tmp_path}/train.csv has 1 column that no key of the config names: note",
        f"{tmp_path}/train.csv has 3 lines inside of quotes (lines 2 to 3, lines 5 to 7), which belong to the cells "
        "of the line before; close the quotes if they are rows",
    ]


# -------------------------------------------------------------------------------------------------------------- splits
SPLIT_TABLES = {
    "csv": "\nimage,split,labels\na.png,train,x\n\nb.png,test,y;z\nsub/c.png,train,z\n",
    "wide.csv": "\nimage,split,x,y,z\na.png,train,1,0,0\n\nb.png,test,0,1,1\nsub/c.png,train,0,0,1\n",
    "jsonl": """

{"image": "a.png", "split": "train", "labels": ["x"]}

{"image": "b.png", "split": "test", "labels": ["y", "z"]}
{"image": "sub/c.png", "split": "train", "labels": ["z"]}
""",
}


@pytest.mark.parametrize("kind", SPLIT_TABLES)
def test_a_column_assigns_rows_to_splits(tmp_path, kind):
    write(tmp_path, f"all.{kind}", SPLIT_TABLES[kind])
    name = kind.rpartition(".")[2]
    data = settings(tmp_path, name=name, table=f"all.{kind}", label_column="" if "wide" in kind else "labels")
    train, test = open_split(data, "train"), open_split(data, "test")
    assert train.classes == test.classes == ("x", "y", "z")  # from the whole table
    assert (listed(train), listed(test)) == (["a.png: x", "sub/c.png: z"], ["b.png: y, z"])
    assert [train.images.line(row) for row in range(2)] == [(f"all.{kind}", 3), (f"all.{kind}", 6)]
    assert train.images.take(np.array([1])).line(0) == (f"all.{kind}", 6)


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
    split = opened("csv", tmp_path)
    assert len(split) == 2
    assert unused_input(split.usage) == [
        f"{tmp_path}/train.csv is the file of split train (data.table), so another split in 1 row (line 3: 'test') is "
        "ignored"
    ]


def test_spellings_of_a_split_have_one_key():
    names_of_key = {
        "train": "train|Train| TRAIN |training|Training set|trainset|train-split|trn|tr",
        "val": "val|valid|Validation|dev|devel|development|validation_set",
        "test": "test|TEST|testing|test data|tst|test_images",
        "test_shift": "test_shift|Test-Shift",
        "é": "\u00e9|e\u0301|\u00c9",
        "tests": "tests",
        "set": "set",
    }
    for key, names in names_of_key.items():
        assert {split_key(name) for name in names.split("|")} == {key}


def test_accounts_of_the_splits_of_a_file_are_joined():
    """Images that are left out of one split only are counted once, and are not used in the account of the others."""

    def account(*splits):
        usage = Usage("labels.csv", "row", {"train": 40, "val": 10})
        usage.leave_out("without labels", count=2)
        for split in splits:
            usage.merge(split, 1)
            usage = usage.drop(split, "without a file", ["a.png"])
        return usage

    joined, *more = join_usages([account("train"), account("val"), account()])
    assert not more
    assert (joined.given, joined.used, joined.unused) == (52, {"train": 38, "val": 8}, 4)
    document = joined.document()
    assert document["left_out"] == {
        "without labels": 2,
        "without a file (split train)": 1,
        "without a file (split val)": 1,
    }
    assert (document["given"], document["merged"]) == (52, 2)
    assert joined.hold_out("train", "val", 5).used == {"train": 33, "val": 5}


# ---------------------------------------------------------------------------------------------------------------- size
@pytest.mark.slow
def test_large_tables_take_little_memory(tmp_path):
    """Of 100,000 images with 5 of 100 labels each, which are not there."""
    names = [f"class {k:02d}" for k in range(100)]
    chosen = np.random.RandomState(0).randint(100, size=(100_000, 5))
    rows = (f"{row % 1000:03d}/{row:07d}.jpg,{';'.join(names[k] for k in ks)}\n" for row, ks in enumerate(chosen))
    (tmp_path / "train.csv").write_text("image,labels\n" + "".join(rows))
    tracemalloc.start()
    split = open_split(settings(tmp_path, bad_images="skip"), "train", keep_missing=True)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(split) == 100_000
    assert len(split.classes) == 100
    assert kept < 30e6  # 10 MB of labels, and 9 MB of names with their containers
    assert peak < 60e6


@pytest.mark.parametrize(
    ("table", "splits", "val", "left_out"),
    [
        ("{split}/metadata.csv", "train test", "", {"test": 1}),
        ("{split}/metadata.csv", "Train Validation extra", "val", {"extra": 1}),
        ("{split}/metadata.csv", "train val valid", "val", {"valid": 1}),  # the exact name prevails
        ("{split}/metadata.csv", "train dev valid", "val", {"valid": 1}),  # one spelling is used, and one is said
        ("labels_{split}.csv", "train old", "", {"old": 1}),
        ("{split}.csv", "train valid corrections", "", {"valid": 1}),  # a file of another name is no split
        ("{split}/{split}.csv", "train test", "", {"test": 1}),
    ],
)
def test_files_of_splits_are_found_in_any_spelling_and_those_of_unused_splits_are_counted(
    table, splits, val, left_out, tmp_path
):
    for name in splits.split():
        write(tmp_path, table.replace("{split}", name), f"image,labels\n{name}.png,x\n", [f"{name}/{name}.png"])
    keys = {"table": table, "images": "{split}", "val_split": val, "test_splits": ()}
    opened = open_splits(settings(tmp_path, **keys), [val])
    used = ("train", "val") if val else ("train",)
    assert [len(split) for split in opened.values()] == [1] * len(used)
    assert not any(len(split.images.missing()) for split in opened.values())
    reasons = {f"of split '{name}', while the config uses {', '.join(used)}": count for name, count in left_out.items()}
    rest = opened["train"].usage[1]
    assert rest.place == f"{tmp_path}/{table}"
    assert {reason: part.count for reason, part in rest.left_out.items()} == reasons


def test_a_file_of_an_unused_split_that_cannot_be_read_is_said(tmp_path):
    write(tmp_path, "train.csv", "image,labels\na.png,x\n", ["a.png"])
    write(tmp_path, "test.csv", "id\n1\n", ())
    rest = open_split(settings(tmp_path, table="{split}.csv", val_split="", test_splits=()), "train").usage[1]
    assert rest.notes[0].startswith("has split 'test', which is not used and cannot be read: ")
