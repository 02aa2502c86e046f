"""Tables of metadata beside images: the layouts of ImageFolder, found by themselves, and in predictions."""

import json

import pytest
from helpers.refusals import Refusal, each
from helpers.tables import lines, write, write_images

from mlmoe_jax.config import load_config
from mlmoe_jax.data.containers.catalog import open_images
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.sources.own_layout import find_layout
from mlmoe_jax.data.usage import Usage, unused_input
from mlmoe_jax.errors import UserError


def opened(root, split="train", **keys):
    config = load_config(f"own_csv:root={root}", [(f"data.{key}", value) for key, value in keys.items()]).data
    return open_split(config, split)


def labels_of(split):
    return {
        name: [split.classes[k] for k in row.nonzero()[0]] for name, row in zip(split.ids, split.labels, strict=True)
    }


NAMES = {"a.png": ["sea"], "sub/c.png": ["sand", "sea"]}
JSONL = lines({"file_name": "a.png", "tags": ["sea"]}, {"file_name": "sub/c.png", "tags": ["sea", "sand"]})
PER_CLASS = "file_name,sea,sand\na.png,1,0\nsub/c.png,True,1\n"


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        # datasets-examples/doc-image-4 and 5: a table at the root
        ("metadata.csv", "file_name,labels\na.png,sea\nsub/c.png,sea;sand\n", "labels"),
        ("metadata.csv", "\ufefffile_name, caption, tags\na.png,by day,sea\nsub/c.png,,sea;sand\n", "tags"),
        ("metadata.csv", "file_name,labels\na.png,\"['sea']\"\nsub/c.png,\"['sea', 'sand']\"\n", "labels"),
        ("metadata.csv", PER_CLASS, ""),
        ("metadata.jsonl", JSONL, "tags"),
        ("metadata.jsonl", JSONL.replace("tags", "genres"), "genres"),
        ("metadata.jsonl", JSONL.replace("file_name", "photo_file_name"), "tags"),
        # datasets-examples/doc-image-6: the images in another folder than the table
        ("metadata.csv", "file_name,labels\n./a.png,sea\nsub\\c.png,sea;sand\n", "labels"),
    ],
)
def test_a_table_at_the_root(tmp_path, name, text, found):
    write(tmp_path, name, text)
    assert find_layout(str(tmp_path))["label_column"] == found
    assert {image: sorted(labels) for image, labels in labels_of(opened(tmp_path, val_fraction=0.0)).items()} == NAMES


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metadata.jsonl", lines({"file_name": "b.png", "tags": []}) + JSONL),
        ("metadata.csv", "file_name,tags\nb.png,\na.png,sea\nsub/c.png,sea;sand\n"),
    ],
)
def test_the_first_image_may_have_no_label(tmp_path, name, text):
    write(tmp_path, name, text, ("a.png", "b.png", "sub/c.png"))
    found = labels_of(opened(tmp_path, val_fraction=0.0))
    assert {image: sorted(labels) for image, labels in found.items()} == {**NAMES, "b.png": []}


@pytest.mark.parametrize("above", ["", "data/"])
def test_a_table_per_folder_of_a_split(tmp_path, above):
    """texturedesign/td02_urban-surface-textures: train/metadata.jsonl and test/metadata.jsonl."""
    for split in ("train", "validation"):
        write(tmp_path / above / split, "metadata.jsonl", JSONL)
    layout = find_layout(str(tmp_path))
    assert (layout["table"], layout["images"]) == (f"{above}{{split}}/metadata.jsonl", f"{above}{{split}}")
    train = opened(tmp_path, val_fraction=0.0)
    assert [labels_of(train)[f"train/{name}"] for name in NAMES] == [["sea"], ["sand", "sea"]]
    assert len(opened(tmp_path, "val", val_fraction=0.0)) == 2
    assert train.images.read(1).shape == (2, 3, 3)


def test_a_column_that_is_not_clear_can_be_named(tmp_path):
    write(tmp_path, "metadata.csv", "a_file_name,b_file_name,tags,genres\na.png,b.png,sea,sand\n")
    assert labels_of(opened(f"{tmp_path},label_column=genres", val_fraction=0.0, image_column="b_file_name")) == {
        "b.png": ["sand"]
    }
    for column, path in {"b_file_name": "b.png", "a_file_name": "a.png"}.items():
        images = open_images(f"{tmp_path}/metadata.csv", Usage("", "file"), column=column)
        assert images.name(0) == f"{tmp_path}/{path}"
    with pytest.raises(UserError, match=r"has several columns of images: a_file_name, b_file_name .* --column"):
        open_images(f"{tmp_path}/metadata.csv", Usage("", "file"))


def test_a_table_in_a_folder_and_what_it_does_not_use(tmp_path):
    """A column that nothing names, an image without a row, and a row without labels."""
    write(tmp_path / "photos", "metadata.csv", "file_name,labels,width\na.png,sea,3\nb.png,,3\n")
    split = opened(tmp_path, val_fraction=0.0)
    assert split.ids == ["a.png", "b.png"]
    assert "has 1 column that no key of the config names: width" in "\n".join(unused_input(split.usage))


def test_labels_csv_is_read_before_metadata(tmp_path):
    write(tmp_path, "labels.csv", "image,labels\na.png,sea\n")
    write(tmp_path, "metadata.csv", PER_CLASS)
    assert find_layout(str(tmp_path)) == {"table": "labels.csv"}


@pytest.mark.parametrize(("name", "text"), [("metadata.csv", PER_CLASS), ("metadata.jsonl", JSONL)])
def test_images_of_a_table_are_labeled(tmp_path, name, text):
    write(tmp_path, name, text)
    images = open_images(f"{tmp_path}/{name}", Usage("", "file"))
    assert [images.name(row) for row in range(len(images))] == [f"{tmp_path}/{image}" for image in NAMES]
    assert open_images(str(tmp_path), Usage("", "file")) is None  # stays a folder of images


def test_a_folder_of_images_with_an_archive_of_others_stays_one(tmp_path):
    write_images(tmp_path, ["a.png"])
    (tmp_path / "raw.tar").write_bytes(b"")
    assert open_images(str(tmp_path), Usage("", "file")) is None


def tables(*names, text=PER_CLASS):
    """Return a function that writes tables, or the text of one per name."""
    return lambda at: [write(at, name, text) for name in names] and at


def broken(text, name="metadata.csv"):
    return lambda at: write(at, name, text) or at


REFUSALS = [
    Refusal(name, make, lambda at: opened(at, val_fraction=0.0), *says)
    for name, make, *says in (
        (
            "huggingface/datasets#7337: tables in folders that are no splits",
            tables("one/metadata.csv", "two/metadata.csv"),
            "has several tables of metadata: one/metadata.csv, two/metadata.csv",
            "train/metadata.csv",
        ),
        ("two kinds of tables", tables("metadata.csv", "metadata.jsonl"), "has several tables of metadata"),
        ("no file_name", broken("url,labels\na.png,sea\n"), "has no column 'image'", "(columns: url, labels)"),
        (
            "two columns of images",
            broken("a_file_name,b_file_name,labels\na.png,b.png,sea\n"),
            "has no column 'image', which data.image_column names (columns: a_file_name, b_file_name, labels)",
        ),
        (
            "huggingface/diffusers#3878: no labels",
            broken('{"file_name": "a.png", "edit_prompt": "thinner"}\n', "metadata.jsonl"),
            "metadata.jsonl line 1 should be a JSON object",
            "under 'labels'",
        ),
        (
            "clovaai/donut#69: several objects on a line",
            broken('{"file_name": "a.png"} {"file_name": "b.png"}\n', "metadata.jsonl"),
            "metadata.jsonl line 1 is damaged",
        ),
        ("an object that is cut", broken(JSONL[:90], "metadata.jsonl"), "metadata.jsonl line 2"),
        ("a row with too many cells", broken("file_name,labels\na.png,sea,sand\n"), "line 2 has 3 cells"),
        (
            "a cell with parts of several types",
            broken('{"file_name": "a.png", "size": [1, "a"], "labels": [1]}\n', "metadata.jsonl"),
            "metadata.jsonl line 1 has the label 1",
        ),
        ("an empty table", broken(""), "metadata.csv is empty"),
        ("a list instead of an object", broken("[1, 2]\n", "metadata.jsonl"), "metadata.jsonl"),
        ("UTF-16", lambda at: (at / "metadata.csv").write_bytes("file_name".encode("utf-16")) and at, "is not UTF-8"),
        ("a pointer of Git LFS", broken("version https://git-lfs.github.com/spec/v1\n"), "has no column 'image'"),
    )
]


@each(REFUSALS)
def test_what_cannot_be_used_is_refused(case, tmp_path):
    case.check(tmp_path)


def test_a_table_in_a_store_is_refused(refusal):
    import fsspec

    store = fsspec.filesystem("memory")
    store.pipe("/table/metadata.csv", b"file_name,labels\na.png,sea\n")
    says = "memory://table/metadata.csv is in an object store, where only Parquet and tar files are read"
    assert says in refusal(find_layout, "memory://table")
    assert says in refusal(open_images, "memory://table/metadata.csv", Usage("", "file"))
    store.rm("/table", recursive=True)


def test_georgefwt_aqualora_8_images_without_a_row_are_counted(tmp_path):
    """Georgefwt/AquaLoRA#8: ImageFolder stops at an image without metadata; a folder of other images does not."""
    write(tmp_path, "metadata.jsonl", json.dumps({"file_name": "a.png", "labels": ["sea"]}) + "\n")
    assert opened(tmp_path, val_fraction=0.0).ids == ["a.png"]
