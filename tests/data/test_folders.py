"""Images in one folder per class: the splits and classes, and what is said of other files."""

import functools
import os
import shutil

import pytest
from helpers import tables
from helpers.tables import listed, widths, write_images
from PIL import Image

from mlmoe_jax.data.decoding import IMAGE_FORMATS
from mlmoe_jax.data.image_search import image_suffixes
from mlmoe_jax.data.split_checks import check_splits, label_warnings
from mlmoe_jax.data.usage import unused_input

opened = functools.partial(tables.opened, "folders")


def opened_alone(root, **keys):
    """Open the training split where no other split is asked for."""
    return opened(root, **{"val_split": "", "test_splits": (), **keys})


@pytest.fixture
def photos(tmp_path):
    images = ["train/dog/b.jpg", "train/dog/2021/a.PNG", "train/cat/c.webp", "train/cat/.hidden.jpg"]
    write_images(tmp_path, [*images, "train/.trash/x.jpg", "train/loose.jpg", "test/dog/d.jpg"])
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    return tmp_path


def test_one_folder_per_split_and_class(photos):
    split = opened(photos)
    assert (split.name, split.classes) == ("train", ("cat", "dog"))
    assert listed(split) == ["train/cat/c.webp: cat", "train/dog/2021/a.PNG: dog", "train/dog/b.jpg: dog"]
    assert widths(split) == [3, 2, 1]
    assert opened(photos, "test").classes == ("dog",)
    of_model = opened(photos, "test", ("cat", "dog"))
    assert (of_model.classes, listed(of_model)) == (("cat", "dog"), ["test/dog/d.jpg: dog"])


def test_links_are_followed_unless_they_lead_to_a_folder_above(photos, tmp_path_factory):
    """Its images would be counted again and again, and two such links would never end."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write_images(elsewhere, ["e.jpg"])
    (photos / "test" / "elk").symlink_to(elsewhere, target_is_directory=True)
    before = opened(photos, "test").ids
    assert before == ["test/dog/d.jpg", "test/elk/e.jpg"]
    for name, target in (("again", photos / "test" / "dog"), ("all", photos), ("here", "."), ("up", photos.parent)):
        (photos / "test" / "dog" / name).symlink_to(target, target_is_directory=True)
    assert opened(photos, "test").ids == before


def test_classes_directly_below_the_root(tmp_path):
    images = [f"{name}/{k}.png" for name in ("a", "b") for k in range(10)]
    write_images(tmp_path, images)
    alone = opened_alone(tmp_path)
    assert (alone.classes, alone.ids) == (("a", "b"), images), "no other split is asked for"
    train, val = (opened(tmp_path, split, val_fraction=0.2, test_splits=()) for split in ("train", "val"))
    assert train.classes == val.classes == ("a", "b")
    assert 0 < len(val) < len(train)
    assert sorted([*train.ids, *val.ids]) == images


def test_images_are_known_by_suffix_or_content(tmp_path):
    suffixes = image_suffixes()
    assert {Image.registered_extensions().get(suffix) for suffix in suffixes} >= set(IMAGE_FORMATS)
    images = [f"a/x{suffix.upper() if k % 2 else suffix}" for k, suffix in enumerate(sorted(suffixes))]
    images += ["a/b/none", "a/x.jpg_large", "a/x.001", "a/two.names.JPE"]
    left_out = ["loose.png", "a/.hidden.png", ".trash/a.png", "__MACOSX/a/x.png", "a/@eaDir/x.png/s.jpe"]
    write_images(tmp_path, [*images, *left_out])
    others = ("a/notes.txt", "a/PX", "a/empty", "a/x.tif.gz", "a/x.svg", "a/Thumbs.db", ".DS_Store", "__MACOSX/a/y.txt")
    for name in others:
        (tmp_path / name).write_bytes(b"" if name == "a/empty" else b"P5 no image")
    for name in ("a/pipe", "a/pipe.gif"):
        os.mkfifo(tmp_path / name)
    Image.new("RGB", (1, 2)).save(tmp_path / "a" / "raw.DNG", "TIFF")
    (tmp_path / "a" / "up").symlink_to("..")
    (tmp_path / "other.csv").write_text("image,label,suggested,accept\n")
    split = opened_alone(tmp_path, corrections="other.csv")
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


OUTSIDE = " outside the folders of {}: 4 of 4 files are not used: 4 in '{}'"


@pytest.mark.parametrize(
    ("folders", "used", "unused", "keys"),
    [
        ("Train,valid,TEST", {"train": ["Train"], "val": ["valid"], "test": ["TEST"]}, "", {}),
        ("training_set,Validation ", {"train": ["training_set"], "val": ["Validation "]}, "", {}),
        ("train,Train,val", {"train": ["Train", "train"], "val": ["val"]}, "", {}),
        ("train,val,x", {"train": ["train"]}, OUTSIDE.format("train, val", "x"), {}),
        (
            "train,Val",
            {"train": ["train"], "val": ["train"]},
            OUTSIDE.format("train", "Val"),
            {
                "val_fraction": 0.5,
                "split_seed": 2,
                "test_splits": (),
            },  # the folder of a split that is held out is not used
        ),
    ],
)
def test_folders_of_splits_in_any_spelling(tmp_path, folders, used, unused, keys):
    write_images(tmp_path, [f"{top}/{name}/{k}.png" for top in folders.split(",") for name in "ab" for k in range(2)])
    for split, expected in used.items():
        found = opened(tmp_path, split, **keys)
        assert found.classes == ("a", "b")
        assert list(dict.fromkeys(name.split("/")[0] for name in found.ids)) == expected
        said = "".join(unused_input(found.usage))
        assert unused in said if unused else not said


def test_folders_of_one_class_in_two_spellings(tmp_path):
    write_images(tmp_path, [f"{name}/{k}.png" for name in ("\u00e9", "e\u0301", "\u00e9 ", "nan") for k in range(2)])
    split = opened_alone(tmp_path)
    assert split.classes == ("nan", "\u00e9")
    assert split.labels[:].sum(axis=0).tolist() == [2, 4]
    assert "lists images again in 2 rows (\u00e9/0.png, \u00e9/1.png), which are merged" in unused_input(split.usage)[0]
    assert label_warnings(split) == ["labels whose names stand for no value: nan; are they labels?"]


def test_a_file_in_several_classes_is_one_image_with_all_labels(tmp_path):
    write_images(tmp_path, [f"{name}/{k}.png" for name in ("cat", "dog") for k in range(4)])  # of eight sizes
    (tmp_path / "elk").mkdir()
    for source, copy in (("cat/1", "dog/also"), ("cat/1", "elk/too"), ("cat/2", "cat/again"), ("dog/3", "elk/4")):
        shutil.copy(tmp_path / f"{source}.png", tmp_path / f"{copy}.png")
    (tmp_path / "elk" / "5.png").write_bytes((tmp_path / "cat" / "0.png").read_bytes()[:-1] + b"x")  # of equal size
    for name in ("cat/empty.png", "dog/empty.png"):
        (tmp_path / name).write_bytes(b"")
    split = opened_alone(tmp_path)
    assert sorted(listed(split)) == [
        "cat/0.png: cat",
        "cat/1.png: cat, dog, elk",
        *(f"cat/{name}.png: cat" for name in ("2", "3", "again", "empty")),
        *(f"dog/{name}.png: dog" for name in ("0", "1", "2")),
        "dog/3.png: dog, elk",
        "dog/empty.png: dog",
        "elk/5.png: elk",
    ]
    (usage,) = split.usage
    assert (usage.used, usage.merged) == ({"train": 12}, {"train": 3})
    assert "has 3 files again in another class (dog/also.png as cat/1.png, elk/too.png as cat/1.png, " in usage.notes[0]


def test_closed_folders_are_said(photos, monkeypatch):
    closed, scandir = [str(photos / "test" / name) for name in ("elk", "lost+found")], os.scandir
    for folder in closed:
        os.mkdir(folder)

    def scan(folder):
        if str(folder) in closed:
            raise PermissionError(folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", scan)
    (sentence,) = unused_input(opened(photos, "test").usage[:1])
    assert sentence == f"{photos}/test: 1 of 2 files is not used: 1 in folders that cannot be read (elk/)"


def test_a_file_in_two_splits_is_said(photos):
    shutil.copy(photos / "train" / "dog" / "b.jpg", photos / "test" / "dog" / "d.jpg")
    train, test = (opened(photos, split, ("cat", "dog"), val_split="") for split in ("train", "test"))
    (warning,) = [sentence for sentence in check_splits(train, [test]) if "shares" in sentence]
    assert "train shares 1 image with other splits (test/dog/d.jpg as train/dog/b.jpg)" in warning
    assert len(test) == 1, "it is not left out"


def test_images_of_phones_are_named_instead_of_left_out(photos):
    for name in ("IMG_1.HEIC", "IMG_2"):
        (photos / "test" / "dog" / name).write_bytes(b"\0\0\0\x24ftypheic\0\0\0\0mif1heic")
    split = opened(photos, "test")
    assert split.ids == ["test/dog/IMG_1.HEIC", "test/dog/IMG_2", "test/dog/d.jpg"]
    assert "it is HEIC, the format of phones; install pillow-heif (the extra heif), or" in split.images.problem(0)
