import io

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from mlmoe_jax.apps.papers.sweep.plot import Line, draw


@pytest.fixture
def drawn(monkeypatch):
    """A function that draws one panel or several and returns the figure at the time when it is saved."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))

    def call(panels, x_values, **options):
        draw(panels if isinstance(panels, dict) else {"": panels}, x_values, x_label="x", y_label="y", **options)
        return figures[-1]

    return call


def straight(x):
    return Line("a", x, [90.0 + i for i in range(len(x))], [0.0] * len(x))


def test_the_png_does_not_depend_on_the_users_style_and_does_not_change_it():
    options = {"x_label": "groups", "y_label": "mAP (%)", "title": "t", "legend": "split"}
    content = draw({"": [straight([2, 3])]}, [2, 3], **options)
    with Image.open(io.BytesIO(content)) as image:
        assert image.format == "PNG"
        assert np.asarray(image.convert("L")).std() > 5
    with matplotlib.rc_context({"axes.facecolor": "black"}):
        before = dict(matplotlib.rcParams)
        assert draw({"": [straight([2, 3])]}, [2, 3], **options) == content
        assert dict(matplotlib.rcParams) == before


def test_numbers_are_placed_by_value_in_any_order(drawn):
    (axes,) = drawn([straight([8, 2, 3])], [8, 2, 3]).axes
    assert axes.get_xscale() == "linear"
    assert sorted(axes.get_xticks()) == [2, 3, 8]
    assert axes.lines[0].get_xydata().tolist() == [[2, 91], [3, 92], [8, 90]]
    assert axes.lines[0].get_linestyle() == "-"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("x", "y")


@pytest.mark.parametrize(
    ("values", "scale", "ticks"),
    [
        ([1e-4, 1e-3, 1e-2], "log", [1e-4, 1e-3, 1e-2]),
        ([0.0, 1e-3, 1e-1], "symlog", [0, 1e-3, 1e-1]),
        ([1, 2, 4, 8, 16, 32], "log", [1, 2, 4, 8, 16, 32]),
        ([2, 3, 5, 8, 13], "linear", [2, 3, 5, 8, 13]),
        ([-1, 0, 100], "linear", None),
        (list(range(1, 41)), "linear", None),
        ([7], "linear", [7]),
    ],
)
def test_the_scale_separates_all_numbers(drawn, values, scale, ticks):
    (axes,) = drawn([straight(values)], values).axes
    assert axes.get_xscale() == scale
    if ticks is None:
        assert len(axes.get_xticks()) < 15
    else:
        assert axes.get_xticks().tolist() == ticks


@pytest.mark.parametrize("values", [["adamw", "sgd"], [1.0, float("inf")]])
def test_values_that_are_not_finite_numbers_are_categories_in_the_given_order(drawn, values):
    (axes,) = drawn([straight(values)], values).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == [str(value) for value in values]
    assert axes.lines[0].get_xdata().tolist() == [0, 1]
    assert axes.lines[0].get_linestyle() == ":"


def test_deviations_become_error_bars(drawn):
    lines = [Line("a", [1, 2], [90.0, 91.0], [0.5, 0.25]), straight([1, 2])]
    (axes,) = drawn(lines, [1, 2]).axes
    (bars,) = axes.collections
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[89.5, 90.5], [90.75, 91.25]]


def test_unordered_points_are_drawn_with_their_mean(drawn):
    (axes,) = drawn([Line("a", ["0", "1"], [90.0, 92.0], [0, 0], level=True)], ["0", "1"]).axes
    points, mean = axes.lines
    assert points.get_linestyle() == "None"
    assert mean.get_ydata() == [91, 91]
    (band,) = axes.patches
    assert (band.get_y(), band.get_height()) == pytest.approx((91 - 2**0.5, 2 * 2**0.5))


def test_a_label_has_the_same_style_in_every_panel_and_a_style_of_its_own(drawn):
    lines = [Line(str(i), [1], [90.0 + i], [0]) for i in range(12)]
    figure = drawn({"val": lines, "test": lines[::-1]}, [1], legend="groups")
    looks = [{tuple(line.get_ydata()): (line.get_color(), line.get_marker()) for line in a.lines} for a in figure.axes]
    looks = [{y: (tuple(np.atleast_1d(c)), marker) for y, (c, marker) in one.items()} for one in looks]
    assert looks[0] == looks[1]
    assert len(set(looks[0].values())) == 12
    assert [a.get_title() for a in figure.axes] == ["val", "test"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [str(i) for i in range(12)]
    assert legend.get_title().get_text() == "groups"


def test_labels_are_drawn_literally_and_truncated():
    odd = ["^back$", "$x^{", "_hidden", "a" * 200, ""]
    lines = [Line(name, odd, [1.0] * 5, [0] * 5) for name in odd]
    options = {"x_label": "$", "y_label": "$a", "title": "100 $ $", "legend": "$_$"}
    with Image.open(io.BytesIO(draw({"$y_": lines}, odd, **options))) as image:
        assert image.width < 2000


def test_many_names_have_room_and_a_long_title_is_broken(drawn):
    few, many = ([f"name {k}" for k in range(count)] for count in (5, 20))
    title = "a title of many words that is wider than the figure, so that it would run into the legend"
    narrow, wide = (drawn([straight(names)], names, title=title) for names in (few, many))
    assert wide.get_figwidth() > narrow.get_figwidth()
    assert [figure.axes[0].get_xticklabels()[0].get_rotation() for figure in (narrow, wide)] == [0, 60]
    assert len(narrow.get_suptitle().splitlines()) > 1
    assert " ".join(narrow.get_suptitle().split()) == title
    assert drawn([straight([1, 2])], [1, 2], title="two\nlines").get_suptitle() == "two\nlines"
