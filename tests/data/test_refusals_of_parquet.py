"""Odd Parquet files from public reports and others: each is read right, or refused in one sentence."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.parquet_files import IMAGE, class_label, content, images, notes, png, sequence, write
from helpers.refusals import CUT, EMPTY, Refusal, damaged, each, run_command
from helpers.tables import data_settings, opened

from mlmoe_jax.data.containers.catalog import open_images
from mlmoe_jax.data.sources.open import open_splits
from mlmoe_jax.data.usage import Usage, unused_input

COLUMNS = {"image": images(3), "labels": [["a"], ["b"], ["a", "b"]]}


def of(at, **keys):
    return opened("parquet", at, **keys)


def use(name: str, columns: dict, *says: str, features=None, file="train.parquet", **keys) -> Refusal:
    """One file with these columns, opened with these keys of `data`."""
    return Refusal(name, lambda at: write(at / file, columns, features) and None, lambda at: of(at, **keys), *says)


def one(name: str, value, *says: str, features=None, **keys) -> Refusal:
    """A file with one image and this cell of labels."""
    columns = {"image": images(1), "labels": value if isinstance(value, pa.Array) else [value]}
    return use(name, columns, "{at}/train.parquet#0, with the labels", *says, features=features, **keys)


def broken(name: str, how, *says: str) -> Refusal:
    return damaged(name, lambda at: write(at / "train.parquet", COLUMNS) and None, "train.parquet", how, of, *says)


def no_pages(stored: bytes) -> bytes:
    """Overwrite the pages, but not the footer."""
    size = len(stored) - 8 - int.from_bytes(stored[-8:-4], "little")
    return b"PAR1" + b"\xff" * (size - 4) + stored[size:]


LIST_OF_CLASSES = {"image": IMAGE, "labels": sequence(class_label("a", "b"))}

REFUSALS = [
    # ---- damaged files
    broken("a download that stopped: VectorDBBench 199", CUT, "{at}/train.parquet is damaged"),
    broken("an empty file: aws-sdk-pandas 1043", EMPTY, "{at}/train.parquet is damaged"),
    broken("a pointer of Git LFS: suds 49", b"version https://git-lfs.github.com/spec/v1\n", "is damaged"),
    broken("a web page saved as a file", b"<!DOCTYPE html>" + b" " * 100, "is damaged"),
    broken(
        "a footer of thrift that cannot be read: arrow 38804",
        lambda one: one[:-30] + b"\xff" * 22 + one[-8:],
        "cannot read {at}/train.parquet",
    ),
    broken("pages that are overwritten", no_pages, "cannot read {at}/train.parquet"),
    broken("an encrypted footer", lambda one: one[:-4] + b"PARE", "cannot read {at}/train.parquet"),
    # ---- columns
    use(
        "no images at all: hive, ClickHouse 10680",
        {"id": [1], "labels": [["a"]]},
        "no column 'image' of bytes or paths",
    ),
    use("two columns with one name", {"image": images(1), "labels": [["a"]]}, "two columns 'image'"),
    use(
        "the column of images is misspelled",
        COLUMNS,
        "has no column 'picture' of bytes or paths (columns: image, labels)",
        image_column="picture",
    ),
    use(
        "the images are numbers",
        {"image": [1], "labels": [["a"]]},
        "has no column 'Image ' of bytes or paths",
        image_column="Image ",
    ),
    use(
        "several images in a row: FAI-RL 81",
        {"images": [images(2)], "labels": [["a"]]},
        "no column 'image' of bytes or paths",
    ),
    use("pixels: BigDL 3955", {"image": [[[1, 2], [3, 4]]], "labels": [["a"]]}, "no column 'image' of bytes or paths"),
    use(
        "two columns of images",
        {"left": images(1), "right": images(1), "labels": [["a"]]},
        "several columns of images: left, right",
    ),
    use("no labels: BigDL 3895", {"image": images(1), "width": [4]}, "no column of labels (columns: image, width)"),
    use(
        "the column of labels is misspelled",
        COLUMNS,
        "has no column 'tags', which data.label_column",
        label_column="tags",
    ),
    use(
        "a class per column: danjacobellis/chexpert",
        {"image": images(1), "Edema": [1], "Mass": [0]},
        "several columns that may be the labels: Edema, Mass",
        features={"image": IMAGE, "Edema": class_label("absent", "present"), "Mass": class_label("absent", "present")},
    ),
    use(
        "captions and tags",
        {"image": images(1), "caption_words": [["a"]], "objects": [["b"]]},
        "caption_words, objects",
    ),
    use("no group", COLUMNS, "has no column 'patient', which data.group_column names", group_column="patient"),
    use("no numbers for classes", {"image": images(1), "text": ["a"]}, "no column of a class", label_column=""),
    use(
        "a class that no column has",
        {"image": images(1), "a": [1]},
        "no column 'b', which the list of classes",
        label_column="",
        classes="{at}",
    ),
    # ---- cells
    one("boxes: detection data", [{"bbox": [1, 2], "category": 3}], "numbers need"),
    one("a class beyond the last", [0, 2], "not different numbers from 0 to 1", features=LIST_OF_CLASSES),
    one("a negative class in a list", [0, -1], "not different numbers", features=LIST_OF_CLASSES),
    one("a class twice", [1, 1], "not different numbers", features=LIST_OF_CLASSES),
    one("numbers without names: coyo", [3], "numbers need the names of their classes, in their order, in data.classes"),
    one("an empty name", ["a", ""], "not a name"),
    one("a probability per class", {"a": 0.7, "b": 0.1}, "the value 0.7"),
    one("lists in lists", [["a"], ["b"]], "numbers need the names"),
    one("a date", np.datetime64("2024-01-01").item(), "numbers need"),
    one("a literal that is no list", "{'a': 1}", "a literal that is not a list of names"),
    use(
        "nan as a name",
        {"image": images(1), "labels": ["nan"]},
        "has the label 'nan' of train.parquet#0, which stands for no value",
    ),
    use(
        "nothing but nulls",
        {"image": images(1), "labels": pa.array([None], pa.list_(pa.string()))},
        "has no labeled image (1 image without labels)",
    ),
    use(
        "a number above 1 in a column per class",
        {"image": images(1), "sea": [1], "width": [640]},
        "the value 640",
        label_column="",
    ),
    use(
        "a null path",
        {"file_name": ["a.png", None], "labels": [["a"], ["b"]]},
        "{at}/train.parquet#1",
        "it has no path of an image",
    ),
    use(
        "images as text",
        {"image": ["iVBOR" * 1000], "labels": [["a"]]},
        "{at}/train.parquet#0",
        "its path has 5,000 characters; store images as bytes",
    ),
    use(
        "a group that is no name",
        {**COLUMNS, "g": [[1], [2], [3]]},
        "#0",
        "the split or the group is not a name",
        group_column="g",
    ),
    one("a null among names", ["a", None], "the list has names and other values, such as null; remove those"),
    use(
        "a class and a list of tags",
        {"image": images(1), "label": [0], "tags": [["c"]]},
        "several columns that may be the labels: label, tags",
        features={"image": IMAGE, "label": class_label("a", "b"), "tags": sequence({"dtype": "string"})},
    ),
    use(
        "two texts that may be the labels",
        {"image": images(1), "Category": ["a"], "genre": ["b"]},
        "several columns that may be the labels: Category, genre",
    ),
    use(
        "bytes of another kind beside paths",
        {"mask_rle": [b"x"], "file_name": ["a.png"], "labels": [["a"]]},
        "several columns of images: mask_rle, file_name (columns: mask_rle, file_name, labels); name it with --column",
    ),
    # ---- files and splits
    use("only a test split", COLUMNS, "{at} has no files of split train; its splits are test", file="test.parquet"),
    use(
        "no rows: deephaven 5530",
        {"image": pa.array([], pa.binary()), "labels": pa.array([], pa.string())},
        "{at} has no images of split train; set data.root to a folder with some",
    ),
    Refusal("an empty folder", None, of, "{at} has no Parquet files; set data.root"),
    Refusal(
        "classes that differ between files",
        lambda at: (
            [
                write(
                    at / f"{k}.parquet",
                    {"image": images(1), "labels": [[0]]},
                    {"labels": sequence(class_label("a", str(k)))},
                )
                for k in range(2)
            ]
            and None
        ),
        of,
        "{at}/1.parquet has other classes or another kind of images than {at}/0.parquet",
    ),
    Refusal("no such bucket", None, lambda at: of("memory://nowhere"), "memory://nowhere has no Parquet files"),
    Refusal(
        "no library for a store",
        None,
        lambda at: of("s3://bucket/data"),
        "needs the package s3fs; run `pip install s3fs`",
    ),
    Refusal("no such kind of store", None, lambda at: of("dropbox9://data"), "cannot read dropbox9://data"),
]


def name_twice(at):
    table = pa.table([pa.array(images(1)), pa.array(images(1)), pa.array([["a"]])], names=["image", "image", "labels"])
    pq.write_table(table, at / "train.parquet")


REFUSALS[8].make = name_twice


def list_classes(at):
    (at / "names.txt").write_text("a\nb\n")
    write(at / "train.parquet", {"image": images(1), "a": [1]})


REFUSALS[20].make, REFUSALS[20].call = list_classes, lambda at: of(at, label_column="", classes="names.txt")


@each(REFUSALS)
def test_refusals(case, tmp_path):
    case.check(tmp_path)


def test_a_command_is_refused_with_exit_code_2(tmp_path):
    (tmp_path / "train.parquet").write_bytes(content(COLUMNS)[:100])
    case = Refusal("cut", None, lambda at: run_command("data", f"--config=own_csv:root={at}"), "is damaged")
    case.check(tmp_path)


# ------------------------------------------------------------------------------------------------- odd, but read right
@pytest.mark.parametrize(
    "cells",
    [
        pa.array([png(k) for k in range(3)], pa.binary()),
        pa.array([png(k) for k in range(3)], pa.large_binary()),
        pa.array([png(k) for k in range(3)], pa.binary_view()),
        pa.array([png(k % 2) for k in (0, 1, 0)]).dictionary_encode(),
        pa.array([{"bytes": png(k), "path": None} for k in range(3)]),
        pa.array([{"path": "x", "bytes": png(k), "more": 1} for k in range(3)]),
        pa.array(
            [{"bytes": png(k), "path": "a"} for k in range(3)],
            pa.struct({"bytes": pa.large_binary(), "path": pa.large_string()}),
        ),
    ],
    ids=[
        "binary",
        "large: arrow 21526",
        "view",
        "dictionary: nanoparquet 122",
        "no path: dataset-viewer 2545",
        "more: dask, datasets 5869",
        "polars",
    ],
)
def test_types_of_images(tmp_path, cells):
    write(tmp_path / "a.parquet", {"img": cells, "labels": ["a", "b", "a"]})
    split = of(tmp_path)
    stored = [cell["bytes"] if isinstance(cell, dict) else cell for cell in cells.to_pylist()]
    assert [split.images.encoded(row) for row in range(3)] == stored


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "zstd"},
        {"compression": "none", "use_dictionary": False},
        {"compression": "gzip", "data_page_size": 100},
        {"version": "1.0", "data_page_version": "2.0"},
        {"row_group_size": 1},
        {"use_content_defined_chunking": True},
        {"store_schema": False},
        {"use_byte_stream_split": False, "column_encoding": {"image.bytes": "PLAIN"}, "use_dictionary": False},
    ],
    ids=[
        "zstd",
        "plain: datasets 7976",
        "gzip",
        "pages 2.0",
        "one row per group: arrow 42956",
        "chunks",
        "no schema",
        "PLAIN",
    ],
)
def test_ways_to_write_a_file(tmp_path, options):
    columns = {"image": images(200), "labels": [["a"], ["b"]] * 100}
    write(tmp_path / "a.parquet", columns, **options)
    split = of(tmp_path)
    assert [split.images.encoded(row) for row in (0, 63, 64, 65, 199, 1)] == [png(k) for k in (0, 63, 64, 65, 199, 1)]


def test_nested_columns_of_many_pages_arrow_32723_datasets_7793(tmp_path):
    labels = [[f"label {k % 50} {'x' * 200}", "b"] for k in range(5000)]
    write(tmp_path / "a.parquet", {"image": [png()] * 5000, "labels": labels}, data_page_size=500)
    assert len(of(tmp_path).classes) == 51


def test_a_folder_of_spark_with_other_files_modin_4782(tmp_path):
    write(tmp_path / "part-00000-1b2c.c000.snappy.parquet", COLUMNS)
    for name in ("_SUCCESS", "._SUCCESS.crc", ".part-00000-1b2c.c000.snappy.parquet.crc", "_committed_1", "notes.txt"):
        (tmp_path / name).write_text("x")
    assert len(of(tmp_path)) == 3


def test_a_file_without_rows_may_have_columns_without_types(tmp_path):
    """As a job of Spark or pandas leaves them."""
    write(tmp_path / "train-0.parquet", {"image": pa.array([], pa.null()), "labels": pa.array([], pa.null())})
    write(tmp_path / "train-1.parquet", COLUMNS)
    split = of(tmp_path)
    assert split.ids[0] == "train-1.parquet#0"
    assert split.images.encoded(2) == png(2)
    assert len(open_images(str(tmp_path), Usage("", ""))) == 3


def test_folders_of_spark_are_columns(tmp_path):
    """partitionBy("split", "label"); the value of a null, and one with a space."""
    for folder in ("label=cat", "label=a%20dog", "label=__HIVE_DEFAULT_PARTITION__"):
        write(tmp_path / "split=train" / folder / "part-0.parquet", {"image": images(1), "width": [2]})
    write(tmp_path / "split=val/label=cat/part-0.parquet", {"image": images(1), "width": [2]})
    split = of(tmp_path)
    assert split.ids == ["split=train/label=a%20dog/part-0.parquet#0", "split=train/label=cat/part-0.parquet#0"]
    assert (split.classes, split.labels[:].tolist()) == (("a dog", "cat"), [[1, 0], [0, 1]])
    assert of(tmp_path, label_column="label", image_column="image").classes == split.classes
    assert "1 without labels" in " ".join(unused_input(split.usage))


def test_paths_are_relative_to_the_file_or_to_all_files(tmp_path):
    for name in ("images/a.png", "data/b.png", "c.png", "data/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(png())
    table = {"file_name": ["images/a.png", "b.png", "c.png"], "labels": ["x", "y", "x"]}
    write(tmp_path / "data" / "train.parquet", table)
    split = of(tmp_path)
    assert split.ids == ["images/a.png", "data/b.png", "data/c.png"]
    assert not len(split.images.missing())


def test_images_that_cannot_be_read_are_rows_of_the_account(tmp_path):
    cells = [
        *images(1),
        {"bytes": b"no image", "path": "a"},
        {"bytes": None, "path": "gone.png"},
        {"bytes": b"", "path": None},
        None,
    ]
    path = write(tmp_path / "a.parquet", {"image": cells, "labels": [["a"], ["b"], ["a"], ["b"], ["a"]]})
    split = of(tmp_path)
    problems = [split.images.problem(row) for row in range(5)]
    assert problems[0] == ""
    assert f"cannot read {path}#1 as an image" in problems[1]
    assert "gone.png" in problems[2]
    assert problems[3:] == [f"{path}#3 has no image", f"{path}#4 has no image"]
    assert split.images.frames_note() == []
    assert split.images.stamp(2) == "missing"
    assert len({split.images.stamp(row) for row in range(5)}) == 5


def test_the_label_columns_may_be_called_like_parts_of_others(tmp_path):
    write(tmp_path / "a.parquet", {"image": images(1), "labels": ["x"], "labels.raw": ["y"], "a.b": [1]})
    assert of(tmp_path).classes == ("x",)


def test_notes_of_another_program_are_no_features(tmp_path):
    table = pa.table(COLUMNS)
    for k, noted in enumerate((b"{", b"[]", b'{"info": null}', json.dumps({"info": {"features": []}}).encode())):
        pq.write_table(
            table.replace_schema_metadata({b"huggingface": noted, b"pandas": b"{}"}), tmp_path / f"{k}.parquet"
        )
    assert len(of(tmp_path)) == 12
    assert notes({})


def test_a_store_is_read_as_a_folder(tmp_path):
    import fsspec

    store = fsspec.filesystem("memory")
    for split in ("train", "val"):
        store.pipe(f"/photos/{split}/0.parquet", content({"image": images(3), "labels": ["a", "b", "a"]}))
    splits = open_splits(data_settings("parquet", "memory://photos", test_splits=()), ["train", "val"])
    assert splits["val"].ids[0] == "val/0.parquet#0"
    assert splits["val"].images.encoded(2) == png(2)
    assert len(open_images("memory://photos", Usage("", ""))) == 6
    assert len(open_images("memory://photos/val/0.parquet", Usage("", ""))) == 3
    assert open_images("memory://elsewhere", Usage("", "")) is None


def test_paths_of_images_in_a_store_are_not_missing():
    import fsspec

    table = content({"file_name": ["a.png", "b.png"], "labels": ["x", "y"]})
    fsspec.filesystem("memory").pipe("/paths/train.parquet", table)
    split = of("memory://paths", bad_images="skip")
    assert [split.images.name(row) for row in range(2)] == ["memory://paths/a.png", "memory://paths/b.png"]


def test_what_is_no_container(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    for place in (tmp_path, tmp_path / "a.png", tmp_path / "gone"):
        assert open_images(os.fspath(place), Usage("", "")) is None
