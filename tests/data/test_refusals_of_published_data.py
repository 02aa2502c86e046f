"""Published data sets whose files are missing or damaged."""

import contextlib
import functools
import json

import pytest
from helpers.published_data import WRITE, coco_file, write_nuswide, write_voc
from helpers.refusals import GONE, Refusal, damaged, each, replacing
from helpers.tables import opened

from mlmoe_jax.data.sources.source import VARIABLE, Published

INSTANCES, CATEGORIES, IMAGES = "annotations/instances_train2014.json", '"categories": [', '"images": ['
VOC_LISTS = "VOCdevkit/VOC2012/ImageSets/Main"
MARKS, MARKS_OF_SKY = "Groundtruth/Labels_Train.txt", "Groundtruth/TrainTestLabels/Labels_sky_Train.txt"
INDEX, NIH, CHEXPERT = "vg_category_500_labels_index.json", "Data_Entry_2017.csv", "CheXpert-v1.0-small/train.csv"


# ------------------------------------------------------------------------------------------------------------- damage
def broken(name: str, file: str, how, *says: str, split="train", case="", make=None) -> Refusal:
    """A data set of which one file is damaged. By default, the case is the new content."""
    says = [f"{{at}}/{file} is damaged: ", *says] if isinstance(how, str) else says
    return damaged(f"{name} {case or how}", make or WRITE[name], file, how, lambda at: opened(name, at, split), *says)


def added(part: str, item: dict):
    """Return a damage: one more category or image."""
    return replacing(part, f"{part}{json.dumps(item)}, ")


def write_marks_of_concepts(at) -> None:
    write_nuswide(at, merged=False)


def with_last_line(text: str):
    """Return a damage: the third line is another one."""
    return lambda content: b"\n".join([*content.splitlines()[:2], text.encode()])


DAMAGE = [
    *(
        broken("coco2014", INSTANCES, content)
        for content in (
            "[]",
            '{"images": [',
            '{"images": [], "annotations": []}',
            '{"images": {}, "annotations": [1], "categories": []}',
            '{"images": [], "annotations": [{"image_id": 1, "caption": "a dog"}], "categories": []}',
            '{"images": [], "annotations": [], "categories": [{"id": 1, "name": null}]}',
            '{"images": [{"id": [1], "file_name": "a.jpg"}], "annotations": [], "categories": []}',
        )
    ),
    *(
        broken("coco2014", INSTANCES, how, f"{{at}}/{INSTANCES} {says}", case=says)
        for how, says in (
            (replacing('"image_id": 30', '"image_id": 7'), "is damaged: it has no "),
            (added(CATEGORIES, {"id": 2, "name": "bottle"}), "names the class 'bottle' twice"),
            (added(CATEGORIES, {"id": 44, "name": "flask"}), "is damaged: it lists the category id 44 twice"),
            (
                added(IMAGES, {"id": 7, "file_name": coco_file("train", 100)}),
                f"lists train2014/{coco_file('train', 100)} with two ",
            ),
            (added(IMAGES, {"id": 100, "file_name": "a.jpg"}), "is damaged: it lists the image id 100 twice"),
        )
    ),
    broken("coco2014", INSTANCES, GONE, f"there is no file {{at}}/{INSTANCES}; coco2014 needs ", case="gone"),
    *(
        broken("voc2012", f"{VOC_LISTS}/cow_train.txt", f"2007_000033  1\n\n{line}\n")
        for line in ("2008_000002", "2008_000002 2", "2008_000002 1 1", "", "\xff\xfe\x00")
    ),
    broken("voc2012", f"{VOC_LISTS}/aeroplane_train.txt", b"", f"{{at}}/{VOC_LISTS} lists no images", case="no images"),
    *(
        broken("nuswide", file, with_last_line(text), *says, case=f"{text} {file}", make=make)
        for text in ("", "0 0 2", "sky", "10")
        for file, make, *says in (
            (
                MARKS,
                write_nuswide,
                f"{{at}}/{MARKS} for the images of {{at}}/ImageList/TrainImagelist.txt is damaged: ",
            ),
            (
                MARKS_OF_SKY,
                write_marks_of_concepts,
                "{at}/Groundtruth/TrainTestLabels for the images of ",
                "txt is damaged: ",
            ),
        )
    ),
    broken("nuswide", MARKS, GONE, "cannot read {at}/Groundtruth/TrainTestLabels/Labels_airport", case="without marks"),
    broken(
        "nuswide", MARKS_OF_SKY, GONE, f"cannot read {{at}}/{MARKS_OF_SKY}", case="gone", make=write_marks_of_concepts
    ),
    *(
        broken("vg256", "objects.json", content)
        for content in (
            '[{"image_id": 1, "obj',
            "{}",
            "[1]",
            '[{"objects": []}]',
            '[{"image_id": 1, "objects": [{"names": [5]}]}]',
        )
    ),
    broken("vg256", "objects.json", GONE, "there is neither objects_v1_2.json nor objects.json in {at}; ", case="gone"),
    *(broken("vg500", INDEX, content) for content in ('{"3.jpg": [500]}', '{"3.jpg": "a"}', "{}", "[]")),
    broken("vg500", INDEX, GONE, f"cannot read {{at}}/{INDEX} (No such file or directory); vg500 ", case="gone"),
    *(
        broken("chestxray14", file, how, says, case=says, split=split)
        for file, how, split, says in (
            (
                "test_list.txt",
                b"2.png\n9.png\n",
                "test",
                f"/{NIH} is damaged: it has 1 of the 2 images of test",
            ),
            ("images/2.png", GONE, "all", "the first is {at}/images/2.png; "),
            (NIH, replacing("Hernia", "Flu"), "all", "line 2 has the label 'Flu', which is not one of the 14 classes"),
            (NIH, replacing("Finding Labels", "Labels"), "all", "has no column 'Finding Labels'"),
            (NIH, GONE, "all", "there is no table Data_Entry_2017_v2020.csv in {at}; chestxray14 needs "),
            ("train_val_list.txt", GONE, "train", "docs/datasets.md#chestx-ray14"),
        )
    ),
    *(
        broken("chexpert", CHEXPERT, how, f"{{at}}/{CHEXPERT} {says}", case=says)
        for how, says in (
            (replacing("-1.0", "2"), "is damaged: an observation is '2' and should be 1.0, 0.0, -1.0 or empty"),
            (replacing(",Male", ""), "line 2 has 18 cells"),
            (replacing("Path", "File"), "has no column 'Path'"),
        )
    ),
    broken("chexpert", CHEXPERT, GONE, "docs/datasets.md#chexpert", case="gone"),
]


@each(DAMAGE)
def test_damage(case, tmp_path):
    case.check(tmp_path)


# ------------------------------------------------------------------------------------------------------ names and roots
KNOWN = (
    "digits, digits_single, synthetic, voc2007, voc2012, coco2014, nuswide, vg256, vg500, chestxray14, chexpert, csv, "
    "jsonl, parquet, webdataset, folders, coco_json, label_studio, fiftyone, cvat, sidecar, wd_tagger, xmp, "
    "xmp_lightroom, keywords, packed, tfds:NAME"
)
BIRDS = Published("birds", "images and labels.txt", "https://example.org/birds", "birds")
HOW = (
    "birds needs images and labels.txt, published at https://example.org/birds: put it there, or set data.root to its "
    "folder (docs/datasets.md#birds shows how); --config=NAME:dataset=digits needs no files"
)


def use(case: str, name: str, *says: str, make=None, root="", split="train", model_classes=None, **keys) -> Refusal:
    """A split of a data set in the folder, or in `root` below it, opened with these keys of `data`."""
    call = lambda at: opened(name, at / root, split, model_classes, **keys)  # noqa: E731
    return Refusal(f"{name} {case}", make or WRITE.get(name), call, *says)


def search(case: str, place: str, root="", variable="", make=lambda at: None) -> Refusal:
    """A published data set that is looked for from the working directory."""

    @contextlib.contextmanager
    def work(at):
        make(at)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(at)
            patch.setenv(VARIABLE, variable)
            yield

    return Refusal(case, work, lambda _: BIRDS.folder(root), f"there is no folder {place}; {HOW}")


def write_names(at) -> None:
    WRITE["vg500"](at)
    (at / "names.txt").write_text("a\nb\n")


REFUSALS = [
    *(
        use("unknown split", name, f"data set {name} has no split 'nope'; it has ", split="nope")
        for name in KNOWN.split(", ")[:11]
    ),
    use("misspelled", "coco14", "there is no data set 'coco14'; did you mean 'coco2014'?"),
    use("unknown", "zzz", f"there is no data set 'zzz'; there are {KNOWN}"),
    use("with a part", "digits:x", "did you mean 'digits'?"),
    search("in the default folder", "data/birds"),
    search("in the folder of the variable", "/mnt/all/birds", variable="/mnt/all"),
    search("only in the root", "typo", root="typo", make=lambda at: (at / "data/birds").mkdir(parents=True)),
    use("no root", "voc2012", "there is no folder {at}/no; ", root="no"),
    use(
        "elsewhere",
        "voc2012",
        "ImageSets/Main is not in {at}/VOCdevkit/VOC2012, {at}/VOC2012 or {at}; voc2012 needs VOCdevkit/VOC2012, "
        "published at http://host.robots.ox.ac.uk/pascal/VOC/voc2012/: put it there, or set data.root to its folder "
        "(docs/datasets.md#voc-2012 shows how); --config=NAME:dataset=digits needs no files",
        make=lambda at: None,
    ),
    use("the other year", "voc2007", "ImageSets/Main is not in ", make=write_voc, root="VOCdevkit/VOC2012"),
    *(
        use(
            f"no positive label {labels}",
            "voc2012",
            "no image of split train of voc2012 has a positive label; ",
            make=functools.partial(write_voc, splits={"train": {"2008_000009": labels}}),
        )
        for labels in ("", "~boat")
    ),
    use("with empty images", "vg256", "data.keep_empty cannot be used with vg256", keep_empty=True),
    use(
        "two names",
        "vg500",
        "{at}/names.txt lists 2 labels, but vg500 has 500; correct data.classes",
        make=write_names,
        classes="names.txt",
    ),
    use("few labels", "synthetic", "data.labels is 15 and should be at least 16", labels=15),
    use("groups", "synthetic", "data.group_column=a is a column of tables (csv, jsonl), and ", group_column="a"),
    use(
        "other classes",
        "digits_single",
        "split val of digits_single has the labels 0, 1, 2, 3, … (10), but the model was trained on a, b",
        split="val",
        model_classes=["a", "b"],
    ),
]


@each(REFUSALS)
def test_refusals(case, tmp_path):
    case.check(tmp_path)
