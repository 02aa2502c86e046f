"""The chart of docs/results.md, drawn from the tables of the page."""

import re

import pytest

from tools.docs import draw_digits


def test_results_are_those_of_the_tables_and_drawn(tmp_path):
    page = draw_digits.PAGE.read_text()
    results = draw_digits.read_results(page)
    draw_digits.draw(results, tmp_path / "a.svg")
    drawn = re.findall(r">([\d.]+) \| ([\d.]+)<", (tmp_path / "a.svg").read_text())
    assert set(drawn) == {(f"{shift:.1f}", f"{test:.1f}") for test, shift in results.values()}
    assert results["ML-VPT"] == (94.61, 91.17)
    assert list(results) == sorted(results, key=lambda name: results[name][1])
    with pytest.raises(ValueError, match="no results of ML-VPT"):
        draw_digits.read_results(page.replace("`mlvpt_digits`", "`other`"))
