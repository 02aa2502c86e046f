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

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE, UNKNOWN
from mlmoe_jax.data.sources.rows import ImageRow, Listing, select_split
from mlmoe_jax.data.sources.source import DataSource, Published, find_in_folders
from mlmoe_jax.data.sources.tables import read_columns
from mlmoe_jax.data.split import Split
from mlmoe_jax.runtime.files import damage_explained

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
CODE_OF_OBSERVATION = {"1.0": POSITIVE, "0.0": NEGATIVE, "-1.0": UNKNOWN, "": UNKNOWN}


# ------------------------------------------------------------------------------------------------------- ChestX-ray14
def open_chestxray14(data_config: ConfigDict, split: str) -> Split:
    """Open the split train (the official training and validation images), test or all, in the order of the table."""
    folder = NIH.folder(data_config.root)
    table = max(folder.glob("Data_Entry_2017*.csv"), default=None)
    if table is None:
        raise NIH.missing(f"there is no table Data_Entry_2017_v2020.csv in {folder}")
    names = set(NIH.lines(folder / LISTS[split])) if LISTS[split] else None
    with damage_explained(table):
        rows = list(_nih_rows(table))
        if names is not None:
            rows = [row for row in rows if row.image in names]
            if len(rows) != len(names):
                raise ValueError(f"it has {len(rows):,} of the {len(names):,} images of {LISTS[split]}")
        opened = select_split(rows, Listing(table, split, folder), FINDINGS)
    parts = [path.relative_to(folder) for path in sorted(folder.glob("images_*/images"))]
    return find_in_folders(opened, [*parts, "images"])


def _nih_rows(table: Path) -> Iterator[ImageRow]:
    columns = ("Image Index", "Finding Labels", "Patient ID")
    for line, (name, findings, patient) in read_columns(NIH.text(table), columns, table):
        labels = findings.split("|") if findings != NO_FINDING else ()
        yield ImageRow(name, dict.fromkeys(labels, POSITIVE), group=patient, line=line)


# ----------------------------------------------------------------------------------------------------------- CheXpert
def open_chexpert(data_config: ConfigDict, split: str) -> Split:
    """Open the split train or valid. Ids are paths such as train/patient00001/study1/view1_frontal.jpg.

    Images are in the order of the table. `data.root` is the folder of the tables or its parent folder.
    """
    root = STANFORD.folder(data_config.root)
    folder = next((root / name for name in ARCHIVES if (root / name).is_dir()), root)
    table = folder / f"{split}.csv"
    with damage_explained(table):
        opened = select_split(_chexpert_rows(table), Listing(table, split, folder), OBSERVATIONS)
    return replace(opened, labels=_apply_no_finding(np.array(opened.labels)))


def _chexpert_rows(table: Path) -> Iterator[ImageRow]:
    for line, (path, *cells) in read_columns(STANFORD.text(table), ("Path", *OBSERVATIONS), table):
        if unknown := set(cells) - CODE_OF_OBSERVATION.keys():
            raise ValueError(f"an observation is {min(unknown)!r} and should be 1.0, 0.0, -1.0 or empty")
        file = path.split("/", 1)[1]
        codes = map(CODE_OF_OBSERVATION.__getitem__, cells)
        yield ImageRow(file, dict(zip(OBSERVATIONS, codes, strict=True)), group=file.split("/")[1], line=line)


def _apply_no_finding(labels: np.ndarray) -> np.ndarray:
    """Return labels i8[N,14] that are consistent with "No Finding": it means that no disease is present or uncertain.

    If an image has this label, its unknown diseases become negative. If an image has a disease, "No Finding" becomes
    negative.
    """
    none, diseases = labels[:, 0], labels[:, 1:-1]  # views
    none[(diseases == POSITIVE).any(axis=1)] = NEGATIVE
    diseases[none == POSITIVE] = NEGATIVE
    return labels


CHESTXRAY14 = DataSource(open_chestxray14, splits=tuple(LISTS), labels=len(FINDINGS), published=NIH)
CHEXPERT = DataSource(open_chexpert, splits=("train", "valid"), labels=len(OBSERVATIONS), published=STANFORD)
