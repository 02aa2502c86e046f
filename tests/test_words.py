"""The words of the project: few back references, standard terms, American spelling."""

import pytest

from tools.docs import words

# A value of a public format, labels of a published data set, and a pattern.
ALLOWED = {
    "mlmoe_jax/apps/tools/duplicates.py look",
    "mlmoe_jax/data/files/vg256_categories.json room",
    "tools/docs/citations.py figures",
}
MOST = {"back references": 30, "private words": 0, "British spelling": 0}


@pytest.fixture(scope="module")
def counts():
    return words.count()


@pytest.mark.parametrize("kind", MOST)
def test_words_that_make_a_reader_read_twice_are_few(counts, kind):
    places = [place for place in counts[kind] if f"{place.split(':')[0]} {place.split()[-1]}" not in ALLOWED]
    assert len(places) <= MOST[kind], "\n".join(places)
