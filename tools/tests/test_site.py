"""The pages of the documentation: their links, their place in the site, and the site that is built from them."""

import re
import time
from collections import Counter
from pathlib import Path

import pytest
from helpers import browser
from helpers.paths import REPOSITORY

from mlmoe_jax.apps.papers.paper import PAPERS, load_paper
from tools.docs import build_site as site
from tools.docs import write_papers

DOCS = REPOSITORY / "docs"


def test_links_become_those_of_the_site():
    page = (
        "[a](api.md#models) ![b](architecture.svg) [`c`](../README.md#use) [d](../LICENSE) [e](https://e.org) `[f](g)`"
    )
    home = "[a](api.md#models) ![b](architecture.svg) [`c`](index.md#use) "
    assert site.relinked(page, "docs/troubleshooting.md") == f"{home}d [e](https://e.org) `[f](g)`"
    linked = site.relinked(page, "docs/troubleshooting.md", "https://host/x/")
    assert linked == f"{home}[d](https://host/x/LICENSE) [e](https://e.org) `[f](g)`"
    assert site.relinked("[a](docs/api.md) [b](CHANGELOG.md)", "README.md") == "[a](api.md) [b](changelog.md)"


# -------------------------------------------------------------------------------------------------------- navigation
def test_every_page_is_in_the_navigation_once():
    listed = Counter(re.findall(r'= "([\w/-]+\.md)"', site.SETTINGS.read_text()))
    assert set(listed.values()) == {1}
    pages = {*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb"), *map(REPOSITORY.joinpath, site.ELSEWHERE)}
    places = {site.place_of(page.relative_to(REPOSITORY).as_posix()) for page in pages}
    assert not places - set(listed), "add them to docs/zensical.toml"


def test_the_images_of_the_pages_are_small():
    images = sorted((DOCS / "images").glob("*.png"))
    assert images
    assert not [image.name for image in images if image.stat().st_size > 150_000]


# -------------------------------------------------------------------------------------------------------------- site
@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    for name in ("zensical", "nbconvert"):
        pytest.importorskip(name, reason="pip install '.[docs]'")
    return site.build(tmp_path_factory.mktemp("site") / "docs")


def test_the_site_is_built_without_a_warning(built):
    names = {path.relative_to(built).as_posix() for path in built.rglob("*.html")}
    assert {"index.html", "api.html", "changelog.html", "citation.html"} <= names
    assert "cff-version" in (built / "citation.html").read_text()
    assert 'href="https://host' not in (built / "architecture.html").read_text()
    assert not [path for path in built.rglob("*.html") if re.search(r"<script[^>]*src=.?https?:", path.read_text())]


def test_pages_fit_the_window_and_load_nothing_from_elsewhere(built):
    executable = browser.find() or pytest.skip("no Chromium is installed")
    with browser.Browser(executable) as tab:
        for page in sorted(built.rglob("*.html")):
            if page.name == "404.html":
                continue
            tab.call("Page.navigate", url=page.as_uri())
            while not tab.run(f"document.readyState === 'complete' && location.pathname === '{page}'"):
                time.sleep(0.05)
            for width in (1280, 390):
                tab.look(width=width, phone=width < 500)
                assert tab.run("document.scrollingElement.scrollWidth") <= width, (page.name, width)
        assert not tab.problems
        assert not [address for address in tab.requests if not address.startswith(("file:", "data:", "blob:"))]


# ------------------------------------------------------------------------------------------------ published numbers
@pytest.mark.parametrize("name", PAPERS)
def test_the_page_of_published_numbers_has_every_one_that_can_be_read(name):
    """Except those of a figure whose numbers are differences of a table."""
    paper, page = load_paper(name), write_papers.page()
    for result in paper.tables():
        if result.id == "drmoe.gains":
            continue
        rest = page.partition(f"`--table={result.id}`")[2].partition("\n### ")[0]
        for row in result.rows:
            assert all(str(number) in rest for number in row.numbers.values() if number.value is not None)
