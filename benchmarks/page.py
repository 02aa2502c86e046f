"""Text that a benchmark writes into a page of the documentation."""

from pathlib import Path


def write_between(page: Path, marks: tuple[str, str], text: str) -> None:
    """Replace what a page has between two marks, each on its own line.

    Raises:
      SystemExit: the page lacks a mark.
    """
    start, end = marks
    before, opening, rest = page.read_text().partition(start)
    _, closing, after = rest.partition(end)
    if not (opening and closing):
        raise SystemExit(f"{page} has no lines '{start}' and '{end}' to write the table between")
    page.write_text(f"{before}{start}\n\n{text}\n\n{end}{after}")
