"""Groups of images, such as the images of a patient, which are never in two parts."""

import time

import numpy as np
import pytest
from helpers.tables import data_settings, jsonl, lines, open_source, settings
from sklearn.model_selection import GroupKFold

from mlmoe_jax.data.sampling import assign_folds
from mlmoe_jax.data.sources.open import open_split


def medical(images: int, patients: int, labels: int, rarest: float) -> tuple[np.ndarray, np.ndarray]:
    """Return codes of labels that a patient tends to keep, with frequencies down to `rarest`, and the patients."""
    draw = np.random.default_rng(0)
    often = draw.gamma(0.5, size=patients)
    patient = np.concatenate([np.arange(patients), draw.choice(patients, images - patients, p=often / often.sum())])
    odds = np.geomspace(1 / 6, rarest, labels) * draw.gamma(0.3, 3, (patients, labels))
    return (draw.random((images, labels)) < odds[patient]).astype(np.int8), patient


# ------------------------------------------------------------------------------------------------------ folds and parts
@pytest.mark.parametrize("tables", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_group_of_random_tables_is_in_two_parts(tmp_path, tables):
    draw = np.random.default_rng(tables)
    for seed in range(tables):
        images = int(draw.integers(4, 80))
        group = draw.integers(0, draw.integers(2, 30), images)
        group[:2], names = (0, 1), draw.choice(["", "a", "b", "a;b", "c"], images)
        rows = [f"{row}.png,{names[row]},{f'p{group[row]}' if draw.random() < 0.9 else ''}" for row in range(images)]
        (tmp_path / "all.csv").write_text("\n".join(["image,labels,patient", *rows, "last.png,a,p1"]))
        keys = {"table": "all.csv", "group_column": "patient", "bad_images": "skip", "split_seed": seed}
        data = settings(tmp_path, val_fraction=0.3, **keys)
        train, val = (open_split(data, name, keep_missing=True) for name in ("train", "val"))
        assert {*train.ids, *val.ids} == {*(f"{row}.png" for row in range(images)), "last.png"}
        assert len(train) + len(val) == images + 1
        assert not set(filter(None, train.groups)) & set(filter(None, val.groups))
        count = len(set(train.units))
        fold = assign_folds(train.labels, min(5, count), seed, train.units)
        assert len(set(zip(fold.tolist(), train.units, strict=True))) == count
        assert len(np.unique(fold)) == min(5, count)


def patients(numbers: np.ndarray) -> list[str]:
    return [f"p{number}" for number in numbers]


def test_folds_of_groups_have_the_shares_of_each_label():
    codes, patient = medical(3000, 900, 8, 1 / 40)
    fold = assign_folds(codes, 5, 0, patients(patient))
    random = GroupKFold(5, shuffle=True, random_state=0).split(codes, groups=patient)
    errors = [
        np.mean([np.abs(codes[rows].mean(axis=0) / codes.mean(axis=0) - 1) for rows in parts])
        for parts in ([np.flatnonzero(fold == number) for number in range(5)], [rows for _, rows in random])
    ]
    assert errors[0] < errors[1] / 3
    assert np.bincount(fold).tolist() == [600] * 5


def test_a_large_table_has_folds_in_seconds():
    codes, patient = medical(112_120, 30_805, 14, 1 / 500)
    began = time.process_time()
    fold = assign_folds(codes, 5, 0, patients(patient))
    assert time.process_time() - began < 5
    assert np.ptp([codes[fold == number].sum(axis=0) for number in range(5)], axis=0).max() <= 3
    assert len(np.unique(np.stack([fold, patient]), axis=1).T) == 30_805


@pytest.mark.parametrize("grouped", [False, True])
def test_folds_depend_neither_on_the_order_of_images_nor_on_that_of_labels(grouped):
    codes, patient = medical(200, 60, 12, 1 / 40)
    names = patients(patient) if grouped else [f"{row}.png" for row in range(200)]
    rows, columns = np.random.default_rng(0).permutation(200), np.random.default_rng(1).permutation(12)
    fold = assign_folds(codes, 5, 0, names)
    np.testing.assert_array_equal(assign_folds(codes[rows][:, columns], 5, 0, [names[row] for row in rows]), fold[rows])
    assert (assign_folds(codes, 5, 1, names) != fold).any()


@pytest.mark.parametrize("sizes", [(96, 1, 1, 1, 1), (1, 1), (50, 50), (1, 1, 10)])
def test_no_fold_is_empty_whatever_the_sizes_of_groups(sizes):
    group = np.repeat(np.arange(len(sizes)), sizes)
    for codes in (np.ones((len(group), 1), np.int8), np.zeros((len(group), 0), np.int8), group[:, None] == [0, 1]):
        fold = assign_folds(codes.astype(np.int8), len(sizes), 0, patients(group))
        assert len(np.unique(fold)) == len(sizes)


# ------------------------------------------------------------------------------------------------------------ tables
def test_a_column_names_the_groups(tmp_path):
    (tmp_path / "train.csv").write_text('image,labels,patient\na.png,x," 007 "\nb.png,,\nc.png,y,007\n')
    assert open_source(settings(tmp_path, group_column="patient"), "train").groups == ["007", "", "007"]
    assert open_source(settings(tmp_path), "train").groups is None
    (tmp_path / "test.csv").write_text("image,labels,patient\na.png,x,7.0\nb.png,,\nc.png,y,a.0\n")  # by pandas
    assert open_source(settings(tmp_path, group_column="patient"), "test", ("x", "y")).groups == ["7", "", "a.0"]
    (tmp_path / "train.csv").write_text("image,x,patient,y\na.png,1,p,0\nb.png,0,q,\n")
    split = open_source(settings(tmp_path, group_column="patient", label_column=""), "train")
    assert (split.classes, split.groups) == (("x", "y"), ["p", "q"])
    assert split.take(np.array([1, 0]), "val").groups == ["q", "p"]
    with pytest.raises(ValueError, match="do not fit together"):
        type(split)("train", split.classes, split.labels, split.ids, split.images, ["p"])


def test_a_key_names_the_groups(tmp_path, refusal):
    rows = [{"image": f"{k}.png", "labels": ["x"]} for k in range(4)]
    rows[0]["patient"], rows[1]["patient"], rows[2]["patient"] = 7, "p", None
    (tmp_path / "train.jsonl").write_text(lines(*rows))
    data = jsonl(tmp_path, group_column="patient")
    assert open_source(data, "train").groups == ["7", "p", "", ""]
    (tmp_path / "train.jsonl").write_text(lines({"image": "a.png", "labels": [], "patient": ["p"]}))
    sentence = refusal(open_source, data, "train")
    assert "line 1 should be a JSON object with a path under 'image', and under 'labels' " in sentence


def test_mistakes_of_groups_are_explained(tmp_path, refusal):
    (tmp_path / "train.csv").write_text("image,labels,patient,site\na.png,x,p,\nb.png,x,p,\n")
    keys = {"bad_images": "skip", "val_fraction": 0.5}
    assert refusal(open_split, settings(tmp_path, group_column="person"), "train") == (
        f"{tmp_path}/train.csv has no column 'person', which data.group_column names (columns: image, labels, patient, "
        "site); correct one of the two"
    )
    assert refusal(open_split, settings(tmp_path, group_column="site"), "train").startswith(
        f"{tmp_path}/train.csv has no group in the column 'site' for any image of split train; "
    )
    (tmp_path / "no_values.csv").write_text("image,labels,patient\na.png,x,NaN\nb.png,x,NaN\n")
    sentence = refusal(open_split, settings(tmp_path, table="no_values.csv", group_column="patient"), "train")
    assert sentence.startswith(f"{tmp_path}/no_values.csv has the group 'NaN', which stands for no value; ")
    sentence = refusal(open_split, settings(tmp_path, group_column="patient", **keys), "val")
    assert " of 2 training images in 1 group leaves none for training; " in sentence
    sentence = refusal(open_split, data_settings("synthetic", group_column="patient"), "train")
    assert sentence.startswith("data.group_column=patient is a column of tables (csv, jsonl), and the data set ")
