"""The values that the report page shows, and pages of very large runs."""

import base64
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from helpers.label_trees import violations
from helpers.made_run import GRID, IMAGES, NAMES, data_block, image_ids, make_run, section, write_samples
from helpers.scored_run import stored_metrics, write_results
from PIL import Image
from sklearn.metrics import precision_recall_curve

from mlmoe_jax.apps.report import labels, mistakes, page, result_sections, run_files, samples, training
from mlmoe_jax.apps.report.predictions import KINDS, MOST_MISTAKES, SIDE, Predictions
from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.apps.tools.compare import SEED
from mlmoe_jax.data.decoding import BadImage
from mlmoe_jax.data.images import ArrayImages
from mlmoe_jax.data.label_tree import LabelTree
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.metrics.bootstrap import draw
from mlmoe_jax.evaluation.metrics.multilabel import average_precision
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.models.calibration import probabilities
from mlmoe_jax.models.consistency import Consistency
from mlmoe_jax.runs.decisions import Thresholds, read_thresholds, to_logits, write_thresholds
from mlmoe_jax.runs.folder import RunFolder


# -------------------------------------------------------------------------------------------------------------- numbers
def test_precision_recall_points_equal_scikit_learn(monkeypatch):
    monkeypatch.setattr(result_sections, "MOST_POINTS", 1000)
    draw = np.random.default_rng(0)
    positive, values = draw.random(300) < 0.3, draw.random(300).round(2)
    entries = values[:, None], positive[:, None], np.ones((300, 1), bool)
    points = result_sections.precision_recall_points(*entries)
    precision, recall, cuts = precision_recall_curve(positive, values)
    at = np.searchsorted(cuts, points[:, 2])
    np.testing.assert_allclose(points, np.stack([recall[at], precision[at], cuts[at]], axis=1))
    monkeypatch.setattr(result_sections, "MOST_POINTS", 10)
    few = result_sections.precision_recall_points(*entries)
    assert len(few) == 10
    np.testing.assert_array_equal(few[[0, -1]], points[[0, -1]])


def test_calibration_equals_the_metrics(text, run):
    error = stored_metrics(run)["test"]["ECE_pooled"]
    assert f"calibration error: {100 * error:.2f} %" in section(text, "scores")
    bins = np.array([list(row.values()) for row in data_block(text, "reliability")["datasets"]["rows"]])
    np.testing.assert_allclose(np.abs(bins[:, 0] - bins[:, 1]) @ bins[:, 2] / bins[:, 2].sum(), error, atol=1e-4)
    first = data_block(text, "precision-recall")["datasets"]["rows"][0]
    assert first["recall"] == 1, "at the lowest threshold of a positive"


# ------------------------------------------------------------------------------------------------------------- mistakes
def test_worst_mistakes_match_a_plain_loop():
    draw = np.random.default_rng(1)
    codes, values = draw.choice([0, 1, -1, 2], (30, 4)).astype(np.int8), draw.random((30, 4)).round(2)
    split = SplitScores("test", image_ids("test", 30), values, codes)
    judged = Predictions(split, "abcd", np.array([0.2, 0.5, 0.7, np.inf]), "")
    for (_, kind, sign), code in zip(KINDS, (0, 1), strict=True):
        entries = [
            (-sign * values[n, k], n, k)
            for n in range(30)
            for k in range(4)
            if codes[n, k] == code and (values[n, k] >= judged.thresholds[k]) == (code == 0)
        ]
        expected = [(n, k) for _, n, k in sorted(entries)][:MOST_MISTAKES]
        assert judged.worst(kind, sign) == expected
    unknown = Predictions(SplitScores("", split.ids, values, np.full_like(codes, -1)), "abcd", np.zeros(4), "")
    assert unknown.worst("false", 1) == []


def test_mistakes_leave_out_unknown_and_difficult_labels(text, run):
    test, cuts = StoredRun(run).split("test"), (0.1, 0.2, 0.3, 0.4, np.inf)  # of the made run
    negative = np.where((test.codes == 0) & (test.scores >= cuts), test.scores, 0)
    assert data_block(text, "mistakes-false")["rows"][0][1] == pytest.approx(negative.max(), abs=1e-4)
    available = set(image_ids("test", 3))  # the samples: the data set of the run has other images
    for outcome in ("false", "missed"):
        data = data_block(text, f"widget-cards-{outcome}")
        expected = [row for row in data_block(text, f"mistakes-{outcome}")["rows"] if row[2] in available]
        assert [[*card["labels"][0][::2], card["id"]] for card in data["cards"]] == expected
        assert {card["labels"][0][1] for card in data["cards"]} == {outcome}
    judged, found = RunFiles(run).predictions, section(text, "mistakes")
    assert f"{judged.false.sum()} labels wrongly predicted and {judged.missed.sum()} missed. " in found
    assert "images cannot be shown: the data" in found


def test_images_have_their_present_and_predicted_labels(text, run):
    judged = RunFiles(run).predictions
    ids = judged.scored.ids.tolist()
    cards = {card["id"]: card["labels"] for card in data_block(text, "widget-cards-images")["cards"]}
    assert set(cards) == set(image_ids("test", 3)) == set(data_block(text, "of-images"))
    for name, shown in cards.items():
        codes, predicted = judged.scored.codes[ids.index(name)], judged.predicted[ids.index(name)]
        expected = {
            (NAMES[k], {1: "right" if guess else "missed", 0: "false"}.get(int(code), "unknown"))
            for k, (code, guess) in enumerate(zip(codes, predicted, strict=True))
            if code == 1 or guess
        }
        assert {(label, outcome) for label, outcome, _ in shown} == expected
    rows = data_block(text, "image-table")["rows"]
    wrong = judged.missed.sum(axis=1) + judged.false.sum(axis=1)
    assert {row[0]: row[1] for row in rows} == dict(zip(ids, wrong.tolist(), strict=True))
    assert [row[1] for row in rows] == sorted(wrong.tolist(), reverse=True)
    assert rows[0][1] == len([*filter(None, ", ".join(rows[0][2:4]).split(", "))])


def test_thresholds_of_predictions(tmp_path):
    folder = make_run(tmp_path, samples=0)
    for source, threshold, origin in (
        ({}, 0.3, "thresholds.json"),
        ({"split": "val"}, 0.3, "thresholds.json"),
        ({"split": "test"}, 0.5, "0.5 for every label"),
    ):
        write_thresholds(folder, Thresholds(dict.fromkeys(NAMES, 0.3), source))
        found = RunFiles(folder).predictions
        assert (found.thresholds.tolist(), found.origin) == ([threshold] * len(NAMES), origin)
    (folder / "thresholds.json").unlink()
    assert RunFiles(folder).predictions.thresholds.tolist() == [0.5] * len(NAMES)


def test_scores_are_corrected(tmp_path):
    folder = make_run(tmp_path / "run")
    labels = {name: {"scale": 0.5, "offset": 0.25} for name in NAMES}
    calibration = {"split": "val", "labels": labels}
    write_thresholds(folder, replace(read_thresholds(folder), calibration=calibration))
    files = RunFiles(folder)
    raw, note = files.scored.scores, result_sections.score_curves(files)[0].text
    expected = probabilities(0.5 * to_logits(raw) + 0.25)
    np.testing.assert_allclose(files.corrected.scores, expected, rtol=1e-6)
    np.testing.assert_allclose(files.samples.scores, expected[: len(files.samples.images)], rtol=1e-3)
    np.testing.assert_array_equal(files.predictions.predicted, expected >= files.thresholds.limits(NAMES))
    assert "The scores are corrected as fitted on val; raw " in note


def test_scores_agree_with_the_tree_of_the_labels(tmp_path):
    folder, buffer = make_run(tmp_path / "run"), io.BytesIO()
    before = RunFiles(folder)
    raw, tree = before.scored.scores, LabelTree(((0, 1), (3, 2)), ((1, 2),))
    replace(before.label_space, tree=tree).save(buffer)
    folder.write_bytes("label_space.npz", buffer.getvalue())
    files = RunFiles(folder)
    np.testing.assert_array_equal(files.scored.scores, Consistency.of(tree, 0.5, 5)(raw), err_msg="as measured")
    reported = Consistency.of(tree, files.thresholds.limits(NAMES), 5)
    np.testing.assert_array_equal(files.corrected.scores, reported(raw))
    assert not np.array_equal(files.corrected.scores, files.scored.scores)
    assert "corrected" not in result_sections.score_curves(files)[0].text
    write_thresholds(folder, Thresholds(dict.fromkeys(NAMES, 0.9), {"split": "test"}))
    judged = RunFiles(folder).predictions  # at 0.5, because the thresholds were fitted on its split
    assert violations(tree, raw, judged.thresholds) > violations(tree, judged.scored.scores, judged.thresholds) == 0


def test_thumbnails_are_read_from_the_data_set_if_it_has_the_same_labels(tmp_path, monkeypatch):
    class Images(ArrayImages):
        def open(self, row, *how):
            if row == 4:
                raise BadImage("damaged")
            return super().open(row, *how)

    folder = make_run(tmp_path / "run", samples=0)
    files = RunFiles(folder)
    scored, mistaken = files.scored, files.predictions.mistaken
    pixels = np.full((IMAGES, 300, 200, 3), np.arange(IMAGES)[:, None, None, None], np.uint8)
    codes = scored.codes.copy()
    codes[3, 0] = 1 - np.clip(codes[3, 0], 0, 1)
    split = Split("test", NAMES, codes, scored.ids.tolist(), Images(pixels))
    monkeypatch.setattr(run_files, "open_split", lambda data, name, **how: split)
    found = files.images
    assert {"test/003.jpg", "test/004.jpg"} <= set(mistaken)
    assert list(found) == [name for name in mistaken if name not in ("test/003.jpg", "test/004.jpg")]
    assert "2 images cannot be shown: " in mistakes.mistakes(files)[0].text
    with Image.open(io.BytesIO(found["test/007.jpg"])) as shown:
        assert max(shown.size) == SIDE
        assert np.abs(np.asarray(shown).astype(int) - 7).max() <= 2

    def absent(*_, **__):
        raise UserError("data.root is empty")

    monkeypatch.setattr(run_files, "open_split", absent)
    assert RunFiles(folder).images == {}


# --------------------------------------------------------------------------------------------------------------- labels
def test_conditional_probabilities_and_groups(text, run):
    space = RunFiles(run).label_space
    assert not space.together.diagonal().any()
    run_files = RunFiles(run)
    run_files.label_space = replace(space, positives=0 * space.positives)
    charts = labels.groups(run_files)[2].charts
    assert not any(chart.spec["datasets"]["rows"] for chart in charts)
    cells = {(cell["a"], cell["b"]): cell["value"] for cell in data_block(text, "heat-0")["datasets"]["rows"]}
    for a, b in ((0, 1), (1, 0)):
        assert cells[NAMES[a], NAMES[b]] == pytest.approx(space.counts[a, b] / space.positives[a], abs=1e-3)
    groups = [row[1:] for row in data_block(text, "group-table")["rows"]]
    assert groups[0] == [1, 2, "cat, dog"]
    assert [size for _, size, _ in groups] == [2, 3, 2, 3]


def test_heat_maps_show_the_most_frequent_labels_of_a_model_without_groups(run, monkeypatch):
    monkeypatch.setattr(labels, "MOST_MAPPED", 3)
    files, none = RunFiles(run), np.zeros(5, int)
    files.label_space = replace(files.label_space, co_group=none, dc_group=none)
    note, charts, *_ = labels.groups(files)
    assert "Of 5 labels, the heat maps show the 3 most frequent" in note.text
    [chart] = charts.charts
    frequent = np.argsort(-files.label_space.positives, kind="stable")[:3]
    assert {row["b"] for row in chart.spec["datasets"]["rows"]} <= {NAMES[k] for k in frequent}


# -------------------------------------------------------------------------------------------------------------- samples
def test_gates_per_image_and_their_means(text, run):
    weights = np.load(run / "samples/explained.npz")
    packed = {gate["name"]: gate for gate in data_block(text, "widget-gates")["gates"]}
    for name, images in (("co", 3), ("experts", 1)):
        values = np.frombuffer(base64.b64decode(packed[name]["weights"]), np.uint8) / 255
        assert packed[name]["images"] == images
        np.testing.assert_allclose(values, weights[f"gates/{name}"].ravel(), atol=0.003)
    assert "The weights of experts do not depend on the image" in section(text, "gates")
    table, space = data_block(text, "gate-table"), RunFiles(run).label_space
    experts = weights["gates/experts"].astype(float)[0]
    expected = np.column_stack(
        [
            weights["gates/co"].astype(float).mean(axis=0),
            experts,
            experts[:, :2].sum(axis=1),
            (space.counts / space.positives[:, None]).sum(axis=1) / 4,
        ]
    )
    np.testing.assert_allclose([row[1:] for row in table["rows"]], expected, atol=1e-5)
    assert [name for name, _ in table["columns"][3:7]] == [
        *("experts: shared 1", "experts: shared 2", "experts: task 1"),
        "experts: all shared experts",
    ]


def test_sections_about_samples_say_what_is_missing(run):
    kinds, files = {kind.name: kind for kind in page.SECTION_KINDS}, RunFiles(run)
    files.samples = replace(files.samples, gates={}, attention={})
    assert kinds["gates"].describe(files).missing.startswith("This model has no gates")
    assert kinds["attention"].describe(files).missing.startswith("The head of this model has no attention maps")
    files.samples = None
    assert "keeps no sample images" in kinds["gates"].describe(files).missing


def test_attention_maps_and_their_peaks(text, run, monkeypatch):
    maps = np.load(run / "samples/explained.npz")["attention/labels"].astype(float)
    packed = {kind["name"]: kind for kind in data_block(text, "widget-attention")["maps"]}
    files = RunFiles(run)
    codes, values = files.samples.codes, files.samples.scores
    for s, shown in enumerate(packed["labels"]["shown"]):
        assert shown == sorted(range(5), key=lambda k: (codes[s, k] != 1, -values[s, k])), "labels of the image first"
        maps[s] = maps[s, shown]
    values = np.frombuffer(base64.b64decode(packed["labels"]["maps"]), np.uint8).reshape(maps.shape) / 255
    np.testing.assert_allclose(values, maps / maps.max(-1, keepdims=True), atol=0.003)
    np.testing.assert_allclose(packed["labels"]["peaks"], maps.max(-1) * GRID[0] * GRID[1], atol=0.006)
    assert packed["prompts"]["queries"]["1"] == "co group 2, expert 1"
    monkeypatch.setattr(samples, "MOST_QUERIES", 2)
    few = samples.pack_attention(files, files.samples, "labels", files.samples.attention["labels"])
    assert few["shown"] == [shown[:2] for shown in packed["labels"]["shown"]]


def test_images_are_embedded_once_by_name(text, run, copied):
    embedded, block = data_block(text, "of-images"), data_block(text, "samples")
    for n, name in enumerate(block["ids"]):
        assert base64.b64decode(embedded[name].partition(",")[2]) == (run / f"samples/{n:04}.jpg").read_bytes()
    assert block["ids"] == image_ids("test", 3).tolist()
    assert json.dumps(block["labels"]).count("[") > 3 * len(NAMES)
    copied.write_json("samples/index.json", copied.read_json("samples/index.json") | {"split": "val"})
    shared = samples.shared_data(RunFiles(copied))
    assert shared["ids"][0] == "val: test/000.jpg", "other splits may have the same names"


# ----------------------------------------------------------------------------------------------------------- very large
def test_a_page_with_twenty_thousand_labels_stays_small(tmp_path, run, no_bundle):
    count, images, draw = 20_000, 2, np.random.default_rng(0)
    folder = RunFolder(tmp_path / "huge")
    folder.write_text("config.json", run.read_text("config.json"))
    folder.write_text("labels.txt", "".join(f"label {k}\n" for k in range(count)))
    codes, values = (draw.random((images, count)) < 0.3).astype(np.int8), draw.random((images, count)).round(3)
    write_results(folder, {"test": {"mAP": 0.3}}, SplitScores("test", image_ids("test", images), values, codes))
    rows = [["test", f"label {k}", 3, k / count] for k in range(count)]
    folder.write_csv("per_class.csv", ["split", "label", "positives", "AP"], rows)
    write_samples(folder, codes, values, draw)
    text = page.write_report(folder).read_text()
    assert len(text) < 5_000_000
    assert len(data_block(text, "label-table")["rows"]) == count
    assert len(data_block(text, "widget-gates")["labels"]) == samples.MOST_GATED
    assert "Of 20,000" in section(text, "gates")


def test_intervals_are_those_of_metrics_of_resampled_images(run):
    files = RunFiles(run)
    found, truth, values = training.intervals(files, resamples=4), files.raw.entries("negative"), []
    for counts in np.concatenate(list(draw(len(files.raw), 4, SEED)), axis=1).astype(int).T:
        rows = np.repeat(np.arange(len(files.raw)), counts)
        values.append(np.nanmean(average_precision(truth.scores[rows], truth.positive[rows], mask=truth.valid[rows])))
    reach, value = 1.96 * np.std(values, ddof=1), files.results["test"].metrics["mAP"]
    assert found["mAP"] == pytest.approx((value - reach, min(1.0, value + reach)))
    assert "mAP@3" not in found, "it is not resampled"
