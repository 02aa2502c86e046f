import json

import pytest
from helpers.published_data import instances
from helpers.tables import data_settings, listed, widths, write

from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.usage import unused_input


# ------------------------------------------------------------------------------------------------------ your own images
def write_own(folder, split, categories, images) -> None:
    """Write an annotation file for images {name: categories}, and the images."""
    numbered = {(8 + row, name): labels for row, (name, labels) in enumerate(images.items())}
    content = instances(numbered, {name: 7 * k + 3 for k, name in enumerate(categories)})
    write(folder, f"annotations/{split}.json", json.dumps(content), [f"images/{name}" for name in images])


@pytest.fixture
def opened(tmp_path):
    """Return a function that opens a split of small photographs."""
    write_own(tmp_path, "train", ["dog", "cat"], {"a.png": ["cat"], "b.png": [], "x/c.png": ["dog", "cat"]})
    write_own(tmp_path, "val", ["cat", "elk", "dog"], {"d.png": ["cat", "cat"]})
    keys = {"table": "annotations/{split}.json", "images": "images"}
    return lambda split, classes=None, **changes: open_split(
        data_settings("coco_json", tmp_path, **keys | changes), split, classes=classes
    )


def test_own_images_and_their_labels(opened, tmp_path):
    split = opened("train")
    assert (split.name, split.classes) == ("train", ("dog", "cat"))
    assert listed(split) == ["x/c.png: dog, cat", "a.png: cat", "b.png:"]  # by the ids 10, 8 and 9 as text
    assert widths(split) == [3, 1, 2]
    assert listed(opened("val", ("dog", "cat", "cow"))) == ["d.png: cat"], "categories are found by name"
    assert unused_input(split.usage) == [
        f"{tmp_path}/annotations/train.json has 1 image without an annotation, whose labels are all negative: b.png"
    ]


def test_a_key_of_images_names_their_split(opened, tmp_path):
    path = tmp_path / "annotations" / "train.json"
    content = json.loads(path.read_text())
    for image, split in zip(content["images"], ("Train", "valid", "train"), strict=True):
        image["split"] = split
    content["categories"][0]["name"] += " "  # as people write it
    path.write_text(json.dumps(content))
    assert listed(opened("train", table="annotations/train.json")) == ["x/c.png: dog, cat", "a.png: cat"]
    val = opened("val", table="annotations/train.json")
    assert (val.ids, val.classes) == (["b.png"], ("dog", "cat"))
