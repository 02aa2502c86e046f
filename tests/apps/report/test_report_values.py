"""The values that the report page shows, and pages of very large runs."""

import base64
import json
import math

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
from helpers.scored_run import write_run
from sklearn.metrics import precision_recall_curve

from mlmoe_jax.apps.report import labels, mistakes, page, samples, scores
from mlmoe_jax.apps.report.frequency import by_frequency
from mlmoe_jax.apps.report.resampling import resample
from mlmoe_jax.apps.report.run_files import Evaluated, RunFiles
from mlmoe_jax.apps.tools.compare import SEED
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.metrics.bootstrap import draw
from mlmoe_jax.evaluation.metrics.multilabel import average_precision
from mlmoe_jax.evaluation.metrics.ranking import rank
from mlmoe_jax.evaluation.results import SplitScores
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
        expected = [(n, k) for _, n, k in sorted(entries)][: mistakes.MOST_MISTAKES]
        assert mistakes.worst(split, code, -sign) == expected
    assert mistakes.worst(SplitScores("", split.ids, values, np.full_like(codes, -1)), 0, 1) == []


def test_mistakes_leave_out_unknown_and_difficult_labels(text, run):
    rows = data_block(text, "mistakes-false-positives")["rows"]
    with np.load(run / "scores.npz") as stored:
        test = stored["split"] == "test"
        negative = np.where(stored["labels"][test] == 0, stored["scores"][test], 0)
    assert rows[0][1] == pytest.approx(negative.max(), abs=1e-4)
    available = set(image_ids("test", 3))  # the samples: the data set of the run has other images
    for group, name in zip(data_block(text, "widget-mistakes"), ("positives", "negatives"), strict=True):
        assert group["title"] == f"False {name}, worst first"
        listed = data_block(text, f"mistakes-false-{name}")["rows"]
        expected = [cells for cells in listed if cells[2] in available]
        assert [[row["label"], row["score"], row["id"]] for row in group["rows"]] == expected
    assert "images are not shown, since" in section(text, "mistakes")


@pytest.fixture(scope="module")
def judged(run):
    return mistakes.judge(RunFiles(run))


def test_confused_labels_match_a_plain_loop(text, judged):
    expected = {}
    for codes, scores_of in zip(judged.table.codes, judged.table.scores, strict=True):
        predicted = scores_of >= judged.cuts.values
        for a in range(5):
            for b in range(5):
                if codes[a] == 1 and not predicted[a] and codes[b] == 0 and predicted[b]:
                    expected[NAMES[a], NAMES[b]] = expected.get((NAMES[a], NAMES[b]), 0) + 1
    rows = data_block(text, "confusion-table")["rows"]
    assert {(row[0], row[1]): row[2] for row in rows} == expected
    assert [row[2] for row in rows] == sorted(expected.values(), reverse=True)
    a, _, count, of_missed, of_present = rows[0]
    k = NAMES.index(a)
    present = judged.table.codes[:, k] == 1
    missed = present & (judged.table.scores[:, k] < judged.cuts.values[k])
    assert (of_missed, of_present) == (pytest.approx(count / missed.sum()), pytest.approx(count / present.sum()))
    cells = data_block(text, "confusion-heat")["datasets"]["rows"]
    assert {(cell["y"], cell["x"]) for cell in cells} == set(expected)
    assert max(cell["value"] for cell in cells) == 1


def test_of_very_many_labels_those_with_most_mistakes_are_counted(judged, monkeypatch):
    whole = mistakes.confused(judged).toarray()
    monkeypatch.setattr(mistakes, "MOST_CONFUSED", 2)
    few = mistakes.confused(judged).toarray()
    a, b = (np.argsort(-of.sum(axis=0), kind="stable")[:2] for of in (judged.missed, judged.false))
    expected = np.zeros_like(whole)
    expected[np.ix_(a, b)] = whole[np.ix_(a, b)]
    np.testing.assert_array_equal(few, expected)
    assert (few != whole).any()


def test_images_have_their_present_and_predicted_labels(text, judged):
    found = data_block(text, "widget-images")
    assert {card["id"] for card in found["cards"]} == set(image_ids("test", 3))
    assert found["thumbnails"] == dict.fromkeys(image_ids("test", 3), ""), "samples are embedded only once"
    ids = judged.table.ids.tolist()
    for card in found["cards"]:
        n = ids.index(card["id"])
        predicted = judged.table.scores[n] >= judged.cuts.values
        shown = {(k, code, guess) for k, code, _, guess in card["labels"]}
        expected = {
            (k, code, int(predicted[k])) for k, code in enumerate(judged.table.codes[n]) if code == 1 or predicted[k]
        }
        assert shown == expected
    rows = data_block(text, "image-table")["rows"]
    assert sorted(row[0] for row in rows) == sorted(ids)
    wrong = judged.missed.sum(axis=1) + judged.false.sum(axis=1)
    assert [row[1] for row in rows] == sorted(wrong.tolist(), reverse=True)
    assert rows[0][1] == len(list(filter(None, ", ".join(rows[0][2:4]).split(", "))))


def test_intervals_are_those_of_metrics_of_resampled_images(run):
    files = RunFiles(run)
    main, found = files.main_split, resample(files, most=4)
    label, mask = main.scores.targets("negative")
    weights = np.concatenate(list(draw(len(label), 4, SEED)), axis=1).astype(int)
    for r, of_resample in enumerate(weights.T):
        rows = np.repeat(np.arange(len(label)), of_resample)
        ap = average_precision(main.scores.scores[rows], label[rows], mask=mask[rows])
        np.testing.assert_allclose(found.ap[r], ap)
        assert found.metrics["mAP"][r] == pytest.approx(np.nanmean(ap))
    assert found.count == 4
    reach = 1.96 * np.std(found.metrics["mAP"], ddof=1)
    assert found.interval("mAP", 0.5) == pytest.approx((0.5 - reach, 0.5 + reach))
    assert found.interval("mAP", 0.0)[0] == 0  # a metric is a fraction
    assert found.interval("mAP", 1.0)[1] == 1
    assert found.interval("mAP", math.nan) is None
    assert found.interval("mAP@3", 0.5) is None
    reach = 1.96 * np.std(found.ap[:, :2].mean(axis=1), ddof=1)
    assert found.mean_ap([0, 1], 0.5) == pytest.approx((0.5 - reach, 0.5 + reach))


def test_the_interval_of_rare_labels_contains_the_value(tmp_path):
    draw, names = np.random.default_rng(0), [f"label {k}" for k in range(100)]
    codes = np.zeros((500, 100), np.int8)
    for k in range(100):
        codes[draw.choice(500, 2, replace=False), k] = 1
    values = np.clip(draw.normal(0.3 + 0.2 * codes, 0.1), 0, 1)
    folder = write_run(tmp_path, SplitScores("test", image_ids("test", 500), values, codes), names=names)
    ap = np.mean([average_precision(values[:, [k]], codes[:, [k]])[0] for k in range(100)])
    folder.write_json("results.json", {"test": {"mAP": ap}})
    found = resample(RunFiles(folder), most=100)
    assert np.percentile(found.metrics["mAP"], 2.5) > ap  # why percentiles would not do
    for low, high in (found.interval("mAP", ap), found.mean_ap(range(100), ap)):
        assert low < ap < high
        assert ap - low == pytest.approx(high - ap)


def test_thirds_of_the_labels_by_training_images(tmp_path, run):
    names, ap = tuple("abcdefg"), [0.1, 0.2, math.nan, 0.4, 0.5, 0.6, 0.7]
    positives = np.array([70, 10, 5, 20, 60, 30, 50])
    space = LabelSpace(names, np.zeros((7, 7), int), positives, 100, np.zeros(7, int), np.zeros(7, int))
    with open(tmp_path / "label_space.npz", "wb") as file:
        space.save(file)
    (tmp_path / "config.json").write_text(run.read_text("config.json"))
    table = [{"label": name, "AP": "" if math.isnan(one) else str(one)} for name, one in zip(names, ap, strict=True)]
    files = RunFiles(RunFolder(tmp_path))
    parts = by_frequency(files, Evaluated("test", {}, table))
    [shown] = [part for part in parts if part.kind == "table"]
    assert [row[:4] for row in shown.rows] == [
        ["rare", "10 to 20", "2", "30.00"],
        ["medium", "30 to 50", "2", "65.00"],
        ["frequent", "60 to 70", "2", "30.00"],
    ]
    points = parts[-1].charts[0].spec["datasets"]["rows"]
    assert [(point["label"], point["images"], point["value"]) for point in points] == sorted(
        ((name, int(n), one) for name, n, one in zip(names, positives, ap, strict=True) if not math.isnan(one)),
        key=lambda point: point[1],
    )
    assert by_frequency(files, Evaluated("test", {}, table[:5])) == [], "these are not the labels of the run"


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
