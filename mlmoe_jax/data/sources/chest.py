"""Chest X-rays with labels that a program read from reports, NIH ChestX-ray14 and CheXpert, from the published layouts.

`chestxray14`: 112,120 images of 30,805 patients, 14 findings. An image with "No Finding" has no label.

    Data_Entry_2017_v2020.csv or Data_Entry_2017.csv     # Image Index, Finding Labels (separated by |), Patient ID
    train_val_list.txt, test_list.txt                    # the official split, a file name per line
    images_001/images/00000001_000.png, …                # images_001 to images_012, or one folder images

`chexpert`: 223,414 training and 234 validation images, 14 observations: 1.0 present, 0.0 absent, -1.0 uncertain, or
empty. Uncertain and empty cells are unknown, except where "No Finding" says more, see `_apply_no_finding`.

    train.csv, valid.csv                                 # Path, Sex, Age, Frontal/Lateral, AP/PA, 14 observations
    train/patient00001/study1/view1_frontal.jpg, …

The images of a patient are a group. Images without a positive label are kept.
"""

import csv
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.images import ImageFiles
from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE, UNKNOWN
from mlmoe_jax.data.sources.source import Published, Source, require_split
from mlmoe_jax.data.split import Split
from mlmoe_jax.runtime.files import damage_explained
from mlmoe_jax.runtime.text import some

NIH = Published(
    "chestxray14",
    "Data_Entry_2017_v2020.csv, train_val_list.txt, test_list.txt and images_001 to images_012",
    "https://nihcc.app.box.com/v/ChestXray-NIHCC",
    "chestx-ray14",
)
LISTS = {"train": "train_val_list.txt", "test": "test_list.txt", "all": None}
NO_FINDING = "No Finding"
FINDINGS = (
    *("Atelectasis", "Cardiomegaly", "Effusion", "Infiltration", "Mass", "Nodule", "Pneumonia", "Pneumothorax"),
    *("Consolidation", "Edema", "Emphysema", "Fibrosis", "Pleural_Thickening", "Hernia"),
)

STANFORD = Published(
    "chexpert",
    "train.csv, valid.csv, train and valid",
    "https://stanfordmlgroup.github.io/competitions/chexpert/",
    "chexpert",
)
ARCHIVES = ("CheXpert-v1.0-small", "CheXpert-v1.0")
DISEASES = (
    *("Enlarged Cardiomediastinum", "Cardiomegaly", "Lung Opacity", "Lung Lesion", "Edema", "Consolidation"),
    *("Pneumonia", "Atelectasis", "Pneumothorax", "Pleural Effusion", "Pleural Other", "Fracture"),
)
OBSERVATIONS = (NO_FINDING, *DISEASES, "Support Devices")
CELLS = {"1.0": POSITIVE, "0.0": NEGATIVE, "-1.0": UNKNOWN, "": UNKNOWN}


# ------------------------------------------------------------------------------------------------------- ChestX-ray14
def open_chestxray14(data_config: ConfigDict, split: str, classes: Sequence[str] | None = None) -> Split:
    """Open train (the official training and validation images), test, or all. Images are in the order of the table."""
    require_split(NIH.name, split, LISTS)
    folder = NIH.folder(data_config.root)
    table = max(folder.glob("Data_Entry_2017*.csv"), default=None)
    if table is None:
        raise NIH.missing(f"there is no table Data_Entry_2017_v2020.csv in {folder}")
    listed = LISTS[split] and {line.strip() for line in NIH.lines(folder / LISTS[split])} - {""}
    with damage_explained(table):
        rows = list(_rows(NIH, table, ("Image Index", "Finding Labels", "Patient ID")))
        if listed is not None:
            rows = [row for row in rows if row[0] in listed]
            if len(rows) != len(listed):
                raise ValueError(f"it has {len(rows):,} of the {len(listed):,} images of {LISTS[split]}")
        place, labels = {name: k for k, name in enumerate(FINDINGS)}, np.zeros((len(rows), len(FINDINGS)), np.int8)
        for row, (name, findings, _) in enumerate(rows):
            present = findings.split("|") if findings != NO_FINDING else []
            if not place.keys() >= set(present):
                raise ValueError(f"{name} has the findings {findings!r}, which are not all of {some(FINDINGS, 14)}")
            labels[row, [place[finding] for finding in present]] = POSITIVE
    names, patients = [name for name, *_ in rows], [patient for *_, patient in rows]
    return Split(split, FINDINGS, labels, names, ImageFiles(folder, _with_folders(names, folder)), groups=patients)


def _with_folders(names: Sequence[str], folder: Path) -> list[str]:
    """Return the paths of images below `folder`. An image that is in no folder of images is expected in `images`."""
    places = [place for place in (*sorted(folder.glob("images_*/images")), folder / "images") if place.is_dir()]
    place_of = {name: place.relative_to(folder) for place in places for name in os.listdir(place)}
    return [f"{place_of.get(name, 'images')}/{name}" for name in names]


# ----------------------------------------------------------------------------------------------------------- CheXpert
def open_chexpert(data_config: ConfigDict, split: str, classes: Sequence[str] | None = None) -> Split:
    """Open train or valid, with ids such as train/patient00001/study1/view1_frontal.jpg in the order of the table.

    `data.root` may be the folder of the tables, or the folder above it.
    """
    require_split(STANFORD.name, split, ("train", "valid"))
    root = STANFORD.folder(data_config.root)
    folder = next((place for name in ARCHIVES if (place := root / name).is_dir()), root)
    table = folder / f"{split}.csv"
    with damage_explained(table):
        rows = list(_rows(STANFORD, table, ("Path", *OBSERVATIONS)))
        files = [path.split("/", 1)[1] for path, *_ in rows]
        patients = [file.split("/")[1] for file in files]
        if unknown := {cell for _, *cells in rows for cell in cells} - CELLS.keys():
            raise ValueError(f"an observation is {min(unknown)!r} and should be 1.0, 0.0, -1.0 or empty")
        codes = [CELLS[cell] for _, *cells in rows for cell in cells]
    labels = np.array(codes, np.int8).reshape(len(rows), len(OBSERVATIONS))
    return Split(split, OBSERVATIONS, _apply_no_finding(labels), files, ImageFiles(folder, files), groups=patients)


def _apply_no_finding(labels: np.ndarray) -> np.ndarray:
    """Return labels i8[N,14] with what "No Finding" says: that no disease is present or uncertain.

    The diseases of an image with this label are absent, and an image with a disease is without this label.
    """
    labels = labels.copy()
    none, diseases = labels[:, 0], labels[:, 1:-1]  # views
    none[(diseases == POSITIVE).any(axis=1)] = NEGATIVE
    diseases[none == POSITIVE] = NEGATIVE
    return labels


# --------------------------------------------------------------------------------------------------------------- both
def _rows(published: Published, table: Path, columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of `columns` for each line of a table; KeyError or ValueError for a table of another form."""
    reader = csv.reader(published.lines(table))
    header = {name: at for at, name in enumerate(next(reader, ()))}
    places = [header[name] for name in columns]
    for cells in reader:
        if len(cells) <= max(places):
            raise ValueError(f"line {reader.line_num} has {len(cells)} cells")
        yield tuple(cells[at] for at in places)


CHESTXRAY14 = Source(open_chestxray14, labels=lambda data_config: len(FINDINGS), published=NIH)
CHEXPERT = Source(open_chexpert, labels=lambda data_config: len(OBSERVATIONS), published=STANFORD)
