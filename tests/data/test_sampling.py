"""Images that are held out, folds, and groups such as the images of a patient, which are never in two parts."""

import hashlib
import time
import unicodedata

import numpy as np
import pytest
from helpers.tables import lines, settings, split_of, write

from mlmoe_jax.data.label_matrix import LabelMatrix, few_positives
from mlmoe_jax.data.sampling import assign_folds, draw_held_out, draw_rows
from mlmoe_jax.data.sources.open import open_split


# ------------------------------------------------------------------------------------------------------ held-out images
def specified(names: list[str], seed: int, fraction: float) -> list[bool]:
    """Draw as docs/evaluation.md describes it."""
    digests = [hashlib.sha256(str(seed).encode() + b"\0" + name.encode()).hexdigest() for name in names]
    numbers = [int(digest[:16], 16) / 2**64 for digest in digests]
    least = min(numbers)
    return [number < fraction or number == least for number in numbers]


@pytest.mark.parametrize("seed", [0, 17])
def test_the_draw_is_as_specified(seed):
    names = [f"träger/{number}.jpg" for number in range(3000)]
    held_out = draw_held_out(names, 0.1, seed)
    assert held_out.tolist() == specified(names, seed, 0.1)
    assert draw_held_out(names[:50], 1e-9, seed).tolist() == specified(names[:50], seed, 1e-9), "one image at least"
    decomposed = [unicodedata.normalize("NFD", name) for name in names]  # as on a Mac
    assert (draw_held_out(decomposed, 0.1, seed) == held_out).all()


@pytest.mark.parametrize("column", ["", "patient"])
def test_images_are_held_out_by_the_name_of_their_group_or_their_own(tmp_path, column):
    rows = [(f"{row}.png", f"p{row // 6}" if row % 3 == 0 else "") for row in range(60)]
    text = "".join(f"{name},a,{patient}\n" for name, patient in rows)
    (tmp_path / "all.csv").write_text(f"image,labels,patient\n{text}")
    data = settings(tmp_path, table="all.csv", bad_images="skip", val_fraction=0.3, group_column=column)
    train, val = (open_split(data, name, keep_missing=True) for name in ("train", "val"))
    held_out = specified([(column and patient) or name for name, patient in rows], 0, 0.3)
    for split, is_held_out in ((train, False), (val, True)):
        assert split.ids == [name for (name, _), held in zip(rows, held_out, strict=True) if held == is_held_out]
    assert [split.usage[0].used for split in (train, val)] == 2 * [{"train": len(train), "val": len(val)}]


@pytest.mark.parametrize(
    ("positives", "says"),
    [
        ((10, 10, 0), ""),
        ((9, 9, 40), "a median of 9 positives per label"),
        ((1, 0, 1), "a median of 1 positives per label"),
        ((), ""),
    ],
)
def test_few_positives_of_the_held_out_images_are_said(positives, says):
    labels = np.arange(40)[:, None] < np.array(positives, int)
    assert few_positives(np.where(labels, 1, -1).astype(np.int8)) == says


# --------------------------------------------------------------------------------------------------------------- groups
def medical(images: int, patients: int, labels: int, rarest: float) -> tuple[np.ndarray, np.ndarray]:
    """Return codes of labels that a patient tends to keep, with frequencies down to `rarest`, and the patients."""
    draw = np.random.default_rng(0)
    often = draw.gamma(0.5, size=patients)
    patient = np.concatenate([np.arange(patients), draw.choice(patients, images - patients, p=often / often.sum())])
    odds = np.geomspace(1 / 6, rarest, labels) * draw.gamma(0.3, 3, (patients, labels))
    return (draw.random((images, labels)) < odds[patient]).astype(np.int8), patient


# ------------------------------------------------------------------------------------------------------ folds and parts
def patients(numbers: np.ndarray) -> list[str]:
    return [f"p{number}" for number in numbers]


def test_a_large_table_has_folds_of_equal_sizes_and_shares_of_each_label_in_seconds():
    codes, patient = medical(56_000, 15_000, 14, 1 / 500)
    began = time.process_time()
    fold = assign_folds(codes, 5, 0, patients(patient))
    assert time.process_time() - began < 3
    assert np.ptp([codes[fold == number].sum(axis=0) for number in range(5)], axis=0).max() <= 3
    assert np.bincount(fold).tolist() == [11_200] * 5
    assert len(np.unique(np.stack([fold, patient]), axis=1).T) == 15_000


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
@pytest.mark.parametrize(
    ("name", "text", "groups"),
    [
        ("csv", 'image,labels,patient\na.png,x," 007 "\nb.png,,\nsub/c.png,y,007\n', ["007", "", "007"]),
        ("csv", "image,labels,patient\na.png,x,7.0\nb.png,,\nsub/c.png,y,a.0\n", ["7", "", "a.0"]),  # by pandas
        ("wide", "image,x,patient,y\na.png,1,p,0\nb.png,0,q,\n", ["p", "q"]),
        (
            "jsonl",
            lines(
                {"image": "a.png", "labels": ["x"], "patient": 7},
                {"image": "b.png", "labels": ["x"], "patient": "p"},
                {"image": "sub/c.png", "labels": ["x"], "patient": None},
            ),
            ["7", "p", ""],
        ),
        (
            "jsonl",
            '{"image": "a.png", "labels": ["x"]}\n{"image": "b.png", "labels": ["y"], "patient": "p"}',
            ["", "p"],
        ),
    ],
)
def test_a_column_or_a_key_names_the_groups(tmp_path, name, text, groups):
    write(tmp_path, "train", text)
    keys = {"name": "csv", "label_column": ""} if name == "wide" else {"name": name}
    data = settings(tmp_path, table="train", group_column="patient", **keys)
    split = open_split(data, "train")
    assert split.groups == groups
    assert "patient" not in split.classes
    assert split.take(np.array([1, 0]), "val").groups == [groups[1], groups[0]]
    data.update({"group_column": "", "label_column": "labels"})
    assert name == "wide" or open_split(data, "train").groups is None


def test_the_fingerprint_of_a_split_depends_on_names_labels_and_groups():
    given = {"ids": "xy", "labels": (1, 0, 0, 0), "groups": ["p", "q"]}
    changes = ({}, {"ids": "xz"}, {"labels": (0, 1, 0, 0)}, {"groups": ["p", "p"]})
    assert len({split_of(**given | change).fingerprint for change in changes}) == 4


# ------------------------------------------------------------------------------------------------------ draw_rows
def test_images_with_rare_labels_are_drawn_more_often():
    """In proportion to max(1, √(t/f)) of their rarest label: here 1, 2 and 10 of 0.04/f with f of 0.5, 0.01, 0.0004."""
    codes = np.zeros((10_000, 4), np.int8)
    codes[:5_000, 0], codes[100:200, 1], codes[150:154, 2], codes[9_000:, 3] = 1, 1, 1, -1
    factors = np.ones(10_000)
    factors[100:200], factors[150:154] = 2, 10
    labels, random = LabelMatrix.of(codes), np.random.default_rng(0)
    drawn = [draw_rows(random.permutation(10_000), epoch * 10_000, labels, 0.04, 3) for epoch in range(40)]
    expected = factors * 10_000 / factors.sum()
    for rows in drawn:
        often = np.bincount(rows, minlength=10_000)
        assert often.sum() == 10_000
        assert (np.abs(often - expected) < 1).all(), "rounded up or down"
    assert len({rows.tobytes() for rows in map(np.sort, drawn)}) > 1, "each epoch draws anew"
    mean = np.mean([np.bincount(rows, minlength=10_000) for rows in drawn], axis=0)
    assert abs(mean[150:154].mean() / mean[:100].mean() - 10) < 0.5


def test_without_repetition_each_image_is_drawn_once_per_epoch():
    places = np.arange(4)[::-1]
    assert draw_rows(places, 8, LabelMatrix.of(np.eye(4, dtype=np.int8)), 0.0, 0) is places
