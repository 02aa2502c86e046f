"""The chart of docs/results.md, against the tables that it is drawn from."""

import importlib.util
import re

import pytest
from helpers.paths import REPOSITORY

_SPEC = importlib.util.spec_from_file_location("draw_digits", REPOSITORY / "docs" / "draw_digits.py")
drawing = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(drawing)

PAGE = drawing.PAGE.read_text()
LABEL = re.compile(r">([\d.]+) \| ([\d.]+)<")  # mAP on test_shift and on test


def labels_of(results):
    return {(f"{shift:.1f}", f"{test:.1f}") for test, shift in results.values()}


def test_the_committed_chart_has_the_figures_of_the_page():
    chart = drawing.CHART.read_text()
    assert set(LABEL.findall(chart)) == labels_of(drawing.read_results(PAGE)), "run `python docs/draw_digits.py`"
    for name in drawing.NAMES.values():
        assert f">{name}<" in chart
    assert "](digits.svg)" in PAGE


def test_results_are_those_of_the_tables_and_drawn(tmp_path):
    results = drawing.read_results(PAGE)
    drawing.draw(results, tmp_path / "a.svg")
    assert set(LABEL.findall((tmp_path / "a.svg").read_text())) == labels_of(results)
    assert results["ML-VPT"] == (94.61, 91.17)
    assert list(results) == sorted(results, key=lambda name: results[name][1])
    with pytest.raises(ValueError, match="no results of ML-VPT"):
        drawing.read_results(PAGE.replace("`mlvpt_digits`", "`other`"))
