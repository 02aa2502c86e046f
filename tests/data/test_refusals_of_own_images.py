"""Images in folders of classes, annotations in COCO's format and exports of labeling tools that are refused."""

import json

from helpers.labeling import CVAT_XML, LABELS_XML, annotation, choices, task
from helpers.refusals import Refusal, each
from helpers.tables import data_settings, opened, write, write_images

from mlmoe_jax.data.sources.open import open_split


# ------------------------------------------------------------------------------------------------------------- folders
def folders(images: str, *says: str, split="train", model_classes=None, **keys) -> Refusal:
    """Images at these paths; no other split is asked for."""
    keys = {"val_split": "", "test_splits": (), **keys}
    return Refusal(
        f"{images} {split}",
        lambda at: write_images(at, images.split()),
        lambda at: opened(**{"name": "folders", "root": at} | keys, split=split, model_classes=model_classes),
        *says,
    )


MISSING = (
    "there is no folder {{at}}/{} (folders there: {}); sort the images into {{at}}/SPLIT/CLASS, or into {{at}}/CLASS "
)
MISSING += "with data.val_fraction above 0 and data.test_splits cleared"

FOLDERS = [
    folders("cat/train/0.png cat/Test/1.png dog/2.png", "cat/Test has the name of a split, in the folder"),
    folders("photos/Train/cat/0.png photos/valid/cat/1.png", "or set data.root to"),
    folders("photos/cat/0.png photos/dog/1.png", "all images are in folders in "),
    folders("Train/photos/cat/0.png Train/photos/dog/1.png", "if the classes are in there, move them to "),
    folders("Train/0.png Train/1.png", "Train lists no images in folders of classes; "),
    folders("valid/cat/0.png cat/1.png", "/train (folders there: cat, valid); sort the images into"),
    folders("cat/0.png dev/1.png", "; rename dev, which has the name of a split, if it is a class"),
    folders(".x/0.png", "1 of 1 file is not used: 1 hidden or in folders of the system"),
    folders("train/a.jpg", "{at}/train lists no images in folders of classes"),
    folders("a/0.png b/0.png", MISSING.format("train", "a, b"), val_split="val"),
    folders("a/0.png b/0.png", MISSING.format("test", "a, b"), split="test", val_fraction=0.5),
    folders(
        "a/0.png test/a/0.png", MISSING.format("train", "a, test"), val_fraction=0.5
    ),  # it would be read as a class
    folders("train/cat/c.png", "{at}/train has the label 'cat' of train/cat/c.png, which ", model_classes=["dog"]),
    folders("", "data.root is '', which is not a folder; set it to the folder of your images, with the", root=""),
]


# ----------------------------------------------------------------------------------------------------- labeling tools
def tool(name: str, content: object, *says: str, split="train", **keys) -> Refusal:
    """The file of a labeling tool, beside images a.jpg, a.png and e.png; `classes` is the text of that file."""
    classes = "classes.xml" if keys.get("classes", "").startswith("<") else "classes.txt"

    def make(at) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        write(at, "export", text, ("a.jpg", "a.png", "e.png"))
        write(at, classes, keys.get("classes", ""), ())

    def call(at):
        data = data_settings(name, at, **keys | {"table": "export", "classes": classes if "classes" in keys else ""})
        return open_split(data, split)

    return Refusal(f"{name} {says[0]} {content}"[:100], make, call, *says)


def studio(content: object, *says: str, **keys) -> Refusal:
    return tool("label_studio", content, *says, **keys)


SEA = [task("a.png", annotation(choices("sea")))]
TOOLS = [
    studio([task("a.png", annotation(choices("x", control="tags")))], "named tags, not labels; set data.label_column"),
    studio(
        [task(f"s3://bucket/{name}.png", annotation(choices("x"))) for name in "aqr"],
        "{at}/export has 2 images at addresses such as s3://bucket/q.png, and {at} does not have one file",
    ),
    studio([task("a.png")], "has no labeled image (1 image without labels)"),
    studio(
        [task("a.png", annotation(choices("x")), split="train"), task("e.png", split="test")],
        "lists no images of split val; its splits are train; ",  # without that of an image without labels
        split="val",
    ),
    studio([task("a.png", annotation(choices(5)))], "has the label 5 of a.png, which is no name"),
    studio(
        [task("a.png", annotation(), Split="val"), task("a.png", annotation(), split="train")],
        "gives a.png the splits val and train",
    ),
    studio({"tasks": []}, "is damaged"),
    studio([], "lists no images"),
    studio([{"data": {"photo": "a.png", "id": 1}}], "has id, photo, not image; set data.image_column"),
    studio("[[[", "is damaged"),
    studio(
        SEA,
        "the choices of {at}/classes.xml are named labels, quality, not tags; set data.label_column to a name",
        classes=LABELS_XML,
        label_column="tags",
    ),
    studio(
        SEA,
        "it lists no choices of labels",
        classes='<View><Image name="i" value="$image"/><Choices name="labels" toName="i"/></View>',
    ),
    studio(SEA, "has no splits, so all its images are in split train", split="val"),
    studio(SEA, "has the label 'sea' of a.png, which is not one of the 2 classes", classes=LABELS_XML),
    studio(SEA, "has the label 'sea' of a.png, which is not one of the 1 classes", classes="seas\n"),
    tool("fiftyone", {"classes": None, "labels": {"a": ["sea"]}}, "names a, which is a.jpg and a.png"),
    tool("fiftyone", {"classes": ["sea", "sea"], "labels": {}}, "names the class 'sea' twice"),
    *(
        tool("fiftyone", {"classes": ["sea"], "labels": {"e": [k]}}, f"has the label {k} of e.png, which is no name")
        for k in (-1, 1, None)
    ),
    tool(
        "cvat",
        '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><annotations>&b;</annotations>',
        "it has a document type, which is not read",
    ),
    tool("cvat", "<a><b></a>", "is damaged: mismatched tag: line 1"),
    tool(
        "cvat",
        CVAT_XML.replace('"b c.png"', '"a.png"'),
        "{at}/export lists a.png with two values of its label 'sand & sun': ",
    ),
    tool("coco_json", {}, "{at}/export is damaged: it has no "),
]


# --------------------------------------------------------------------------------------------------------------- boxes
def boxes(text: str, says: str, classes: str = "") -> Refusal:
    """A file of boxes in place of tags, beside an image."""

    def make(at) -> None:
        write(at, "a.txt", text, ("a.png",))
        write(at, "classes.txt", "dog\ncat\n", ())

    return Refusal(
        f"{text!r} {classes}",
        make,
        lambda at: open_split(data_settings("sidecar", at, table=".", classes=classes), "train"),
        f"{{at}}/a.txt has boxes and {says}; write the names of labels, or for boxes of YOLO set data.classes",
    )


BOX = "0 0.5 0.5 0.2 0.2"
BOXES = [
    *(
        boxes(text, repr(text))
        for text in (BOX, f"{BOX} 0.9", f"1{' 0.1 0.2' * 5}", "0 5e-1 .5 2.E-1 1", "0\t1\t1\t1\t1")
    ),
    *(
        boxes(text, repr(text))
        for text in ("dog 48 240 195 371", "10 10 20 10 20 20 10 20 plane 0", "Car 0.0 0 -1.5 9 1 1")
    ),
    boxes("377,117,463,117,465,130,378,130,A", "'377,117,463,117,465,130,378,130,A'"),
    boxes(f"{BOX}\n2 0.5 0.5 0.2 0.2\n", "'2 0.5 0.5 0.2 0.2'", "classes.txt"),
    boxes(f"{BOX}\ndog, cat\n", "'dog, cat'", "classes.txt"),
    boxes("gsd:0.14\n10 10 20 10 20 20 10 20 plane 0", "'gsd:0.14'", "classes.txt"),
]


@each([*FOLDERS, *TOOLS, *BOXES])
def test_refusals(case, tmp_path):
    case.check(tmp_path)
