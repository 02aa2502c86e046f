"""The pages of the documentation: their links, their place in the site, and the site that is built from them."""

import ast
import re
import time
from collections import Counter
from pathlib import Path

import pytest
from helpers import browser
from helpers.documents import PAGES
from helpers.paths import REPOSITORY
from helpers.site import site

DOCS = REPOSITORY / "docs"
ALL_PAGES = sorted({*PAGES, *REPOSITORY.glob("*.md")})


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the host of a repository makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found, counts = set(), Counter()
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(f"{slug}-{counts[slug]}" if counts[slug] else slug)
        counts[slug] += 1
    return found


def links(page: Path) -> list[tuple[str, str]]:
    """The (address, anchor) of every link of a page to a file here."""
    found = []

    def note(rest: str) -> str:
        found.extend((one[3], (one[4] or "").removeprefix("#")) for one in site.LINK.finditer(rest))
        return rest

    site.outside_code(page.read_text(), note)
    return [(address, anchor) for address, anchor in found if not re.match(r"[a-z]+:", address)]


# ------------------------------------------------------------------------------------------------------------- links
@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page):
    wrong = []
    for address, anchor in links(page):
        target = (page.parent / address).resolve() if address else page
        if not target.is_relative_to(REPOSITORY) or not target.exists():
            wrong.append(address)
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            wrong.append(f"{address}#{anchor}")
    assert not wrong


def test_links_are_found():
    assert sum(len(links(page)) for page in ALL_PAGES) > 150
    assert "the-exact-fast-path" in anchors(DOCS / "architecture.md")


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


# --------------------------------------------------------------------------------------------------- troubleshooting
def messages() -> list[str]:
    """Every text of the package, with … for the values in it."""
    found = []
    for path in (REPOSITORY / "mlmoe_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_program():
    page, texts = (DOCS / "troubleshooting.md").read_text(), messages()
    first_cells = re.findall(r"^\| ([^|]*) \| [^|]* \|$", page, re.MULTILINE)
    quoted = [text for cell in first_cells for text in re.findall(r"`([^`]+)`", cell)]
    quoted = [text for text in quoted if " " in text]
    assert len(quoted) > 20
    assert not [text for text in quoted if not any(text in one for one in texts)]


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


@pytest.mark.slow
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
