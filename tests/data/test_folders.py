import os
import shutil

import numpy as np
import pytest
from helpers.tables import data_settings
from PIL import Image

from mlmoe_jax.data.images import IMAGE_FORMATS, image_suffixes
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.split_checks import check_splits, label_warnings
from mlmoe_jax.data.usage import unused_input


def settings(root, **keys):
    return data_settings("folders", root, **keys)


def write(folder, *files):
    for k, file in enumerate(files):
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (k + 1, 2)).save(path, "PNG")


@pytest.fixture
def photos(tmp_path):
    write(tmp_path, "train/dog/b.jpg", "train/dog/2021/a.PNG", "train/cat/c.webp", "train/cat/.hidden.jpg")
    write(tmp_path, "train/.trash/x.jpg", "train/loose.jpg", "test/dog/d.jpg")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    return tmp_path


def test_one_folder_per_split_and_class(photos):
    split = open_split(settings(photos), "train")
    assert split.name == "train"
    assert split.classes == ("cat", "dog")
    assert split.ids == ["train/cat/c.webp", "train/dog/2021/a.PNG", "train/dog/b.jpg"]
    assert split.labels.dtype == np.int8
    np.testing.assert_array_equal(split.labels, [[1, 0], [0, 1], [0, 1]])
    assert [image.shape[1] for image in split.images] == [3, 2, 1]


def test_classes_of_the_training_split(photos, refusal):
    assert open_split(settings(photos), "test").classes == ("dog",)
    split = open_split(settings(photos), "test", classes=("cat", "dog"))
    assert split.classes == ("cat", "dog")
    assert split.labels.tolist() == [[0, 1]]
    sentence = refusal(open_split, settings(photos), "train", classes=("dog",))
    assert sentence.startswith(f"{photos}/train has the label 'cat' of train/cat/c.webp, which is not")


def test_links_are_followed_unless_they_lead_to_a_folder_above(photos, tmp_path_factory):
    """Its images would be counted again and again, and two such links would never end."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write(elsewhere, "e.jpg")
    (photos / "test" / "elk").symlink_to(elsewhere, target_is_directory=True)
    before = open_split(settings(photos), "test").ids
    assert before == ["test/dog/d.jpg", "test/elk/e.jpg"]
    for name, target in (("again", photos / "test" / "dog"), ("all", photos), ("here", "."), ("up", photos.parent)):
        (photos / "test" / "dog" / name).symlink_to(target, target_is_directory=True)
    assert open_split(settings(photos), "test").ids == before


def test_classes_directly_below_the_root(tmp_path):
    write(tmp_path, *(f"{name}/{k}.png" for name in ("a", "b") for k in range(10)))
    alone = open_split(settings(tmp_path, val_split="", test_splits=()), "train")
    assert (alone.classes, len(alone)) == (("a", "b"), 20), "no other split is asked for"
    data = settings(tmp_path, val_fraction=0.2, test_splits=())
    train, val = open_split(data, "train"), open_split(data, "val")
    assert train.classes == val.classes == ("a", "b")
    assert 0 < len(val) < len(train)
    assert sorted([*train.ids, *val.ids]) == sorted(f"{name}/{k}.png" for name in ("a", "b") for k in range(10))


def test_images_are_known_by_suffix_or_content(tmp_path):
    suffixes = image_suffixes()
    assert {Image.registered_extensions().get(suffix) for suffix in suffixes} >= set(IMAGE_FORMATS)
    images = [f"a/x{suffix.upper() if k % 2 else suffix}" for k, suffix in enumerate(sorted(suffixes))]
    images += ["a/b/none", "a/x.jpg_large", "a/x.001", "a/two.names.JPE"]
    write(tmp_path, *images, "loose.png", "a/.hidden.png", ".trash/a.png", "__MACOSX/a/x.png", "a/@eaDir/x.png/s.jpe")
    others = ("a/notes.txt", "a/PX", "a/empty", "a/x.tif.gz", "a/x.svg", "a/Thumbs.db", ".DS_Store", "__MACOSX/a/y.txt")
    for name in others:
        (tmp_path / name).write_bytes(b"" if name == "a/empty" else b"P5 no image")
    for name in ("a/pipe", "a/pipe.gif"):
        os.mkfifo(tmp_path / name)
    Image.new("RGB", (1, 2)).save(tmp_path / "a" / "raw.DNG", "TIFF")
    (tmp_path / "a" / "up").symlink_to("..")
    (tmp_path / "other.csv").write_text("image,label,suggested,accept\n")
    split = open_split(settings(tmp_path, val_split="", test_splits=(), corrections="other.csv"), "train")
    assert split.ids == sorted([*images, "a/pipe.gif"])
    assert split.classes == ("a",)
    usage, *_ = split.usage
    assert usage.used == {"train": len(split)}
    assert {reason: (part.count, part.examples) for reason, part in usage.left_out.items()} == {
        "hidden or in folders of the system": (4, [".trash/a.png", "__MACOSX/a/x.png", "a/.hidden.png"]),
        "behind links to a folder above them": (1, ["a/up"]),
        "in no image format": (7, ["a/PX", "a/empty", "a/notes.txt"]),
        "outside every folder of a class": (1, ["loose.png"]),
    }


@pytest.mark.parametrize(
    ("folders", "used", "unused"),
    [
        (["Train", "valid", "TEST"], {"train": ["Train"], "val": ["valid"], "test": ["TEST"]}, ""),
        (["training_set", "Validation "], {"train": ["training_set"], "val": ["Validation "]}, ""),
        (["train", "Train", "val"], {"train": ["Train", "train"], "val": ["val"]}, ""),
        (
            ["train", "val", "x"],
            {"train": ["train"]},
            " outside the folders of train, val: 4 of 4 files are not used: 4 in 'x'",
        ),
    ],
)
def test_folders_of_splits_in_any_spelling(tmp_path, folders, used, unused):
    write(tmp_path, *(f"{folder}/{name}/{k}.png" for folder in folders for name in ("a", "b") for k in range(2)))
    for split, expected in used.items():
        opened = open_split(settings(tmp_path), split)
        assert opened.classes == ("a", "b")
        assert list(dict.fromkeys(name.split("/")[0] for name in opened.ids)) == expected
        assert unused in "".join(unused_input(opened.usage))
        assert bool(unused) == bool(unused_input(opened.usage))


def test_folders_of_one_class_in_two_spellings(tmp_path):
    write(tmp_path, *(f"{folder}/{k}.png" for folder in ("\u00e9", "e\u0301", "\u00e9 ", "nan") for k in range(2)))
    opened = open_split(settings(tmp_path, val_split="", test_splits=()), "train")
    assert opened.classes == ("nan", "\u00e9")
    assert opened.labels.sum(axis=0).tolist() == [2, 4]
    assert (
        "lists images again in 2 rows (\u00e9/0.png, \u00e9/1.png), which are merged" in unused_input(opened.usage)[0]
    )
    assert label_warnings(opened) == ["labels whose names stand for no value: nan; are they labels?"]


def test_a_split_that_is_held_out_has_no_folder_that_is_used(tmp_path):
    write(tmp_path, *(f"{split}/{name}/{k}.png" for split in ("train", "Val") for name in "ab" for k in range(5)))
    for split in ("train", "val"):
        opened = open_split(settings(tmp_path, val_fraction=0.4, test_splits=()), split)
        assert {name.split("/")[0] for name in opened.ids} == {"train"}
        assert "outside the folders of train: 10 of 10 files are not used: 10 in 'Val'" in unused_input(opened.usage)[0]


@pytest.mark.parametrize(
    ("files", "fragment"),
    [
        (
            ["cat/train/0.png", "cat/Test/1.png", "dog/2.png"],
            "cat/Test has the name of a split, in the folder",
        ),
        (["photos/Train/cat/0.png", "photos/valid/cat/1.png"], "or set data.root to"),
        (["photos/cat/0.png", "photos/dog/1.png"], "all images are in folders in "),
        (["Train/photos/cat/0.png", "Train/photos/dog/1.png"], "if the classes are in there, move them to "),
        (["Train/0.png", "Train/1.png"], "Train lists no images in folders of classes; "),
        (["valid/cat/0.png", "cat/1.png"], "/train (folders there: cat, valid); sort the images into"),
        (["cat/0.png", "dev/1.png"], "; rename dev, which has the name of a split, if it is a class"),
        ([".x/0.png"], "1 of 1 file is not used: 1 hidden or in folders of the system"),
    ],
)
def test_layouts_that_would_mix_splits_and_classes_are_refused(tmp_path, refusal, files, fragment):
    write(tmp_path, *files)
    assert fragment in refusal(open_split, settings(tmp_path, val_split="", test_splits=()), "train")


def test_a_file_in_several_classes_is_one_image_with_all_labels(tmp_path):
    write(tmp_path, *(f"{name}/{k}.png" for name in ("cat", "dog") for k in range(4)))  # of eight sizes
    for source, copy in (("cat/1", "dog/also"), ("cat/1", "elk/too"), ("cat/2", "cat/again"), ("dog/3", "elk/4")):
        (tmp_path / copy).parent.mkdir(exist_ok=True)
        shutil.copy(tmp_path / f"{source}.png", tmp_path / f"{copy}.png")
    (tmp_path / "elk" / "5.png").write_bytes((tmp_path / "cat" / "0.png").read_bytes()[:-1] + b"x")  # of equal size
    for name in ("cat/empty.png", "dog/empty.png"):
        (tmp_path / name).write_bytes(b"")
    split = open_split(settings(tmp_path, val_split="", test_splits=()), "train")
    labels = dict(zip(split.ids, split.labels.tolist(), strict=True))
    assert labels == {
        **{f"cat/{name}.png": [1, 0, 0] for name in ("0", "2", "3", "again", "empty")},
        **{f"dog/{name}.png": [0, 1, 0] for name in ("0", "1", "2", "empty")},
        "cat/1.png": [1, 1, 1],
        "dog/3.png": [0, 1, 1],
        "elk/5.png": [0, 0, 1],
    }
    (usage,) = split.usage
    assert (usage.used, usage.merged) == ({"train": 12}, {"train": 3})
    assert "has 3 files again in another class (dog/also.png as cat/1.png, elk/too.png as cat/1.png, " in usage.notes[0]


def test_folders_that_cannot_be_read_are_said(photos, monkeypatch):
    closed, scandir = [str(photos / "test" / name) for name in ("elk", "lost+found")], os.scandir
    for folder in closed:
        os.mkdir(folder)

    def scan(folder):
        if str(folder) in closed:
            raise PermissionError(folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", scan)
    (sentence,) = unused_input(open_split(settings(photos), "test").usage[:1])
    assert sentence == f"{photos}/test: 1 of 2 files is not used: 1 in folders that cannot be read (elk/)"


def test_a_file_in_two_splits_is_said(photos):
    shutil.copy(photos / "train" / "dog" / "b.jpg", photos / "test" / "dog" / "d.jpg")
    train, test = (
        open_split(settings(photos, val_split=""), split, classes=("cat", "dog")) for split in ("train", "test")
    )
    (warning,) = [sentence for sentence in check_splits(train, [test]) if "shares" in sentence]
    assert "train shares 1 image with other splits (test/dog/d.jpg as train/dog/b.jpg)" in warning
    assert len(test) == 1, "it is not left out"


def test_images_of_phones_are_named_instead_of_left_out(photos):
    for name in ("IMG_1.HEIC", "IMG_2"):
        (photos / "test" / "dog" / name).write_bytes(b"\0\0\0\x24ftypheic\0\0\0\0mif1heic")
    split = open_split(settings(photos), "test")
    assert split.ids == ["test/dog/IMG_1.HEIC", "test/dog/IMG_2", "test/dog/d.jpg"]
    assert "it is HEIC, the format of phones; install pillow-heif (the extra heif), or" in split.images.problem(0)


def test_missing_folder_of_a_split(tmp_path, refusal):
    write(tmp_path, "a/0.png", "b/0.png")
    expected = (
        f"there is no folder {tmp_path}/train (folders there: a, b); sort the images into {tmp_path}/SPLIT/CLASS, or "
        f"into {tmp_path}/CLASS with data.val_fraction above 0 and data.test_splits cleared"
    )
    assert refusal(open_split, settings(tmp_path), "train") == expected
    sentence = refusal(open_split, settings(tmp_path, val_fraction=0.5), "test")
    assert sentence == expected.replace("/train", "/test")
    write(tmp_path, "test/a/0.png")  # a folder of a split would be read as a class
    sentence = refusal(open_split, settings(tmp_path, val_fraction=0.5), "train")
    assert sentence.startswith(f"there is no folder {tmp_path}/train (folders there: a, b, test); ")


def test_folders_without_images(tmp_path, refusal):
    assert refusal(open_split, settings(""), "train") == (
        "data.root is '', which is not a folder; set it to the folder of your images, with the folders of classes"
    )
    (tmp_path / "train").mkdir()
    write(tmp_path / "train", "a.jpg")
    for folder in ("", "a"):
        (tmp_path / "train" / folder).mkdir(exist_ok=True)
        sentence = refusal(open_split, settings(tmp_path), "train")
        assert sentence.startswith(f"{tmp_path}/train lists no images")
