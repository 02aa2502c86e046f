"""The accuracy of attributes and their confusions, beside those of scikit-learn."""

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, balanced_accuracy_score, confusion_matrix

from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE, UNKNOWN
from mlmoe_jax.data.label_tree import Attribute, LabelTree
from mlmoe_jax.evaluation.metrics.attribute_metrics import count_confusions, describe_confusions, measure_attributes
from mlmoe_jax.evaluation.metrics.entries import Entries

NAMES = ("color: white", "dog", "color: red", "color: blue")
COLOR = Attribute("color", (2, 3, 0))
TREE = LabelTree(attributes=(COLOR,))


@pytest.fixture(scope="module")
def drawn():
    """The values of 60 images, a few blue, their most probable values, and the entries; of 9 the value is unknown."""
    draw = np.random.default_rng(0)
    given, taken = draw.choice(3, 60, p=[0.6, 0.1, 0.3]), draw.choice(3, 60, p=[0.3, 0.2, 0.5])
    scores, codes = draw.random((60, 4)) / 2, np.full((60, 4), NEGATIVE, np.int8)
    for row in range(60):
        scores[row, COLOR.labels[taken[row]]] = 0.9
        codes[row, COLOR.labels[given[row]]] = POSITIVE
    scores[:, 1] = 1  # of a tag
    codes[:9, list(COLOR.labels)] = UNKNOWN
    valid = codes != UNKNOWN
    positive = (codes == POSITIVE) | ~valid  # what is not valid does not count, whatever it is
    return given[9:], taken[9:], Entries(scores, positive, valid, tree=TREE)


def test_images_are_counted_by_their_value_and_the_most_probable_one(drawn):
    given, taken, entries = drawn
    counts = count_confusions(entries, COLOR)
    np.testing.assert_array_equal(counts, confusion_matrix(given, taken))
    described = describe_confusions(entries, NAMES)
    assert described == {"color": {"values": ["red", "blue", "white"], "images": counts.tolist()}}


def test_accuracies_are_those_of_scikit_learn(drawn):
    given, taken, entries = drawn
    assert measure_attributes(entries) == {
        "accuracy/color": pytest.approx(accuracy_score(given, taken)),
        "balanced_accuracy/color": pytest.approx(balanced_accuracy_score(given, taken)),
    }


def test_a_value_of_no_image_has_no_share(drawn):
    _, _, entries = drawn
    rows = entries.positive[:, 3] & entries.valid[:, 3]  # blue
    rest = Entries(entries.scores[~rows], entries.positive[~rows], entries.valid[~rows], tree=TREE)
    right = [count / total for count, total in zip(*_shares(rest), strict=True) if total]
    assert measure_attributes(rest)["balanced_accuracy/color"] == pytest.approx(np.mean(right))


def _shares(entries):
    counts = count_confusions(entries, COLOR)
    return counts.diagonal(), counts.sum(axis=1)
