import os
import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from helpers import scored_run
from helpers.commands import csv_rows
from helpers.metric_cases import evaluate_scores
from helpers.runs import CLASSES, published_config, write_published

from mlmoe_jax.config import default_config
from mlmoe_jax.data.decoding import STRICT, BadImage
from mlmoe_jax.data.images import ArrayImages
from mlmoe_jax.data.label_codes import DIFFICULT, POSITIVE, UNKNOWN
from mlmoe_jax.data.label_tree import LabelTree
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.data.split import Split
from mlmoe_jax.evaluation.evaluate import evaluate_run, score_split
from mlmoe_jax.evaluation.measure import Measured, measure, measure_and_write, results_table, write_measured
from mlmoe_jax.evaluation.metrics.multilabel import per_class
from mlmoe_jax.evaluation.results import FALL, SplitScores
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.models.apply import make_eval_step
from mlmoe_jax.models.calibration import probabilities
from mlmoe_jax.runs import restore
from mlmoe_jax.runs.assemble import preprocess_for
from mlmoe_jax.runs.decisions import Thresholds
from mlmoe_jax.runs.folder import RunFolder, training_finished
from mlmoe_jax.runs.image_record import ImageRecord
from mlmoe_jax.runs.restore import open_run
from mlmoe_jax.runtime.sharding import make_mesh


def make_split(rows: int, name: str = "val", seed: int = 0) -> Split:
    """Return a split whose image `row` has all pixels equal to `row`."""
    labels = np.random.default_rng(seed).integers(-1, 3, (rows, len(CLASSES))).astype(np.int8)
    images = np.broadcast_to(np.arange(rows, dtype=np.uint8)[:, None, None, None], (rows, 8, 8, 3))
    return Split(name, CLASSES, labels, [f"{name}/{row}" for row in range(rows)], ArrayImages(images))


def space_of(together, positives, images: int, **options) -> LabelSpace:
    """Return labels of one group with the counts of a training."""
    together, positives = np.array(together, np.int64), np.array(positives, np.int64)
    groups = np.zeros(len(positives), np.int32)
    return LabelSpace(CLASSES[: len(groups)], together, positives, images, groups, groups, **options)


def small_batches():
    """Return a config with batches of four small images, and a mesh."""
    config = default_config()
    config.data.image_size, config.eval.batch_size = 8, 4
    return config, make_mesh(config.mesh)


# ---------------------------------------------------------------------------------------------------------- scores
def test_probabilities_of_neighboring_logits_differ():
    close = np.array([12, np.nextafter(np.float32(12), np.float32(13))], np.float32)
    assert np.diff(probabilities(close)) > 0, "float32 probabilities would be equal"


def test_scoring_takes_little_more_memory_than_the_scores():
    images, labels = 256, 4096
    split = make_split(images)
    split = replace(split, labels=np.zeros((images, labels), np.int8), classes=tuple(map(str, range(labels))))

    def eval_step(values, frozen, batch):
        return {"logits": np.ones((4, labels), np.float32), "id": batch["id"], "mask": batch["mask"]}

    config, mesh = small_batches()
    config.data.threads, config.data.workers = 1, 0
    tracemalloc.start()
    scored = score_split(eval_step, {"x": {}}, {}, split, config, mesh)["x"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert scored.scores.dtype == np.float32
    assert scored.readable() is scored, "no copy if all images have scores"
    assert peak < 1.5 * scored.scores.nbytes


class CountedImages(ArrayImages):
    """Images that count how often each is read."""

    def __init__(self, array: np.ndarray):
        super().__init__(array)
        self.reads = np.zeros(len(array), int)

    def open(self, row: int, decoding=STRICT) -> np.ndarray:
        self.reads[row] += 1
        return super().open(row, decoding)


@pytest.mark.parametrize("rows", [1, 4, 11])
def test_every_image_is_read_once_and_scored_by_row_with_all_weights(rows):
    def eval_step(factor, frozen, batch):
        assert frozen == "frozen"
        assert batch["image"].shape == (4, 8, 8, 3)
        assert batch.keys() == {"image", "mask", "id"}, "labels stay on the host"
        color = factor * np.asarray(batch["image"][:, 0, 0, 0], np.float32)
        order = np.array([2, 0, 3, 1])  # the order of the logits is given by their rows
        logits = np.stack([color, -color, 0 * color + 2], axis=1)
        return {"logits": logits[order], "id": batch["id"][order], "mask": batch["mask"][order]}

    plain, (config, mesh) = make_split(rows), small_batches()
    split = replace(plain, images=CountedImages(plain.images.array))
    config.data.threads, config.data.workers = 1, 0  # nothing is read to time it
    factors = {"raw": 0.5, "ema": -0.25}
    scored = score_split(eval_step, factors, "frozen", split, config, mesh)
    assert list(scored) == list(factors)
    assert split.images.reads.tolist() == [1] * rows
    for name, factor in factors.items():
        assert scored[name].source is split
        color = factor * np.arange(rows)
        expected = 1 / (1 + np.exp(-np.stack([color, -color, 0 * color + 2], axis=1)))
        np.testing.assert_array_equal(scored[name].scores, expected.astype(np.float32))


def test_measure_applies_masks_cuts_and_the_training_frequency():
    codes = np.array([[POSITIVE, 0], [DIFFICULT, POSITIVE], [0, UNKNOWN], [POSITIVE, 0]], np.int8)
    split = Split("val", ("a", "b"), codes, list("wxyz"), np.zeros((4, 2, 2, 3), np.uint8))
    scores = np.array([[0.9, 0.2], [0.8, 0.6], [0.7, 0.9], [0.3, 0.1]])
    space, config = space_of(np.zeros((2, 2)), [5, 5], 10), default_config()

    def measured(difficult, threshold=0.5, **options):
        config.data.difficult_eval, config.eval.threshold = difficult, threshold
        return measure(SplitScores.of(split, scores), space, config, **options)

    negative = measured("negative")
    np.testing.assert_allclose(negative["mAP"], ((1 + 2 / 4) / 2 + 1) / 2)
    ignored = measured("ignore")
    np.testing.assert_allclose(ignored["mAP"], ((1 + 2 / 3) / 2 + 1) / 2)
    positive = measured("positive")
    np.testing.assert_allclose(positive["mAP"], ((1 + 1 + 3 / 4) / 3 + 1) / 2)
    # a: three of four predicted at 0.5, one of them right; b: one of three, right
    assert negative["OP@0.5"] == 2 / 4
    other = measured("negative", 0.85)
    assert other["OP@0.85"] == 1 / 1
    # each label is in half of the training images: two of the four known a and one of the three known b are predicted
    assert negative["CP@prior_matched_transductive"] == (1 / 2 + 1 / 1) / 2
    # fitted on another split, a at 0.75 and b at 0.15: two a and two b, one of each correct
    fitted = Thresholds({"b": 0.15, "a": 0.75}, {"split": "other"})
    assert measured("negative", fitted=fitted)["OP@fitted"] == 2 / 4
    assert measured("negative", fitted=replace(fitted, source={"split": "val"})) == negative, "not on its own split"
    config.metrics.preset = "mlgcn"
    both = measured("negative")
    assert both["mlgcn/mAP"] == pytest.approx(ignored["mAP"]), "ML-GCN leaves difficult labels out of the mAP"
    entries = SplitScores.of(split, scores).entries("negative")
    first = evaluate_scores(scores, entries.positive, entries.valid, {}, k=1)
    assert first["OP@top1"] == 2 / 4, "the unknown b of the third image is not ranked before its a"


def test_results_are_written(tmp_path, monkeypatch):
    folder, settings = RunFolder(tmp_path), replace(scored_run.SETTINGS, difficult="ignore")
    measured = {}
    for seed, (name, rows) in enumerate({"val": 5, "test": 7}.items()):
        scored = SplitScores.of(make_split(rows, name, seed), np.random.default_rng(seed).random((rows, 3)))
        metrics = {"mAP": (1 + seed) / 4, "OP@0.5": 1.0}
        measured[name] = Measured(scored, scored.entries("ignore"), metrics, [])
    write_measured(folder, measured, CLASSES, settings)
    rows = csv_rows(tmp_path / "per_class.csv")
    assert list(rows[0]) == ["split", "label", "positives", "AP", "AP_envelope", "AP_11point", "AUC"]
    assert [(row["split"], row["label"]) for row in rows] == [(name, label) for name in measured for label in CLASSES]
    for split, label, *values in map(dict.values, rows):
        codes, k = measured[split].scored.codes, CLASSES.index(label)
        known = (codes == 0) | (codes == 1)
        expected = per_class(measured[split].scored.scores, codes, mask=known)
        numbers = [float(value or "nan") for value in values]
        np.testing.assert_allclose(numbers, [column[k] for column in expected.values()])

    order, write_json = [], RunFolder.write_json
    monkeypatch.setattr(RunFolder, "write_json", lambda *of: (order.extend(os.listdir(tmp_path)), write_json(*of)))
    (tmp_path / "per_class.csv").unlink()
    write_measured(folder, measured, CLASSES, settings, ends_training=True)
    assert {"scores", "per_class.csv"} <= set(order), "a run with the results of the training is finished"
    assert training_finished(folder)


def test_an_evaluation_waits_while_a_training_writes_its_results(tmp_path):
    folder = RunFolder(tmp_path)
    writer = threading.Thread(target=write_measured, args=(folder, {}, CLASSES, scored_run.SETTINGS))
    with folder.changing_results():
        writer.start()
        writer.join(0.2)
        assert not (folder / "results.json").exists()
    writer.join()
    assert folder.read_json("results.json") == {}


def test_metrics_are_of_scores_that_agree_with_the_tree_and_raw_scores_are_stored(tmp_path):
    folder, config, split = RunFolder(tmp_path), default_config(), make_split(60, "test")
    space = space_of(np.zeros((3, 3)), np.ones(3), 9, tree=LabelTree(((0, 1),)))
    raw = SplitScores.of(split, np.random.default_rng(0).random((60, 3)).astype(np.float32))
    agreeing = replace(raw, scores=raw.scores.copy())
    agreeing.scores[:, 1] = raw.scores[:, :2].max(axis=1)
    folder.write_text("labels.txt", "".join(f"{name}\n" for name in CLASSES))
    results = measure_and_write(folder, {"test": raw}, space, config)["test"]
    assert results["mAP"] == measure(agreeing, replace(space, tree=LabelTree()), config)["mAP"]
    np.testing.assert_array_equal(StoredRun(folder).split("test").scores, raw.scores)
    of_labels = [float(row["AP"] or "nan") for row in csv_rows(tmp_path / "per_class.csv")]
    assert np.nanmean(of_labels) == pytest.approx(results["mAP"])
    config.eval.consistent = False
    independent = measure(raw, space, config)
    assert independent["mAP"] == measure(raw, replace(space, tree=LabelTree()), config)["mAP"] != results["mAP"]
    assert independent["hF1@0.5"] > 0


def test_results_include_pairs_of_labels(tmp_path):
    """In training b is in nearly all images with a; a model that predicts b with a is wrong without the correlation."""
    folder, config = RunFolder(tmp_path), default_config()
    space = space_of([[0, 90, 0], [90, 0, 0], [0, 0, 0]], [100, 300, 50], 1000)
    a = np.repeat([1, 0], 40)
    scores = np.stack([0.1 + 0.8 * a, 0.2 + 0.6 * a, np.full(80, 0.5)], axis=1)
    scored = {}
    for name, b in {"test": a, "test_shift": np.tile([1, 0], 40)}.items():
        codes = np.stack([a, b, np.tile([1, 1, 0, 0], 20)], axis=1).astype(np.int8)
        split = Split(name, CLASSES, codes, [f"{name}/{row}" for row in range(80)], np.zeros((80, 1)))
        scored[name] = SplitScores.of(split, scores)
    results = measure_and_write(folder, scored, space, config)
    assert scored_run.stored_metrics(folder)["test_shift"] == pytest.approx(results["test_shift"])
    rows = {row["split"]: row for row in csv_rows(tmp_path / "cooccurrence.csv")}
    assert [(row["a"], row["b"]) for row in rows.values()] == [("a", "b")] * 2, "only 30 % of the images with b have a"
    assert rows["test"]["fpr_with_a"] == "", "no image has a alone"
    assert float(rows["test_shift"]["fpr_with_a"]) == 1
    assert results["test_shift"][FALL] == results["test"]["mAP"] - results["test_shift"]["mAP"] > 0
    assert FALL not in results["test"]
    measure_and_write(folder, {"test": scored["test"]}, space, config)
    assert FALL not in scored_run.stored_metrics(folder)["test_shift"], "it would refer to other results on test"
    measure_and_write(folder, scored, replace(space, together=np.zeros((3, 3), int)), config)
    assert not (tmp_path / "cooccurrence.csv").exists(), "no pair occurs together in this training"


def test_results_are_shown_in_percent():
    of_test = {"mAP": 0.12346, "CF1@0.5": 1.0, "CF1@top3": 0.25, "precision@1": 0.75, "ECE": 0.125}
    results = {"test": of_test, "shift": {**of_test, "mAP": 0.5}}
    head, *main = [line.split() for line in results_table(results).text().splitlines()]
    assert head == ["metric,", "%", "test", "shift"]
    assert main == [["mAP", "12.35", "50.00"], ["CF1@0.5", *2 * ["100.00"]], ["precision@1", *2 * ["75.00"]]]
    _, *every = [line.split() for line in results_table(results, every=True).text().splitlines()]
    assert every == [["CF1@top3", *2 * ["25.00"]], ["ECE", *2 * ["12.50"]], *main], "the main ones are the last"


# ------------------------------------------------------------------------------------------ runs and their folders
@pytest.fixture
def config(run, monkeypatch):
    """The config of a run on the backbone `tiny`, with synthetic splits."""
    monkeypatch.setattr(restore, "open_split", lambda data, name, **knows: make_split(6, name))
    return published_config()


def test_a_run_folder_is_evaluated(config, tmp_path, caplog):
    folder = RunFolder(tmp_path / "run")
    parts, values = write_published(folder, config)
    ImageRecord.of([*make_split(6, "train").ids, *make_split(6, "val").ids[:2]], []).write(folder)
    results = evaluate_run(
        folder, [("data.test_splits", "val,test,train"), ("eval.threshold", "0.25"), ("eval.batch_size", "2")]
    )
    assert set(results) == {"val", "test", "train"}
    for share in ("2 of the 6 images of split val", "6 of the 6 images of split train"):
        assert f"{share} are, by their names, training images of {folder}" in caplog.text
    stored = StoredRun(folder).results
    assert stored.keys() == results.keys()
    assert (stored["val"].settings.threshold, config.eval.threshold) == (0.25, 0.5)
    assert not training_finished(folder)

    run = open_run(folder)
    assert (run.step, run.notes["kind"], run.label_space.names) == (20, "raw", CLASSES)
    step = make_eval_step(replace(run, definition=parts.definition, preprocess=preprocess_for(config)))
    expected = score_split(step, {"x": values}, parts.frozen, make_split(6), config, run.mesh)["x"]
    np.testing.assert_allclose(StoredRun(folder).split("val").scores, expected.scores, rtol=1e-5)
    run.config.eval.threshold = 0.25
    again = measure(expected, run.label_space, run.config)
    assert results["val"] == pytest.approx(again, nan_ok=True)
    assert "OP@0.25" in results["val"]


class Unreadable(ArrayImages):
    """Images of which the first cannot be read."""

    def open(self, row, decoding=STRICT):
        if row == 0:
            raise BadImage("cannot read val/0 as an image: it is empty")
        return super().open(row, decoding)


def test_unreadable_images_are_left_out_and_listed(config, tmp_path, monkeypatch, refusal):
    folder = RunFolder(tmp_path / "run")
    write_published(folder, config)
    whole = make_split(6)
    holed = replace(whole, images=Unreadable(whole.images.array))
    monkeypatch.setattr(restore, "open_split", lambda data, name, **knows: holed)
    assert "cannot read val/0" in refusal(evaluate_run, folder, [("data.test_splits", "val")], error=BadImage)
    results = evaluate_run(folder, [("data.test_splits", "val"), ("data.bad_images", "skip")])
    assert folder.read_text("skipped_images.csv").splitlines() == [
        "split,image,why",
        "val,val/0,cannot read val/0 as an image: it is empty",
    ]
    np.testing.assert_array_equal(StoredRun(folder).split("val").read, [False] + 5 * [True])
    monkeypatch.setattr(restore, "open_split", lambda data, name, **knows: whole.take(np.arange(1, 6), "val"))
    assert evaluate_run(folder, [("data.test_splits", "val")]) == results
