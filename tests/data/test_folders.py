import numpy as np
import pytest
from helpers.tables import data_settings
from PIL import Image

from mlmoe_jax.data.images import IMAGE_FORMATS
from mlmoe_jax.data.sources.folders import IMAGE_SUFFIXES
from mlmoe_jax.data.sources.open import open_split


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
    assert sentence.startswith(f"{photos}/train has the label 'cat', which is not one of the 1 classes")


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
    assert (len(train), len(val)) == (16, 4)
    assert sorted([*train.ids, *val.ids]) == sorted(f"{name}/{k}.png" for name in ("a", "b") for k in range(10))


def test_images_of_every_format_that_is_read_are_found(photos):
    formats = {Image.registered_extensions().get(suffix) for suffix in IMAGE_SUFFIXES}
    assert formats >= set(IMAGE_FORMATS)
    write(photos, "test/dog/e.avif", "test/dog/f.JP2")
    split = open_split(settings(photos), "test")
    assert split.ids == ["test/dog/d.jpg", "test/dog/e.avif", "test/dog/f.JP2"]
    assert [image.shape[1] for image in split.images] == [3, 1, 2]


def test_images_of_phones_are_named_instead_of_left_out(photos):
    (photos / "test" / "dog" / "IMG_1.HEIC").write_bytes(b"\0\0\0\x24ftypheic\0\0\0\0mif1heic")
    split = open_split(settings(photos), "test")
    assert split.ids == ["test/dog/IMG_1.HEIC", "test/dog/d.jpg"]
    assert "it is HEIC, the format of phones, which is not read; convert it to JPEG" in split.images.problem(0)


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
