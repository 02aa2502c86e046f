"""NIH ChestX-ray14 and CheXpert, in small tables and in the published tables of the package torchxrayvision."""

import csv
import gzip
import importlib.util
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.tables import data_settings
from PIL import Image

from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE, UNKNOWN
from mlmoe_jax.data.sources.chest import DISEASES, FINDINGS, OBSERVATIONS
from mlmoe_jax.data.sources.open import count_labels, open_split

NIH_HEADER = "Image Index,Finding Labels,Follow-up #,Patient ID,OriginalImage[Width,Height],\n"
NIH_ROWS = ("Hernia|Mass,0,1", "No Finding,1,1", "Effusion,0,2", "Pleural_Thickening,0,3")
CHEXPERT_HEADER = ",".join(("Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", *OBSERVATIONS))
PATH = "CheXpert-v1.0-small/{}/patient0000{}/study1/view1_frontal.jpg"


@pytest.fixture
def nih(tmp_path):
    rows = [f"{k}.png,{row},2682,2749,\n" for k, row in enumerate(NIH_ROWS)]
    (tmp_path / "Data_Entry_2017.csv").write_text(NIH_HEADER + "".join(rows))
    (tmp_path / "train_val_list.txt").write_text("3.png\n0.png\n1.png\n")
    (tmp_path / "test_list.txt").write_text("2.png")
    for k, place in enumerate(("images_001/images", "images_012/images", "images", "images_012/images")):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        Image.new("L", (k + 4, 4)).save(tmp_path / place / f"{k}.png")
    return tmp_path


def names_of(split, code=POSITIVE) -> list[list[str]]:
    return [[split.classes[k] for k in np.flatnonzero(row == code)] for row in split.labels]


def test_chestxray14_has_the_official_split_and_all_images(nih):
    train, test, whole = (open_split(data_settings("chestxray14", nih), name) for name in ("train", "test", "all"))
    assert train.ids == ["0.png", "1.png", "3.png"]
    assert names_of(train) == [["Mass", "Hernia"], [], ["Pleural_Thickening"]]
    assert ((train.labels == NEGATIVE).sum(), train.groups) == (39, ["1", "1", "3"])
    assert [image.shape[1] for image in whole.images] == [4, 5, 6, 7]
    assert (test.ids, names_of(test)) == (["2.png"], [["Effusion"]])
    assert count_labels(data_settings("chestxray14", nih)) == 14


def test_mistakes_in_chestxray14_are_explained(nih, refusal):
    (nih / "test_list.txt").write_text("2.png\n9.png\n")
    sentence = refusal(open_split, data_settings("chestxray14", nih), "test")
    assert sentence == f"{nih}/Data_Entry_2017.csv is damaged: it has 1 of the 2 images of test_list.txt"
    (nih / "images/2.png").unlink()
    assert f"{nih}/images/2.png" in refusal(open_split, data_settings("chestxray14", nih), "all")
    (nih / "Data_Entry_2017_v2020.csv").write_text("Image Index,Finding Labels,Patient ID\na.png,Flu,1\n")
    sentence = refusal(open_split, data_settings("chestxray14", nih), "all")
    assert "line 2 has the label 'Flu', which is not one of the 14 classes" in sentence
    (nih / "Data_Entry_2017_v2020.csv").write_text("Image Index,Patient ID\n")
    assert "has no column 'Finding Labels'" in refusal(open_split, data_settings("chestxray14", nih), "all")
    (nih / "train_val_list.txt").unlink()
    assert "docs/datasets.md#chestx-ray14" in refusal(open_split, data_settings("chestxray14", nih), "train")


@pytest.fixture
def chexpert(tmp_path):
    cells = {1: "1.0,,,,,,,,,0.0,,,,1.0", 2: ",,-1.0,1.0,,-1.0,0.0,,,,,,,", 3: ",,,,,,-1.0,,,,,,,0.0"}
    rows = [f"{PATH.format('train', number)},Male,60,Frontal,AP,{row}" for number, row in cells.items()]
    valid = f"{PATH.format('valid', 4)},Male,60,Lateral,,{','.join(['0.0'] * 13 + ['1.0'])}"
    folder = tmp_path / "CheXpert-v1.0-small"
    folder.mkdir()
    (folder / "train.csv").write_text("\n".join([CHEXPERT_HEADER, *rows]))
    (folder / "valid.csv").write_text(f"{CHEXPERT_HEADER}\n{valid}\n")
    for place in [PATH.format("train", number) for number in cells] + [PATH.format("valid", 4)]:
        (tmp_path / place).parent.mkdir(parents=True)
        Image.new("L", (6, 4)).save(tmp_path / place)
    return tmp_path


def test_uncertain_and_empty_cells_of_chexpert_are_unknown(chexpert):
    train, valid = (open_split(data_settings("chexpert", chexpert), name) for name in ("train", "valid"))
    assert train.ids[1] == "train/patient00002/study1/view1_frontal.jpg"
    assert train.groups == ["patient00001", "patient00002", "patient00003"]
    assert train.images[2].shape == (4, 6, 3)
    assert names_of(train) == [["No Finding", "Support Devices"], ["Lung Opacity"], []]
    assert names_of(train, NEGATIVE) == [list(DISEASES), ["No Finding", "Consolidation"], ["Support Devices"]]
    assert (train.labels[2] == UNKNOWN).sum() == 13
    assert names_of(valid, NEGATIVE) == [list(OBSERVATIONS[:-1])]
    beside = data_settings("chexpert", chexpert / "CheXpert-v1.0-small")
    assert open_split(beside, "train").ids == train.ids


def test_mistakes_in_chexpert_are_explained(chexpert, refusal):
    table = chexpert / "CheXpert-v1.0-small/train.csv"
    text = table.read_text()
    damage = "is damaged: an observation is '2' and should be 1.0, 0.0, -1.0 or empty"
    for wrong, says in ((text.replace("-1.0", "2", 1), damage),
                        (text.replace(",Male", "", 1), "line 2 has 18 cells"),
                        (text.replace("Path", "File", 1), "has no column 'Path'")):  # fmt: skip
        table.write_text(wrong)
        sentence = refusal(open_split, data_settings("chexpert", chexpert), "train")
        assert sentence.startswith(f"{table} {says}")
    table.unlink()
    assert "docs/datasets.md#chexpert" in refusal(open_split, data_settings("chexpert", chexpert), "train")


# ---------------------------------------------------------------------------------------------------- published tables
@pytest.fixture
def package() -> Path:
    """The folder of torchxrayvision, which is not imported because it needs torch."""
    spec = importlib.util.find_spec("torchxrayvision")
    if spec is None:
        pytest.skip("the published tables are in the package torchxrayvision, which is not installed")
    return Path(spec.origin).parent


def unpacked(package: Path, name: str, place: Path) -> list[dict[str, str]]:
    """Write a table of the package to `place`; return its rows."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(package / "data" / name) as source, place.open("wb") as file:
        shutil.copyfileobj(source, file)
    with place.open(newline="") as file:
        return list(csv.DictReader(file))


def settings_of(name, root):
    return data_settings(name, root, bad_images="skip", val_fraction=0.1)


@pytest.mark.slow
def test_the_published_table_of_chestxray14(package, tmp_path):
    """torchxrayvision counts a finding where its name is in the cell."""
    rows = unpacked(package, "Data_Entry_2017_v2020.csv.gz", tmp_path / "Data_Entry_2017_v2020.csv")
    data = settings_of("chestxray14", tmp_path)
    data.train_split, data.val_split = "all", "val"
    began = time.process_time()
    train, val = (open_split(data, name, keep_missing=True) for name in ("all", "val"))
    assert time.process_time() - began < 10
    assert len(train) + len(val) == len(rows) == 112_120
    counts = [sum(name in row["Finding Labels"] for row in rows) for name in FINDINGS]
    assert ((train.labels == 1).sum(axis=0) + (val.labels == 1).sum(axis=0)).tolist() == counts
    assert len(set(train.groups)) + len(set(val.groups)) == len({*train.groups, *val.groups}) == 30_805
    whole = np.array(counts) / len(rows)
    for part, error in ((train, 0.05), (val, 0.5)):  # the rarest finding has 227 images
        assert np.abs((part.labels == 1).mean(axis=0) / whole - 1).max() < error


@pytest.mark.slow
def test_the_published_table_of_chexpert(package, tmp_path):
    """torchxrayvision sets all but Support Devices to 0 where No Finding is 1, and takes -1 and empty as unknown."""
    rows = unpacked(package, "chexpert_train.csv.gz", tmp_path / "train.csv")
    data = settings_of("chexpert", tmp_path)
    data.val_fraction = 0
    split = open_split(data, "train", keep_missing=True)
    assert len(split) == len(rows) == 223_414
    assert split.groups == [re.search(r"patient\d+", row["Path"])[0] for row in rows]
    healthy = np.array([row["No Finding"] == "1.0" for row in rows])
    for k, name in enumerate(OBSERVATIONS[1:], 1):
        values = np.array([row[name] or "nan" for row in rows], np.float32)
        if name != "Support Devices":
            values[healthy] = 0
        values[values == -1] = np.nan
        np.testing.assert_array_equal(np.where(split.labels[:, k] == UNKNOWN, np.nan, split.labels[:, k]), values)
    np.testing.assert_array_equal(split.labels[:, 0] == POSITIVE, healthy)
