"""NIH ChestX-ray14 and CheXpert: their groups and folders, and the published tables of torchxrayvision."""

import csv
import gzip
import importlib.util
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.published_data import write_chestxray14, write_chexpert
from helpers.tables import data_settings

from mlmoe_jax.data.label_codes import POSITIVE, UNKNOWN
from mlmoe_jax.data.sources.chest import FINDINGS, OBSERVATIONS
from mlmoe_jax.data.sources.open import open_split


def test_the_tables_may_be_in_the_root_or_in_the_folder_of_the_archive(tmp_path):
    write_chexpert(tmp_path)
    train, inside = (
        open_split(data_settings("chexpert", root), "train") for root in (tmp_path, tmp_path / "CheXpert-v1.0-small")
    )
    assert inside.ids == train.ids


def test_the_images_of_a_patient_are_a_group(tmp_path):
    write_chestxray14(tmp_path)
    write_chexpert(tmp_path)
    assert open_split(data_settings("chestxray14", tmp_path), "all").groups == ["1", "1", "2", "3"]
    of_stanford = open_split(data_settings("chexpert", tmp_path), "train")
    assert of_stanford.groups == ["patient00000", "patient00001", "patient00002"]


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
