import re

import pytest
from helpers.paths import REPOSITORY

from mlmoe_jax.config import default_config
from mlmoe_jax.data.sources.open import SOURCES, root_of
from mlmoe_jax.data.sources.source import Published

BIRDS = Published("birds", "images and labels.txt", "https://example.org/birds", "birds")
HOW = (
    "birds needs images and labels.txt, published at https://example.org/birds: put it there, or set data.root to its "
    "folder (docs/datasets.md#birds shows how)"
)
BENCHMARKS = {name: found for name in SOURCES if (found := SOURCES[name].published)}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working directory, without $MLMOE_DATA."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv("MLMOE_DATA", raising=False)
    return tmp_path


def test_a_folder_is_looked_for_in_order(place, monkeypatch):
    (place / "work" / "data" / "birds").mkdir(parents=True)
    assert str(BIRDS.folder()) == "data/birds"
    monkeypatch.setenv("MLMOE_DATA", str(place / "all"))
    assert str(BIRDS.folder()) == "data/birds"
    (place / "all" / "birds").mkdir(parents=True)
    assert BIRDS.folder() == place / "all" / "birds"
    (place / "own").mkdir()
    assert BIRDS.folder(place / "own") == place / "own"
    monkeypatch.setenv("HOME", str(place))
    assert BIRDS.folder("~/own") == place / "own"
    monkeypatch.setenv("MLMOE_DATA", "~/all")
    assert BIRDS.folder() == place / "all" / "birds"


def test_where_nothing_is_one_sentence_says_all(place, monkeypatch, refusal):
    assert refusal(BIRDS.folder) == f"there is no folder data/birds (and $MLMOE_DATA is not set); {HOW}"
    monkeypatch.setenv("MLMOE_DATA", "/mnt/all")
    assert refusal(BIRDS.folder) == f"there is no folder /mnt/all/birds or data/birds; {HOW}"
    (place / "work" / "data" / "birds").mkdir(parents=True)
    assert refusal(BIRDS.folder, "typo") == f"there is no folder typo; {HOW}", "a root that is set is the only place"


def test_the_root_of_a_config(place):
    data = default_config().data
    data.update({"name": "csv", "root": "anywhere"})
    assert root_of(data) == "anywhere"
    (place / "work" / "data" / "voc2007").mkdir(parents=True)
    data.update({"name": "voc2007", "root": ""})
    assert root_of(data) == "data/voc2007"


def test_the_published_data_sets_say_where_they_are_explained():
    assert set(BENCHMARKS) == {"voc2007", "voc2012", "coco2014", "nuswide", "vg256", "vg500"}
    page = (REPOSITORY / "docs" / "datasets.md").read_text()
    sections = {re.sub(r"[^a-z0-9]+", "-", title.lower()) for title in re.findall(r"^## (.+)$", page, re.MULTILINE)}
    for name, published in BENCHMARKS.items():
        assert published.name == name
        assert published.section in sections
        assert published.address in page
