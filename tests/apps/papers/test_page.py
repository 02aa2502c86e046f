"""docs/papers.md, which the data files of the papers make."""

from helpers.paths import REPOSITORY

from mlmoe_jax.apps.papers.page import page
from mlmoe_jax.apps.papers.paper import MISSING, PAPERS, load


def test_the_page_in_the_repository_is_up_to_date():
    written = (REPOSITORY / "docs" / "papers.md").read_text()
    assert written == page(), "run python -m mlmoe_jax.apps.papers.page > docs/papers.md"


def test_the_page_has_every_result_and_caveat():
    text = page()
    plain = " ".join(text.split())
    for name in PAPERS:
        paper = load(name)
        for result in paper.results():
            assert f"\n### {paper.name}, {result.title}\n" in text
            assert f"`--mode=reproduce --table={result.id}`" in text
        assert all(note in plain for note in paper.notes.values())


def test_a_row_has_its_numbers_what_was_reached_here_and_its_notes():
    lines = page().splitlines()
    (row,) = (line for line in lines if line.startswith("| ML-VPT | ViT-B/16, MAE | 224 | 75.2 "))
    assert (
        row == f"| ML-VPT | ViT-B/16, MAE | 224 | 75.2 | 69.5 | 69.9 | 69.6? | 74.0 | 74.9 | 74.4 | {MISSING} | 2, 21 |"
    )
    assert "| AP sofa | 87.8 | 88.5 |" in lines  # a table with many columns is turned
    assert any(line.endswith("| 0.616 / 0.5106 / 0.4498 / 0.3168 / 0.2303 |  |") for line in lines)
