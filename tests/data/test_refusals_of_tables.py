"""Tables that are refused, with their file and line: columns, cells, labels, classes, splits, groups, corrections."""

import json

from helpers.refusals import Refusal, each
from helpers.tables import SPREADSHEET, lines, settings, write

from mlmoe_jax.data.labels.name_vectors import read_classes
from mlmoe_jax.data.sources.open import open_split, open_splits

TABLE = "image,labels\na.png,dog\nb.png,cat;dog\nsub/c.png,\n"


def use(case: str, *says: str, split="train", model_classes=None, call=None, files=(), **keys) -> Refusal:
    """The table `train.csv`, or other files {name: text}, opened with these keys of `data`."""

    def make(at) -> None:
        for name, text in (dict(files) or {"train.csv": TABLE}).items():
            write(at, name, text)

    def open_table(at):
        options = {key: value.format(at=at) if key in ("root", "images") else value for key, value in keys.items()}
        return open_split(settings(**{"root": at} | options), split, classes=model_classes)

    return Refusal(case[:80], make, call or open_table, *says)


def of_csv(text: str, says: str, **keys) -> Refusal:
    """A table with this text; `says` is what is said of it."""
    return use(f"{text} {keys or ''}", f"{{at}}/train.csv {says}", files={"train.csv": text}, **keys)


def of_codes(text: str, says: str, **keys) -> Refusal:
    """A table with one column per class."""
    return of_csv(text, says, label_column="", **keys)


def of_jsonl(line: str, says: str, **keys) -> Refusal:
    """A table whose second line is this text."""
    text = f'{{"image": "a.png", "labels": ["x"]}}\n{line}\n'
    table = {"name": "jsonl", "table": "train.jsonl"}
    return use(line, f"{{at}}/train.jsonl line 2 {says}", files={"train.jsonl": text}, **table, **keys)


def of_label(label: object, says: str) -> Refusal:
    """A table whose second line has these labels, or a list of one label."""
    labels = label if isinstance(label, list | dict) else [label]
    line = json.dumps({"image": "b.png", "labels": labels}, ensure_ascii=False)
    return of_jsonl(line, f"has the label {says}")


def of_classes(content: str, says: str) -> Refusal:
    """A file of classes."""
    files, call = {"names.txt": content}, lambda at: read_classes(at / "names.txt")
    return use(f"classes {content}", f"{{at}}/names.txt {says}", files=files, call=call)


def of_corrections(rows: str, says: str, heading="image,label,given,suggested,score,accept\n") -> Refusal:
    """A file of corrections of the table."""
    files = {"train.csv": TABLE, "fixed.csv": heading + rows}
    return use(f"{rows} {heading}", f"{{at}}/fixed.csv {says}", files=files, corrections="fixed.csv")


def in_encoding(encoding: str, file: str, text: str) -> Refusal:
    keys = {"name": file.rpartition(".")[2], "table": file}
    return Refusal(
        f"{file} {encoding} {text!r}",
        lambda at: (at / file).write_text(text, encoding=encoding) and None,
        lambda at: read_classes(at / file) if keys["name"] == "txt" else open_split(settings(at, **keys), "train"),
        f"{{at}}/{file} is not UTF-8; save it as UTF-8, in Excel as CSV UTF-8",
    )


COLUMNS = [
    of_csv("", "is empty; write a line with the column names, then one line per image"),
    of_csv("image,labels\n", "lists no images"),
    of_csv("image,labels\n\n\n", "lists no images"),
    of_csv("file,labels\na.png,x\n", "has no column 'image', which data.image_column names (columns: file, labels); "),
    of_csv(
        "image,tags\na.png,x\n",
        "has no column 'labels', which data.label_column (empty: a column per class) names (columns: image, tags); "
        "correct one of the two",
    ),
    of_csv("image,labels,image\na.png,x,y\n", "has two columns 'image'; write a line with the column names"),
    of_csv("image;labels\na.png;x\n", "has no column 'image', which data.image_column names (columns: image;labels); "),
    of_codes("image\na.png\n", "has no column of a class; "),
    of_codes("image,cat,dog,\na.png,1,1,1\n", "has a column without a name; "),  # as spreadsheets write it
    of_codes(",image,cat,dog\n1,a.png,1,1\n", "has a column without a name; "),  # the index of a table
    of_codes(
        "image,dog,width\na.png,1,640\n",
        "line 2 has the cell '640' in the column 'width', where 1, 0 or empty for unknown should be; correct it, list",
    ),
    of_codes(
        "image,width,dog,cat\na.png,640,1,0\n",
        "has the column 'width', which is not one of the 2 classes; remove it, or list the class columns in the "
        "file of data.classes",
        model_classes=["dog", "cat"],
    ),
    of_codes(
        "image,width,dog\na.png,640,1\n",
        "has no column 'cow', which the list of classes names (columns: width, dog); ",
        model_classes=["dog", "cow"],
    ),
    use("no separator", "data.separator is empty; ", separator=""),
]

CELLS = [
    of_csv("image,labels\na.png,x,y\n", "line 2 has 3 cells, but there are 2 columns; "),
    of_csv("image,labels\na.png\n", "line 2 has 1 cells, but there are 2 columns; "),
    of_csv("image,labels\na.png,x\n,x\n", "line 3 has no image path"),
    of_csv('image,labels\na.png,"x\nb.png,y"\n', "line 2 has the label 'x\\nb.png,y', with a line break or "),
    of_csv('image,labels\n"a.png,x\nb.png",y\n', "line 2 has a line break in the cell 'a.png,x\\nb.png'; close the "),
    of_csv('image,split,labels\na.png,"train,x\nb.png,train",y\n', "line 2 has a line break in the cell 'train,x\\nb"),
    of_csv(
        f"image,labels\na.png,{'x' * 200_000}\n",
        "cannot be read from line 2 on: field larger than field limit (131072); close the quote",
    ),
    *(
        of_codes(
            f"image,cat\na.png,1\nb.png,{cell}\n",
            f"line 3 has the cell '{cell}' in the column 'cat', where 1, 0 or empty for unknown ",
        )
        for cell in ("yes", "-1")
    ),
    *(
        of_csv(f'image,labels\na.png,"{cell}"\n', f"line 2 has the labels {cell!r}, a literal that ")
        for cell in ("[car, dog]", "{'car': 1}", "[0, 1]", "[['car']]", "array(['car'])", "{}")
    ),
    *(
        of_jsonl(line, "should be a JSON object with a path under 'image', and under 'labels' ")
        for line in (
            *('{"image": ', '{"image": "a.png"}', "[]", "5", '"a"', "[" * 100_000, '{"image": 5, "labels": []}'),
            '{"image": "a.png", "labels": [], "split": ["p"]}',
            *(
                f'{{"image": "b.png", "labels": {labels}}}'
                for labels in (
                    *('{"dog": 1, "dog": 0}', '[["dog"]]', "true", '{"dog": NaN}', '"dog"', "null", '[""]'),
                    *('{"dog": 2}', '{"dog": "1"}', '{"dog": []}'),
                )
            ),
        )
    ),
    of_jsonl('{"image": "a.png", "labels": [], "patient": ["p"]}', "should be a JSON object", group_column="patient"),
    *(
        in_encoding(encoding, file, text)
        for encoding in ("latin-1", "utf-16", "utf-16-le")
        for file, text in (
            ("train.csv", "image,labels\na.png,é\n"),
            ("train.jsonl", '{"image": "a.png", "labels": ["é"]}'),
            ("names.txt", "café\n"),
        )
    ),
    in_encoding("utf-16-le", "train.csv", "image,labels\na.png,x\n"),  # each byte is one of UTF-8, too
]

PACKED = [
    use(
        f"a spreadsheet as {keys}",
        "/mine.xlsx is a spreadsheet or another archive, not text; save its table as CSV UTF-8, comma delimited",
        files={"train.csv": TABLE, "mine.xlsx": SPREADSHEET},
        **keys,
    )
    for keys in (
        *({key: "mine.xlsx"} for key in ("table", "classes", "tree", "corrections")),
        *({"name": name, "table": "mine.xlsx"} for name in ("jsonl", "coco_json", "label_studio", "fiftyone")),
    )
]

LABELS = [
    of_csv("image,labels\na.png,x\na.png,\n", "lists a.png in the lines 2 and 3 with two values of its labels: some "),
    of_codes("image,cat\na.png,0\na.png,1\n", "lists a.png in the lines 2 and 3 with two values of its label 'cat': "),
    of_csv("image,labels\na.png,x\nb.png,N/A\n", "line 3 has the label 'N/A', which stands for no value; leave it out"),
    of_csv("image,labels\na.png,\nb.png,;\n", "contains no labels, so the classes are unknown; "),
    of_label(5, "5, which is no name; "),
    of_label(["x", True], "True, which is no name; "),
    of_label("None", "'None', which stands for no value; "),
    of_label("False", "'False', which is the value of a label; "),
    of_label({"NaN": 1}, "'NaN', which stands for no value; "),
    *(
        of_label(name, f"{name!r}, which has values; ")
        for name in ("0 1 0", "0.2 0.7", "dog:0", "dog=true", "dog 0.93")
    ),
    of_label("<b>dog</b>", "'<b>dog</b>', which looks like a list in JSON or Python, or like XML; "),
    of_label("['dog']", "\"['dog']\", which looks like a list in JSON or Python, "),
    *(of_label(name, f"{name!r}, with a quote ") for name in ("“dog", "dog”", "“dog”", '"dog"', "'dog'")),
    *(of_label(name, f"{name!r}, with a line break or another ") for name in ("x\ny", "x\ry", "x\0y", "x\u2028y")),
]

NAMED = {"train.csv": "image,labels\na.png,dog\nb.png,dog;kat\nsub/c.png,kat;elk\n", "names.txt": "dog\ncat\n"}
CLASSES = [
    use(
        "a label that is no class",
        "{at}/train.csv line 3 has the label 'kat', which is not one of the 2 classes; did you mean 'cat'",
        files=NAMED,
        classes="names.txt",
    ),
    use(
        "a label that is no class of the model",
        "{at}/train.csv line 4 has the label 'elk', which is not one of the 2 classes; correct it, or list all classes "
        "in data.classes",
        files=NAMED,
        model_classes=["dog", "kat"],
    ),
    use(
        "classes in another order than the model's",
        "split train of csv has the labels dog, cat, but the model was trained on cat, dog",
        files={"train.csv": TABLE, "names.txt": "dog\ncat\n"},
        classes="names.txt",
        model_classes=["cat", "dog"],
    ),
    of_classes("b\na\nb\n", "line 3 has the label 'b', which is 'b' of {at}/names.txt line 1, or differs only in case"),
    of_classes("dog, cat, person\n", "line 1 has the label 'dog, cat, person', which looks like several"),
    of_classes(" \n", "contains no class names; write one class name per line"),
    use("no classes", "cannot read {at}/no.txt: No such file or directory", classes="no.txt"),
]

IN_COLUMN = {"table": "all.csv", "files": {"all.csv": "image,labels,split\na.png,x,train\nb.png,y;z,test\n"}}
IN_SPLITS = {"train.csv": TABLE, "test.csv": "image,labels\na.png,z\n"}
SPLITS = [
    use(
        "a split that no row names",
        "{at}/all.csv lists no images of split val; its splits are test, train; rename them, or set data.train_split, "
        "data.val_split and data.test_splits",
        split="val",
        **IN_COLUMN,
    ),
    use(
        "a table without splits",
        "{at}/train.csv has no splits, so all its images are in split learn and none in test; write one table per "
        "split and use {split} in data.table, or hold out images with data.val_fraction and clear data.test_splits",
        split="test",
        table="train.csv",
        train_split="learn",
    ),
    use("a label of a test split", "label 'z'", files=IN_SPLITS, call=lambda at: open_splits(settings(at), ["test"])),
    use(
        "no training split",
        "for split nope",
        files=IN_SPLITS,
        call=lambda at: open_splits(settings(at, train_split="nope"), ["test"]),
    ),
    use(
        "all images are held out",
        "data.val_fraction=1.0 of 3 training images leaves none for training; ",
        split="val",
        val_fraction=1.0,
    ),
    use(
        "the only image is held out",
        "of 1 training image leaves none for training",
        "1 of 2 rows is not used: 1 of split 'test'",
        val_fraction=0.3,
        test_splits=(),
        **IN_COLUMN,
    ),
]

PATIENTS = {"train.csv": "image,labels,patient,site,day\na.png,x,p,,NaN\nb.png,x,p,,NaN\n"}
GROUPS = [
    use(
        "no column of groups",
        "{at}/train.csv has no column 'person', which data.group_column names (columns: image, labels, patient, site, "
        "day); correct one of the two",
        files=PATIENTS,
        group_column="person",
    ),
    use(
        "an empty column of groups",
        "{at}/train.csv has no group in the column 'site' for any image of split train; ",
        files=PATIENTS,
        group_column="site",
    ),
    use(
        "no value as group",
        "{at}/train.csv has the group 'NaN', which stands for no value; ",
        files=PATIENTS,
        group_column="day",
    ),
    use(
        "the only group is held out",
        " of 2 training images in 1 group leaves none for training; ",
        files=PATIENTS,
        group_column="patient",
        split="val",
        val_fraction=0.5,
    ),
]

NO_PATHS = ["a.png", "a.png\0", "\ud800.png", "x" * 5000, "b/" * 3000]
FILES = [
    use(
        "no root",
        "data.root is '', which is not a folder; set it to the folder of your images, with the table {split}.csv",
        root="",
    ),
    use(
        "a root in a bucket", "gs://b/x is an address, and data.name=csv reads local files; copy them", root="gs://b/x"
    ),
    use("a table in a bucket", "gs://b/t.csv is an address, and data.name=csv reads", table="gs://b/t.csv"),
    use("a root that is no folder", "data.root is '{at}/no', which is not a folder; set it to", root="{at}/no"),
    use("no table", "there is no {at}/val.csv for split val; correct data.table, which is {split}.csv", split="val"),
    use(
        "images outside of their folder",
        "{at}/train.csv lists {at}/a.png, which is not below {at}/sub; ",
        files={"train.csv": "image,labels\n{at}/a.png,x\nc.png,y\n"},
        images="sub",
    ),
    use(
        "images without a file",
        "1 of the 2 images of train have no file, the first is {at}/3.png; ",
        files={"train.csv": "image,labels\na.png,x\n3.png,x\n"},
    ),
    use(
        "paths that no file can have",
        "4 of the 5 images of train have no file",
        files={"train.jsonl": lines(*({"image": name, "labels": ["x"]} for name in NO_PATHS))},
        name="jsonl",
        table="train.jsonl",
    ),
]

CORRECTIONS = [
    of_corrections(rows, says)
    for rows, says in (
        ("d.png,cat,0,1,0.1,yes\n", "line 2 corrects the image 'd.png', which split train does not have; write"),
        ("a.png,Cat,0,1,0.1,yes\n", "line 2 corrects the label 'Cat', which split train does not have; write"),
        ("a.png,cat,0,2,0.1,\n", "line 2 has '2' under suggested, which should be 1, 0 or empty"),
        (
            "\na.png,cat,0,1,0.1,maybe\n",
            "line 3 has 'maybe' under accept, which should be yes, no or empty; ",
        ),
        ("a.png,cat,0,1,0.1,yes,no\n", "line 2 has 7 cells, but there are 6 columns"),
        ("a.png,cat,0,1,0.1,yes\na.png,cat,0,0,0.1,yes\n", "line 3 contradicts an earlier line about a.png and 'cat'"),
        ("a.png,cat,0,1,0.1,no\na.png,cat,0,1,0.1,yes\n", "line 3 contradicts an earlier line about a.png and 'cat'"),
    )
] + [
    of_corrections("", "has no column 'image', which its format names", heading="photo; label\n"),
    of_corrections("", "has no column 'accept'", heading="image,label,suggested\n"),
    use("no corrections", "cannot read {at}/none.csv: ", corrections="none.csv"),
    use("a folder of corrections", "cannot read {at}/sub", corrections="sub"),
]


@each([*COLUMNS, *CELLS, *PACKED, *LABELS, *CLASSES, *SPLITS, *GROUPS, *FILES, *CORRECTIONS])
def test_refusals(case, tmp_path):
    case.check(tmp_path)
