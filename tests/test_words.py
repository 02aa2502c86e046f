"""The words of the project: few back references, standard terms, American spelling."""

import pytest
from helpers import words

# A value of a public format, and labels of a published data set.
ALLOWED = {
    "mlmoe_jax/apps/tools/duplicates.py look",
    "mlmoe_jax/data/files/vg256_categories.json room",
}
MOST = {"back references": 30, "private words": 0, "British spelling": 0}


@pytest.fixture(scope="module")
def counts():
    return words.count()


@pytest.mark.parametrize("kind", MOST)
def test_words_that_make_a_reader_read_twice_are_few(counts, kind):
    places = [place for place in counts[kind] if f"{place.split(':')[0]} {place.split()[-1]}" not in ALLOWED]
    assert len(places) <= MOST[kind], "\n".join(places)


def test_each_kind_of_word_is_counted(tmp_path, monkeypatch):
    (tmp_path / "page.md").write_text("These figures are those of the `room`.\nThe colour is honest.\n")
    monkeypatch.setattr(words, "REPOSITORY", tmp_path)
    assert words.count(("page.md",)) == {
        "back references": ["page.md:1 those of"],
        "private words": ["page.md:1 figures", "page.md:2 honest"],
        "British spelling": ["page.md:2 colour"],
    }
