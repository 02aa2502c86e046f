"""The page of the server in a browser."""

import base64
import contextlib

import pytest
from helpers import browser
from helpers.color_model import color
from helpers.color_server import in_thread, make_labeler
from helpers.drawn_images import encoded
from helpers.jobs import until

from mlmoe_jax.apps.serving.connections import LimitedServer
from mlmoe_jax.apps.serving.server import LOOPBACK, make_app
from mlmoe_jax.apps.serving.service import READY, Service
from mlmoe_jax.data.label_tree import Attribute, LabelTree

GIVE = """(() => {
  const bytes = text => Uint8Array.from(atob(text), letter => letter.charCodeAt(0)), given = new DataTransfer();
  for (const [name, text] of %s) given.items.add(new File([bytes(text)], name, {type: 'image/png'}));
  document.dispatchEvent(%s);
})()"""
DROP = "new DragEvent('drop', {dataTransfer: given, bubbles: true})"
PASTE = "new ClipboardEvent('paste', {clipboardData: given, bubbles: true})"
NAMES = "[...document.querySelectorAll('#labels button')].map(row => row.firstChild.textContent)"


@contextlib.contextmanager
def served(labeler):
    """The address of a server in a thread of this process."""
    service = Service(labeler)
    server = LimitedServer(make_app(service, hosts=LOOPBACK), service, 0)
    with in_thread(server) as ((host, port), _):
        until(lambda: service.state == READY)
        yield f"http://{host}:{port}"


@pytest.fixture(scope="module")
def address(labeler):
    with served(labeler) as address:
        yield address


@pytest.fixture(scope="module")
def tab(address):
    with browser.opened(address) as tab:
        yield tab


def give(tab, images: dict[str, bytes], how: str = DROP) -> None:
    """Drop or paste files, and wait until the server has answered."""
    files = str([[name, base64.b64encode(content).decode()] for name, content in images.items()])
    painted = "Number(document.getElementById('canvas').dataset.drawn ?? 0)"
    before = tab.run(painted)
    tab.run(GIVE % (files, how))
    state = "document.getElementById('state').textContent"
    until(lambda: tab.run(painted) > before or "cannot" in tab.run(state))


def test_a_dropped_image_gets_bars_thresholds_gates_and_attention(tab):
    image = color(0, 0, 200)
    image[:2, 2:, 0] = 250
    give(tab, {"<b>a</b>.png": encoded(image)})
    assert tab.run(NAMES)[0] == "blue"
    assert tab.run("document.getElementById('chosen').textContent") == "2 of 4 labels"
    width = tab.run("document.querySelector('#labels button.yes .bar i').style.width")
    assert float(width.rstrip("%")) > 99
    assert tab.run("document.querySelectorAll('#labels .bar b').length") == 4
    assert "50%" in tab.run("document.querySelector('#labels .bar b').style.left")
    legends = tab.run("[...document.querySelectorAll('.gate')].map(gate => gate.textContent)")
    assert [text.startswith(f"gate {name} of blue") for name, text in zip(("g", "static"), legends, strict=True)]
    assert "first 50" in legends[0]
    assert tab.run("document.getElementById('caption').textContent").startswith("<b>a</b>.png: attention of red")
    pixels = "document.getElementById('canvas').getContext('2d').getImageData(0, 0, 416, 416).data"
    bright, dark = tab.run(f"(data => [data[4 * (30 * 416 + 380)], data[4 * (380 * 416 + 30)]])({pixels})")
    assert bright > dark + 100, "the heat is where the attention is"


def test_selecting_a_label_shows_its_gates_and_attention(tab):
    give(tab, {"a.png": encoded(color(51, 0, 200))})
    rows = tab.run(NAMES)
    tab.run(f"document.querySelectorAll('#labels button')[{rows.index('green')}].click()")
    assert tab.run("document.querySelector('.gate strong').textContent") == "gate g of green"
    until(lambda: "attention of green" in tab.run("document.getElementById('caption').textContent"))
    pressed = (
        "[...document.querySelectorAll('#labels button[aria-pressed=true] span:first-child')].map(s => s.textContent)"
    )
    assert tab.run(pressed) == ["green"]


def test_values_of_an_attribute_have_no_threshold_and_a_sentence_says_so(tab):
    assert "attribute" not in tab.run("document.getElementById('rule').textContent")
    labeler = make_labeler(tree=LabelTree(attributes=(Attribute("tone", (0, 1)),)))
    labeler.compile()
    with served(labeler) as address, browser.opened(address) as own:
        give(own, {"a.png": encoded(color(60, 51, 200))})
        rule = own.run("document.getElementById('rule').textContent")
        marked = own.run("document.querySelectorAll('#labels .bar b').length")
        chosen = own.run("[...document.querySelectorAll('#labels .yes')].map(row => row.firstChild.textContent)")
    assert rule.endswith("Of labels without a mark, the most probable of each attribute is predicted.")
    assert marked == 2
    assert chosen == ["blue", "dark", "red"]


def test_a_pasted_image_replaces_the_one_before(tab):
    give(tab, {"image.png": encoded(color(200))}, PASTE)
    assert tab.run(NAMES)[0] == "red"
    assert "image.png" in tab.run("document.getElementById('caption').textContent")


def test_several_images_can_be_switched_and_a_bad_one_is_named(tab):
    give(tab, {"red.png": encoded(color(200)), "bad.png": b"no", "blue.png": encoded(color(0, 0, 200))})
    assert "cannot read bad.png" in tab.run("document.getElementById('state').textContent")
    until(lambda: tab.run("document.querySelectorAll('#strip button').length") == 2)
    assert tab.run(NAMES)[0] == "red"
    tab.run("document.querySelectorAll('#strip button')[1].click()")
    assert tab.run(NAMES)[0] == "blue"


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_cut_off_on_any_screen(tab, width, dark):
    tab.look(width=width, dark=dark, phone=width < 500)
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    cut_off = "[...document.querySelectorAll('p, span, label, strong')].filter(part => part.offsetWidth && "
    cut_off += "part.getBoundingClientRect().right > innerWidth + 1).map(part => part.textContent)"
    assert tab.run(cut_off) == []
    background = tab.run("getComputedStyle(document.body).backgroundColor")
    assert (int(background.split("(")[1].split(",")[0]) < 128) == dark
    tab.look(width=1280)


def test_the_page_broke_none_of_its_rules(tab, address):
    """After all clicks of the tests above; the answer 422 to the bad image is logged by the browser."""
    assert [problem for problem in tab.problems if "422" not in str(problem)] == []
    assert {request.partition(":")[0] for request in tab.requests} <= {"http", "data", "blob"}
    assert all(request.startswith((address, "data:", "blob:")) for request in tab.requests)
