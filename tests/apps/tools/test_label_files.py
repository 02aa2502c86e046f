"""The labels of a data set in the formats of labeling tools, and read again."""

import json
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers.packing import config_of

from mlmoe_jax.apps.tools.label_files import write_labels
from mlmoe_jax.data.label_codes import DIFFICULT, NEGATIVE, POSITIVE
from mlmoe_jax.data.sources.labeling_formats import FORMATS
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.sources.voc import VOC_CLASSES


def written(name, root, *, output="labels", **settings):
    """Write the labels of VOC, and return the config of the data in the format, and the notes."""
    table = f"{output}-{{split}}{FORMATS[name].suffix}"
    config = config_of(root, val_split="val", **settings)
    files = write_labels(config, name, str(root / table))
    if name in ("label_studio", "sidecar", "xmp", "xmp_lightroom"):
        settings["classes"] = "labels-train_config.xml" if name == "label_studio" else "classes.txt"
        (root / "classes.txt").write_text("\n".join(VOC_CLASSES))
    return config_of(root, name, table=table, val_split="val", **settings).data, files.text()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("treatment", ["negative", "positive"])
def test_labels_come_back(small_voc, name, treatment):
    keep = {"keep_empty": True, "difficult_train": treatment, "difficult_eval": treatment}
    data, text = written(name, small_voc, **keep)
    for split in ("train", "val"):
        ours, theirs = (open_split(config, split) for config in (config_of(small_voc, **keep).data, data))
        labels = ours.labels[:].copy()
        if not FORMATS[name].holds_difficult:
            labels[labels == DIFFICULT] = POSITIVE if treatment == "positive" else NEGATIVE
        order = np.argsort([f"VOC2012/{image}" for image in ours.ids])
        assert theirs.classes == ours.classes
        assert list(theirs.ids) == [f"VOC2012/{ours.ids[row]}" for row in order]
        np.testing.assert_array_equal(theirs.labels, labels[order])
        count = np.count_nonzero(ours.labels[:] == DIFFICULT)
        absent = "present" if treatment == "positive" else "absent"
        sentence = f"{count} difficult labels are written as {absent}, because the format has no mark for them"
        assert (sentence in text) is not FORMATS[name].holds_difficult


@pytest.mark.parametrize("name", FORMATS)
def test_unknown_labels_are_counted_and_images_without_known_labels_stay_unlabeled(tmp_path, name):
    for image in ("a", "b\u202fPM", "c"):  # in the names of screenshots
        (tmp_path / f"{image}.png").write_bytes(b"")
    (tmp_path / "all.csv").write_text("image,x,y\na.png,1,\nb\u202fPM.png,0,1\nc.png,,\n")
    keys = {"table": "all.csv", "label_column": "", "val_split": ""}
    path = tmp_path / f"out{FORMATS[name].suffix}"
    files = write_labels(config_of(tmp_path, "csv", **keys), name, str(path))
    assert "1 unknown labels are written as absent" in files.text()
    again = open_split(config_of(tmp_path, name, table=path.name, val_split="").data, "train")
    assert list(again.ids) == ["a.png", "b\u202fPM.png"]
    assert again.labels[:].tolist() == [[1, 0], [0, 1]]


def test_the_files_are_what_the_tools_read(small_voc):
    """Their shapes are documented by label_studio's import, FiftyOne's parser and CVAT."""
    written("label_studio", small_voc)
    first = json.loads((small_voc / "labels-train.json").read_text())[0]
    assert first["data"] == {"image": "/data/local-files/?d=VOC2012/JPEGImages/t0.jpg"}
    view = ElementTree.parse(small_voc / "labels-train_config.xml").getroot()
    assert [choice.get("value") for choice in view.iter("Choice")] == list(VOC_CLASSES)
    written("cvat", small_voc)
    image = ElementTree.parse(small_voc / "labels-train.xml").getroot().find("image")
    assert image.attrib == {"id": "0", "name": "VOC2012/JPEGImages/t0.jpg", "width": "50", "height": "30"}
    written("wd_tagger", small_voc, output="tags")
    lines = (small_voc / "tags-train" / "selected_tags.csv").read_text().splitlines()
    assert lines[:2] == ["tag_id,name,category,count", "0,aeroplane,0,2"]
    assert (small_voc / "tags-train/VOC2012/JPEGImages/t0.txt").read_text().startswith("aeroplane, bus, ")
