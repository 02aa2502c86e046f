"""The values that the report page shows, and pages of very large runs."""

import base64
import json

import numpy as np
import pytest
from helpers.made_run import (
    GRID,
    IMAGES,
    NAMES,
    data_block,
    image_ids,
    make_run,
    section,
    write_samples,
)
from sklearn.metrics import precision_recall_curve

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.metrics.ranking import rank
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.report import labels, page, samples, scores
from mlmoe_jax.report.run_files import RunFiles
from mlmoe_jax.runs.folder import RunFolder


# -------------------------------------------------------------------------------------------------------------- numbers
def test_precision_recall_points_equal_scikit_learn():
    draw = np.random.default_rng(0)
    positive, values = draw.random(300) < 0.3, draw.random(300).round(2)
    ranking = rank(values[positive], [values[~positive]])
    points = scores.precision_recall_points(ranking, values[positive], most=1000)
    precision, recall, cuts = precision_recall_curve(positive, values)
    at = np.searchsorted(cuts, points[:, 2])
    np.testing.assert_allclose(points, np.stack([recall[at], precision[at], cuts[at]], axis=1))
    few = scores.precision_recall_points(ranking, values[positive], most=10)
    assert len(few) == 10
    np.testing.assert_array_equal(few[[0, -1]], points[[0, -1]])


def test_calibration_equals_the_metrics(text, run):
    error = run.read_json("results.json")["test"]["ECE_pooled"]
    assert f"error of all scores: {100 * error:.2f} %" in section(text, "scores")
    bins = np.array(
        [[row["score"], row["share"], row["count"]] for row in data_block(text, "reliability")["datasets"]["pooled"]]
    )
    np.testing.assert_allclose(np.abs(bins[:, 0] - bins[:, 1]) @ bins[:, 2] / bins[:, 2].sum(), error, atol=1e-4)


def test_worst_mistakes_match_a_plain_loop():
    draw = np.random.default_rng(1)
    codes, values = draw.choice([0, 1, -1, 2], (30, 4)).astype(np.int8), draw.random((30, 4)).round(2)
    split = SplitScores("test", image_ids("test", 30), values, codes)
    for code, sign in ((0, -1), (1, 1)):
        entries = [(sign * values[n, k], n, k) for n in range(30) for k in range(4) if codes[n, k] == code]
        expected = [(n, k) for _, n, k in sorted(entries)][: scores.MOST_MISTAKES]
        assert scores.worst(split, code, -sign) == expected
    assert scores.worst(SplitScores("", split.ids, values, np.full_like(codes, -1)), 0, 1) == []


def test_mistakes_leave_out_unknown_and_difficult_labels(text, run):
    rows = data_block(text, "mistakes-false-positives")["rows"]
    with np.load(run / "scores.npz") as stored:
        test = stored["split"] == "test"
        negative = np.where(stored["labels"][test] == 0, stored["scores"][test], 0)
    assert rows[0][1] == pytest.approx(negative.max(), abs=1e-4)
    gallery = data_block(text, "widget-mistakes")
    assert [group["title"].split(" among")[0] for group in gallery] == ["False positives", "False negatives"]
    assert {row["image"] for group in gallery for row in group["rows"]} == {0, 1, 2}


def test_conditional_probabilities_and_the_graph():
    space = LabelSpace(
        ("a", "b", "c", "d"),
        np.array([[0, 6, 1, 0], [6, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]),
        np.array([10, 8, 4, 0]),
        20,
        np.array([0, 1, 0, 1]),
        np.zeros(4, int),
    )
    given = labels.conditional_probability(space, np.arange(4))
    np.testing.assert_allclose(given[0], [0, 0.6, 0.1, 0])
    np.testing.assert_allclose(given[:, 0], [0, 0.75, 0.25, 0])
    graph = labels.label_graph("g", "groups", space, np.arange(4), space.co_group, given)
    assert [(edge["source"], edge["target"], edge["p"]) for edge in graph.edges] == [(1, 0, 0.75)]
    assert graph.edges[0]["text"] == "p(a | b) = 0.75, reverse 0.60"
    assert graph.edges[0]["color"] is None  # between two groups
    assert [node["group"] for node in graph.nodes] == [1, 2, 1, 2]
    assert all(node["x"] ** 2 + node["y"] ** 2 == pytest.approx(1, abs=1e-3) for node in graph.nodes)
    around = sorted(graph.nodes, key=lambda node: node["angle"])
    assert [node["name"] for node in around] == ["a", "c", "b", "d"]  # group by group


def test_the_heat_map_shows_the_conditional_probabilities(text, run):
    space = RunFiles(run).label_space
    cells = {(cell["y"], cell["x"]): cell["value"] for cell in data_block(text, "heat-co")["datasets"]["rows"]}
    for a, b in ((0, 1), (1, 0)):
        expected = space.counts[a, b] / space.positives[a]
        assert cells[NAMES[a], NAMES[b]] == pytest.approx(expected, abs=1e-3)


# -------------------------------------------------------------------------------------------------------------- samples
def test_gates_and_their_summaries(text, run):
    weights = np.load(run / "samples/explained.npz")
    packed = {gate["name"]: gate for gate in data_block(text, "widget-gates")["gates"]}
    for name, images in (("co", 3), ("experts", 1)):
        values = np.frombuffer(base64.b64decode(packed[name]["weights"]), np.uint8) / 255
        assert packed[name]["images"] == images
        np.testing.assert_allclose(values, weights[f"gates/{name}"].ravel(), atol=0.003)
    cells = data_block(text, "gate-co-mean")["datasets"]["rows"]
    expected = weights["gates/co"].astype(float).mean(axis=0).ravel()
    np.testing.assert_allclose([cell["value"] for cell in cells], expected, atol=1e-4)
    assert "The weights of experts are the same for every image" in section(text, "gates")
    assert 'id="data-gate-experts-deviation"' not in text


def test_attention_maps_and_their_peaks(text, run):
    maps = np.load(run / "samples/explained.npz")["attention/labels"].astype(float)
    packed = {kind["name"]: kind for kind in data_block(text, "widget-attention")["maps"]}
    values = np.frombuffer(base64.b64decode(packed["labels"]["maps"]), np.uint8).reshape(maps.shape) / 255
    np.testing.assert_allclose(values, maps / maps.max(-1, keepdims=True), atol=0.003)
    np.testing.assert_allclose(packed["labels"]["peaks"], maps.max(-1) * GRID[0] * GRID[1], atol=0.006)
    assert packed["prompts"]["queries"]["1"] == "co group 2, expert 1"


def test_attention_maps_are_bounded(run, monkeypatch):
    monkeypatch.setattr(samples, "MOST_BYTES", 3 * 2 * GRID[0] * GRID[1])
    files = RunFiles(run)
    packed = samples._pack(files, files.samples, "labels", files.samples.attention["labels"])
    assert packed["kept"] == [samples.image_labels(files.samples, s, 2) for s in range(3)]
    assert packed["left_out"] == len(NAMES)


def test_the_labels_of_an_image_come_first(run):
    found = RunFiles(run).samples
    for s in range(3):
        order = samples.image_labels(found, s, 5)
        expected = sorted(range(5), key=lambda k: (found.codes[s, k] != 1, -found.scores[s, k]))
        assert order == expected


# ----------------------------------------------------------------------------------------------------------- very large
def test_a_page_with_twenty_thousand_labels_stays_small(tmp_path, run, no_bundle):
    count, images, draw = 20_000, 4, np.random.default_rng(0)
    folder = RunFolder(tmp_path / "huge")
    folder.write_text("config.json", run.read_text("config.json"))
    folder.write_text("labels.txt", "".join(f"label {k}\n" for k in range(count)))
    codes, values = (draw.random((images, count)) < 0.3).astype(np.int8), draw.random((images, count)).round(3)
    folder.write_json("results.json", {"test": {"mAP": 0.3}})
    rows = [["test", f"label {k}", 3, k / count] for k in range(count)]
    folder.write_csv("per_class.csv", ["split", "label", "positives", "AP"], rows)
    split = np.full(images, "test")
    folder.write_npz("scores.npz", ids=image_ids("test", images), scores=values, labels=codes, split=split)
    write_samples(folder, codes[:2], values[:2], draw)
    text = page.write_report(folder).read_text()
    assert len(text) < 4_000_000
    assert len(data_block(text, "label-table")["rows"]) == count
    assert len(data_block(text, "ap-bars")["datasets"]["rows"]) == 100
    assert len(data_block(text, "widget-curves")) == scores.MOST_LABELS
    assert len(data_block(text, "widget-gates")["labels"]) == samples.MOST_LABELS
    maps = {kind["name"]: kind for kind in data_block(text, "widget-attention")["maps"]}
    assert [len(kept) for kept in maps["labels"]["kept"]] == [samples.MOST_QUERIES] * 2
    for name in ("labels", "gates", "attention", "scores"):
        assert "Of 20,000" in section(text, name)


def test_many_labels_of_a_label_space(tmp_path, run):
    count = 300
    counts = np.triu(np.ones((count, count), np.int64), 1)
    group = np.arange(count) % 4
    space = LabelSpace(tuple(map(str, range(count))), counts + counts.T, np.arange(count) + 1, 1000, group, group)
    with open(tmp_path / "label_space.npz", "wb") as file:
        space.save(file)
    (tmp_path / "config.json").write_text(run.read_text("config.json"))
    parts = labels.groups(RunFiles(RunFolder(tmp_path))).parts
    graphs = [part for part in parts if part.kind == "graph"]
    assert "Of 300 labels, the 80 most frequent" in parts[0].text
    assert [node["name"] for node in graphs[0].nodes] == [str(k) for k in range(220, 300)]


def test_images_are_embedded_from_the_files_of_the_folder(text, run):
    block = data_block(text, "samples")
    for n, image in enumerate(block["images"]):
        assert base64.b64decode(image.partition(",")[2]) == (run / f"samples/{n:04}.jpg").read_bytes()
    assert block["ids"] == image_ids("test", 3).tolist()
    assert json.dumps(block["labels"]).count("[") > 3 * len(NAMES)


def test_unreadable_images_are_left_out(tmp_path, no_bundle):
    folder = make_run(tmp_path / "run", samples=0)
    with np.load(folder / "scores.npz") as stored:
        arrays = dict(stored)
    arrays["scores"][np.flatnonzero(arrays["split"] == "test")[5]] = np.nan
    folder.write_npz("scores.npz", **arrays)
    assert len(RunFiles(folder).splits["test"].scores) == IMAGES - 1
    assert f"of all {IMAGES - 1} images" in page.write_report(folder).read_text()


def test_a_folder_needs_a_config(tmp_path):
    with pytest.raises(UserError, match="it has no config"):
        RunFiles(RunFolder(tmp_path))
