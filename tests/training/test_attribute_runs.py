"""A run with an attribute beside tags: its fit, its metrics, and equal predictions in all outputs."""

import csv
import json

import numpy as np
import pytest
from PIL import Image
from sklearn.linear_model import LogisticRegression

from mlmoe_jax.apps.report.predictions import VALUE_RULE
from mlmoe_jax.config import load_config
from mlmoe_jax.data.label_tree import Attribute
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.measure import confusion_tables
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.main import main
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.training.logistic.penalty_search import fit_logistic
from mlmoe_jax.training.loop import train

COLORS = {"red": (220, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 220)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run on squares, bright or dark, of three colors; of one image, the color is unknown."""
    root, random = tmp_path_factory.mktemp("colors"), np.random.default_rng(0)
    for split, count in {"train": 45, "test": 12}.items():
        lines = ["image,labels,color"]
        for number in range(count):
            color, is_bright = list(COLORS)[number % 3], bool(random.integers(2))
            pixels = np.array(COLORS[color]) * (1.0 if is_bright else 0.5) + random.normal(0, 6, (64, 64, 3))
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(root / f"{split}{number}.png")
            lines.append(f"{split}{number}.png,{'bright' * is_bright},{color if number else ''}")
        (root / f"{split}.csv").write_text("\n".join(lines))
    data = {"data.name": "csv", "data.root": root, "data.attributes": "color", "data.val_split": ""}
    fit = {"data.cache_features": "float32", "train.fit": "logistic", "loss.kind": "bce", "eval.select_on": "none"}
    small = {"data.test_splits": "test", "model.backbone.weights": "none", "report.samples": 0}
    texts = [(key, str(value)) for key, value in (data | fit | small).items()]
    train(load_config("linear_probe:dataset=digits", texts), folder := RunFolder(root / "run"))
    return folder


@pytest.mark.budget(30)
def test_metrics_and_outputs_have_the_attribute(folder, tmp_path):
    run, predictor = StoredRun(folder), Predictor.from_run(folder.path)
    scores, codes = run.split("test").scores, run.split("test").codes
    values = [k for k, label in enumerate(run.labels) if label.startswith("color: ")]
    np.testing.assert_allclose(scores[:, values].sum(axis=1), 1, atol=1e-6)
    right = (scores[:, values].argmax(axis=1) == codes[:, values].argmax(axis=1))[1:]
    assert run.metrics["test"]["accuracy/color"] == pytest.approx(right.mean())
    assert right.mean() > 0.8
    table = run.results["test"].confusions["color"]
    assert table["values"] == ["blue", "green", "red"]
    assert np.trace(table["images"]) == right.sum()
    assert np.sum(table["images"]) == 11  # the color of one image is unknown

    images = [str(folder.path.parent / f"test{number}.png") for number in range(12)]
    results = predictor(images)
    best = [table["values"][k] for k in scores[:, values].argmax(axis=1)]
    assert [result.attributes for result in results] == [{"color": value} for value in best]
    assert all(f"color: {value}" in result.labels for value, result in zip(best, results, strict=True))
    for name in ("p.csv", "p.jsonl"):
        output = tmp_path / name
        assert main(["predict", f"--workdir={folder.path}", "--images", *images, f"--output={output}"]) == 0
        with output.open(newline="") as file:
            rows = list(csv.DictReader(file)) if name == "p.csv" else list(map(json.loads, file))
        assert [row["color"] for row in rows] == best
    assert main(["report", f"--workdir={folder.path}"]) == 0
    page = (folder.path / "report.html").read_text()
    assert 'id="confusion-color"' in page
    assert page.count(VALUE_RULE) == 2


@pytest.mark.budget(30)
def test_an_evaluation_prints_the_confusions_of_few_values(folder, capsys, monkeypatch):
    evaluate = ["eval", f"--workdir={folder.path}", "--config.report.samples=0"]
    assert main(evaluate) == 0
    out = capsys.readouterr().out
    images = StoredRun(folder).results["test"].confusions["color"]["images"]
    rows = [
        ["color", "blue", "green", "red"],
        *([name, *map(str, row)] for name, row in zip(sorted(COLORS), images, strict=True)),
    ]
    _, table = out.split("color of the images of test: the given value in rows, the most probable one in columns\n")
    assert [line.split() for line in table.splitlines()] == rows
    monkeypatch.setattr("mlmoe_jax.apps.cli.commands._MOST_VALUES", 2)
    assert main(evaluate) == 0
    assert "color of the images" not in capsys.readouterr().out
    assert confusion_tables(folder, ["val"]) == []


def test_values_are_renamed_and_left_out_but_not_joined(folder, tmp_path):
    predictor, image = Predictor.from_run(folder.path), str(folder.path.parent / "test3.png")  # red
    (tmp_path / "new").write_text("color: red,rouge\n")
    (tmp_path / "joined").write_text("color: red,x\nbright,x\n")
    (tmp_path / "out").write_text("color: red\n")
    assert predictor.rename(tmp_path / "new")(image).attributes == {"color": "rouge"}
    assert predictor.rename(leave_out=tmp_path / "out")(image).attributes == {"color": ""}
    with pytest.raises(UserError, match="a value of the attribute color is joined"):
        predictor.rename(tmp_path / "joined")


def test_the_fit_is_that_of_scikit_learn():
    random, values = np.random.default_rng(0), (0, 2, 3)
    features = random.normal(size=(200, 8)).astype(np.float32)
    value = (features @ random.normal(size=(8, 3)) + random.normal(size=(200, 3))).argmax(axis=1)
    codes = np.insert(np.eye(3, dtype=np.int8)[value], 1, features[:, 0] > 0, axis=1)
    codes[:20][:, values] = -1
    fit = fit_logistic(features, codes, attributes=[Attribute("color", values)])
    # the images, and one at their mean that has each value in part
    inputs = np.concatenate([features[20:], np.repeat(features.mean(axis=0)[None], 3, axis=0)])
    weights = np.append(np.ones(180), np.full(3, 1 / 3))
    expected = LogisticRegression(C=fit.penalty, tol=1e-9, max_iter=1000)
    expected.fit(inputs, np.append(value[20:], [0, 1, 2]), sample_weight=weights)
    logits = (features @ fit.kernel + fit.bias)[:, values]
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(shares, expected.predict_proba(features), atol=1e-3)
    np.testing.assert_allclose(fit.held_out_scores[:, values].sum(axis=1), 1, atol=1e-6)


def test_a_value_with_one_image_has_finite_scores():
    features = np.random.default_rng(0).normal(size=(60, 20)).astype(np.float32)
    codes = np.zeros((60, 3), np.int8)
    codes[:, 0], codes[5] = 1, (0, 1, 0)
    fit = fit_logistic(features, codes, attributes=[Attribute("color", (0, 1, 2))])
    assert np.isfinite(fit.bias).all()
    assert (fit.held_out_scores > 1e-3).all()
