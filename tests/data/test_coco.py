import json

import numpy as np
import pytest
from helpers.tables import data_settings
from PIL import Image

from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.usage import unused_input

# ids with gaps and out of order, as in the real file
CATEGORIES = [{"id": 1, "name": "person"}, {"id": 44, "name": "bottle"}, {"id": 13, "name": "stop sign"}]
IMAGES = {"train": [30, 9, 100, 2000], "val": [42]}
ANNOTATIONS = {
    "train": [(30, 44, 0), (30, 44, 0), (9, 13, 0), (100, 1, 1), (100, 13, 0)],  # image, category, crowd
    "val": [(42, 1, 0)],
}


def open_coco(root, split, **keys):
    return open_split(data_settings("coco2014", root, **keys), split)


def file_name(split, number):
    return f"COCO_{split}2014_{number:012d}.jpg"


def instances(split) -> dict:
    return {
        "info": {"year": 2014},
        "images": [{"id": number, "file_name": file_name(split, number)} for number in IMAGES[split]],
        "annotations": [
            {"id": row, "image_id": image, "category_id": category, "iscrowd": crowd}
            for row, (image, category, crowd) in enumerate(ANNOTATIONS[split])
        ],
        "categories": CATEGORIES,
    }


def write_instances(folder, split, content) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "annotations" / f"instances_{split}2014.json").write_text(text)


@pytest.fixture
def coco(tmp_path):
    folder = tmp_path / "coco"
    (folder / "annotations").mkdir(parents=True)
    for split, numbers in IMAGES.items():
        write_instances(folder, split, instances(split))
        (folder / f"{split}2014").mkdir()
        for number in numbers:
            Image.new("RGB", (10 + number % 50, 8)).save(folder / f"{split}2014" / file_name(split, number))
    return folder


def test_labels_order_and_images(coco):
    split = open_coco(coco, "train")
    assert split.name == "train"
    assert split.classes == ("person", "bottle", "stop sign")
    assert split.ids == [f"train2014/{file_name('train', number)}" for number in (100, 30, 9)]  # sorted as text
    assert split.labels.dtype == np.int8
    np.testing.assert_array_equal(split.labels, [[1, 0, 1], [0, 1, 0], [0, 0, 1]])  # the crowd of persons counts
    assert [image.shape[1] for image in split.images] == [10, 40, 19]
    assert open_coco(str(coco), "val").ids == [f"val2014/{file_name('val', 42)}"]


def test_images_without_annotations_are_dropped_unless_kept(coco):
    kept = open_coco(coco, "train", keep_empty=True)
    assert kept.ids[1] == f"train2014/{file_name('train', 2000)}"
    assert len(kept) == 4
    np.testing.assert_array_equal(kept.labels[1], [0, 0, 0])


@pytest.mark.parametrize(
    "content",
    [
        [],
        '{"images": [',
        {"images": [], "annotations": []},
        {"images": {}, "annotations": [1], "categories": []},
        {"images": [], "annotations": [{"image_id": 1, "caption": "a dog"}], "categories": []},
        {"images": [], "annotations": [], "categories": [{"id": 1, "name": None}]},
        {"images": [{"id": [1], "file_name": "a.jpg"}], "annotations": [], "categories": []},
    ],
)
def test_json_of_another_kind(coco, refusal, content):
    write_instances(coco, "train", content)
    path = coco / "annotations" / "instances_train2014.json"
    assert refusal(open_coco, coco, "train").startswith(f"{path} is damaged: ")
    content = instances("train")
    content["annotations"][2]["image_id"] = 7
    write_instances(coco, "train", content)
    assert refusal(open_coco, coco, "train").startswith(f"{path} is damaged: it has no ")


@pytest.mark.parametrize(
    ("part", "item", "what"),
    [
        ("categories", {"id": 2, "name": "bottle"}, "names the class 'bottle' twice"),
        ("categories", {"id": 44, "name": "flask"}, "is damaged: it lists the category id 44 twice"),
        (
            "images",
            {"id": 7, "file_name": file_name("train", 100)},
            f"lists {file_name('train', 100)} with two values of ",
        ),
        ("images", {"id": 100, "file_name": "a.jpg"}, "is damaged: it lists the image id 100 twice"),
    ],
)
def test_ambiguous_names(coco, refusal, part, item, what):
    content = instances("train")
    content[part] = [*content[part], item]
    write_instances(coco, "train", content)
    path = coco / "annotations" / "instances_train2014.json"
    sentence = refusal(open_coco, coco, "train")
    assert sentence.startswith(f"{path} {what}")


def test_real_coco_labels_agree_with_the_official_ones(shared_data):
    with np.load(shared_data / "coco14_labels.npz") as stored:
        official = dict(zip(stored["image_id"].tolist(), stored["labels"], strict=True))
        classes = tuple(stored["classes"])
    for name, count in (("train", 110), ("val", 50)):
        split = open_coco(shared_data / "coco", name)
        assert len(split) == count
        assert split.classes == classes
        numbers = [int(identifier[-16:-4]) for identifier in split.ids]
        assert numbers == sorted(numbers, key=str)
        np.testing.assert_array_equal(split.labels, [official[number] for number in numbers])
        assert split.images[0].shape[2] == 3


# ------------------------------------------------------------------------------------------------------ your own images
def own_settings(root, **keys):
    return data_settings("coco_json", root, **{"table": "annotations/{split}.json", "images": "images", **keys})


def write_own(folder, split, categories, images):
    """Write an annotation file for images {name: categories}, and the images."""
    ids = {name: 7 * k + 3 for k, name in enumerate(categories)}
    content = {
        "images": [{"id": row + 8, "file_name": file} for row, file in enumerate(images)],
        "annotations": [
            {"image_id": row + 8, "category_id": ids[name], "bbox": [0, 0, 1, 1]}
            for row, names in enumerate(images.values())
            for name in names
        ],
        "categories": [{"id": number, "name": name} for name, number in ids.items()],
    }
    (folder / "annotations").mkdir(exist_ok=True)
    (folder / "annotations" / f"{split}.json").write_text(json.dumps(content))
    for row, file in enumerate(images):
        path = folder / "images" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (row + 1, 2)).save(path)


@pytest.fixture
def photos(tmp_path):
    write_own(tmp_path, "train", ["dog", "cat"], {"a.png": ["cat"], "b.png": [], "x/c.png": ["dog", "cat"]})
    write_own(tmp_path, "val", ["cat", "elk", "dog"], {"d.png": ["cat", "cat"]})
    return tmp_path


def test_own_images_and_their_labels(photos):
    split = open_split(own_settings(photos), "train")
    assert split.name == "train"
    assert split.classes == ("dog", "cat")
    assert split.ids == ["x/c.png", "a.png", "b.png"]  # by the ids 10, 8 and 9 as text
    assert split.labels.dtype == np.int8
    np.testing.assert_array_equal(split.labels, [[1, 1], [0, 1], [0, 0]])
    assert [image.shape[1] for image in split.images] == [3, 1, 2]
    assert unused_input(split.usage) == [
        f"{photos}/annotations/train.json has 1 image without an annotation, whose labels are all negative: b.png"
    ]


def test_categories_in_another_order_are_read_by_name(photos, refusal):
    split = open_split(own_settings(photos), "val", classes=("dog", "cat", "cow"))
    assert split.classes == ("dog", "cat", "cow")
    assert split.labels.tolist() == [[0, 1, 0]]  # elk is listed but never annotated
    sentence = refusal(open_split, own_settings(photos), "val", classes=("dog", "elk"))
    assert sentence.startswith(
        f"{photos}/annotations/val.json has the label 'cat' of d.png, which is not one of the 2 classes; "
    )


def test_one_file_is_the_training_split(photos, refusal):
    data = own_settings(photos, table="annotations/train.json")
    assert len(open_split(data, "train")) == 3
    sentence = refusal(open_split, data, "test")
    assert sentence.startswith(
        f"{photos}/annotations/train.json has no splits, so all its images are in split train and none in test; "
    )


def test_a_key_of_images_names_their_split(photos):
    path = photos / "annotations" / "train.json"
    content = json.loads(path.read_text())
    for number, image in enumerate(content["images"]):
        image["split"] = ("Train", "valid", "train")[number]
    content["categories"][0]["name"] += " "  # as people write it
    path.write_text(json.dumps(content))
    data = own_settings(photos, table="annotations/train.json")
    assert open_split(data, "train").ids == ["x/c.png", "a.png"]
    assert open_split(data, "val").ids == ["b.png"]
    assert open_split(data, "val").classes == ("dog", "cat")


def test_images_in_one_folder_per_split(photos):
    (photos / "images").rename(photos / "train")
    split = open_split(own_settings(photos, images="{split}"), "train")
    assert split.images[1].shape[1] == 1


def test_missing_and_damaged_files_are_refused(photos, refusal):
    path = photos / "annotations" / "train.json"
    assert refusal(open_split, own_settings(photos), "test") == (
        f"there is no {photos}/annotations/test.json for split test; correct data.table, which is "
        "annotations/{split}.json"
    )
    path.write_text("{}")
    assert refusal(open_split, own_settings(photos), "train").startswith(f"{path} is damaged: it has no ")
