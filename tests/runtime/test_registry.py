import sys

import pytest

from mlmoe_jax.runtime.registry import Registry


@pytest.fixture
def shapes():
    return Registry("shape", {"circle": "made_shapes:Circle", "square": "made_shapes:draw_square"})


@pytest.fixture
def made_shapes(tmp_path, monkeypatch):
    (tmp_path / "made_shapes.py").write_text("class Circle: pass\n\ndef draw_square(): return 4\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("made_shapes", None)


def test_names_are_known_without_an_import(shapes):
    assert list(shapes) == ["circle", "square"]
    assert len(shapes) == 2
    assert "circle" in shapes
    assert "triangle" not in shapes
    assert "made_shapes" not in sys.modules


def test_entries_can_be_added_later(shapes, made_shapes):
    shapes.entries["round"] = "made_shapes:Circle"
    assert shapes["round"] is shapes["circle"]
    assert list(shapes) == ["circle", "square", "round"]


def test_a_family_stands_for_all_names_that_begin_like_it(made_shapes):
    shapes = Registry("shape", {"circle": "made_shapes:Circle", "polygon:NAME": "made_shapes:draw_square"})
    assert shapes["polygon:square"] is shapes["polygon:NAME"] is sys.modules["made_shapes"].draw_square
    assert list(shapes) == ["circle", "polygon:NAME"]
    assert [name in shapes for name in ("polygon:", "polygon", "circle:NAME", "circle:a", None)] == [False] * 5
