"""The check of a data set: counts, problems and messages."""

import io
import json
import re

import numpy as np
import pytest
from helpers.packing import config_of, shard_of, smooth_image, write_packed
from helpers.tables import CLASSES, settings, split_of, write
from PIL import Image

from mlmoe_jax.apps.tools import check
from mlmoe_jax.apps.tools.check import check_data, report_outcome
from mlmoe_jax.apps.tools.check_table import name_sequences
from mlmoe_jax.apps.tools.duplicates import find_duplicates, inspect_images
from mlmoe_jax.config import default_config
from mlmoe_jax.data.decoding import STRICT
from mlmoe_jax.data.images import ImageFiles
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.split_checks import check_splits, require_readable
from mlmoe_jax.data.twins import similar_pairs


# ------------------------------------------------------------------------------------------------ before each training
def test_splits_without_problems_pass():
    train = split_of("1234", np.eye(4))
    assert check_splits(train, []) == []
    val, test = (
        split_of("5678", np.eye(4), "val", ["p", "", "", "q"]),
        split_of("abcd", np.eye(4), "test", ["", "r"] * 2),
    )
    assert check_splits(train, [val, test]) == [], "images without a group are not of one group"
    assert check_splits(train, [val, val]) == [], "the same split"


@pytest.mark.parametrize(("brightest", "gray_bits", "said"), [(4095, 16, "12"), (1030, 12, ""), (900, 12, "10")])
def test_gray_images_that_would_look_black_are_a_warning(brightest, gray_bits, said, tmp_path, caplog):
    names = [f"{row}.png" for row in range(20)]
    for row, name in enumerate(names):
        gray = np.full((4, 4), row * brightest // 19, np.uint16 if row else np.uint8)
        Image.fromarray(gray).save(tmp_path / name)
    config = default_config().data
    config.gray_bits = gray_bits
    labels = np.ones((20, len(CLASSES)), np.int8)
    require_readable([Split("train", CLASSES, labels, names, ImageFiles(tmp_path, names))], config)
    start = (
        f"15 of 16 images of split train that were tried are 16-bit grayscale, and the brightest value is {brightest:,}"
    )
    assert caplog.text.count(start) == bool(said)
    assert (f"set --config.data.gray_bits={said}" in caplog.text) == bool(said)


def test_classes_without_positives_or_others_are_a_warning():
    marks = np.array([[1, 0, 2, -1], [1, 0, 2, -1]])  # difficult and unknown labels are not positive
    others = [split_of("3", [0, 1, 0, 0], "val"), split_of("4", 1, "test")]
    assert check_splits(split_of("12", marks), others) == [
        "split train has no positive image of 3 of its 4 classes, which cannot be learned: b, c, d",
        "split train has only positive images of 1 of its 4 classes, which cannot be learned: a",
        "split val has no positive image of 1 of its 4 classes, which cannot be measured on it: a",
    ]


# ------------------------------------------------------------------------------------------------------ similar images
@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([f"clip{c}_{n:03}.jpg" for c in range(3) for n in range(5)], "15 images in 3 sequences by name (clip0_…, cl"),
        ([f"cam{c}/{10 * n}" for c in range(2) for n in range(4)], "8 images in 2 sequences by name (cam0/…, cam1/…)"),
        ([f"IMG_{n:04}.jpg" for n in range(20)], ""),
        ([f"{n}.png" for n in range(20)], ""),
        ([f"{label}/{n}.png" for label in CLASSES for n in range(9)], ""),
        ([f"{label.upper()}.{n}.png" for label in CLASSES for n in range(9)], ""),
        ([f"{year}_{n:06}" for year in (2007, 2008) for n in (15, 16, 23, 41, 44, 58)], ""),
        ([f"train-{s:03}.tar#{n:04}.jpg" for s in range(3) for n in range(5 * s, 5 * s + 5)], ""),
        ([f"{s}.parquet#{n}" for s in range(3) for n in range(5)], ""),
        ([f"0.tar#clip{c}_{n}.jpg" for c in range(3) for n in range(5)], "15 images in 3 sequences by name (clip0_…"),
        ([*(f"clip{c}_{n}" for c in range(2) for n in range(4)), *map(str, range(9))], ""),
    ],
)
def test_names_that_differ_in_a_last_number_are_a_hint(names, said):
    split = split_of(names, np.ones((len(names), len(CLASSES))))
    half = len(names) // 2
    sentence = "".join(name_sequences([split]))
    assert sentence.startswith(said)
    assert bool(sentence) == bool(said)
    assert name_sequences([split.take(np.arange(half), "train"), split.take(np.arange(half, len(names)), "val")]) == (
        [sentence] if said else []
    ), "the splits count together"
    assert name_sequences([split_of(names, 1, groups=["g"] * len(names))]) == []


def photo(seed, size=(160, 120)) -> bytes:
    """A smooth image as JPEG."""
    smooth_image(*size, seed).save(buffer := io.BytesIO(), "JPEG")
    return buffer.getvalue()


def test_similar_images_are_paired_with_the_first_of_them():
    random = np.random.default_rng(0)
    look = random.random((40, 8, 8, 8)).astype(np.float16)
    look[30:] = look[:10] + random.normal(0, 0.02, (10, 8, 8, 8)).astype(np.float16)
    look[39] = np.roll(look[5][:, ::-1, ::-1], 1, axis=-1)
    copies = [*((row, row + 30) for row in range(9)), (5, 39)]
    assert similar_pairs(look, look, same=True) == copies
    assert similar_pairs(look[:30], look[30:], same=False) == [(i, j - 30) for i, j in copies]
    assert similar_pairs(look[:1], look[:0], same=False) == similar_pairs(look[:0], look[:1], same=False) == []
    assert similar_pairs(np.zeros((30, 8, 8, 8)), np.zeros((30, 8, 8, 8)), same=True) == [], "blank images"


def test_many_images_are_not_described_and_missing_ones_not_tried(tmp_path, monkeypatch, capsys):
    names = [f"{k}.png" for k in range(4)]
    for name in names[:2]:
        (tmp_path / name).write_bytes(photo(0))
    split = Split("train", ("a",), np.array([[1], [0], [1], [0]], np.int8), names, ImageFiles(tmp_path, names))
    described = inspect_images(split, np.arange(3), lambda: None, STRICT)
    assert [item.kind for item in find_duplicates([described])] == ["content"]
    assert "histogram" in described.images.dtype.names
    opened = []
    monkeypatch.setattr("mlmoe_jax.apps.tools.duplicates.MOST_COMPARED", 3)
    monkeypatch.setattr(ImageFiles, "encoded", lambda self, row: opened.append(row) or photo(0))
    inspection = inspect_images(split, np.arange(4), lambda: None, STRICT)
    images, errors = inspection.images, inspection.errors
    assert "not searched among more than 3 images" in capsys.readouterr().err
    assert sorted(opened) == [0, 1]
    assert list(errors) == [2, 3]
    assert str(errors[2]) == f"cannot read {tmp_path}/2.png as an image: No such file or directory"
    (duplicates,) = find_duplicates([inspection])
    assert (duplicates.kind, duplicates.other_labels) == ("content", 1)
    assert images.dtype.names == ("row", "width", "height", "content")


# -------------------------------------------------------------------------------------------------------------- report
@pytest.fixture
def data_set(tmp_path, monkeypatch):
    """A function that writes a data set, and returns its config.

    A row of a split has a file, its content (the number of a photo, bytes, or None), and the code of each label.
    """

    def make(**splits):
        def open_split(data, wanted, **options):
            assert (data.bad_images, options["keep_missing"]) == ("skip", True)
            names, images, labels = zip(*splits[wanted], strict=True)
            for name, image in zip(names, images, strict=True):
                if image is not None:
                    (tmp_path / name).write_bytes(photo(image) if isinstance(image, int) else image)
            codes = np.array([["-012".index(code) - 1 for code in row] for row in labels], np.int8)
            return Split(wanted, CLASSES, codes, names, ImageFiles(tmp_path, names))

        monkeypatch.setattr("mlmoe_jax.data.sources.open.open_split", open_split)
        monkeypatch.setattr(check, "find_root", lambda data: data.root)
        return config_of(tmp_path, "mine", val_split="val", test_splits=("test",))

    return make


GOOD = {
    "train": [
        ("1.jpg", 1, "1100"),
        ("2.jpg", photo(2, (99, 30)), "1102"),
        ("3.jpg", 3, "011-"),
        ("4.jpg", 4, "0001"),
    ],
    "val": [("5.jpg", 5, "1111")],
    "test": [("6.jpg", 6, "1111"), ("7.jpg", 7, "1000")],
}


def test_the_report_of_a_data_set_without_problems(data_set):
    config = data_set(**GOOD)
    outcome = report_outcome(check_data(config))
    assert outcome.exit_code == 0
    report = json.loads(outcome.json())
    assert report["problems"] == report["warnings"] == report["duplicates"] == []
    assert report["classes"] == list(CLASSES)
    assert list(report["splits"]) == ["train", "val", "test"]
    train = report["splits"]["train"]
    assert (train["images"], train["decoded"], train["missing"], train["unreadable"], train["bad"]) == (4, 4, 0, 0, [])
    assert (train["width"], train["height"]) == ([99, 160, 160], [30, 120, 120])
    assert (train["mean_labels"], train["images_by_labels"]) == (1.75, [0, 1, 3])
    assert (train["positive"], train["difficult"], train["unknown"]) == ([2, 3, 1, 1], [0, 0, 0, 1], [0, 0, 0, 1])
    assert report["splits"]["val"]["images_by_labels"] == [0, 0, 0, 0, 1]

    text = outcome.text()
    assert text.splitlines()[0] == f"data set mine in {config.data.root}: 4 classes"
    assert text.rstrip().endswith("no problems found")


@pytest.mark.parametrize(
    ("fit", "codes", "says"),
    [
        ("steps", ["1-0-", "-1--"], ""),
        (
            "steps",
            ["1---", "-1--"],
            " leaves out unknown labels, and no training label is known to be absent: ",
        ),
        ("logistic", ["1000"], "train.fit=logistic needs two images or more, of two groups"),
    ],
)
def test_what_a_training_would_refuse_is_a_problem(fit, codes, says, data_set):
    rows = [(f"{k}.jpg", k, code) for k, code in enumerate(codes, 1)]
    config = data_set(train=rows, val=GOOD["val"], test=GOOD["test"])
    config.train.fit = fit
    outcome = report_outcome(check_data(config))
    problems = json.loads(outcome.json())["problems"]
    assert [says in problem for problem in problems] == ([True] if says else [])
    assert outcome.exit_code == (1 if says else 0)


def test_categories_that_do_not_fit_are_a_problem(tmp_path):
    write(tmp_path, "train.csv", "image,labels\na.png,x\nb.png,y\n", images=("a.png", "b.png"))
    write(tmp_path, "kinds.csv", "label,category\nx,letter\n", images=())
    data = settings(tmp_path, categories="kinds.csv", val_split="", test_splits=())
    config = default_config()
    config.data = data
    assert check_data(config)["problems"] == [f"{tmp_path}/kinds.csv has no category for 1 label: y; add them"]


def test_missing_and_unreadable_images_are_problems(data_set):
    splits = GOOD | {"val": [("5.jpg", 5, "1000"), ("8.jpg", None, "1000")]}
    splits["test"] = [("6.jpg", b"not an image", "1000"), ("7.jpg", photo(7)[:-500], "1000")]
    config = data_set(**splits)
    report = check_data(config)
    assert (report["splits"]["val"]["missing"], report["splits"]["val"]["unreadable"]) == (1, 0)
    assert (report["splits"]["test"]["missing"], report["splits"]["test"]["unreadable"]) == (0, 2)
    assert report["splits"]["test"]["width"] is None
    assert [(item["id"], item["missing"]) for item in report["splits"]["val"]["bad"]] == [("8.jpg", True)]
    first, second = report["problems"]
    assert first == (
        f"1 of the 2 images of split val cannot be found (8.jpg): put {config.data.root}/8.jpg there, or "
        "correct data.root, data.images or the paths in the table"
    )
    assert second.startswith(
        "2 of the 2 images of split test cannot be read (6.jpg, 7.jpg): cannot read 6.jpg as an image: its content"
    )
    assert "; cannot read 7.jpg as an image: it is damaged or cut short" in second
    outcome = report_outcome(report)
    assert outcome.exit_code == 1
    assert f"problem: {first}\nproblem: {second}" in outcome.text()


def test_groups_in_two_splits_are_a_problem_and_labels_that_contradict_the_tree_are_warnings(tmp_path):
    (tmp_path / "tree.yaml").write_text("implies: {a: c}")
    for name, rows in {"train": "1.png,a,p\n2.png,a;c,q\n4.png,b,\n", "test": "3.png,a,p\n"}.items():
        (tmp_path / f"{name}.csv").write_text(f"image,labels,patient\n{rows}")
    for k in (1, 2, 3, 4):
        (tmp_path / f"{k}.png").write_bytes(photo(k))
    keys = {"val_split": "", "test_splits": ("test",), "tree": "tree.yaml", "group_column": "patient"}
    report = check_data(config_of(tmp_path, "csv", **keys))
    assert report["problems"] == [
        "split test shares 1 of its 1 group with split train (p); move the images of a group into one split, or clear "
        "data.group_column"
    ]
    splits = report["splits"].values()
    assert [(split["groups"], split["positive"]) for split in splits] == [(3, [2, 1, 2]), (1, [1, 0, 1])]
    assert re.search(r"^  groups +3 +1$", report_outcome(report).text(), re.MULTILINE)
    assert [text.partition(" have")[0] for text in report["warnings"] if "(data.tree)" in text] == [
        "1 of the 3 images of split train",
        "1 of the 1 images of split test",
    ]


def test_groups_in_two_spellings_are_told():
    first = split_of(["1", "2", "3"], groups=["patient 1", "", "x"])
    assert check_splits(first, [split_of(["4"], name="test", groups=["Patient_1"])])[:1] == [
        "groups that differ only in case, spaces, hyphens or underscores, and may be one: patient 1, Patient_1"
    ]
    assert not any("groups" in text for text in check_splits(first, [split_of(["4"], name="test")]))


def test_damaged_files_of_packed_data_are_problems(tmp_path):
    write_packed(tmp_path)
    shard = shard_of(tmp_path, "val")
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    outcome = report_outcome(check_data(config_of(tmp_path, "packed", val_split="val")))
    assert outcome.exit_code == 1
    assert f"problem: {shard} has changed since it was packed" in outcome.text()


def test_duplicate_images_are_reported(data_set):
    splits = {
        "train": [
            ("1.jpg", 1, "1000"),
            ("2.jpg", 2, "0100"),
            ("2.jpg", None, "0100"),
            ("3.jpg", 1, "1000"),
            ("4.jpg", 4, "0011"),
        ],
        "val": [("5.jpg", 1, "0001"), ("1.jpg", None, "1000"), ("6.jpg", 6, "1000")],
        "test": [("7.jpg", photo(4, (110, 90)), "0011")],
    }
    report = check_data(data_set(**splits))
    found = {
        (item["kind"], *item["splits"]): (item["images"], item["other_labels"], item["examples"])
        for item in report["duplicates"]
    }
    assert found == {
        ("id", "train", "train"): (1, 0, [["2.jpg", "2.jpg"]]),
        ("content", "train", "train"): (1, 0, [["1.jpg", "3.jpg"]]),
        ("id", "train", "val"): (1, 0, [["1.jpg", "1.jpg"]]),
        ("content", "train", "val"): (1, 1, [["1.jpg", "5.jpg"]]),
        ("content", "val", "val"): (1, 1, [["5.jpg", "1.jpg"]]),
        ("look", "train", "test"): (1, 0, [["4.jpg", "7.jpg"]]),
    }
    assert report["problems"] == [
        "split val shares 1 of its 3 images with split train (same id), such as 1.jpg as 1.jpg",
        "split val shares 1 of its 3 images with split train (same file content, 1 of them with other labels), "
        "such as 5.jpg as 1.jpg",
    ]
    assert any(
        line.startswith("split test shares 1 of its 1 images with split train (similar appearance)")
        for line in report["warnings"]
    )
    assert len(report["warnings"]) == 6


def test_the_text_is_short_for_many_classes_and_labels(data_set, monkeypatch):
    report = check_data(data_set(**GOOD))
    monkeypatch.setattr(check, "SHOWN_CLASSES", 2)
    text = report_outcome(report).text()
    lines = text.splitlines()
    classes = next(number for number, line in enumerate(lines) if line.startswith("class "))
    assert [line.split()[0] for line in lines[classes : classes + 4]] == ["class", "b", "…", "d"]
    assert "2 more (all with --json)" in lines[classes + 2]
    assert all(len(line) <= 120 for line in lines)
