import json

import numpy as np
import pytest
from PIL import Image

from mlmoe_jax.config import default_config
from mlmoe_jax.data.sources.coco import open_coco_json


def settings(root, **keys):
    data = default_config().data
    data.update(
        {"name": "coco_json", "root": str(root), "table": "annotations/{split}.json", "images": "images", **keys}
    )
    return data


def write(folder, split, categories, images):
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
    write(tmp_path, "train", ["dog", "cat"], {"a.png": ["cat"], "b.png": [], "x/c.png": ["dog", "cat"]})
    write(tmp_path, "val", ["cat", "elk", "dog"], {"d.png": ["cat", "cat"]})
    return tmp_path


def test_labels_order_and_images(photos):
    split = open_coco_json(settings(photos), "train")
    assert split.name == "train"
    assert split.classes == ("dog", "cat")
    assert split.ids == ["x/c.png", "a.png"]  # by the ids 10 and 8 as text
    assert split.labels.dtype == np.int8
    np.testing.assert_array_equal(split.labels, [[1, 1], [0, 1]])
    assert [image.shape[1] for image in split.images] == [3, 1]
    kept = open_coco_json(settings(photos, keep_empty=True), "train")
    assert kept.ids == ["x/c.png", "a.png", "b.png"]


def test_categories_in_another_order_are_read_by_name(photos, refusal):
    split = open_coco_json(settings(photos), "val", classes=("dog", "cat", "cow"))
    assert split.classes == ("dog", "cat", "cow")
    assert split.labels.tolist() == [[0, 1, 0]]  # elk is listed but never annotated
    sentence = refusal(open_coco_json, settings(photos), "val", classes=("dog", "elk"))
    assert sentence == (
        f"{photos}/annotations/val.json annotates the category 'cat', which is not a class of the training split; "
        "remove it or train with it"
    )


def test_one_file_is_the_training_split(photos, refusal):
    data = settings(photos, table="annotations/train.json")
    assert len(open_coco_json(data, "train")) == 2
    sentence = refusal(open_coco_json, data, "test")
    assert sentence.startswith(
        f"{photos}/annotations/train.json has no {{split}} in its name, so all its images are in split train and "
        "none in test; "
    )


def test_images_in_one_folder_per_split(photos):
    (photos / "images").rename(photos / "train")
    split = open_coco_json(settings(photos, images="{split}"), "train")
    assert split.images[1].shape[1] == 1


def test_missing_files_and_images_are_refused(photos, refusal):
    path = photos / "annotations" / "train.json"
    assert refusal(open_coco_json, settings(photos), "test") == (
        f"there is no table {photos}/annotations/test.json for split test; correct data.table, which is "
        "annotations/{split}.json (found train.json, val.json)"
    )
    (photos / "images" / "a.png").unlink()
    sentence = refusal(open_coco_json, settings(photos), "train")
    assert sentence.startswith(f"1 of the 2 listed images are not in {photos}/images, the first is a.png; ")
    assert len(open_coco_json(settings(photos, bad_images="skip"), "train")) == 2
    write(photos, "train", ["dog"], {"a.png": []})
    assert refusal(open_coco_json, settings(photos), "train").startswith(f"no image of {path} has a positive label; ")
    path.write_text("{}")
    assert refusal(open_coco_json, settings(photos), "train").startswith(f"{path} is damaged: it has no ")
    assert refusal(open_coco_json, settings(""), "train") == (
        "data.root is empty; set it to the folder that holds the table annotations/{split}.json of your images"
    )
