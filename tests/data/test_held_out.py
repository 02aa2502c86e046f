"""The images that are held out for validation."""

import hashlib
import itertools
import unicodedata

import numpy as np
import pytest
from helpers.tables import settings

from mlmoe_jax.data.label_codes import few_positives
from mlmoe_jax.data.sampling import draw_held_out
from mlmoe_jax.data.sources.open import open_split

NAMES = [f"{row}.png" for row in range(60)]


def drawn(folder, names, *, labels="a", **keys) -> tuple[set[str], set[str]]:
    """Return the ids of the training images and of the held-out images. Every third image has a group."""
    rows = [f"{name},{labels},{f'p{int(name[:-4]) // 6}' if int(name[:-4]) % 3 == 0 else ''}" for name in names]
    (folder / "all.csv").write_text("\n".join(["image,labels,patient", *rows]))
    data = settings(folder, table="all.csv", bad_images="skip", **{"val_fraction": 0.3} | keys)
    train, val = (set(open_split(data, name, keep_missing=True).ids) for name in ("train", "val"))
    assert train | val == set(names)
    assert not train & val
    return train, val


def specified(names: list[str], seed: int, fraction: float) -> list[bool]:
    """Draw as docs/evaluation.md describes it."""
    digests = [hashlib.sha256(str(seed).encode() + b"\0" + name.encode()).hexdigest() for name in names]
    numbers = [int(digest[:16], 16) / 2**64 for digest in digests]
    return [number < fraction or number == min(numbers) for number in numbers]


@pytest.mark.parametrize("seed", [0, 17])
def test_the_draw_is_as_specified(seed):
    names = [f"träger/{number}.jpg" for number in range(3000)]
    held_out = draw_held_out(names, 0.1, seed)
    assert held_out.tolist() == specified(names, seed, 0.1)
    assert abs(held_out.sum() - 300) < 50
    decomposed = [unicodedata.normalize("NFD", name) for name in names]  # as on a Mac
    assert (draw_held_out(decomposed, 0.1, seed) == held_out).all()
    assert held_out[draw_held_out(names, 0.05, seed)].all(), "a larger fraction only adds images"


def test_a_small_table_has_a_held_out_image_and_holds_out_no_trained_one_as_it_grows():
    names = [f"{number}.jpg" for number in range(1, 61)]
    held_out = [draw_held_out(names[:count], 0.1, 0) for count in range(1, 61)]
    assert [drawn.sum() for drawn in held_out[:53]] == [1] * 53, "no hash is below 0.1 up to 53.jpg"
    for before, after in itertools.pairwise(held_out):
        assert not (after[: len(before)] & ~before).any()


@pytest.mark.parametrize("groups", ["", "patient"])
def test_no_image_changes_its_part_if_the_table_changes(tmp_path, groups):
    train, val = drawn(tmp_path, NAMES[:40], group_column=groups)
    for names in (NAMES[:40][::-1], [*NAMES[40:], *NAMES[:40]], NAMES[10:40], [name for name in NAMES if name in val]):
        names = [*names, min(train)] if set(names) <= val else names  # both parts need an image
        for labels in ("a", "a;b"):
            now = drawn(tmp_path, names, labels=labels, group_column=groups)
            assert not now[0] & val
            assert not now[1] & train
    assert drawn(tmp_path, NAMES[:40], split_seed=1, group_column=groups) != (train, val)


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


def test_the_account_of_a_table_counts_the_held_out_images(tmp_path):
    rows = [f"{name},a,train" for name in NAMES]
    (tmp_path / "all.csv").write_text("\n".join(["image,labels,split", *rows, "x.png,a,other"]))
    data = settings(tmp_path, table="all.csv", bad_images="skip", val_fraction=0.3)
    train, val = (open_split(data, name, keep_missing=True) for name in ("train", "val"))
    for split in (train, val):
        (usage,) = split.usage
        assert (usage.used, usage.unused) == ({"train": len(train), "val": len(val)}, 1)


def test_an_error_of_the_draw_says_what_else_is_not_used(tmp_path, refusal):
    (tmp_path / "all.csv").write_text("image,labels,split\na.png,a,train\nb.png,a,other\n")
    data = settings(tmp_path, table="all.csv", bad_images="skip", val_fraction=0.3)
    error = refusal(open_split, data, "train", keep_missing=True)
    assert "of 1 training image leaves none for training" in error
    assert "1 of 2 rows is not used: 1 of split 'other'" in error
