"""Labels of labeling tools, as the tools write them."""

import json

import numpy as np
import pytest
from helpers.tables import data_settings
from PIL import Image

from mlmoe_jax.data.label_codes import DIFFICULT, NEGATIVE, POSITIVE, UNKNOWN
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.usage import unused_input

IMAGES = ("a.png", "b c.png", "sub/c+d.png", "e.png")


@pytest.fixture
def folder(tmp_path):
    for name in IMAGES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (3, 2)).save(tmp_path / name)
    return tmp_path


def opened(name, folder, table, content=None, split="train", **keys):
    """Return {image: {label: code other than NEGATIVE}} and the classes of a split."""
    if content is not None:
        (folder / table).write_text(content if isinstance(content, str) else json.dumps(content))
    result = open_split(data_settings(name, folder, table=table, **keys), split)
    codes = [{result.classes[k]: int(row[k]) for k in np.flatnonzero(row != NEGATIVE)} for row in result.labels]
    return dict(zip(result.ids, codes, strict=True)), result.classes


def choices(*names, control="labels"):
    return {"from_name": control, "to_name": "image", "type": "choices", "value": {"choices": list(names)}}


def task(image, *annotations, **data):
    return {"id": 1, "data": {"image": image, **data}, "annotations": list(annotations), "predictions": []}


def annotation(*results, **more):
    return {"id": 1, "result": list(results), "was_cancelled": False, "ground_truth": False, **more}


# ------------------------------------------------------------------------------------------------------- Label Studio
def test_annotations_of_label_studio(folder):
    quality, alone = choices("blurred", control="quality"), choices() | {"value": {"choices": "sand"}}
    content = [
        task("/data/local-files/?d=a.png", annotation(choices("sea"), alone, quality)),
        task("http://here:8080/data/local-files/?d=b%20c.png", annotation(quality)),  # looked at, without a label
        task("/data/local-files?d=sub/c%2Bd.png", annotation(choices("sea"), was_cancelled=True)),
        task("e.png"),
    ]
    labels, classes = opened("label_studio", folder, "export.json", content)
    assert labels == {"a.png": {"sand": POSITIVE, "sea": POSITIVE}, "b c.png": {}}
    assert classes == ("sand", "sea")
    split = open_split(data_settings("label_studio", folder, table="export.json"), "train")
    assert unused_input(split.usage) == [
        f"{folder}/export.json: 2 of 4 images are not used: 2 without labels (sub/c+d.png, e.png)",
        f"{folder}/export.json has 2 results of tags other than labels, which are not used: quality (choices)",
    ]


def test_annotations_that_differ_make_a_label_unknown_unless_one_is_the_truth(folder):
    both = (annotation(choices("sea", "sand")), annotation(choices("sea")))
    content = [task("a.png", *both), task("e.png", *both, annotation(choices("sand"), ground_truth=True))]
    labels, _ = opened("label_studio", folder, "export.json", content)
    assert labels == {"a.png": {"sand": UNKNOWN, "sea": POSITIVE}, "e.png": {"sand": POSITIVE}}
    (usage,) = open_split(data_settings("label_studio", folder, table="export.json"), "train").usage
    assert usage.notes == ["has 1 image with labels that are unknown, since annotations differ: a.png"]


def test_the_small_export_of_label_studio(folder):
    rows = [
        {"image": "/data/upload/a.png", "id": 1, "labels": {"choices": ["sea", "sand"]}, "annotation_id": 1},
        {"image": "e.png", "id": 2, "labels": "sea", "annotation_id": 2},
        {"image": "b c.png", "id": 3, "annotation_id": 3},
        {"image": "sub/c+d.png", "id": 4, "annotation_id": None},
    ]
    (folder / "upload").mkdir()
    (folder / "a.png").rename(folder / "upload" / "a.png")
    labels, _ = opened("label_studio", folder, "min.json", rows)
    assert labels == {"upload/a.png": {"sand": 1, "sea": 1}, "e.png": {"sea": 1}, "b c.png": {}}


CONFIG = """<View><Image name="i" value="$image"/>
<Choices name="quality" toName="i"><Choice value="blurred"/></Choices>
<Choices name="labels" toName="i"><Choice value="sky &amp; sea"/><Choice value="An ape" alias="ape"/></Choices>
<Taxonomy name="place" toName="i"><Choice value="zoo"/></Taxonomy></View>"""


def test_the_labeling_configuration_names_the_classes_and_the_split_is_a_field_of_the_data(folder, refusal):
    (folder / "labels.xml").write_text(CONFIG)
    content = [task("a.png", annotation(choices("ape")), split="train"), task("e.png", annotation(), split="val")]
    keys = {"classes": "labels.xml", "split": "val"}
    assert opened("label_studio", folder, "x.json", content, **keys) == ({"e.png": {}}, ("sky & sea", "ape"))
    sentence = refusal(opened, "label_studio", folder, "x.json", content, label_column="tags", **keys)
    assert sentence == f"the choices of {folder}/labels.xml are named labels, quality, not tags; set " + (
        "data.label_column to a name"
    )
    (folder / "labels.xml").write_text(
        '<View><Image name="i" value="$image"/><Choices name="labels" toName="i"/></View>'
    )
    assert "it lists no choices of labels" in refusal(opened, "label_studio", folder, "x.json", content, **keys)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([task("a.png", annotation(choices("x", control="tags")))], "named tags, not labels; set data.label_column"),
        ([task("s3://bucket/a.png", annotation(choices("x")))], "is not a local file of Label Studio"),
        ([task("a.png")], "has no labeled image (1 image without labels)"),
        ([task("a.png", annotation(choices(5)))], "has the label 5 of a.png, which is no name"),
        (
            [task("a.png", annotation(), Split="val"), task("a.png", annotation(), split="train")],
            "gives a.png the splits val and train",
        ),
        ({"tasks": []}, "is damaged"),
        ([], "lists no images"),
        ([{"data": {"photo": "a.png", "id": 1}}], "has id, photo, not image; set data.image_column"),
        ("[[[", "is damaged"),
    ],
)
def test_an_export_that_cannot_be_read_is_refused(folder, refusal, content, sentence):
    assert sentence in refusal(opened, "label_studio", folder, "export.json", content)


# ----------------------------------------------------------------------------------------------------------- FiftyOne
def test_labels_of_fiftyone(folder):
    labels = {
        "b c": [1, {"label": 0, "confidence": 0.5, "attributes": {"difficult": True}}],
        "sub/c+d": 1,
        "a": [],
        "e": None,
    }
    result = opened("fiftyone", folder, "labels.json", {"classes": ["sea", "sand"], "labels": labels})
    expected = {"b c.png": {"sea": DIFFICULT, "sand": POSITIVE}, "sub/c+d.png": {"sand": POSITIVE}, "a.png": {}}
    assert result == (expected, ("sea", "sand"))


def test_labels_of_fiftyone_without_classes_and_with_absolute_paths(folder):
    content = {"classes": None, "labels": {f"{folder}/a.png": ["sea"], "e": "sand"}}
    assert opened("fiftyone", folder, "labels.json", content)[0] == {"a.png": {"sea": 1}, "e.png": {"sand": 1}}


def test_a_name_without_suffix_of_two_files_is_refused(folder, refusal):
    (folder / "a.jpg").write_bytes(b"")
    sentence = refusal(opened, "fiftyone", folder, "labels.json", {"classes": None, "labels": {"a": ["sea"]}})
    assert "names a, which is a.jpg and a.png" in sentence
    sentence = refusal(opened, "fiftyone", folder, "labels.json", {"classes": ["sea", "sea"], "labels": {}})
    assert "names the class 'sea' twice" in sentence
    for label in (-1, 1, None):
        content = {"classes": ["sea"], "labels": {"e": [label]}}
        sentence = refusal(opened, "fiftyone", folder, "labels.json", content)
        assert f"has the label {label} of e.png, which is no name" in sentence


# --------------------------------------------------------------------------------------------------------------- CVAT
XML = """<?xml version="1.0" encoding="utf-8"?>
<annotations><version>1.1</version>
<meta><project><name>not a label</name><labels>
<label><name>sea</name><attributes><attribute><name>difficult</name></attribute></attributes></label>
<label><name>sand &amp; sun</name></label></labels></project></meta>
<image id="0" name="a.png" subset="train"><tag label="sand &amp; sun"/></image>
<image id="1" name="b c.png" subset="train">
  <box label="sea" xtl="0"><attribute name="difficult">true</attribute></box>
  <box label="sea" xtl="1"><attribute name="difficult">false</attribute></box>
  <tag label="sand &amp; sun"><attribute name="difficult">true</attribute></tag></image>
<image id="2" name="e.png" subset="val"></image></annotations>
"""


def test_labels_of_cvat(folder):
    expected = {"a.png": {"sand & sun": POSITIVE}, "b c.png": {"sea": POSITIVE, "sand & sun": DIFFICULT}}
    assert opened("cvat", folder, "a.xml", XML) == (expected, ("sea", "sand & sun"))
    assert opened("cvat", folder, "a.xml", split="val")[0] == {"e.png": {}}
    (usage,) = open_split(data_settings("cvat", folder, table="a.xml"), "train").usage
    assert usage.notes == ["has 1 image without an annotation, whose labels are all negative: e.png"]


def test_entities_of_xml_are_not_expanded(folder, refusal):
    bomb = '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><annotations>&b;</annotations>'
    assert "it has a document type, which is not read" in refusal(opened, "cvat", folder, "a.xml", bomb)
    assert "is damaged: mismatched tag: line 1" in refusal(opened, "cvat", folder, "a.xml", "<a><b></a>")


# ------------------------------------------------------------------------------------------------------------ sidecars
def test_a_text_file_of_tags_per_image(folder):
    (folder / "a.txt").write_text("sea, sand\n", encoding="utf-8-sig")
    (folder / "sub" / "c+d.txt").write_text("")
    assert opened("sidecar", folder, "") == ({"a.png": {"sand": 1, "sea": 1}, "sub/c+d.png": {}}, ("sand", "sea"))


def test_files_beside_the_tags_are_said(folder):
    (folder / "a.png").rename(folder / "\xe9.png")  # and its tags as a Mac names files
    for name in ("e\u0301.txt", "lonely.txt", "notes.pdf", "selected_tags.csv"):
        (folder / name).write_text("sea")
    (folder / "classes.txt").write_text("sea")
    data = data_settings("sidecar", folder, table=".", classes="classes.txt", val_split="", test_splits=())
    split = open_split(data, "train")
    assert split.ids == ["\xe9.png"]
    (usage,) = split.usage
    assert usage.left_out["without an image"].examples == ["lonely.txt", "notes.pdf"]
    assert usage.left_out["without labels"].count == 3


def test_tags_in_the_spelling_of_the_taggers(folder):
    rows = ["tag_id,name,category,count", "1,general,9,5", "2,long_hair,0,9", "3,^_^,0,1", "4,rose_(flower),4,2"]
    (folder / "selected_tags.csv").write_text("\n".join(rows))
    (folder / "a.txt").write_text(r"long hair, ^_^, rose \(flower\)")
    (folder / "e.txt").write_text("long_hair, rose_(flower), general")
    labels, classes = opened("wd_tagger", folder, "")
    assert classes == ("general", "long_hair", "^_^", "rose_(flower)")
    assert set(labels["a.png"]) == {"long_hair", "^_^", "rose_(flower)"}
    assert set(labels["e.png"]) == {"long_hair", "rose_(flower)", "general"}


# -------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"table": "no.json"}, "there is no {folder}/no.json for split train; correct data.table"),
        ({"split": "val"}, "has no splits, so all its images are in split train"),
        ({"classes": "classes.txt"}, "has the label 'sea' of a.png, which is not one of the 1 classes"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folder, refusal, keys, sentence):
    (folder / "classes.txt").write_text("seas\n")
    (folder / "a.json").write_text(json.dumps([task("a.png", annotation(choices("sea")))]))
    result = refusal(opened, "label_studio", folder, **{"table": "a.json", **keys})
    assert sentence.format(folder=folder) in result


def test_an_image_that_is_listed_again_with_other_labels_is_refused(folder, refusal):
    twice = XML.replace('"b c.png"', '"a.png"')
    sentence = refusal(opened, "cvat", folder, "a.xml", twice)
    assert sentence.startswith(f"{folder}/a.xml lists a.png with two values of its label 'sand & sun': ")
