import io
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.name_vectors import drawn_vectors
from helpers.tables import split_of

from mlmoe_jax.data.label_codes import DIFFICULT, POSITIVE, UNKNOWN
from mlmoe_jax.data.label_tree import LabelTree
from mlmoe_jax.data.labels import space as spaces
from mlmoe_jax.data.labels.graph import cooccurrence_vectors, label_graph
from mlmoe_jax.data.labels.space import (
    PUBLISHED_FOR,
    PUBLISHED_GROUPS,
    LabelSpace,
    compute_label_space,
    synthetic_label_space,
)
from mlmoe_jax.data.split import Split
from mlmoe_jax.runtime.formats import read_npz


def model(groups="computed", num_groups=2):
    settings = SimpleNamespace(groups=str(groups), num_groups=num_groups)
    return SimpleNamespace(prompts=settings, head=SimpleNamespace(kind="linear"))


def grouped(groups, num_groups=2, *, data="digits", split=None, seed=0) -> LabelSpace:
    return compute_label_space(split or SMALL, data, model(groups, num_groups), seed=seed, grouped=True)


SMALL = split_of(
    "01234",
    [
        [POSITIVE, POSITIVE, 0, 0],
        [POSITIVE, POSITIVE, UNKNOWN, 0],
        [POSITIVE, 0, 0, DIFFICULT],
        [0, 0, POSITIVE, UNKNOWN],
        [0, 0, 0, 0],
    ],
)


def test_a_label_space_counts_positive_labels():
    space = compute_label_space(SMALL, "digits", model(), seed=0)
    assert (space.names, space.images) == (SMALL.classes, 5)
    assert space.positives.tolist() == [3, 2, 1, 0]
    assert not space.co_group.any() | space.dc_group.any(), "without groups"
    counts = np.zeros((4, 4), int)
    counts[0, 1] = counts[1, 0] = 2
    np.testing.assert_array_equal(space.counts, counts)
    np.testing.assert_allclose(space.frequency, [0.6, 0.4, 0.2, 0])


def load(path: Path) -> LabelSpace:
    return LabelSpace.from_arrays(read_npz(io.BytesIO(path.read_bytes())))


def test_save_and_load(tmp_path):
    groups = np.array([0, 1, 1], np.int32), np.array([1, 0, 2], np.int32)
    counts, vectors = np.arange(9).reshape(3, 3), np.ones((3, 2), np.float32)
    space = LabelSpace(("grün", "a b", "c"), counts, np.array([5, 0, 7]), 11, *groups, vectors)
    for given in (space, replace(space, tree=LabelTree(((0, 1), (2, 1)), ((0, 2),)))):
        given.save(tmp_path / "label_space.npz")
        loaded = load(tmp_path / "label_space.npz")
        assert (loaded.names, loaded.images, loaded.tree) == (given.names, given.images, given.tree)
        assert (type(loaded.names[0]), type(loaded.images)) == (str, int)
        for name in ("counts", "positives", "co_group", "dc_group", "vectors"):
            assert getattr(loaded, name).dtype == getattr(given, name).dtype, name
            np.testing.assert_array_equal(getattr(loaded, name), getattr(given, name), err_msg=name)


def test_memory_does_not_grow_with_the_square_of_the_labels(tmp_path):
    labels = np.zeros((50, 20_000), np.int8)
    labels[np.arange(50), np.arange(50)] = labels[:, 19_999] = POSITIVE
    split = split_of([*map(str, range(50))], labels, classes=map(str, range(20_000)))
    tracemalloc.start()
    space = compute_label_space(split, "digits", model(), seed=0)
    space.save(tmp_path / "label_space.npz")
    again = load(tmp_path / "label_space.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6, "dense counts would take 3.2 GB"
    assert (again.together != space.together).nnz == 0
    assert again.together.nnz == 100
    assert again.positives[[0, 19_999]].tolist() == [1, 50]


def test_a_synthetic_label_space_spreads_labels_over_groups():
    space = synthetic_label_space(7, 3)
    assert len(set(space.names)) == 7
    assert space.co_group.tolist() == space.dc_group.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert space.counts.shape == (7, 7)
    assert space.frequency.tolist() == [0] * 7, "no training images, but no division by 0"


# ---------------------------------------------------------------------------------------------------------- groups
def random_split(labels: int = 12) -> Split:
    draw = np.random.default_rng(0)
    codes = draw.random((300, labels)) < draw.random(labels)
    return split_of([*map(str, range(300))], codes, classes=map(str, range(labels)))


def test_computed_groups_use_the_root_of_each_side(monkeypatch):
    asked = []

    def group(counts, positives, *, side, **options):
        asked.append((counts.sum(), positives.tolist(), side, options))
        return np.full(len(counts), side == "dc", np.int32)

    monkeypatch.setattr(spaces, "group_labels", group)
    space = grouped("computed", 3, seed=7)
    assert (space.co_group.any(), space.dc_group.all()) == (False, True)
    roots = {"co": 2.0, "dc": 3.0}
    assert asked == [(4, [3, 2, 1, 0], side, {"num_groups": 3, "seed": 7, "tau": roots[side]}) for side in roots]


@pytest.mark.parametrize(("data", "table", "labels"), [("coco2014", "coco", 80), ("voc2012", "voc2007", 20)])
def test_published_groups_are_used(data, table, labels):
    published = json.loads(PUBLISHED_GROUPS.read_text())[table]["3"]
    space = grouped("published", 3, data=data, split=random_split(labels))
    assert space.co_group.tolist() == published["co"]
    assert space.dc_group.tolist() == published["dc"]
    assert space.co_group.dtype == np.int32


def test_published_groups_cover_all_labels():
    tables = json.loads(PUBLISHED_GROUPS.read_text())
    labels = {"coco": 80, "voc2007": 20, "nuswide": 81, "vg256": 256}
    assert set(PUBLISHED_FOR.values()) <= set(tables)
    for name, table in tables.items():
        for count, pair in table.items():
            for side in ("co", "dc"):
                assert len(pair[side]) == labels[name]
                assert set(pair[side]) <= set(range(int(count))), (name, count, side)


def test_groups_from_a_file(tmp_path):
    (tmp_path / "groups.json").write_text('{"co": [0, 1, 1, 0], "dc": [1, 1, 0, 0]}')
    space = grouped(tmp_path / "groups.json")
    assert (space.co_group.tolist(), space.dc_group.tolist()) == ([0, 1, 1, 0], [1, 1, 0, 0])


# ---------------------------------------------------------------------------------------------------- word vectors
def graph_model(**graph):
    settings = SimpleNamespace(kind="ml_gcn", graph=SimpleNamespace(**{"word_vectors": "", "vector_width": 6, **graph}))
    return SimpleNamespace(prompts=model().prompts, head=settings)


def test_word_vectors_come_from_the_counts_or_from_a_file(tmp_path):
    space = compute_label_space(SMALL, "digits", graph_model(), seed=0, vectors=True)
    expected = cooccurrence_vectors(space.counts, space.positives, space.images, width=6)
    np.testing.assert_array_equal(space.vectors, expected)
    path = tmp_path / "glove.txt"
    path.write_text("".join(f"{name} {k}.0 0.5\n" for k, name in enumerate(SMALL.classes)))
    from_file = compute_label_space(SMALL, "digits", graph_model(word_vectors=str(path)), seed=0, vectors=True)
    np.testing.assert_array_equal(from_file.vectors[:, 0], np.arange(4))
    assert compute_label_space(SMALL, "digits", model(), seed=0).vectors is None


def test_vectors_of_names_are_ordered_as_the_labels_and_stored(tmp_path):
    descriptions = tuple((name,) for name in SMALL.classes[::-1])
    vectors = drawn_vectors(SMALL.classes[::-1], 4, projects_from=6, sha256="ab12", descriptions=descriptions)
    space = compute_label_space(SMALL, "digits", model(), seed=0, name_vectors=vectors)
    np.testing.assert_array_equal(space.name_vectors.vectors, vectors.vectors[::-1])
    assert (space.name_vectors.names, space.name_vectors.descriptions) == (SMALL.classes, descriptions[::-1])
    space.save(tmp_path / "space.npz")
    with (tmp_path / "space.npz").open("rb") as file:
        arrays = read_npz(file)
    stored = LabelSpace.from_arrays(arrays)
    assert stored.name_vectors.about() == space.name_vectors.about()
    np.testing.assert_array_equal(stored.name_vectors.projection, vectors.projection)
    with pytest.raises(ValueError, match="of other names"):
        LabelSpace.from_arrays(arrays | {"names": np.asarray([f"new {name}" for name in SMALL.classes])})
    with pytest.raises(ValueError, match="not printable"):
        LabelSpace.from_arrays(arrays | {"names": np.asarray([f"{name}\x1b[31m" for name in SMALL.classes])})


def test_vectors_of_names_are_word_vectors_of_the_length_of_glove():
    vectors = drawn_vectors(SMALL.classes, 4)
    space = compute_label_space(SMALL, "digits", graph_model(), seed=0, vectors=True, name_vectors=vectors)
    np.testing.assert_allclose(space.vectors, 0.377 * 2 * vectors.vectors, rtol=1e-6)


def test_further_names_have_no_images_and_leave_the_others_as_they_are():
    vectors = drawn_vectors((*SMALL.classes, "new", "newer"), 4)
    known = replace(vectors, names=SMALL.classes, vectors=vectors.vectors[:-2])
    space = compute_label_space(SMALL, "digits", graph_model(), seed=0, vectors=True, name_vectors=known)
    more = space.with_names(vectors.for_labels(("newer", *SMALL.classes, "new")))
    count = len(SMALL.classes)
    assert more.names == (*SMALL.classes, "newer", "new")
    np.testing.assert_array_equal(more.counts[:count, :count], space.counts)
    assert not more.counts[count:].any()
    assert not more.counts[:, count:].any()
    np.testing.assert_array_equal(more.positives, [*space.positives, 0, 0])
    np.testing.assert_array_equal(more.vectors[:count], space.vectors)
    np.testing.assert_array_equal(more.name_vectors.vectors[count:], vectors.vectors[[-1, -2]])
    graph, before = (label_graph(each.counts, each.positives) for each in (more, space))
    np.testing.assert_array_equal(graph[:count, :count], before)
    np.testing.assert_array_equal(graph[count:, count:], np.eye(2))
    assert not graph[count:, :count].any()
