"""What the checks of words and citations find, and the image of the architecture."""

import pytest

from tools.docs import citations, words
from tools.docs import draw_architecture as drawing


def test_each_kind_of_word_is_counted(tmp_path, monkeypatch):
    (tmp_path / "page.md").write_text("These figures are those of the `room`.\nThe colour is honest.\n")
    monkeypatch.setattr(words, "REPOSITORY", tmp_path)
    assert words.count(("page.md",)) == {
        "back references": ["page.md:1 those of"],
        "private words": ["page.md:1 figures", "page.md:2 honest"],
        "British spelling": ["page.md:2 colour"],
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("(A, eq. 3)", ""),
        ("as printed: A, eq. 3–5, and A,\n    sec. 2.3–2.4", ""),
        ("A and B, table 1; A, figure 3b", ""),
        ("# (A,\n#   eq. 4)", ""),
        ("table 3 3 3", ""),
        ("(eq. 3)", "'eq. 3' is not of the form"),
        ("(AA, eq. 3)", "'eq. 3' is not of the form"),
        ("(A, eqs. 3-4)", "'eqs. 3-4' is not of the form"),
        ("(A, eq. 3 and 4)", "'eq. 3 and 4' is not of the form"),
        ("A's equation 3", "'equation 3' is not of the form"),
        ("(A, eq. 4–6)", "does not list A, eq. 6"),
        ("(A, sec. 3)", "does not list A, sec. 3"),
    ],
)
def test_citations_of_another_form_or_place_are_found(text, problem):
    sources = {"A": {"eq. 3", "eq. 4", "eq. 5", "sec. 2.3", "sec. 2.4", "figure 3b"}, "A and B": {"table 1"}}
    found = citations.wrong(text, sources)
    assert len(found) == bool(problem)
    assert all(problem in one for one in found)


def test_every_arrow_of_the_image_leads_down():
    placed = drawing.boxes()
    for user, box in placed.items():
        for used, below in placed.items():
            if drawing.LAYER_OF[user] < drawing.LAYER_OF[used]:
                assert box.leave < below.enter, (user, used)
