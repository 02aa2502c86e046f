"""The plot of a sweep or a figure: its axes, lines and PNG file."""

import io
import math

import numpy as np
import pytest
from PIL import Image

from mlmoe_jax.apps.papers.grid import value_text
from mlmoe_jax.apps.papers.plot import Mark, draw_plot, make_chart, x_axis


def straight(x, label="a", panel=""):
    return [Mark(panel, label, one, 90.0 + i, 0.5) for i, one in enumerate(x)]


def spec_of(marks, **texts):
    return make_chart(marks, **{"x_label": "x", "y_label": "y", **texts}).to_dict()


def layer(spec, kind):
    (one,) = (one for one in spec["spec"]["layer"] if one["mark"]["type"] == kind)
    return one


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([1e-4, 1e-3, 1e-2], "log"),
        ([0.0, 1e-3, 1e-1], "linear"),
        ([8, 2, 3], "linear"),
        ([-1, 0, 100], "linear"),
        ([7], "linear"),
    ],
)
def test_numbers_have_ticks_on_a_scale_for_their_range(values, scale):
    numeric, axis = x_axis(values, "groups")
    axis = axis.to_dict()
    assert numeric
    assert (axis["scale"]["type"], axis["axis"]["values"], axis["title"]) == (scale, sorted(values), "groups")


@pytest.mark.parametrize("values", [["sgd", "adamw"], [1.0, float("inf")], [True, False]])
def test_values_that_are_not_finite_numbers_are_names_in_the_given_order(values):
    spec = spec_of(straight(values))
    line = layer(spec, "line")
    assert (
        line["encoding"]["x"]["sort"] == [row["x"] for row in spec["data"]["values"]] == list(map(value_text, values))
    )
    assert line["mark"]["strokeDash"] == [2, 3]
    wide = spec_of(straight([f"name {k}" for k in range(30)]))
    assert wide["spec"]["width"] > spec["spec"]["width"]


def test_panels_share_the_color_of_a_label_and_have_error_bars():
    panels = {"val": range(12), "test": range(11, -1, -1)}
    marks = [mark for panel, lines in panels.items() for line in lines for mark in straight([1], str(line), panel)]
    spec = spec_of([*marks, Mark("val", "none", 2, math.nan)], title="a long title " * 20)
    assert spec["facet"]["column"]["sort"] == ["val", "test"]
    assert spec["resolve"]["scale"] == {"y": "independent"}
    rows = spec["data"]["values"]
    assert rows[0] == {"panel": "val", "label": "0", "x": 1, "y": 90.0, "low": 89.5, "high": 90.5}
    assert (len(rows), {row["panel"] for row in rows}) == (24, {"val", "test"}), (
        "a missing value has no mark and no label"
    )
    assert layer(spec, "line")["encoding"]["x"]["axis"]["values"] == [1, 2], "but a place on the axis"
    assert layer(spec, "point")["encoding"]["color"]["scale"]["domain"] == [str(i) for i in range(12)]
    assert len(spec["title"]["text"]) > 1


def test_the_file_is_a_png_in_which_odd_labels_are_text():
    odd = ["^back$", "$x^{", "_hidden", "a" * 300, ""]
    marks = [Mark("$y_", label, x, 1.0) for label in odd for x in odd]
    content = draw_plot(marks, x_label="$", y_label="$a", title="100 $ $")
    with Image.open(io.BytesIO(content)) as image:
        assert image.format == "PNG"
        assert image.width < 2000
        assert np.asarray(image.convert("L")).std() > 5
