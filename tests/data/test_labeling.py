"""Labels of labeling tools, as the tools write them."""

import json

import pytest
from etils import epath
from helpers.labeling import CVAT_XML, LABELS_XML, annotation, choices, task
from helpers.published_data import instances
from helpers.tables import data_settings, listed, opened, widths, write_images

from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.sources.label_studio_export import prediction
from mlmoe_jax.data.sources.labeling_formats import FORMATS, LabelEntry, LabelFile
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.usage import unused_input
from mlmoe_jax.errors import UserError


@pytest.fixture
def folder(tmp_path):
    write_images(tmp_path, ("a.png", "b c.png", "sub/c+d.png", "e.png"))
    return tmp_path


def read(name, folder, table, content=None, split="train", **keys):
    """Return the images with their labels, and the classes."""
    if content is not None:
        (folder / table).write_text(content if isinstance(content, str) else json.dumps(content))
    result = opened(name, folder, split, table=table, **keys)
    return listed(result), result.classes


# ------------------------------------------------------------------------------------------------------- Label Studio
def test_annotations_of_label_studio(folder):
    quality, alone = choices("blurred", control="quality"), choices() | {"value": {"choices": "sand"}}
    content = [
        task("/data/local-files/?d=a.png", annotation(choices("sea"), alone, quality)),
        task("http://here:8080/data/local-files/?d=b%20c.png", annotation(quality)),  # looked at, without a label
        task("/data/local-files?d=sub/c%2Bd.png", annotation(choices("sea"), was_cancelled=True)),
        task("e.png"),
    ]
    assert read("label_studio", folder, "export.json", content) == (["a.png: sand, sea", "b c.png:"], ("sand", "sea"))
    split = opened("label_studio", folder, table="export.json")
    assert unused_input(split.usage) == [
        f"{folder}/export.json: 2 of 4 images are not used: 2 without labels (sub/c+d.png, e.png)",
        f"{folder}/export.json has 2 results of tags other than labels, which are not used: quality (choices)",
    ]


def test_annotations_that_differ_make_a_label_unknown_unless_one_is_the_truth(folder):
    both = (annotation(choices("sea", "sand")), annotation(choices("sea")))
    content = [task("a.png", *both), task("e.png", *both, annotation(choices("sand"), ground_truth=True))]
    images, _ = read("label_studio", folder, "export.json", content)
    assert images == ["a.png: ?sand, sea", "e.png: sand"]
    (usage,) = opened("label_studio", folder, table="export.json").usage
    assert usage.notes == ["has 1 image with labels that are unknown, since annotations differ: a.png"]


@pytest.mark.parametrize(("labels", "score"), [(("sea", "sand"), 0.6), (("sea",), 0.9), ((), 0.1)])
def test_the_score_of_label_studio_is_that_of_the_least_sure_label(labels, score):
    """Without labels, it is how sure the model is that no label is there."""
    assert prediction(labels, {"sea": 0.9, "sand": 0.6}, "v")["score"] == pytest.approx(score)


def test_the_small_export_of_label_studio(folder):
    rows = [
        {"image": "/data/upload/a.png", "id": 1, "labels": {"choices": ["sea", "sand"]}, "annotation_id": 1},
        {"image": "e.png", "id": 2, "labels": "sea", "annotation_id": 2},
        {"image": "b c.png", "id": 3, "annotation_id": 3},
        {"image": "sub/c+d.png", "id": 4, "annotation_id": None},
    ]
    (folder / "upload").mkdir()
    (folder / "a.png").rename(folder / "upload" / "a.png")
    images, _ = read("label_studio", folder, "min.json", rows)
    assert images == ["upload/a.png: sand, sea", "e.png: sea", "b c.png:"]


def test_the_labeling_configuration_names_the_classes_and_the_split_is_a_field_of_the_data(folder):
    (folder / "labels.xml").write_text(LABELS_XML)
    content = [task("a.png", annotation(choices("ape")), split="train"), task("e.png", annotation(), split="val")]
    keys = {"classes": "labels.xml", "split": "val"}
    assert read("label_studio", folder, "x.json", content, **keys) == (["e.png:"], ("sky & sea", "ape"))


@pytest.mark.parametrize(
    ("files", "addresses", "expected"),
    [
        ("p.png q.png", "/data/upload/3/1a2b3c4d-p.png http://here/data/upload/3/9f8e7d6c-q.png", "p.png q.png"),
        ("x/p.png y/q.png", "/data/upload/3/1a2b3c4d-p.png /data/upload/3/9f8e7d6c-q.png", "x/p.png y/q.png"),
        ("1a2b3c4d-p.png", "/data/upload/3/1a2b3c4d-p.png", "1a2b3c4d-p.png"),
        ("sub/c+(d).png", "/data/upload/3/1a2b3c4d-cd.png", "sub/c+(d).png"),  # as Django stores it
        ("p.png q.png", "s3://bucket/x/p.png https://here/y/q.png?token=1", "p.png q.png"),
        ("p.png", "/data/local-files/?d=photos/p.png", "p.png"),
        ("x/p.png y/p.png", "/data/upload/3/1a2b3c4d-p.png", "upload/3/1a2b3c4d-p.png"),  # which one is not known
        (
            "p.png",
            "/data/upload/3/1a2b3c4d-p.png /data/upload/3/9f8e7d6c-p.png",
            "upload/3/1a2b3c4d-p.png upload/3/9f8e7d6c-p.png",
        ),
        ("deadbeef-p.png", "deadbeef-p.png", "deadbeef-p.png"),
    ],
)
def test_images_of_label_studio_are_found_by_name(files, addresses, expected, tmp_path):
    write_images(tmp_path, files.split())
    content = [task(address, annotation(choices("sea"))) for address in addresses.split()]
    (tmp_path / "export.json").write_text(json.dumps(content))
    data = data_settings("label_studio", tmp_path, table="export.json", bad_images="skip")
    split = open_split(data, "train", keep_missing=True)
    assert split.ids == expected.split()
    found = len(set(files.split()) & set(split.ids) - set(addresses.split()))
    says = [f"has {found} image{'s' if found > 1 else ''} found by name, not by address: {', '.join(split.ids)}"]
    assert split.usage[0].notes == (says if found else [])


# --------------------------------------------------------------------------------------------------------------- COCO
@pytest.fixture
def annotated():
    images = {(8, "a.png"): ["cat", "cat"], (9, "b c.png"): [], (10, "sub/c+d.png"): ["dog ", "cat"]}
    return instances(images, {"dog ": 3, "cat": 10})  # with a blank, as people write it


def test_annotations_of_coco(folder, annotated):
    images = ["sub/c+d.png: dog, cat", "a.png: cat", "b c.png:"]  # by the ids 10, 8 and 9 as text
    assert read("coco_json", folder, "train.json", annotated) == (images, ("dog", "cat"))
    split = opened("coco_json", folder, table="{split}.json", model_classes=("cat", "dog", "cow"))
    assert listed(split) == ["sub/c+d.png: cat, dog", *images[1:]], "categories are found by name"
    assert widths(split) == [3, 1, 2]
    assert unused_input(split.usage) == [
        f"{folder}/train.json has 1 image without an annotation, whose labels are all negative: b c.png"
    ]


def test_a_key_of_images_of_coco_names_their_split(folder, annotated):
    for image, split in zip(annotated["images"], ("Train", "valid", "train"), strict=True):
        image["split"] = split
    images, classes = read("coco_json", folder, "all.json", annotated)
    assert images == ["sub/c+d.png: dog, cat", "a.png: cat"]
    assert read("coco_json", folder, "all.json", split="val") == (["b c.png:"], classes)


# ----------------------------------------------------------------------------------------------------------- FiftyOne
def test_labels_of_fiftyone(folder):
    labels = {
        "b c": [1, {"label": 0, "confidence": 0.5, "attributes": {"difficult": True}}],
        "sub/c+d": 1,
        "a": [],
        "e": None,
    }
    result = read("fiftyone", folder, "labels.json", {"classes": ["sea", "sand"], "labels": labels})
    assert result == (["b c.png: ~sea, sand", "sub/c+d.png: sand", "a.png:"], ("sea", "sand"))


def test_labels_of_fiftyone_without_classes_and_with_absolute_paths(folder):
    content = {"classes": None, "labels": {f"{folder}/a.png": ["sea"], "e": "sand"}}
    assert read("fiftyone", folder, "labels.json", content)[0] == ["a.png: sea", "e.png: sand"]


# --------------------------------------------------------------------------------------------------------------- CVAT
def test_labels_of_cvat(folder):
    train = ["a.png: sand & sun", "b c.png: sea, ~sand & sun"]
    assert read("cvat", folder, "a.xml", CVAT_XML) == (train, ("sea", "sand & sun"))
    assert read("cvat", folder, "a.xml", split="val")[0] == ["e.png:"]
    (usage,) = opened("cvat", folder, table="a.xml").usage
    assert usage.notes == ["has 1 image without an annotation, whose labels are all negative: e.png"]


@pytest.mark.parametrize("marks", [("true", "false"), ("false", "true")])
def test_a_label_of_cvat_is_difficult_only_if_all_its_shapes_are(folder, marks):
    boxes = "".join(f'<box label="sea"><attribute name="difficult">{mark}</attribute></box>' for mark in marks)
    content = f'<annotations><image name="a.png">{boxes}<tag label="attributes"/></image></annotations>'
    assert read("cvat", folder, "a.xml", content)[0] == ["a.png: attributes, sea"], "a label, without data.attributes"


@pytest.mark.parametrize(("version", "mark"), [("model", "score"), ("", "difficult")])
def test_tags_of_cvat_have_the_score_of_a_prediction_or_the_mark_of_a_label(tmp_path, version, mark):
    path = epath.Path(tmp_path / "a.xml")
    FORMATS["cvat"].write(LabelFile(path, ["sea"], ["a.png"], version=version), [])
    assert f"<name>sea</name><attributes><attribute><name>{mark}</name>" in path.read_text()


# ------------------------------------------------------------------------------------------------------------ sidecars
def test_a_text_file_of_tags_per_image(folder):
    (folder / "a.txt").write_text("sea, sand\n", encoding="utf-8-sig")
    (folder / "sub" / "c+d.txt").write_text("")
    assert read("sidecar", folder, "") == (["a.png: sand, sea", "sub/c+d.png:"], ("sand", "sea"))


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("0 0.5 0.5 0.2 0.2\r\n2 .1 .2 3e-1 0.4 0.93\n", "dog, car"),
        (f"1{' 0.1 0.2' * 4}\n1{' 0.1 0.2' * 7}\n", "cat"),  # oriented boxes and polygons
        ("1, 2, 3, 4, 5", "1, 2, 3, 4, 5"),
        ("a dog and 2 cats, size 10 20", "a dog and 2 cats, size 10 20"),
    ],
)
def test_boxes_of_yolo_are_read_by_the_list_of_their_names_and_other_tags_stay(text, labels, folder):
    (folder / "a.txt").write_text(text)
    (folder / "e.txt").write_text("")
    is_yolo = text[1] == " " and text[0].isdigit()
    if is_yolo:
        (folder / "classes.txt").write_text("dog\ncat\ncar\n")
    images, _ = read("sidecar", folder, ".", classes="classes.txt" if is_yolo else "")
    assert images == [f"a.png: {labels}", "e.png:"]


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
    images, classes = read("wd_tagger", folder, "")
    assert classes == ("general", "long_hair", "^_^", "rose_(flower)")
    assert images == ["a.png: long_hair, ^_^, rose_(flower)", "e.png: general, long_hair, rose_(flower)"]


def written_tags(folder, form="sidecar", output=".", labels=("sea", "long_hair")):
    """Write labels of a.png as text files of tags; return the sentence."""
    file = LabelFile(epath.Path(folder / output), ("sea", "long_hair"), [str(folder / "a.png")])
    FORMATS[form].require(file)
    return FORMATS[form].write(file, [LabelEntry(file.images[0], dict.fromkeys(labels, POSITIVE))])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "sea, long_hair\n"),
        ("", "sea, long_hair\n"),
        ("my dog, b\n", "my dog, b, sea, long_hair\n"),
        ("z, a,", "z, a, sea, long_hair\n"),
        ("\ufeffsea, z", "\ufeffsea, z, long_hair\n"),
        ("z\r\na\r\n", "z\r\na\nsea\nlong_hair\n"),
        ("long hair, z", "long hair, z, sea\n"),
        ("long_hair, z, sea", "long_hair, z, sea"),
        ("sea", "sea, long_hair\n"),
    ],
)
def test_labels_are_added_to_the_tags_of_a_person(text, expected, folder):
    if text is not None:
        (folder / "a.txt").write_bytes(text.encode())
    written_tags(folder)
    assert (folder / "a.txt").read_bytes() == expected.encode()
    assert written_tags(folder) == "1 file had all labels already"
    assert (folder / "a.txt").read_bytes() == expected.encode()


def test_tags_beside_the_image_begin_those_in_the_output(folder):
    (folder / "a.txt").write_text("mine")
    assert written_tags(folder, output="out").startswith(f"copy its content over {folder}")
    assert (folder / "out/a.txt").read_text() == "mine, sea, long_hair\n"
    assert (folder / "a.txt").read_text() == "mine"


def test_the_list_of_tags_gets_further_tags(folder):
    (folder / "selected_tags.csv").write_text("tag_id,name,category,count\n7,sea,4,10\n9,zoo,0,3\n")
    written_tags(folder, "wd_tagger")
    expected = "tag_id,name,category,count\n7,sea,4,11\n9,zoo,0,3\n10,long_hair,0,1\n"
    assert (folder / "selected_tags.csv").read_text() == expected
    written_tags(folder, "wd_tagger")
    assert (folder / "selected_tags.csv").read_text() == expected


def test_a_list_of_names_alone_gets_numbers_and_counts(folder):
    (folder / "selected_tags.csv").write_text("name,note\nsea,mine\n")
    written_tags(folder, "wd_tagger")
    expected = "name,note,tag_id,count\nsea,mine,0,1\nlong_hair,,1,1\n"
    assert (folder / "selected_tags.csv").read_text() == expected


@pytest.mark.parametrize(("content", "says"), [(b"0 .1 .2 .3 .4\n", "has boxes"), (b"\xff\xfe\xff", "is not UTF-8")])
def test_a_text_of_another_kind_is_refused_before_anything_is_written(content, says, folder):
    (folder / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match=says):
        written_tags(folder)
    assert (folder / "a.txt").read_bytes() == content
