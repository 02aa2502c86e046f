"""Citations of equations, sections, tables and figures: in one form, and of places that docs/methods.md lists."""

from tools.docs import citations

SOURCES = citations.listed(citations.METHODS.read_text())


def test_every_citation_names_its_source_and_a_place_that_exists():
    assert citations.wrong_by_file(SOURCES) == {}


def test_every_source_that_is_listed_is_cited():
    assert citations.never_cited(SOURCES) == []
