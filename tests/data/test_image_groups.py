"""Groups of images, such as the images of a patient, which are never in two parts."""

import time

import numpy as np
import pytest
from helpers.tables import data_settings, jsonl, lines, open_source, settings
from sklearn.model_selection import GroupShuffleSplit

from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.split import number_groups
from mlmoe_jax.data.stratified_split import draw_groups
from mlmoe_jax.training.logistic.penalty_search import stratified_folds


def medical(images: int, patients: int, labels: int, rarest: float) -> tuple[np.ndarray, np.ndarray]:
    """Return codes of labels that a patient tends to keep, with frequencies down to `rarest`, and the patients."""
    draw = np.random.default_rng(0)
    often = draw.gamma(0.5, size=patients)
    patient = np.concatenate([np.arange(patients), draw.choice(patients, images - patients, p=often / often.sum())])
    odds = np.geomspace(1 / 6, rarest, labels) * draw.gamma(0.3, 3, (patients, labels))
    return (draw.random((images, labels)) < odds[patient]).astype(np.int8), patient


def share_errors(codes: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the relative error of the share of each label among the rows, and in the rest."""
    shares = codes.mean(axis=0)
    return np.abs([codes[rows].mean(axis=0) / shares - 1, np.delete(codes, rows, axis=0).mean(axis=0) / shares - 1])


# ------------------------------------------------------------------------------------------------------ drawn groups
def test_images_without_a_name_are_groups_of_their_own():
    assert number_groups(["b", "", "a", "b", ""], 5).tolist() == [0, 1, 2, 0, 3]
    assert number_groups(None, 3).tolist() == [0, 1, 2]


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
        fold = stratified_folds(train.labels, 5, seed, numbers := train.group_numbers)
        assert len(np.unique(np.stack([fold, numbers]), axis=1).T) == len(np.unique(numbers))
        assert len(np.unique(fold)) == fold.max() + 1 >= min(2, len(np.unique(numbers)))


def test_labels_have_their_shares_in_both_parts():
    codes, patient = medical(3000, 900, 8, 1 / 40)
    rows = draw_groups(codes, patient, 600, 0)
    assert len(rows) == pytest.approx(600, abs=3)
    random = GroupShuffleSplit(5, test_size=0.2, random_state=0).split(codes, groups=patient)
    theirs = [share_errors(codes, rows).mean() for _, rows in random]
    assert share_errors(codes, rows).mean() < min(theirs) / 5
    assert share_errors(codes, rows).max() < 0.1


def test_a_large_table_is_split_in_seconds():
    codes, patient = medical(112_120, 30_805, 14, 1 / 500)
    began = time.process_time()
    rows = draw_groups(codes, patient, 22_424, 0)
    assert time.process_time() - began < 5
    assert share_errors(codes, rows).max() < 0.02
    assert not set(patient[rows]) & set(np.delete(patient, rows))


def test_a_label_of_two_groups_is_in_both_parts_and_the_draw_follows_the_seed():
    codes, patient = np.zeros((60, 2), np.int8), np.arange(60) // 3
    codes[[0, 5, 6], [0, 0, 1]] = 1
    draws = [draw_groups(codes, patient, 12, seed) for seed in range(4)]
    for rows in draws:
        assert len(rows) == 12
        assert codes[rows, 0].sum() == 1
    np.testing.assert_array_equal(draws[0], draw_groups(codes, patient, 12, 0))
    np.testing.assert_array_equal(draws[0], draw_groups(codes, 7 * patient + 5, 12, 0), "numbers are only names")
    assert len({tuple(rows) for rows in draws}) > 1


@pytest.mark.parametrize("sizes", [(96, 1, 1, 1, 1), (1, 1), (50, 50)])
def test_both_parts_have_a_group_whatever_its_size(sizes):
    group = np.repeat(np.arange(len(sizes)), sizes)
    for count in (1, len(group) // 5, len(group) - 1):
        rows = draw_groups(np.ones((len(group), 1), np.int8), group, count, 0)
        assert 0 < len(rows) < len(group)
    folds = stratified_folds(np.ones((len(group), 1), np.int8), len(sizes), 0, group)
    assert len(np.unique(folds)) == folds.max() + 1 >= 2
    assert len(draw_groups(np.ones((4, 1), np.int8), np.zeros(4, int), 2, 0)) == 0


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
    sentence = refusal(open_split, settings(tmp_path, group_column="patient", **keys), "val")
    assert sentence.startswith("all 2 training images are one group, which cannot be in two parts; ")
    sentence = refusal(open_split, data_settings("synthetic", group_column="patient"), "train")
    assert sentence.startswith("data.group_column=patient is a column of tables (csv, jsonl), and the data set ")
