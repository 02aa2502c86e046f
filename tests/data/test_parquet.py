"""Labels in Parquet files: the layouts of the hub, of Spark and of pandas, their splits, and the account."""

import json
import math
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.parquet_files import IMAGE, class_label, images, png, sequence, write
from helpers.tables import data_settings, opened

from mlmoe_jax.config import load_config
from mlmoe_jax.data.label_codes import UNKNOWN
from mlmoe_jax.data.pipeline import build_loader
from mlmoe_jax.data.sources.open import open_splits
from mlmoe_jax.data.usage import unused_input

SEA = {"image": IMAGE, "labels": sequence(class_label("sky", "sea", "sand"))}


def of(root, split="train", **keys):
    return opened("parquet", root, split, **keys)


def sentences(split) -> str:
    return "\n".join(unused_input(split.usage))


# ------------------------------------------------------------------------------------------- layouts of the hub
def test_lists_of_classes_in_many_splits_as_mars_multi_label_classification(tmp_path):
    """gremlin97/mars-multi-label-classification: few_shot_train_10_shot is a split of its own, not a part of train."""
    features = {"image": IMAGE, "labels": sequence(class_label("rah", "cla", "dur"))}
    for split, labels in {"train": [[0], [1, 2]], "val": [[2]], "few_shot_train_10_shot": [[1]] * 3}.items():
        path = tmp_path / "data" / f"{split}-00000-of-00001.parquet"
        write(path, {"image": images(len(labels)), "labels": labels}, features)
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n"
    for name in ("train", "val", "few_shot_train_10_shot"):
        card += f"  - split: {name}\n    path: data/{name}-*\n"
    (tmp_path / "README.md").write_text(f"{card}---\n# Mars\n")
    splits = open_splits(data_settings("parquet", tmp_path, test_splits=()), ["train", "val"])
    assert splits["train"].classes == ("rah", "cla", "dur")
    np.testing.assert_array_equal(splits["train"].labels, [[1, 0, 0], [0, 1, 1]])
    np.testing.assert_array_equal(splits["val"].labels, [[0, 0, 1]])
    assert splits["val"].ids == ["data/val-00000-of-00001.parquet#0"]
    assert "has 1 file of split 'few_shot_train_10_shot', while the config uses train, val" in sentences(splits["val"])
    only = of(tmp_path, "few_shot_train_10_shot", train_split="few_shot_train_10_shot", val_split="", test_splits=())
    assert len(only) == 3


def test_folders_of_splits_and_a_column_of_paths_as_nih_chest_x_ray(tmp_path):
    """alkzar90/NIH-Chest-X-ray-dataset, converted by the hub: the paths of another machine are no images."""
    features = {"image_file_path": {"dtype": "string", "_type": "Value"}, "image": IMAGE}
    features["labels"] = sequence(class_label("No Finding", "Atelectasis"))
    for split in ("train", "validation", "test"):
        columns = {"image_file_path": ["/root/a.png", "/root/b.png"], "image": images(2), "labels": [[0], []]}
        write(tmp_path / split / "0000.parquet", columns, features)
    splits = open_splits(data_settings("parquet", tmp_path), ["train", "val", "test"])
    assert [split.labels[:].tolist() for split in splits.values()] == [[[1, 0], [0, 0]]] * 3
    assert splits["val"].images.encoded(1) == png(1)
    assert "has 1 column that no key of the config names: image_file_path" in sentences(splits["val"])


def test_bytes_that_the_datasets_library_notes_as_images_are_the_images(tmp_path):
    columns = {"audio": [{"bytes": b"RIFF", "path": "a.wav"}] * 2, "scan": images(2), "labels": [["a"], ["b"]]}
    write(tmp_path / "train.parquet", columns, {"audio": {"_type": "Audio"}, "scan": IMAGE})
    assert of(tmp_path).images.encoded(1) == png(1)


def test_a_boolean_column_per_class_beside_a_class_as_vege(tmp_path, refusal):
    """vege of Automated_Vege_Slicing_Thesis: attributes as booleans, and the kind of vegetable as a text."""
    columns = {"image": images(3), "class": ["leek", "onion", "leek"]}
    columns |= {"red": [True, False, None], "sphere": [False, True, True], "leaf": [True, True, False]}
    write(tmp_path / "train.parquet", columns)
    text = refusal(of, tmp_path)
    assert "several columns that may be the labels: class, the columns of booleans red, sphere, leaf" in text
    split = of(tmp_path, label_column="")
    assert split.classes == ("leaf", "red", "sphere")
    np.testing.assert_array_equal(split.labels, [[1, 1, 0], [1, 0, 1], [0, UNKNOWN, 1]])
    assert of(tmp_path, label_column="class").classes == ("leek", "onion")


def test_lists_of_texts_are_found_whatever_their_column_is_called(tmp_path):
    columns = {"picture": [png(0), png(1)], "genres": [["drama", "crime"], None], "id": [4, 5]}
    write(tmp_path / "posters.parquet", columns)
    split = of(tmp_path)
    assert split.classes == ("crime", "drama")
    assert split.ids == ["posters.parquet#0"]
    assert "1 without labels (posters.parquet#1)" in sentences(split)
    assert "has its labels in genres; data.label_column names another column" in sentences(split)


def test_numbers_of_thousands_of_classes_need_their_names_as_coyo_labeled(tmp_path, refusal):
    """kakaobrain/coyo-labeled-300m: indices of classes that only the card names."""
    write(tmp_path / "train.parquet", {"image": images(2), "labels": [[2, 0], [1]], "label_probs": [[0.9, 0.8], [0.7]]})
    assert "numbers need the names of their classes" in refusal(of, tmp_path)
    (tmp_path / "names.txt").write_text("kite\nowl\nwren\n")
    split = of(tmp_path, classes="names.txt")
    assert split.classes == ("kite", "owl", "wren")
    np.testing.assert_array_equal(split.labels, [[1, 0, 1], [0, 1, 0]])


# ------------------------------------------------------------------------------------------------------ forms of labels
@pytest.mark.parametrize(
    ("cells", "feature", "expected"),
    [
        ([[1], [0, 2]], sequence(class_label("a", "b", "c")), [[0, 1, 0], [1, 0, 1]]),
        ([[1], [0, 2]], {"feature": class_label("a", "b", "c"), "_type": "List"}, [[0, 1, 0], [1, 0, 1]]),
        ([[1], [0, 2]], [class_label("a", "b", "c")], [[0, 1, 0], [1, 0, 1]]),
        (pa.array([[1], [0, 2]], pa.large_list(pa.uint8())), sequence(class_label(*"abc")), [[0, 1, 0], [1, 0, 1]]),
        ([2, 0], class_label("a", "b", "c"), [[0, 0, 1], [1, 0, 0]]),
        ([2.0, 0.0], class_label("a", "b", "c"), [[0, 0, 1], [1, 0, 0]]),
        (["b; a", "c"], None, [[1, 1, 0], [0, 0, 1]]),
        (["['b', 'a']", '["c"]'], None, [[1, 1, 0], [0, 0, 1]]),
        (pa.array(["b;a", "c"]).dictionary_encode(), None, [[1, 1, 0], [0, 0, 1]]),
        (pa.array(["b;a", "c"], pa.string_view()), None, [[1, 1, 0], [0, 0, 1]]),
        ([["a", "b"], ["c"]], None, [[1, 1, 0], [0, 0, 1]]),
        ([{"a": 1, "b": None, "c": 0}, {"a": 0, "b": 1, "c": 1}], None, [[1, UNKNOWN, 0], [0, 1, 1]]),
    ],
)
def test_forms_of_labels(tmp_path, cells, feature, expected):
    features = None if feature is None else {"image": IMAGE, "labels": feature}
    write(tmp_path / "a.parquet", {"image": images(2), "labels": cells}, features)
    split = of(tmp_path)
    assert split.classes == ("a", "b", "c")
    np.testing.assert_array_equal(split.labels, expected)


@pytest.mark.parametrize("kind", [pa.int8(), pa.bool_(), pa.float32()])
def test_a_value_per_class_in_a_list(tmp_path, kind):
    cells = pa.array([[0, 1, 1], [1, 0, 0]]).cast(pa.list_(kind))
    write(tmp_path / "a.parquet", {"image": images(2), "labels": cells})
    (tmp_path / "names.txt").write_text("x\ny\nz\n")
    np.testing.assert_array_equal(of(tmp_path, classes="names.txt").labels, [[0, 1, 1], [1, 0, 0]])


@pytest.mark.parametrize("classes", ["x\ny\n", "x\n"])
def test_values_or_numbers_of_one_or_two_classes(tmp_path, refusal, classes):
    """Numbers would make every image positive, and values would too."""
    count = classes.count("\n")
    write(tmp_path / "a.parquet", {"image": images(1), "labels": [list(range(count))]})
    (tmp_path / "names.txt").write_text(classes)
    assert "a.parquet#0, with the labels" in (said := refusal(of, tmp_path, classes="names.txt"))
    assert "they may be numbers of classes, or a 1 or 0 for each" in said
    write(tmp_path / "a.parquet", {"image": images(1), "labels": [classes.split()]})
    assert of(tmp_path, classes="names.txt").labels[:].tolist() == [[1] * count]


@pytest.mark.parametrize("values", [[1, 0, None], [1.0, 0.0, math.nan], [True, False, None]])
def test_columns_per_class(tmp_path, values):
    columns = {"image": images(3), "Pleural Effusion": values, "St. Bernard": values[::-1]}
    write(tmp_path / "a.parquet", columns)
    split = of(tmp_path, label_column="")
    assert split.classes == ("Pleural Effusion", "St. Bernard")
    np.testing.assert_array_equal(split.labels, [[1, UNKNOWN], [0, 0], [UNKNOWN, 1]])


def test_an_unknown_class_of_the_datasets_library_is_no_label(tmp_path):
    features = {"image": IMAGE, "label": class_label("a", "b")}
    write(tmp_path / "a.parquet", {"image": images(2), "label": [1, -1]}, features)
    split = of(tmp_path)
    assert len(split) == 1
    assert "without labels (a.parquet#1)" in sentences(split)


def test_notes_that_were_written_by_hand(tmp_path):
    """As the hub's page on PyArrow writes them."""
    path = write(tmp_path / "a.parquet", {"image": images(1), "thumb": images(1), "labels": [[1]]})
    features = {"image": IMAGE, "labels": sequence(class_label("a", "b"))}
    noted = {b"huggingface": json.dumps({"dataset_info": {"features": features}}).encode()}
    pq.write_table(pq.read_table(path).replace_schema_metadata(noted), path)
    assert of(tmp_path).classes == ("a", "b")


# --------------------------------------------------------------------------------------------------------------- splits
@pytest.mark.parametrize(
    "names",
    [
        ("train.parquet", "validation.parquet"),
        ("data/train-00000-of-00001.parquet", "data/val-00000-of-00001-a1b2c3d4.parquet"),
        ("train/part-00000-of-00001.parquet", "dev/part-00000-of-00001.parquet"),
        ("split=train/part-0-x.c000.snappy.parquet", "split=valid/part-0-y.c000.snappy.parquet"),
        ("coco_train.parquet", "coco_val.parquet"),
        ("default/train/0000.parquet", "default/validation/0000.parquet"),
        ("test_set/train/0000.parquet", "test_set/dev/0000.parquet"),
    ],
)
def test_splits_of_file_names(tmp_path, names):
    for k, name in enumerate(names):
        write(tmp_path / name, {"image": images(k + 1), "labels": [["a"]] * (k + 1)})
    for junk in ("_SUCCESS", ".part-0.crc", "_metadata", "train/.hidden.parquet", "_temporary/train.parquet"):
        (tmp_path / junk).parent.mkdir(exist_ok=True)
        (tmp_path / junk).write_bytes(b"junk")
    splits = open_splits(data_settings("parquet", tmp_path, test_splits=()), ["train", "val"])
    assert [len(split) for split in splits.values()] == [1, 2]


def test_a_column_of_splits(tmp_path):
    columns = {"image": images(4), "labels": [["a"], ["b"], ["a"], ["b"]], "split": ["train", "valid", "test", "train"]}
    write(tmp_path / "all.parquet", columns)
    splits = open_splits(data_settings("parquet", tmp_path), ["train", "val", "test"])
    assert {name: split.ids for name, split in splits.items()} == {
        "train": ["all.parquet#0", "all.parquet#3"],
        "val": ["all.parquet#1"],
        "test": ["all.parquet#2"],
    }
    assert splits["val"].images.encoded(0) == png(1)


def test_a_column_of_numbers_is_splits_in_rows_without_labels_too(tmp_path):
    write(tmp_path / "all.parquet", {"image": images(4), "labels": [["a"], None, ["a"], ["b"]], "split": [0, 0, 1, 0]})
    splits = open_splits(data_settings("parquet", tmp_path, train_split="0"), ["1"])
    assert [split.ids for split in splits.values()] == [["all.parquet#0", "all.parquet#3"], ["all.parquet#2"]]
    assert "1 of 4 rows is not used: 1 without labels" in sentences(splits["1"])


def test_a_column_of_splits_beside_names_of_splits_is_noted(tmp_path):
    """`Dataset.push_to_hub` of the datasets library calls one table train, whatever its column says."""
    columns = {"image": images(2), "labels": [["a"], ["b"]], "split": ["train", "test"]}
    write(tmp_path / "train-00000-of-00001.parquet", columns)
    split = of(tmp_path)
    assert len(split) == 2
    assert "has a column 'split', which is ignored" in "\n".join(unused_input(split.usage))


def test_files_without_split_names_are_the_training_split(tmp_path):
    for k in range(3):
        write(tmp_path / f"part-0000{k}-of-00003.parquet", {"image": images(2, 2 * k), "labels": [["a"], ["b"]]})
    split = of(tmp_path)
    assert len(split) == 6
    assert [split.images.encoded(row) for row in range(6)] == [png(k) for k in range(6)]
    kept = split.take(np.array([5, 0]), "train")
    assert kept.images.encoded(0) == png(5)


def test_one_file_is_all_of_the_data(tmp_path):
    path = write(tmp_path / "test.parquet", {"image": images(2), "labels": [["a"], ["b"]]})
    assert len(of(path)) == 2


def test_configurations_of_a_card(tmp_path, refusal):
    for name in ("large", "small"):
        write(tmp_path / name / "train.parquet", {"image": images(2), "labels": [[name], [name]]})
    card = "---\nconfigs:\n- config_name: large\n  data_files: large/*\n- config_name: small\n  data_dir: small\n---\n"
    (tmp_path / "README.md").write_text(card)
    assert "has several configurations: large, small; append one to the address" in refusal(of, tmp_path)
    (tmp_path / "README.md").write_text(card.replace("data_dir: small", "data_dir: small\n  default: true"))
    assert of(tmp_path).classes == ("small",)


# ------------------------------------------------------------------------------------------------------- paths, groups
def test_a_column_of_paths_is_a_table_of_files(tmp_path):
    for folder in ("train", "val"):
        write(tmp_path / folder / "metadata.parquet", {"file_name": ["a.png", "sub/b.png"], "labels": [["x"], ["y"]]})
        for name in ("a.png", "sub/b.png"):
            (tmp_path / folder / name).parent.mkdir(exist_ok=True)
            (tmp_path / folder / name).write_bytes(png(1))
    split = of(tmp_path)
    assert split.ids == ["train/a.png", "train/sub/b.png"]
    assert split.images.encoded(1) == png(1)
    (tmp_path / "train" / "a.png").unlink()
    assert len(of(tmp_path, bad_images="skip")) == 1


def test_null_bytes_with_a_path(tmp_path):
    cells = [{"bytes": None, "path": "pictures/a.png"}, {"bytes": None, "path": "b.png"}, *images(1, 2)]
    write(tmp_path / "data" / "train.parquet", {"image": cells, "labels": [["x"]] * 3})
    for k, name in enumerate(("pictures/a.png", "data/b.png")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(png(k))
    split = of(tmp_path)
    assert [split.images.encoded(row) for row in range(3)] == [png(0), png(1), png(2)]


def test_groups(tmp_path):
    columns = {"image": images(3), "labels": [["x"], ["y"], []], "patient": [7.0, math.nan, 7.0]}
    write(tmp_path / "a.parquet", columns)
    assert of(tmp_path, group_column="Patient").groups == ["7", "", "7"]


def test_the_images_are_not_read_with_the_labels(tmp_path):
    """A damaged page of images is no reason to refuse the labels."""
    cells = [os.urandom(5000) for _ in range(20)]
    columns = {"image": cells, "labels": [["x"]] * 20}
    path = write(tmp_path / "a.parquet", columns, use_dictionary=False, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[40_000] ^= 255
    path.write_bytes(content)
    split = of(tmp_path)
    assert len(split) == 20
    problem = split.images.problem(3)
    assert f"cannot read {path}#3 as an image" in problem
    assert "crc" in problem.lower()


# ---------------------------------------------------------------------------------------------------------- own layouts
def test_own_csv_finds_parquet_files_unless_there_is_a_table(tmp_path):
    write(tmp_path / "train.parquet", {"image": images(2), "labels": ["a", "b"]})
    layout = f"own_csv:root={tmp_path}"
    assert load_config(layout, []).data.name == "parquet"
    assert load_config(f"{layout}/train.parquet", []).data.name == "parquet"
    assert load_config(f"csra_resnet101:dataset=own,root={tmp_path}", []).data.name == "parquet"
    assert load_config(f"{layout},table=more.jsonl", []).data.name == "jsonl"
    assert load_config(layout, [("data.table", "{split}.csv")]).data.name == "csv"
    (tmp_path / "labels.csv").write_text("image,labels\n")
    assert (load_config(layout, []).data.name, load_config(layout, []).data.table) == ("csv", "labels.csv")


def test_workers_read_the_images_of_a_split(tmp_path, monkeypatch):
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "photos" / "train.parquet", {"image": images(40), "labels": ["a", "b"] * 20}, row_group_size=7)
    data = data_settings("parquet", tmp_path / "photos", workers=2, threads=2, image_size=4)
    split = open_splits(data, [])["train"]
    batches = list(build_loader(data, split, batch_size=16, labels=False))
    rows = np.concatenate([batch["id"] for batch in batches])
    shades = np.concatenate([batch["image"] for batch in batches])[:, 0, 0, 0]
    assert rows.tolist() == [*range(40), *[-1] * 8]
    assert shades[:40].tolist() == list(range(40))
    assert len(list((tmp_path / "cache" / "parquet").glob("*.arrow"))) == 6
