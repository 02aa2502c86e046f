import numpy as np
from helpers.color_model import HALVES, NAMES, color, make_run

from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.inference.ranks import LEAST_IMAGES, LEAST_RANK, Ranks, best_ranked


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


def test_an_image_gets_its_best_label_and_all_of_a_high_rank():
    assert best_ranked(np.array([0.1, LEAST_RANK, 2.0]), None).tolist() == [2, 1]
    assert best_ranked(np.array([-1.0, -2.0, -0.5]), None).tolist() == [2]
    assert best_ranked(np.array([0.1, 0.3, 0.2]), 2).tolist() == [1, 2]


def test_a_ranked_prediction_assigns_labels_by_rank(capsys):
    predictor = Predictor(make_run(), HALVES, ranked=True)
    images = [color(10 * row, 200, 0) for row in range(9)] + [b"", color(255, 200, 0)]
    results = predictor(images, batch_size=4)
    assert results[9].error
    assert results[9].ranks is None
    assert results[10].labels == ("red",), "its score of the other labels is that of all images"
    assert results[10].ranks["red"] > LEAST_RANK
    assert results[10].ranks["green"] == 0
    assert results[0].labels[0] != "red"
    assert [len(r.labels) for r in predictor(images, top_k=2) if not r.error] == [2] * 10
    (alone,) = predictor(images[:1])
    assert (alone.ranks, alone.labels) == (None, ("green",))
    assert "ranks need 8 images" in capsys.readouterr().err
    assert list(results[0].ranks) == list(NAMES)
