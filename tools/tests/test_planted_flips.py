"""`python -m benchmarks.planted_flips`: the flips it draws, what it measures, and its table."""

import numpy as np
import pytest

from benchmarks import planted_flips
from mlmoe_jax.apps.audit.audit import Audit
from mlmoe_jax.data.images import ArrayImages
from mlmoe_jax.data.split import Split


@pytest.mark.parametrize("draw", planted_flips.DRAWS)
def test_flips_are_as_many_as_asked_for_and_only_of_known_labels(draw):
    codes = (np.random.default_rng(1).random((200, 10)) < 0.2).astype(np.int8)
    codes[:20], codes[20:40] = 2, -1
    flips = planted_flips.planted(codes, draw, 0.1, seed=3)
    assert not flips[:40].any()
    np.testing.assert_array_equal(flips, planted_flips.planted(codes, draw, 0.1, seed=3))
    assert (flips != planted_flips.planted(codes, draw, 0.1, seed=4)).any()
    share = round(0.1 * (codes == 1).sum())
    counts = [(flips & (codes == code)).sum() for code in (1, 0)]
    assert counts == [share, share] if draw == "positives" else sum(counts) == 160


def test_measures_on_a_case_by_hand():
    codes = np.array([[1], [0]] * 6, np.int8)  # flips 0 (a removed label would be a 0 now) and 1
    scores = np.where(codes == 1, 0.9, 0.1)
    scores[0], scores[1], scores[3] = 0.2, 0.4, 0.7
    split = Split(
        "train", ("a",), codes, [str(row) for row in range(12)], ArrayImages(np.zeros((12, 2, 2, 3), np.uint8))
    )
    flips = np.zeros((12, 1), bool)
    flips[:2] = True
    values = planted_flips.measure(Audit(split, scores, [], []), flips)
    assert values["found per direction"] == 0.5
    assert (values["flips"], values["found"], values["found, added"], values["found, removed"]) == (2, 0.5, 1, 0)
    assert (values["suggestions"], values["found by suggestions"], values["flips among suggestions"]) == (2, 0.5, 0.5)


def test_the_table_has_means_over_seeds():
    rows = [{"flips": 10, "found": 0.5}, {"flips": 10, "found": 0.7}]
    lines = planted_flips.table({"entries": rows}).splitlines()
    assert lines[0] == "| flips of | flips | found |"
    assert lines[2] == "| entries | 10 | 60.00 ± 14.14 |"
