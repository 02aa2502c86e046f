import json

import numpy as np
from helpers.paths import PARITY

from mlmoe_jax.data.labels import graph as graphs

# Counts over COCO train2014 with classes in category-id order, and over the trainval images of VOC 2007.
COCO = np.load(PARITY / "coco_groups.npz")
VOC = json.loads((PARITY / "voc2007_counts.json").read_text())
TWIN = np.load(PARITY / "graph_heads.npz")
PERSON = 0


def edges(counts, positives, threshold=0.4):
    return graphs.conditional_probabilities(np.array(counts), np.array(positives)) >= threshold


def test_the_graph_of_coco():
    """The graph of ML-GCN has 111 edges, 55 of them to `person`; 15 labels have no outgoing and 57 no incoming edge."""
    found = edges(COCO["counts"], COCO["positives"])
    assert found.sum() == 111
    assert found[:, PERSON].sum() == 55
    assert (found.sum(axis=1) > 0).sum() == 65
    assert (found.sum(axis=0) > 0).sum() == 23
    graph = graphs.label_graph(COCO["counts"], COCO["positives"])
    assert graph.dtype == np.float32
    assert ((graph > 0) & ~np.eye(80, dtype=bool)).sum() == 111
    assert (graph[PERSON] > 0).sum() == 56, "person receives from the labels that imply it"


def test_the_graph_of_voc():
    found = edges(VOC["counts"], VOC["positives"])
    pairs = {(VOC["names"][i], VOC["names"][j]) for i, j in zip(*np.nonzero(found), strict=True)}
    riding = ("bicycle", "bottle", "diningtable", "horse", "motorbike")
    assert pairs == {*((name, "person") for name in riding), ("diningtable", "chair")}


def test_label_graph_by_hand():
    counts, positives = np.array([[0, 4, 2], [4, 0, 0], [2, 0, 0]]), np.array([10, 5, 4])
    probabilities = graphs.conditional_probabilities(np.pad(counts, (0, 1)), np.append(positives, 0))
    np.testing.assert_array_equal(probabilities, [[0, 0.4, 0.2, 0], [0.8, 0, 0, 0], [0.5, 0, 0, 0], [0] * 4])
    found = edges(counts, positives)
    np.testing.assert_array_equal(found, [[0, 1, 0], [1, 0, 0], [1, 0, 0]])
    weights = np.array([[1, 0.25, 0], [0.125, 1, 0], [0.125, 0, 1]])
    d = np.array([1.25, 1.125, 1.125]) ** -0.5
    expected = np.diag(d) @ weights.T @ np.diag(d)
    np.testing.assert_allclose(graphs.label_graph(counts, positives), expected, rtol=2e-6)
    # ML-GCN, eq. 8: the weights are normalized by row, not by column
    weights = np.array([[1, 0.25, 0], [0.25, 1, 0], [0.25, 0, 1]])
    expected = weights / 1.25
    np.testing.assert_allclose(graphs.label_graph(counts, positives, transpose=False), expected, rtol=2e-6)


def test_label_graph_equals_the_torch_reference():
    graph = graphs.label_graph(TWIN["ml_gcn/counts"], TWIN["ml_gcn/positives"])
    assert (graph > 0).sum() > 8
    np.testing.assert_allclose(graph, TWIN["ml_gcn/adjacency"], rtol=1e-6, atol=1e-7)


def test_threshold_removes_edges_and_share_weights_neighbors():
    counts, positives = COCO["counts"], COCO["positives"]
    off = ~np.eye(80, dtype=bool)
    above = [(graphs.label_graph(counts, positives, threshold=t)[off] > 0).sum() for t in (0.1, 0.4, 0.9)]
    assert above[0] > above[1] > above[2]
    np.testing.assert_array_equal(graphs.label_graph(counts, positives, share=0), np.eye(80))
    # The diagonal 1 − p and the neighbors' sum p differ from the authors' code by a factor that normalization removes.
    weights = 0.2 * edges(counts, positives) / (edges(counts, positives).sum(axis=0) + 1e-6) + 0.8 * np.eye(80)
    d = weights.sum(axis=1) ** -0.5
    np.testing.assert_allclose(graphs.label_graph(counts, positives), d[:, None] * weights.T * d, rtol=1e-5)


def test_frequency_order_is_by_decreasing_positives():
    order = graphs.frequency_order(np.array([3, 7, 0, 7, 5]))
    assert order.tolist() == [1, 3, 4, 0, 2]
    assert order.dtype == np.int32
    assert graphs.frequency_order(COCO["positives"])[0] == PERSON
