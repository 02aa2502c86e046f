import json

import numpy as np
import pytest
from PIL import Image

from mlmoe_jax.data.sources.coco import open_coco

# ids with gaps and out of order, as in the real file
CATEGORIES = [{"id": 1, "name": "person"}, {"id": 44, "name": "bottle"}, {"id": 13, "name": "stop sign"}]
IMAGES = {"train": [30, 9, 100, 2000], "val": [42]}
ANNOTATIONS = {
    "train": [(30, 44, 0), (30, 44, 0), (9, 13, 0), (100, 1, 1), (100, 13, 0)],  # image, category, crowd
    "val": [(42, 1, 0)],
}


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


def test_root_without_coco(coco, tmp_path, refusal):
    assert "no folder" in refusal(open_coco, tmp_path / "no", "train")
    sentence = refusal(open_coco, tmp_path, "train")
    assert sentence.startswith(
        f"there is no file {tmp_path}/annotations/instances_train2014.json; coco2014 needs annotations, train2014 and "
    )
    assert refusal(open_coco, coco, "test") == "data set coco2014 has no split 'test'; it has train, val"


@pytest.mark.parametrize(
    "content",
    [
        [],
        None,
        '{"images": [',
        {"images": [], "annotations": []},
        {"images": [{"id": 1}], "annotations": [], "categories": []},
        {"images": {}, "annotations": [1], "categories": []},
        {"images": [], "annotations": [{"image_id": 1, "caption": "a dog"}], "categories": []},
        {"images": [{"id": 1, "file_name": 5}], "annotations": [], "categories": []},
        {"images": [], "annotations": [], "categories": [{"id": 1, "name": None}]},
        {"images": [{"id": [1], "file_name": "a.jpg"}], "annotations": [], "categories": []},
    ],
)
def test_json_of_another_kind(coco, refusal, content):
    write_instances(coco, "train", content)
    path = coco / "annotations" / "instances_train2014.json"
    assert refusal(open_coco, coco, "train").startswith(f"{path} is damaged: ")


@pytest.mark.parametrize("key", ["image_id", "category_id"])
def test_annotations_of_unknown_ids(coco, refusal, key):
    content = instances("train")
    content["annotations"][2][key] = 7
    write_instances(coco, "train", content)
    sentence = refusal(open_coco, coco, "train")
    assert "instances_train2014.json is damaged: it annotates image " in sentence
    assert " 7" in sentence


@pytest.mark.parametrize(
    ("part", "item", "what"),
    [
        ("categories", {"id": 2, "name": "bottle"}, "category 'bottle'"),
        ("categories", {"id": 44, "name": "flask"}, "category id 44"),
        ("images", {"id": 7, "file_name": file_name("train", 100)}, f"image file '{file_name('train', 100)}'"),
        ("images", {"id": 100, "file_name": "a.jpg"}, "image id 100"),
    ],
)
def test_ambiguous_names(coco, refusal, part, item, what):
    content = instances("train")
    content[part] = [*content[part], item]
    write_instances(coco, "train", content)
    path = coco / "annotations" / "instances_train2014.json"
    sentence = refusal(open_coco, coco, "train")
    assert sentence == f"{path} is damaged: it lists the {what} twice"


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
