import json

import numpy as np
import pytest
from helpers.tables import data_settings
from PIL import Image

from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.sources.source import Published
from mlmoe_jax.data.sources.visual_genome import ATTRIBUTES, CATEGORIES, find_category

CLASSES = list(json.loads(CATEGORIES.read_text()))
OF_NAME = {name: k for k, names in enumerate(json.loads(CATEGORIES.read_text()).values()) for name in names}


def open_vg256(root, split, **keys):
    return open_split(data_settings("vg256", root, **keys), split)


def open_vg500(root, split, **keys):
    return open_split(data_settings("vg500", root, **keys), split)


def an_object(*names) -> dict:
    return {"synsets": ["x.n.01"], "object_id": 1, "names": list(names), "x": 0, "y": 0, "w": 9, "h": 9}


def write_image(folder, number) -> None:
    Image.new("RGB", (5 + number % 50, 8)).save(folder / f"{number}.jpg")


@pytest.fixture
def genome(tmp_path):
    """20 images with a label and one without, unordered, in both folders."""
    content = [
        {"image_id": number, "image_url": "u", "objects": [an_object("Man"), an_object("tie" if number % 2 else "zzz")]}
        for number in (*range(30, 20, -1), *range(2, 12))
    ]
    content.append({"image_id": 1, "objects": [an_object("unheard of"), an_object()]})
    (tmp_path / "objects.json").write_text(json.dumps(content))
    for name in ("VG_100K", "VG_100K_2"):
        (tmp_path / name).mkdir()
    for number in (*range(1, 12), *range(21, 31)):
        write_image(tmp_path / ("VG_100K" if number < 20 else "VG_100K_2"), number)
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
    lists = json.loads(CATEGORIES.read_text())
    assert len(lists) == 256
    assert sum(map(len, lists.values())) == 766
    assert len(OF_NAME) == 764
    for name in ("grass field", "grassy field"):
        assert OF_NAME[name] == max(k for k, names in enumerate(lists.values()) if name in names)
    assert len(ATTRIBUTES) == 19
    assert [*CLASSES[:3], CLASSES[-1]] == ["person", "tie", "shirt", "zoo"]


# -------------------------------------------------------------------------------------------------------------- vg256
def test_vg256_labels_order_and_images(genome):
    train, test = open_vg256(genome, "train"), open_vg256(str(genome), "test")
    assert (train.name, test.name) == ("train", "test")
    assert train.classes == tuple(CLASSES)
    assert (len(train), len(test)) == (14, 6)
    numbers = [*range(2, 12), *range(21, 31)]
    order = np.random.RandomState(1).permutation(20)
    for split, rows in ((train, order[:14]), (test, order[14:])):
        expected = [numbers[row] for row in sorted(rows)]
        assert split.ids == [f"VG_100K/{number}.jpg" for number in expected]
        assert split.labels.dtype == np.int8
        assert split.labels[:, CLASSES.index("person")].all()
        assert split.labels[:, CLASSES.index("tie")].tolist() == [number % 2 for number in expected]
        assert split.labels.sum() == len(split) + sum(number % 2 for number in expected)
        assert [image.shape[1] for image in split.images] == [5 + number for number in expected]


def test_vg256_reads_the_objects_once_and_again_when_they_change(genome, monkeypatch):
    first = open_vg256(genome, "train")
    monkeypatch.setattr(Published, "read", lambda *args: pytest.fail("read again"))
    assert len(open_vg256(genome, "test")) == 6
    monkeypatch.undo()
    (genome / "objects_v1_2.json").write_text(
        json.dumps([{"image_id": k, "objects": [an_object("dog")]} for k in (2, 3)])
    )
    assert len(first) == 14
    assert open_vg256(genome, "test").labels[0, CLASSES.index("dog")] == 1


def test_vg256_with_the_second_folder_merged_into_the_first(genome):
    before = open_vg256(genome, "train")
    image = before.images[13]
    for file in (genome / "VG_100K_2").iterdir():
        file.rename(genome / "VG_100K" / file.name)
    (genome / "VG_100K_2").rmdir()
    after = open_vg256(genome, "train")
    assert after.ids == before.ids
    np.testing.assert_array_equal(after.images[13], image)


def test_vg256_errors(genome, tmp_path, refusal):
    assert refusal(open_vg256, genome, "train", keep_empty=True).startswith("data.keep_empty cannot be used with vg256")
    (genome / "objects.json").unlink()
    sentence = refusal(open_vg256, genome, "train")
    assert sentence.startswith(f"there is neither objects_v1_2.json nor objects.json in {genome}; vg256 needs VG_100K ")


@pytest.mark.parametrize(
    "text",
    [
        '[{"image_id": 1, "obj',
        "{}",
        "[1]",
        '[{"objects": []}]',
        '[{"image_id": 1, "objects": [{"names": [5]}]}]',
    ],
)
def test_vg256_objects_of_another_kind(genome, refusal, text):
    (genome / "objects.json").write_text(text)
    assert refusal(open_vg256, genome, "test").startswith(f"{genome}/objects.json is damaged: ")


# -------------------------------------------------------------------------------------------------------------- vg500
@pytest.fixture
def vg500(genome):
    (genome / "train_list_500.txt").write_text("3.jpg\n25.jpg\n2.jpg\n")
    (genome / "test_list_500.txt").write_text("4.jpg\n")
    index = {"2.jpg": [], "3.jpg": [0, 499], "25.jpg": [7], "4.jpg": [1], "5.jpg": [2]}
    (genome / "vg_category_500_labels_index.json").write_text(json.dumps(index))
    return genome


def test_vg500_labels_order_and_images(vg500):
    split = open_vg500(vg500, "train")
    assert split.classes[:2] == ("0", "1")
    assert len(split.classes) == 500
    assert split.ids == ["VG_100K/3.jpg", "VG_100K/25.jpg"]
    assert [np.flatnonzero(row).tolist() for row in split.labels] == [[0, 499], [7]]
    assert [image.shape[1] for image in split.images] == [8, 30]
    assert len(open_vg500(vg500, "train", keep_empty=True)) == 3
    assert open_vg500(vg500, "test").labels[0, 1] == 1
    (vg500 / "names.txt").write_text("\n".join(f"thing {k}" for k in range(500)))
    assert open_vg500(vg500, "train", classes="names.txt").classes[7] == "thing 7"


def test_vg500_errors(vg500, refusal):
    index = vg500 / "vg_category_500_labels_index.json"
    (vg500 / "names.txt").write_text("a\nb\n")
    sentence = refusal(open_vg500, vg500, "train", classes="names.txt")
    assert sentence == f"{vg500}/names.txt lists 2 labels, but vg500 has 500; correct data.classes"
    with (vg500 / "train_list_500.txt").open("a") as file:
        file.write("3.jpg\n")
    assert open_vg500(vg500, "train").usage[0].notes == [
        "lists images again in 1 row (VG_100K/3.jpg), which are merged"
    ]
    for content in ('{"3.jpg": [500]}', '{"3.jpg": "a"}', "{}", "[]"):
        index.write_text(content)
        assert refusal(open_vg500, vg500, "train").startswith(f"{index} is damaged: ")
    index.unlink()
    assert refusal(open_vg500, vg500, "train").startswith(f"cannot read {index} (No such file or directory); vg500 ")
