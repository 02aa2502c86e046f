"""The plot of a sweep or a figure: its axes, lines and PNG file."""

import io

import numpy as np
import pytest
from PIL import Image

from mlmoe_jax.apps.papers.plot import axis_value, draw_plot, x_axis


def points_at(values, line="a", panel="val"):
    return [{"panel": panel, "line": line, "x": axis_value(x), "y": 90.0 + i} for i, x in enumerate(values)]


def x_of(points) -> dict:
    return x_axis(points, "groups").to_dict()


@pytest.mark.parametrize(
    ("values", "scale"),
    [([1e-4, 1e-3, 1e-2], "log"), ([0.0, 1e-3, 1e-1], "linear"), ([8, 2, 3], "linear"), ([-1, 0, 100], "linear")],
)
def test_numbers_have_a_scale_for_their_range(values, scale):
    x = x_of(points_at(values))
    assert (x["type"], x["scale"]["type"], x["title"]) == ("quantitative", scale, "groups")


@pytest.mark.parametrize("values", [["sgd", "adamw"], [True, False], [(2, 1), (1, 2)]])
def test_other_values_are_names_in_the_given_order(values):
    x = x_of(points_at(values))
    assert (x["type"], x["sort"]) == ("nominal", list(map(axis_value, values)))


def test_the_file_is_a_png():
    points = [point for panel in ("val", "test") for line in "ab" for point in points_at([1, 2, 2], line, panel)]
    content = draw_plot(points, x_title="$", y_title="$a", title="100 $ $")
    with Image.open(io.BytesIO(content)) as image:
        assert image.format == "PNG"
        assert np.asarray(image.convert("L")).std() > 5
