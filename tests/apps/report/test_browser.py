"""The report page in a browser."""

import json

import numpy as np
import pytest
from helpers import browser
from helpers.made_run import NAMES, data_block

from mlmoe_jax.apps.report import page


@pytest.fixture(scope="module")
def tab(run, other):
    """A browser without network that shows the page, 1,300 pixels wide."""
    path = page.write_report(run, against=other)
    assert path == run / "report.html"
    with browser.opened(path, width=1300) as tab:
        yield tab


def test_every_section_is_drawn_and_in_the_contents(tab):
    names = [kind.name for kind in page.SECTION_KINDS]
    assert tab.run("[...document.querySelectorAll('main > section')].map(s => s.id)") == names
    assert tab.run("[...document.querySelectorAll('nav a')].map(a => a.hash.slice(1))") == names
    assert tab.run("document.querySelectorAll('section > p.missing').length") == 0
    charts = tab.run("[...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('svg path').length)")
    assert len(charts) >= 11
    assert min(charts) > 0
    names = tab.run("[...document.querySelectorAll('#label-table tbody th')].map(cell => cell.textContent)")
    assert tuple(names) == NAMES


def test_a_click_on_a_heading_sorts_and_a_second_one_reverses(tab, run):
    ap = {row[0]: row[2] for row in data_block((run / "report.html").read_text(), "label-table")["rows"]}
    by_ap = sorted(NAMES, key=lambda name: -ap[name])
    assert _sorted(tab, "AP") == by_ap
    assert _sorted(tab, "AP") == by_ap[::-1]
    assert _sorted(tab, "label")[-1] == "pears & </script> plums"
    state = tab.run("[...document.querySelectorAll('#label-table th[aria-sort]')].map(h => h.ariaSort)")
    assert state.count("ascending") == 1


def test_the_gates_of_a_selected_label_are_shown(tab, run):
    weights = np.load(run / "samples/explained.npz")["gates/co"]
    _select(tab, "gates", 0, "1")
    shown = tab.run(
        """[...document.querySelectorAll('#widget-gates .card')].map(card => [card.querySelector('img').alt,
             [...card.querySelector('.bar').children].map(part => parseFloat(part.style.width))])"""
    )
    assert len(shown) == 3
    for alt, widths in shown:
        row = int(alt.removeprefix("Image test/").removesuffix(".jpg"))
        np.testing.assert_allclose(np.array(widths) / 100, weights[row, 1], atol=0.004)


def test_attention_is_drawn_over_the_selected_image(tab):
    painted = "[...document.querySelectorAll('#widget-attention canvas')].map(of => of.toDataURL()).join()"
    before = tab.run(painted)
    _select(tab, "attention", 1, "1")  # the second image
    assert tab.run(painted) != before
    sides = "(of => [of.clientWidth, of.clientHeight])(document.querySelector('#widget-attention .overlaid %s'))"
    assert tab.run(sides % "canvas") == tab.run(sides % "img")


def test_images_are_filtered_by_label_and_mistake(tab, run):
    cards = data_block((run / "report.html").read_text(), "widget-cards-images")["cards"]
    label = cards[0]["labels"][0][0]

    def shown(menu: int, value: str) -> int:
        _select(tab, "cards-images", menu, value)
        return tab.run("document.querySelectorAll('#widget-cards-images .card').length")

    missed = [[name for name, outcome, _ in card["labels"] if outcome == "missed"] for card in cards]
    assert shown(1, "missed") == sum(map(bool, missed))
    assert shown(0, label) == sum(label in names for names in missed)
    assert shown(1, "") == sum(label in [name for name, *_ in card["labels"]] for card in cards)
    assert shown(0, "") == len(cards) == 3


def test_phones_and_dark_colors_are_supported(tab):
    light = tab.run("getComputedStyle(document.body).backgroundColor")
    tab.look(width=360, dark=True, phone=True)
    assert tab.run("getComputedStyle(document.body).backgroundColor") != light
    assert tab.run("document.documentElement.scrollWidth") == 360
    tab.look(width=1300)


@pytest.mark.parametrize("width", [1300, 390])
def test_no_name_or_caption_is_cut_off(tab, width):
    tab.look(width=width, phone=width < 500)
    tab.run("document.querySelectorAll('details').forEach(part => part.open = true)")
    cut_off = tab.run(
        """[...document.querySelectorAll('dt, dd, p, caption')].filter(element =>
             element.scrollWidth > element.clientWidth || element.getBoundingClientRect().right > innerWidth
           ).map(element => element.textContent)"""
    )
    tab.look(width=1300)
    assert cut_off == []


def test_no_label_name_was_executed_and_nothing_was_loaded(tab):
    """After all clicks of the tests above."""
    assert tab.run("typeof window.hurt") == "undefined"
    assert tab.problems == []
    assert {request.partition(":")[0] for request in tab.requests} <= {"file", "data"}


def _select(tab, widget: str, menu: int, value: str) -> None:
    """Choose an entry of one of the menus of a widget."""
    tab.run(
        f"""(select => {{ select.value = {json.dumps(value)}; select.dispatchEvent(new Event('change')); }})
          (document.querySelectorAll('#widget-{widget} select')[{menu}])"""
    )


def _sorted(tab, column: str) -> list[str]:
    """Click on a column heading of the table of labels; return its labels."""
    return tab.run(
        f"""(() => {{
          const buttons = [...document.querySelectorAll('#label-table thead button')];
          buttons.find(button => button.textContent === '{column}').click();
          return [...document.querySelectorAll('#label-table tbody th')].map(cell => cell.textContent);
        }})()"""
    )
