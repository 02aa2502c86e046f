import numpy as np
import pytest
from helpers.paths import PARITY

from mlmoe_jax.data.labels import grouping

# Several tests are about labels that never occur together.
pytestmark = pytest.mark.filterwarnings("ignore:Graph is not fully connected")

# Counts over the 82,081 labeled images of COCO train2014 with classes in category-id order, and the CO partitions
# published with ML-VPT.
COCO = np.load(PARITY / "coco_groups.npz")


def canonical(groups):
    """Number groups by their first label, in a plain loop."""
    numbers = {}
    return [numbers.setdefault(int(group), len(numbers)) for group in groups]


def blocks(*sizes):
    """Return counts of labels that always occur together within a block and never across blocks, and the blocks."""
    member = np.repeat(np.arange(len(sizes)), sizes)
    counts = np.where(member[:, None] == member, 10, 0)
    np.fill_diagonal(counts, 0)
    return counts, np.full(len(member), 10), member


def grouped(counts, positives, num_groups: int, *, side: str = "co", seed: int = 0):
    return grouping.group_labels(counts, positives, num_groups=num_groups, tau=2, side=side, seed=seed)


def test_cooccurrence_of_many_rows_is_exact():
    labels = np.random.default_rng(0).integers(-1, 3, (150_001, 3), np.int8)
    counts, positives = grouping.cooccurrence(labels)
    np.testing.assert_array_equal(positives, (labels == 1).sum(axis=0))
    assert counts.dtype == positives.dtype == np.int64
    for i, j in ((0, 1), (0, 2), (2, 1)):
        assert counts[i, j] == ((labels[:, i] == 1) & (labels[:, j] == 1)).sum()
    np.testing.assert_array_equal(counts.diagonal(), 0)


def test_affinity_by_hand():
    counts, positives = np.array([[0, 4], [4, 0]]), np.array([4, 16])
    np.testing.assert_allclose(grouping.affinity(counts, positives, tau=2), [[0, 0.75], [0.75, 0]])
    np.testing.assert_allclose(grouping.affinity(counts, positives, tau=1), [[0, 0.625], [0.625, 0]])
    np.testing.assert_allclose(grouping.affinity(counts, positives, tau=2, side="dc"), [[1, 0.25], [0.25, 1]])
    counts, positives = np.zeros((2, 2)), np.array([5, 0])  # a label without positives
    np.testing.assert_array_equal(grouping.affinity(counts, positives, tau=2), np.zeros((2, 2)))
    np.testing.assert_array_equal(grouping.affinity(counts, positives, tau=2, side="dc"), np.ones((2, 2)))


@pytest.mark.variants("seed")
@pytest.mark.parametrize(("num_groups", "sizes"), [(2, None), (3, None), (5, [4, 7, 21, 22, 26])])
@pytest.mark.parametrize("seed", [0, 1])
def test_published_co_groups_of_coco(num_groups, sizes, seed):
    published = COCO[f"co{num_groups}"]
    groups = grouped(COCO["counts"], COCO["positives"], num_groups, seed=seed)
    assert groups.dtype == np.int32
    assert groups.tolist() == canonical(published)
    if sizes:
        assert sorted(np.bincount(groups)) == sizes


def test_co_groups_are_the_blocks_and_dc_groups_divide_them():
    counts, positives, member = blocks(3, 4, 3)
    co = grouped(counts, positives, 3)
    np.testing.assert_array_equal(co, member)
    dc = grouped(counts, positives, 3, side="dc")
    assert all(len(set(dc[member == block])) > 1 for block in range(3))


def test_the_same_seed_gives_the_same_groups(monkeypatch):
    """Of labels without structure, which another seed divides in another way."""
    monkeypatch.setattr(grouping, "_RESTARTS", 1)
    together, positives = grouping.cooccurrence(np.random.default_rng(0).random((60, 20)) < 0.3)
    one, again, other = (grouped(together.toarray(), positives, 6, seed=seed).tolist() for seed in (0, 0, 1))
    assert one == again != other


def test_one_group_and_one_group_per_label():
    counts, positives, member = blocks(2, 3)
    every = grouped(counts, positives, 1)
    single = grouped(counts, positives, 5, side="dc")
    assert every.tolist() == [0] * len(member)
    assert single.tolist() == [0, 1, 2, 3, 4]
    assert every.dtype == single.dtype == np.int32


@pytest.mark.parametrize(("side", "num_groups", "silent"), [("co", 2, 1), ("co", 6, 7), ("dc", 3, 3), ("dc", 6, 7)])
def test_labels_without_positives_get_a_group(side, num_groups, silent, monkeypatch):
    monkeypatch.setattr(grouping, "_RESTARTS", 1)
    labels = np.random.default_rng(0).random((50, 7)) < 0.4
    labels[:, -silent:] = False
    together, positives = grouping.cooccurrence(labels)
    groups = grouped(together.toarray(), positives, num_groups, side=side)
    assert groups.tolist() == canonical(groups)
    assert groups.max() < num_groups
