"""The Predictor, with a model whose logits are known, and labels by rank."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.color_model import HALVES, NAMES, color, expected, make_run
from PIL import Image

import mlmoe_jax.inference.predictor as predictor_module
from mlmoe_jax.data.label_tree import LabelTree
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.inference.ranks import LEAST_IMAGES, LEAST_RANK, Ranks, best_ranked
from mlmoe_jax.runs.folder import RunFolder


@pytest.fixture(scope="module")
def predictor():
    return Predictor(make_run(), HALVES)


@pytest.mark.parametrize(("images", "batch_size"), [(1, 8), (8, 8), (19, 8), (3, 1)])
def test_results_are_in_the_order_of_the_images(predictor, images, batch_size):
    results = predictor([color(10 * row, 255 - 10 * row) for row in range(images)], batch_size=batch_size)
    assert [result.image for result in results] == [f"image {row}" for row in range(images)]
    for row, result in enumerate(results):
        assert list(result.scores) == list(NAMES)
        np.testing.assert_allclose(list(result.scores.values()), expected(10 * row, 255 - 10 * row), rtol=1e-4)
        assert result.labels == tuple(name for name in NAMES if result.scores[name] >= 0.5)
        assert (result.error, result.gates) == ("", None)


def test_each_label_has_its_threshold_which_is_inclusive():
    at_104 = float(1 / (1 + np.exp(-np.float64(np.float32(0.4)))))
    predictor = Predictor(make_run(), {"dark": 0.51, "blue": 0.0, "green": 1.0, "red": at_104 - 1e-6})
    (first, second) = predictor([color(104, 255), color(103, 255)])
    assert first.labels == ("red", "blue")
    assert second.labels == ("blue",)
    dark = Predictor(make_run(), HALVES)([color(0)])[0]
    assert dark.labels == ("dark",), "σ(0) is 0.5, and that is enough"


def test_scores_agree_with_the_tree_of_the_labels():
    tree = LabelTree(((0, 1),), ((1, 2),))  # red implies green, which excludes blue
    limits = {"red": 0.6, "green": 0.9, "blue": 0.5, "dark": 0.6}
    predictor = Predictor(make_run(tree=tree), limits)
    (result,) = predictor([color(110, 0, 105)])
    assert result.labels == ("red", "green")
    assert result.scores["green"] == 0.9
    assert 0.499 < result.scores["blue"] < 0.5
    raw = make_run(tree=tree)
    raw.config.eval.consistent = False
    assert Predictor(raw, limits)([color(110, 0, 105)])[0].labels == ("red", "blue")


def test_top_k_returns_the_best_labels_best_first(predictor):
    images = [color(90, 150, 110), color(0, 0, 0), b""]
    (first, second, bad) = predictor(images, top_k=3)
    assert first.labels == ("green", "blue", "dark")
    assert second.labels == ("dark", "red", "green"), "of equal scores, the first labels"
    assert len(first.scores) == 4
    assert bad.labels == ()
    assert bad.error


def test_even_batches_need_little_padding():
    predictor = Predictor(make_run(), HALVES)
    given = [(5, 32, 1), (64, 32, 1), (65, 32, 1), (65, 32, 8), (3, 32, 8), (1_000_000, 32, 1)]  # images, most, devices
    for (images, most, devices), size in zip(given, [5, 32, 22, 24, 8, 32], strict=True):
        predictor.run = replace(predictor.run, mesh=SimpleNamespace(size=devices))
        assert predictor.even_batch(images, most) == size
    assert predictor.even_batch(65) == 22, "32 images per device"


def test_gates_are_returned_on_request(predictor):
    for row, result in enumerate(predictor([color(51 * row) for row in range(3)], gates=True)):
        assert set(result.gates) == {"g", "static"}
        np.testing.assert_allclose(result.gates["g"][:, 0], [0, 0.25, 0.5, 0.75])
        np.testing.assert_allclose(result.gates["g"][:, 1], [0.2 * row] * 4, rtol=1e-5)
        np.testing.assert_allclose(result.gates["static"][:, 1], 0, atol=1e-6, err_msg="the same for every image")


def test_embeddings_are_the_rows_scores_and_features_of_readable_images(predictor):
    images = [color(90, 150), b"", color(20, 0, 255), color(200)]
    rows, scores, features = map(np.concatenate, zip(*predictor.embed(images, batch_size=3), strict=True))
    assert rows.tolist() == [0, 2, 3]
    np.testing.assert_allclose(features * 255, [[90, 150, 0], [20, 0, 255], [200, 0, 0]], rtol=1e-5)
    np.testing.assert_allclose(scores, [expected(90, 150), expected(20, 0, 255), expected(200)], rtol=1e-4)


def test_bad_images_do_not_affect_the_others(predictor, tmp_path):
    (tmp_path / "a.png").write_bytes(b"not an image")
    results = predictor([color(200), tmp_path / "a.png", color(100), "gone.png", color(0)], batch_size=2)
    assert [result.error.partition(" as")[0] for result in results] == [
        "",
        f"cannot read {tmp_path / 'a.png'}",
        "",
        "cannot read gone.png",
        "",
    ]
    assert results[1].scores is None
    np.testing.assert_allclose([results[row].scores["red"] for row in (0, 2, 4)], expected(200, 100, 0)[:3], rtol=1e-4)


def test_results_are_yielded_while_images_are_read(predictor):
    """The first result is available long before the last image is read."""
    accessed = []

    class Watched(list):
        def __getitem__(self, row):
            accessed.append(row)
            return super().__getitem__(row)

    images = Watched([color(10)] * 500)
    stream = predictor.stream(images, batch_size=2)
    accessed.clear()
    next(stream)
    named = len(images)  # each is accessed once for its name
    assert len(accessed) - named < 100


def test_one_image_gives_its_result_or_raises(predictor, tmp_path, refusal):
    path = tmp_path / "a.png"
    Image.fromarray(color(200)).save(path)
    (of_list,) = predictor([str(path)])
    assert predictor(path) == of_list
    assert predictor(color(200), top_k=1).labels == ("red",)
    batch = predictor(np.stack([color(200), color(0)]))
    assert [result.image for result in batch] == ["image 0", "image 1"]
    (in_list,) = predictor(["gone.jpg"])
    assert in_list.error == refusal(predictor, "gone.jpg"), "not a result without labels"
    assert in_list.error.startswith("cannot read gone.jpg as an image")


def test_nothing_is_returned_for_no_images_and_nan_of_unread_ones_is_ignored(predictor):
    assert predictor([]) == []
    assert Predictor(make_run(bias=np.nan), HALVES)([b""])[0].error


def test_few_images_are_not_padded_to_many():
    predictor = Predictor(make_run(), HALVES)
    sizes = []
    step = predictor._steps[False]

    def watched(values, frozen, batch):
        sizes.append(len(batch["image"]))
        return step(values, frozen, batch)

    predictor._steps[False] = watched
    for images in (1, 2, 5, 33):
        assert len(predictor([color(1)] * images)) == images
    assert sizes == [1, 4, 16, 32, 32]
    before = step._cache_size()
    for images in (3, 1):
        predictor([color(1)] * images, batch_size=2)
    assert sizes[-3:] == [2, 2, 2]
    assert step._cache_size() == before + 1, "the model is compiled once per size"


def test_from_a_run_folder(tmp_path, monkeypatch, refusal):
    folder = RunFolder(tmp_path)
    run = make_run()
    run.config.eval.threshold = 0.25

    given = []

    def open_run(opened, overrides, which):
        assert str(opened) == str(folder)
        given.append(dict(overrides))
        return run

    monkeypatch.setattr(predictor_module, "open_run", open_run)
    assert "thresholds.json" in refusal(Predictor.from_run, tmp_path)
    folder.write_json("thresholds.json", {"thresholds": {"blue": 0.3, "red": 0.1, "dark": 0.4, "green": 0.2}})
    opened = Predictor.from_run(tmp_path)
    assert opened.thresholds.tolist() == [0.1, 0.2, 0.3, 0.4]
    assert opened.version == f"{tmp_path.name} at step 7"
    overridden = Predictor.from_run(tmp_path, [("data.threads", "1"), ("eval.threshold", "0.25")])
    assert overridden.thresholds.tolist() == [0.25] * 4
    Predictor.from_run(tmp_path, [("data.exif", "ignore")])
    assert [keys["data.exif"] for keys in given] == ["apply", "apply", "ignore"], "photographs are turned upright"


def outputs(*batches):
    return [
        {"logits": np.asarray(logits, np.float32), "id": np.asarray(ids), "mask": np.asarray(mask, np.float32)}
        for logits, ids, mask in batches
    ]


def test_a_rank_is_the_logit_standardized_over_the_readable_images():
    draw = np.random.default_rng(0).normal(size=(10, 3)) * [1, 5, 0] + [0, -9, 2]
    bad = np.full((1, 3), 1e9)
    first = (np.concatenate([draw[:4], bad]), [0, 1, 2, 3, 4], [1, 1, 1, 1, 0])
    rest = (np.concatenate([draw[4:], bad]), [5, 6, 7, 8, 9, 10, -1], [1] * 7)
    ranks = Ranks.of(outputs(first, rest))
    values = np.array([ranks(row) for row in draw])
    np.testing.assert_allclose(values.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(values.std(axis=0), [1, 1, 0], atol=1e-6)
    assert Ranks.of(outputs((draw[:7], range(7), [1] * 7))) is None
    assert LEAST_IMAGES == 8


def test_an_image_gets_all_labels_of_a_high_rank():
    assert best_ranked(np.array([0.1, LEAST_RANK, 2.0]), None).tolist() == [2, 1]
    assert best_ranked(np.array([-1.0, -2.0, 1.49]), None).tolist() == [], "no label below the least rank"
    assert best_ranked(np.array([-3.0, 1.6, -2.0]), None).tolist() == [1], "a low rank is no high one"
    assert best_ranked(np.array([0.1, 0.3, 0.2]), 2).tolist() == [1, 2]


def test_ranks_of_few_labels_assign_no_label_below_the_least_and_are_doubted(caplog, capsys):
    """`dark` has the same logit in all images."""
    images = [color(0, 0, 10 * row) for row in range(11)] + [color(255)]
    run = make_run()
    both = Predictor(run, HALVES, ranked=True)
    labels = [result.labels for result in both(images)]
    assert labels == [()] * 10 + [("blue",), ("red",)]
    assert not caplog.messages
    alone = Predictor(only_red(run), {"red": 0.5}, ranked=True)
    assert [result.labels for result in alone(images)] == [()] * 11 + [("red",)]
    assert "ranks of 1 label only order the images" in caplog.text
    assert [result.labels for result in alone([color(90), color(110)])] == [(), ("red",)]
    assert "a single label is assigned by eval.threshold" in capsys.readouterr().err


def only_red(run):
    """Return the run with the first of its labels alone."""

    class First(type(run.definition)):
        def merge(self, values):
            model = super().merge(values)
            return lambda image: replace(found := model(image), logits=found.logits[:, :1], gates={})

    space = SimpleNamespace(**(vars(run.label_space) | {"names": ("red",)}))
    return replace(run, definition=First(), label_space=space)


def test_a_ranked_prediction_assigns_labels_by_rank(capsys):
    predictor = Predictor(make_run(), HALVES, ranked=True)
    images = [color(10 * row, 200, 0) for row in range(9)] + [b"", color(255, 200, 0)]
    results = predictor(images, batch_size=4)
    assert results[9].error
    assert results[9].ranks is None
    assert results[10].labels == ("red",), "its score of the other labels is that of all images"
    assert results[10].ranks["red"] > LEAST_RANK
    assert results[10].ranks["green"] == 0
    assert results[0].labels == ()
    assert [len(r.labels) for r in predictor(images, top_k=2) if not r.error] == [2] * 10
    (alone,) = predictor(images[:1])
    assert (alone.ranks, alone.labels) == (None, ("green",))
    assert "ranks need 8 images" in capsys.readouterr().err
    assert list(results[0].ranks) == list(NAMES)
