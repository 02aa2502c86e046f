"""Label codes that are stored by image equal the dense array that they came from."""

import numpy as np
import pytest

from mlmoe_jax.data.label_matrix import LabelMatrix

CODES = np.array([[0, 1, -1, 2, 0], [-1, -1, 1, -1, 0], [0, 0, 0, 0, 0], [-1, -1, -1, -1, -1]], np.int8)


@pytest.fixture(params=[CODES, CODES[:0], CODES[:, :0]], ids=["some", "no images", "no labels"])
def codes(request):
    return request.param


def test_numpy_reads_what_was_given(codes):
    labels = LabelMatrix.of(codes)
    assert (len(labels), labels.shape, labels[:].dtype) == (len(codes), codes.shape, np.int8)
    np.testing.assert_array_equal(labels, codes)
    np.testing.assert_array_equal(np.concatenate(list(labels.blocks())), codes)
    assert LabelMatrix.of(labels) is labels


@pytest.mark.parametrize("rows", [[2, 0, 0], slice(1, 3), np.array([True, False, False, True]), 1, -1])
def test_rows(rows):
    np.testing.assert_array_equal(LabelMatrix.of(CODES)[rows], CODES[rows])


@pytest.mark.parametrize(
    "use",
    [
        lambda labels: labels == 1,
        lambda labels: labels != 1,
        lambda labels: labels > 0,
        lambda labels: labels <= CODES,
        lambda labels: bool(labels),
        lambda labels: 1 in labels,
        lambda labels: labels[0, 1],
        lambda labels: labels[:, 1],
    ],
)
def test_what_would_mean_something_else_than_for_an_array_is_an_error(use):
    with pytest.raises(TypeError, match=r"labels\[:\] is one"):
        use(LabelMatrix.of(CODES))


def test_images_are_iterated_and_copied_as_those_of_an_array():
    labels = LabelMatrix.of(CODES)
    np.testing.assert_array_equal(list(labels), CODES)
    assert np.asarray(labels, np.float32).dtype == np.float32
    np.testing.assert_array_equal(np.equal(labels, 1), CODES == 1)


def test_only_what_differs_is_stored():
    labels = LabelMatrix.of(CODES)
    assert labels.others.tolist() == [0, -1, 0, -1]
    assert labels.stated.nnz == 3 + 2
    every = LabelMatrix.of(CODES).stated.copy()
    every.data[:] = np.repeat(labels.others, [3, 2, 0, 0])
    assert LabelMatrix(every, labels.others).stated.nnz == 0


@pytest.mark.parametrize("code", [-1, 0, 1, 2])
@pytest.mark.parametrize("axis", [0, 1])
def test_counts_of_each_code(codes, code, axis):
    np.testing.assert_array_equal(LabelMatrix.of(codes).count(code, axis), (codes == code).sum(axis=axis))


def test_marks():
    labels = LabelMatrix.of(CODES)
    np.testing.assert_array_equal(labels.marked(1).toarray(), CODES == 1)
    np.testing.assert_array_equal(labels.marked(1, 2).toarray(), CODES >= 1)


def test_rows_are_taken_joined_and_replaced():
    labels = LabelMatrix.of(CODES)
    np.testing.assert_array_equal(labels.take(np.array([3, 1])), CODES[[3, 1]])
    np.testing.assert_array_equal(LabelMatrix.join([labels, labels.take(np.array([1]))]), CODES[[0, 1, 2, 3, 1]])
    changed = CODES.copy()
    changed[3, 1], changed[0, 4], changed[3, 0] = 1, -1, 0
    found = labels.replace({(3, 1): 1, (0, 4): -1, (3, 0): 0})
    np.testing.assert_array_equal(found, changed)
    np.testing.assert_array_equal(labels, CODES)


@pytest.mark.parametrize("labels", [[3, 0], []])
def test_labels_are_chosen(labels):
    chosen = LabelMatrix.of(CODES).choose(np.array(labels, int))
    np.testing.assert_array_equal(chosen, CODES[:, labels])
    assert chosen.count(-1).tolist() == (CODES[:, labels] == -1).sum(axis=0).tolist()


def test_many_labels_take_the_memory_of_those_that_images_have():
    rows = np.arange(3_000)
    labels = LabelMatrix.join(
        LabelMatrix.of((rows[start : start + 500, None] == np.arange(20_000)).astype(np.int8))
        for start in range(0, 3_000, 500)
    )
    stored = (labels.stated.data, labels.stated.indices, labels.stated.indptr, labels.others)
    assert sum(array.nbytes for array in stored) < 50_000
