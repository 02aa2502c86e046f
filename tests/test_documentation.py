"""The pages of the documentation: their links, the messages that they quote, and the numbers that are stored."""

import ast
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from helpers.documents import NOTES, PAGES
from helpers.paths import REPOSITORY

from benchmarks.measure import digits_methods, scaling_table
from tools.docs import build_site, draw_digits
from tools.docs.source import parse_source

DOCS = REPOSITORY / "docs"
ALL_PAGES = sorted({*PAGES, *NOTES, *REPOSITORY.glob("*.md")})


# ------------------------------------------------------------------------------------------------------------- links
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
        found.extend((one[3], (one[4] or "").removeprefix("#")) for one in build_site.LINK.finditer(rest))
        return rest

    build_site.outside_code(page.read_text(), note)
    return [(address, anchor) for address, anchor in found if not re.match(r"[a-z]+:", address)]


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_leads_to_a_file_and_a_heading(page):
    wrong = []
    for address, anchor in links(page):
        target = (page.parent / address).resolve() if address else page
        if not target.is_relative_to(REPOSITORY) or not target.exists():
            wrong.append(address)
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            wrong.append(f"{address}#{anchor}")
    assert not wrong


def test_the_readme_leads_to_every_page():
    linked = {(REPOSITORY / address).resolve() for address, _ in links(REPOSITORY / "README.md") if address}
    assert not set(DOCS.glob("*.md")) - linked


def test_links_are_found():
    assert sum(len(links(page)) for page in ALL_PAGES) > 150
    assert "the-exact-fast-path" in anchors(DOCS / "architecture.md")


# --------------------------------------------------------------------------------------------------- troubleshooting
def messages() -> list[str]:
    """Every text of the package, with … for the values in it."""
    found = []
    for path in (REPOSITORY / "mlmoe_jax").rglob("*.py"):
        for node in ast.walk(parse_source(path.read_text())):
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


# ------------------------------------------------------------------------------------------------------------ numbers
def test_the_pages_have_the_tables_of_the_stored_results(tmp_path, monkeypatch):
    for name in ("PAGE", "README"):
        copy = tmp_path / name
        copy.write_text(getattr(digits_methods, name).read_text())
        monkeypatch.setattr(digits_methods, name, copy)
    before = [digits_methods.PAGE.read_text(), digits_methods.README.read_text()]
    digits_methods.write(json.loads(digits_methods.RESULTS.read_text()))
    assert [digits_methods.PAGE.read_text(), digits_methods.README.read_text()] == before


def test_the_page_on_scaling_has_the_table_of_the_stored_results():
    table = scaling_table.table(scaling_table.read_results(), scaling_table.Options().efficiency)
    assert f"{scaling_table.MARKS[0]}\n\n{table}\n\n{scaling_table.MARKS[1]}" in scaling_table.PAGE.read_text()


def test_the_chart_has_the_numbers_of_the_page():
    page, chart = draw_digits.PAGE.read_text(), draw_digits.CHART.read_text()
    assert "](digits.svg)" in page
    for name, (test, shift) in draw_digits.read_results(page).items():
        assert f">{name}<" in chart
        assert f">{shift:.1f} | {test:.1f}<" in chart, "run python -m tools.docs.draw_digits"
