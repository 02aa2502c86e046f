import sys

import pytest

from mlmoe_jax.runtime.registry import Registry


@pytest.fixture
def made_shapes(tmp_path, monkeypatch):
    (tmp_path / "made_shapes.py").write_text("class Circle: pass\n\ndef draw_square(): return 4\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("made_shapes", None)


def test_entries_can_be_added_and_are_imported_when_they_are_used(made_shapes):
    shapes = Registry("shape", {"circle": "made_shapes:Circle"})
    shapes.entries["polygon:NAME"] = "made_shapes:draw_square"
    assert list(shapes) == ["circle", "polygon:NAME"]
    assert len(shapes) == 2
    assert [name in shapes for name in ("polygon:", "polygon", "circle:NAME", "circle:a", None)] == [False] * 5
    assert "made_shapes" not in sys.modules
    assert shapes["polygon:square"] is shapes["polygon:NAME"] is sys.modules["made_shapes"].draw_square
