import jax
import numpy as np
import pytest
from helpers.label_trees import draw_tree, violations

from mlmoe_jax.data.label_tree import INDEPENDENT, LabelTree
from mlmoe_jax.models.calibration import Calibration
from mlmoe_jax.models.consistency import Consistency, Scores

ANIMAL, DOG, POODLE, CAT, DARK = range(5)
TREE = LabelTree(((DOG, ANIMAL), (POODLE, DOG), (CAT, ANIMAL), (CAT, DARK)), ((DOG, CAT),))
LIMITS = np.array([0.6, 0.3, 0.5, 0.4, 0.5])


def agreeing(*scores: float, limits=LIMITS) -> list[float]:
    return Consistency.of(TREE, limits, 5)(np.array(scores)).round(5).tolist()


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_no_random_scores_contradict_a_tree(dtype):
    draw, changed, exclusive = np.random.default_rng(0), 0, 0
    for seed in range(20):
        tree, scores = draw_tree(seed), draw.random((500, 12)).astype(dtype)
        limits = draw.choice([0.0, 0.1, 0.3, 0.5, 0.7, 1.0, np.inf], 12)
        consistency = Consistency.of(tree, limits, 12)
        result = consistency(scores)
        assert result.dtype == dtype
        assert not violations(tree, result, consistency.limits)
        assert result.min() >= 0
        assert result.max() <= 1
        np.testing.assert_array_equal(consistency(result), result, err_msg="idempotent")
        changed, exclusive = changed + violations(tree, scores, limits), exclusive + len(tree.exclusive)
    assert changed > 5000
    assert exclusive > 20


def test_a_program_computes_the_same_scores():
    scores = np.random.default_rng(1).random((500, 12)).astype(np.float32)
    for seed in range(2):
        consistency = Consistency.of(draw_tree(seed), np.linspace(0.2, 0.7, 12), 12)
        in_program = np.asarray(jax.jit(consistency)(scores))
        np.testing.assert_array_equal(in_program, consistency(scores))
        assert not violations(draw_tree(seed), in_program.astype(np.float64), consistency.limits)


def test_an_implied_label_gets_the_largest_score_and_is_predicted_too():
    assert agreeing(0.7, 0.1, 0.2, 0.0, 0.0) == [0.7, 0.2, 0.2, 0, 0], "nothing else is predicted"
    assert agreeing(0.1, 0.1, 0.55, 0.0, 0.0) == [0.6, 0.55, 0.55, 0, 0], "the animal at its threshold"
    assert agreeing(0.7, 0.4, 0.2, 0.1, 0.1) == [0.7, 0.4, 0.2, 0.1, 0.1], "scores that agree stay"


def test_of_exclusive_labels_the_strongest_keeps_its_score():
    assert agreeing(0.9, 0.7, 0.6, 0.8, 0.1) == [0.9, 0.3, 0.3, 0.8, 0.8], "and the poodle falls with the dog"
    assert agreeing(0.9, 0.8, 0.6, 0.7, 0.1) == [0.9, 0.8, 0.6, 0.4, 0.4], "and the cat no longer makes it dark"
    assert agreeing(0.9, 0.8, 0.6, 0.8, 0.1)[DOG] == 0.8, "the first of equal ones"
    limits = np.array([0.6, 0.9, 0.5, 0.4, 0.5])
    assert agreeing(0.9, 0.1, 0.55, 0.8, 0.1, limits=limits) == [0.9, 0.5, 0.5, 0.8, 0.8], "0.9 would be a threshold's"
    assert agreeing(0.9, 0.8, 0.6, 0.3, 0.3) == [0.9, 0.8, 0.6, 0.3, 0.3], "below the threshold, it excludes nothing"
    assert agreeing(0.1, 0.5, 0.9, 0.8, 0.1) == [0.9, 0.9, 0.9, 0.4, 0.4], "a dog is as sure as its poodle"


def test_thresholds_that_no_score_could_obey_are_changed():
    limits = Consistency.of(TREE, np.array([np.inf, 0, 0, 0, np.inf]), 5).limits
    assert limits[[ANIMAL, DARK]].tolist() == [1, 1], "predicted with what implies them"
    assert 0 < limits[DOG] < 1e-5
    assert np.isinf(Consistency.of(TREE, np.inf, 5).limits[POODLE])


def test_many_images_are_computed_in_parts():
    scores = np.random.default_rng(2).random((9000, 5))
    consistency = Consistency.of(TREE, LIMITS, 5)
    np.testing.assert_array_equal(consistency(scores)[4000:4200], consistency(scores[4000:4200]))


def test_scores_are_corrected_before_they_agree():
    logits = np.array([[-1.0, 2.0, -9, -9, -9]])
    independent = Scores(Calibration(scale=2.0), Consistency.of(INDEPENDENT, 0.5, 5))
    np.testing.assert_array_equal(independent(logits), Calibration(scale=2.0)(logits))
    scores = Scores(Calibration(scale=2.0), Consistency.of(TREE, 0.5, 5))(logits)
    np.testing.assert_array_equal(scores[0, ANIMAL], scores[0, DOG])
    assert scores[0, DOG] == pytest.approx(1 / (1 + np.exp(-4)))
