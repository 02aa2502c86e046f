"""Graphs of labels from their counts, and vectors of labels from words or counts."""

import numpy as np
import pytest
from helpers.paths import PARITY

from mlmoe_jax.data.labels import graph as graphs
from mlmoe_jax.data.labels.graph import cooccurrence_vectors, read_glove

# --------------------------------------------------------------------------------------------------------------- graphs
# Counts over COCO train2014 with classes in category-id order.
COCO = np.load(PARITY / "coco_groups.npz")


def test_label_graph_by_hand():
    counts, positives = np.array([[0, 4, 2], [4, 0, 0], [2, 0, 0]]), np.array([10, 5, 4])
    probabilities = graphs.conditional_probabilities(np.pad(counts, (0, 1)), np.append(positives, 0))
    np.testing.assert_array_equal(probabilities, [[0, 0.4, 0.2, 0], [0.8, 0, 0, 0], [0.5, 0, 0, 0], [0] * 4])
    weights = np.array([[1, 0.25, 0], [0.125, 1, 0], [0.125, 0, 1]])
    d = np.diag(weights.sum(axis=1) ** -0.5)
    np.testing.assert_allclose(graphs.label_graph(counts, positives), d @ weights.T @ d, rtol=2e-6)


def test_frequency_order_is_by_decreasing_positives():
    order = graphs.frequency_order(np.array([3, 7, 0, 7, 5]))
    assert order.tolist() == [1, 3, 4, 0, 2]
    assert order.dtype == np.int32


# -------------------------------------------------------------------------------------------------------------- vectors
GLOVE = """the 9 9 9
traffic 1 0 0
light 0 2 0
. . . 8 8 8
light show 7 7 7
zebra 0.5 -1e-1 4
dining 1 1 1
table 3 3 3
t-shirt 5 5 5
potted 0 0 6
café 0 7 0
"""


@pytest.fixture
def glove(tmp_path):
    path = tmp_path / "glove.3d.txt"
    path.write_text(GLOVE, encoding="utf-8")
    return path


def test_the_vector_of_a_name_is_the_mean_of_its_words(glove):
    vector_of = {
        "Traffic Light": [0.5, 1, 0],
        "stop light": [0, 2, 0],  # of the words that are in the file
        "zebra": [0.5, -0.1, 4],
        "dining_table": [2, 2, 2],
        "diningtable": [2, 2, 2],
        "T-shirt": [5, 5, 5],
        "zebra-table": [1.75, 1.45, 3.5],
        "Café": [0, 7, 0],
        "potted(plant)": [0, 0, 6],
    }
    vectors = read_glove(glove, list(vector_of))
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, list(vector_of.values()), rtol=1e-6)


def test_a_header_is_not_read_as_a_word(tmp_path):
    path = tmp_path / "vectors.vec"
    path.write_text("2 3\r\n2 1 1 1\r\nzebra 1 2 3\r\n")
    np.testing.assert_array_equal(read_glove(path, ["zebra", "2"]), [[1, 2, 3], [1, 1, 1]])


def cosines(vectors):
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit @ unit.T


def test_products_of_vectors_are_the_positive_mutual_information():
    """If no eigenvalue is negative, the cosines are the entries of the matrix over the roots of its diagonal."""
    labels = np.random.default_rng(0).random((400, 5)) < [0.1, 0.2, 0.3, 0.2, 0.1]
    labels[:, 1] |= labels[:, 0]
    counts, positives = labels.T.astype(int) @ labels, labels.sum(axis=0)
    p = counts / 401
    information = np.maximum(np.log(p / np.outer(np.diagonal(p), np.diagonal(p))), 0)
    assert np.linalg.eigvalsh(information)[0] > 0
    root = np.sqrt(np.diagonal(information))
    np.fill_diagonal(counts, 0)
    vectors = cooccurrence_vectors(counts, positives, 400, width=7)
    np.testing.assert_allclose(cosines(vectors), information / np.outer(root, root), atol=1e-6)
    np.testing.assert_array_equal(vectors[:, 5:], 0)


def test_fewer_columns_keep_the_largest_eigenvalues():
    counts, positives = COCO["counts"], COCO["positives"]
    wide, narrow = (cooccurrence_vectors(counts, positives, 82_081, width=width) for width in (80, 10))
    unit = wide[:, :10] / np.linalg.norm(wide[:, :10], axis=1, keepdims=True)
    np.testing.assert_allclose(narrow, unit * 0.377 * np.sqrt(10), rtol=1e-4, atol=1e-5)
    share = (wide**2).sum(axis=0)
    assert share[0] > share[40] > share[79]


def test_vectors_have_one_sign_and_do_not_depend_on_the_order_of_labels():
    counts, positives = COCO["counts"], COCO["positives"]
    first = cooccurrence_vectors(counts, positives, 82_081, width=40)
    largest = np.abs(first).argmax(axis=0)
    # Rows are scaled after the signs were chosen, so another entry may be the largest now.
    assert (first[largest, np.arange(40)] > 0).mean() > 0.8
    order = np.random.default_rng(1).permutation(80)
    permuted = cooccurrence_vectors(counts[order][:, order], positives[order], 82_081, width=40)
    np.testing.assert_allclose(permuted, first[order], atol=1e-4)


def test_labels_without_positives_have_vectors():
    counts, positives = np.zeros((3, 3), int), np.array([5, 0, 0])
    cosine = cosines(cooccurrence_vectors(counts, positives, 5, width=4))
    np.testing.assert_allclose(cosine, np.eye(3), atol=1e-6)
    nothing = cooccurrence_vectors(np.zeros((4, 4), int), np.zeros(4, int), 0, width=6)
    np.testing.assert_allclose(cosines(nothing), np.eye(4), atol=1e-6)
    one = cooccurrence_vectors(np.zeros((1, 1), int), np.array([8]), 8, width=2)
    assert np.linalg.norm(one) == pytest.approx(0.377 * np.sqrt(2))
