"""Citations of equations, sections, tables and figures: in one form, and of places that docs/methods.md lists.

python -m tools.docs.citations      # prints the other ones by file
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
METHODS = REPOSITORY / "docs" / "methods.md"
SECTION = "\n## References\n"  # of that page: the list, up to its end
# configuration.md is made from the package.
PAGES = [page for page in (REPOSITORY / "docs").glob("*.md") if page.stem != "configuration"]
# The programs that reproduce the tables name them as data.
ABOUT_TABLES = {"papers", "write_papers"}
MODULES = [
    module
    for folder in ("mlmoe_jax", "configs", "benchmarks", "tools", "tests")
    for module in (REPOSITORY / folder).rglob("*.py")
    if not ABOUT_TABLES & {*module.relative_to(REPOSITORY).parts, module.stem}
]
CHECKS = {Path(__file__), REPOSITORY / "tools" / "tests" / "test_checks_of_documents.py"}  # with wrong ones
FILES = sorted({*PAGES, *MODULES, *REPOSITORY.glob("*.md")} - CHECKS)

NUMBER = r"\d+(?:\.\d+)*[a-z]?\b"
KINDS = r"(?:eqs?\.|equations?|secs?\.|sections?|figs?\.|figures?|tables?)"
# A reference to a numbered place, in any wording; a row of numbers is not one.
MENTION = re.compile(rf"\b{KINDS} \(?{NUMBER}(?:(?:-|–|, | to | and ){NUMBER})*(?! \d)", re.I)
LONGEST = 100  # characters of a name
PLACE = re.compile(rf"(eq\.|sec\.|table|figure) ({NUMBER})(?:–({NUMBER}))?")


def places(text: str) -> Iterator[str]:
    """Yield the single places of `eq. 3–5`: eq. 3, eq. 4, eq. 5; of another text nothing."""
    if found := PLACE.fullmatch(text):
        kind, first, last = found.groups()
        before, _, number = first.rpartition(".")
        numbers = [number] if last is None else map(str, range(int(number), int(last.rpartition(".")[2]) + 1))
        yield from (f"{kind} {before}{'.' if before else ''}{number}" for number in numbers)


def listed(page: str) -> dict[str, set[str]]:
    """Return the places of each source in the list of references of a page."""
    entries = page.partition(SECTION)[2].split("\n* **")[1:]
    sources = {}
    for name, _, rest in (entry.partition("**") for entry in entries):
        sources[name] = {place for mention in PLACE.finditer(rest) for place in places(mention[0])}
        assert sources[name], f"{name} has no place that can be cited"
    return sources


def text_of(file: Path) -> str:
    """Return the text of a file without the list of references."""
    return file.read_text().partition(SECTION)[0] if file == METHODS else file.read_text()


def wrong(text: str, sources: Mapping[str, set[str]]) -> list[str]:
    """Return the citations in a text that have another form or cite a place that is not listed."""
    flat = re.sub(r"\s*\n\s*(?:# +)?", " ", text)
    names, found = "|".join(map(re.escape, sorted(sources, key=len, reverse=True))), []
    for mention in MENTION.finditer(flat):
        source = re.search(rf"(?<!\w)({names}), $", flat[: mention.start()])
        cited = set(places(mention[0]))
        if not source or not cited:
            found.append(f"{mention[0]!r} is not of the form 'NAME, eq. 3–4' with a name in docs/methods.md")
        elif unknown := cited - sources[source[1]]:
            found.append(f"docs/methods.md does not list {source[1]}, {', '.join(sorted(unknown))}")
    return found


def wrong_by_file(sources: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """Return the wrong citations of each file that has some."""
    found = {str(file.relative_to(REPOSITORY)): wrong(text_of(file), sources) for file in FILES}
    return {name: problems for name, problems in found.items() if problems}


def never_cited(sources: Mapping[str, set[str]]) -> list[str]:
    """Return the sources that no file cites."""
    text = " ".join(re.sub(r"\s*\n\s*(?:# +)?", " ", text_of(file)) for file in FILES)
    citing = re.finditer(r", (?:eq|sec|table|figure)", text)
    before = [text[max(0, mention.start() - LONGEST) : mention.start()] for mention in citing]
    return [name for name in sources if not any(re.search(rf"(?<!\w){re.escape(name)}$", part) for part in before)]


if __name__ == "__main__":
    for name, problems in wrong_by_file(listed(METHODS.read_text())).items():
        print(name, *problems, sep="\n      ")
