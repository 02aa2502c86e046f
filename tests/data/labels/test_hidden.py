"""Hidden positives of the training labels."""

import hashlib
import json

import numpy as np
import pytest
from helpers.paths import REPOSITORY
from helpers.tables import data_settings, split_of
from numpy.random import RandomState
from scipy.sparse import csr_array

from mlmoe_jax.data.labels.hidden import draw_fraction, draw_one, draw_share, find_mistake, hide_positives


def hidden(labels, rule, **changes):
    split = split_of([f"train/{row}.jpg" for row in range(len(labels))], labels, classes="abcdefgh"[: len(labels[0])])
    return hide_positives(split, data_settings("made", known_positives=str(rule), **changes)).labels[:]


POSITIVE = np.arange(8) < np.arange(9).repeat(200)[:, None]  # 200 images with each number of positives from 0 to 8


def test_the_rules_of_the_lists():
    for divisor in (2, 5):
        known = draw_fraction(csr_array(POSITIVE), RandomState(0), divisor).toarray()
        m = POSITIVE.sum(1)
        np.testing.assert_array_equal(known.sum(1), np.where(m > 0, m // divisor + 1, 0))
        assert not (known & ~POSITIVE).any()
        frequency = known[m == 8].mean(axis=0)
        np.testing.assert_allclose(frequency, (8 // divisor + 1) / 8, atol=0.12)


def test_one_positive_per_image_and_a_share_of_all():
    positive = csr_array(POSITIVE)
    one = draw_one(positive, RandomState(0)).toarray()
    share = draw_share(positive, RandomState(0), 0.4).toarray()
    np.testing.assert_array_equal(one.sum(1), POSITIVE.any(1))
    assert share.sum() == round(0.4 * POSITIVE.sum())
    assert not ((one | share) & ~POSITIVE).any()


def test_only_known_positives_remain_known():
    labels = [[1, 0, -1, 2, 1], [0, 0, 0, 2, 0], [0, 1, 0, 0, 0]]
    assert hidden(labels, "all").tolist() == labels
    known = hidden(labels, "one")
    assert sorted(known[0].tolist()) == [-1, -1, -1, -1, 1]
    assert known[1:].tolist() == [[-1] * 5, [-1, 1, -1, -1, -1]]
    assert (hidden(labels, "0.75", difficult_train="positive") == 1).sum(axis=1).tolist() == [2, 1, 1]


def test_a_list(tmp_path):
    """Both forms of a line in the published lists."""
    path = tmp_path / "list.txt"
    path.write_text("1.jpg, 0 2\n0.jpg,1\n7.jpg,0\n")
    assert hidden([[1, 1, 0], [1, 0, 1]], path).tolist() == [[-1, 1, -1], [1, -1, 1]]


def test_rules_that_are_none():
    """The config of a run with a list is valid where the list is not."""
    assert not any(map(find_mistake, ("all", "one", "0.75", "0.4", "random:0.4", "absent.txt")))
    assert all(map(find_mistake, ("two", "0.5", "random:", "random:0", "random:1", "list")))


@pytest.mark.variants("part")
@pytest.mark.parametrize(("part", "name"), [(1, "val2014"), (0, "train2014")])
def test_the_published_single_positives_of_coco(shared_data, part, name):
    facts = json.loads((REPOSITORY.parent / "shared/golden/missing_labels.json").read_text())["single_positive_coco"]
    stored = np.load(shared_data / "coco14_labels.npz")
    rows = np.flatnonzero(stored["is_val"] == part)
    rows = rows[np.argsort(stored["image_id"][rows].astype(str), kind="stable")]
    choices = draw_one(csr_array(stored["labels"][rows] == 1), RandomState(1200)).indices.astype(np.uint8)
    assert hashlib.sha256(choices.tobytes()).hexdigest() == facts[name]["sha256_of_classes_uint8"]
