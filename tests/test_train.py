import numpy as np
import pytest

from mlmoe_jax.train import _negatives_over_positives


@pytest.mark.parametrize(
    ("difficult", "weights"),
    [("negative", [2.0, 3.0, 1.0]), ("ignore", [2.0, 2.0, 1.0]), ("positive", [2.0, 1.0, 1.0])],
)
def test_positives_weigh_as_much_as_the_known_negatives(difficult, weights):
    labels = np.array([[1, 1, 0], [0, 0, 0], [0, 0, -1], [-1, 2, 0]], np.int8)
    np.testing.assert_allclose(_negatives_over_positives(labels, difficult), weights)
