"""The report page in a browser."""

import re
import time

import numpy as np
import pytest
from helpers import browser
from helpers.made_run import NAMES, SECTIONS, data_block, table

from mlmoe_jax.apps.report import page


@pytest.fixture(scope="module")
def tab(run, other):
    """A browser without network that shows the page, 1,300 pixels wide."""
    if (executable := browser.find()) is None:
        pytest.skip(f"no browser on the path: none of {', '.join(browser.NAMES)}")
    path = page.write_report(run, against=other)
    assert path == run / "report.html"
    with browser.Browser(executable) as opened:
        opened.look(width=1300)
        opened.open(path)
        yield opened


def test_every_section_is_drawn_and_in_the_contents(tab):
    assert tuple(tab.run("[...document.querySelectorAll('main > section')].map(s => s.id)")) == SECTIONS
    assert tuple(tab.run("[...document.querySelectorAll('nav a')].map(a => a.hash.slice(1))")) == SECTIONS
    assert tab.run("document.querySelectorAll('section > p.missing').length") == 0
    charts = tab.run("[...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('svg path').length)")
    assert len(charts) >= 12
    assert min(charts) > 0
    names = tab.run("[...document.querySelectorAll('#label-table tbody th')].map(cell => cell.textContent)")
    assert tuple(names) == NAMES


def test_a_click_on_a_heading_sorts_and_a_second_one_reverses(tab, run):
    ap = {row["label"]: float(row["AP"]) for row in table(run, "per_class.csv") if row["split"] == "test"}
    by_ap = sorted(NAMES, key=lambda name: -ap[name])
    assert _sorted(tab, "AP") == by_ap
    assert _sorted(tab, "AP") == by_ap[::-1]
    assert _sorted(tab, "label")[-1] == "pears & </script> plums"
    state = tab.run("[...document.querySelectorAll('#label-table th[aria-sort]')].map(h => h.ariaSort)")
    assert state.count("ascending") == 1


def test_the_gates_of_a_selected_label_are_shown(tab, run):
    weights = np.load(run / "samples/explained.npz")["gates/co"]
    shown = tab.run(
        """(() => {
          const select = document.querySelector('#widget-gates select');
          select.value = 1;
          select.dispatchEvent(new Event('change'));
          const cards = [...document.querySelectorAll('#widget-gates .cards .card')];
          const widths = card => [...card.querySelector('.bar').children].map(part => parseFloat(part.style.width));
          return cards.map(card => [card.querySelector('img').alt, widths(card)]);
        })()"""
    )
    assert len(shown) == 3
    for alt, widths in shown:
        row = int(alt.removeprefix("Image test/").removesuffix(".jpg"))
        np.testing.assert_allclose(np.array(widths) / 100, weights[row, 1], atol=0.004)


def test_attention_is_drawn_over_the_selected_image(tab):
    painted = "document.querySelector('#widget-attention .detail canvas').toDataURL()"
    before = tab.run(painted)
    tab.run("document.querySelectorAll('#widget-attention .cards .card')[1].click()")
    assert len(before) > 1000
    assert tab.run(painted) != before


def test_the_curve_of_a_selected_label_is_shown(tab):
    chosen = "views['precision-recall'].data('chosen').map(row => row.curve)"
    assert set(tab.run(chosen)) == {NAMES[0]}
    tab.run(
        "(select => { select.value = 2; select.dispatchEvent(new Event('change')); })"
        "(document.querySelector('#widget-curves select'))"
    )
    assert set(tab.run(chosen)) == {NAMES[2]}


def test_images_are_filtered_by_label_and_mistake(tab, run):
    cards = data_block((run / "report.html").read_text(), "widget-images")["cards"]
    label = cards[0]["labels"][0][0]

    def shown(which: str, value: str) -> int:
        return tab.run(
            f"""(() => {{
              const [label, kind] = document.querySelectorAll('#widget-images select');
              {which}.value = '{value}';
              {which}.dispatchEvent(new Event('change'));
              return document.querySelectorAll('#widget-images .card').length;
            }})()"""
        )

    missed = [[k for k, code, _, predicted in card["labels"] if code == 1 and not predicted] for card in cards]
    assert shown("kind", "missed") == sum(map(bool, missed))
    assert shown("label", label) == sum(label in of for of in missed)
    assert shown("kind", "") == sum(label in [k for k, *_ in card["labels"]] for card in cards)
    assert shown("label", "") == len(cards) == 3


def test_curves_are_drawn_over_the_time_of_training(tab):
    titles = "document.querySelector('#curve-loss svg').textContent"
    assert "seconds of training" not in tab.run(titles)
    tab.run(
        "(select => { select.value = 'time'; select.dispatchEvent(new Event('change')); })"
        "(document.querySelector('#widget-axis select'))"
    )
    until = time.monotonic() + 30
    while "seconds of training" not in tab.run(titles):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_phones_and_dark_colors_are_supported(tab):
    assert _contrast(tab) > 7
    light = tab.run("getComputedStyle(document.body).backgroundColor")
    tab.look(width=360, dark=True, phone=True)
    assert tab.run("getComputedStyle(document.body).backgroundColor") != light
    assert _contrast(tab) > 7
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


def _sorted(tab, column: str) -> list[str]:
    """Click on a column heading of the table of labels; return its labels."""
    return tab.run(
        f"""(() => {{
          const buttons = [...document.querySelectorAll('#label-table thead button')];
          buttons.find(button => button.textContent === '{column}').click();
          return [...document.querySelectorAll('#label-table tbody th')].map(cell => cell.textContent);
        }})()"""
    )


def _contrast(tab) -> float:
    """Return the contrast of text and page as defined by WCAG, whose highest level requires 7."""
    colors = tab.run("(style => [style.color, style.backgroundColor])(getComputedStyle(document.body))")
    light = []
    for color in colors:
        channels = np.array([int(part) for part in re.findall(r"\d+", color)[:3]]) / 255
        linear = np.where(channels <= 0.03928, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        light.append(float(linear @ [0.2126, 0.7152, 0.0722]) + 0.05)
    return max(light) / min(light)
