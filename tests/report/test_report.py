"""The report page: the contents of its sections, safety, self-containedness, and its function in a browser."""

import base64
import hashlib
import html
import json
import re
import sys
import types

import jax
import numpy as np
import pytest
from helpers import browser
from helpers.made_run import GRID, IMAGES, NAMES, data_block, image_ids, make_run, table, write_samples
from sklearn.metrics import precision_recall_curve

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.compare import compare_runs
from mlmoe_jax.evaluation.metrics.ranking import rank
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.report import labels, page, samples, scores, training
from mlmoe_jax.report.run_files import RunFiles
from mlmoe_jax.runs.folder import RunFolder

SECTIONS = (
    *("summary", "curves", "metrics", "labels", "differences", "groups", "gates", "attention"),
    *("scores", "mistakes", "thresholds", "cost", "config"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("report") / "other", seed=1, samples=0)


@pytest.fixture(scope="module", autouse=True)
def few_resamples():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlmoe_jax.report.results.compare_runs", lambda a, b: compare_runs(a, b, resamples=20))
        yield


@pytest.fixture
def no_bundle(monkeypatch):
    """Omit the chart library in tests that draw no charts."""
    monkeypatch.setattr(page, "vega_bundle", lambda: "")


@pytest.fixture(scope="module")
def text(run, other, few_resamples) -> str:
    files = RunFiles(run)
    return page.render(page.sections(files, RunFiles(other)), files, "")


def section(text: str, name: str) -> str:
    """Return the visible text of a section."""
    inner = text.split(f'<section id="{name}"')[1].split("</section>")[0]
    inner = re.sub(r"<script.*?</script>", "", inner, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", inner)).split())


# ------------------------------------------------------------------------------------------------------ in a browser
@pytest.fixture(scope="module")
def tab(run, other):
    """A browser without network that shows the page, as wide as a desk's."""
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


def test_a_click_on_a_heading_sorts_and_another_one_turns_the_order_around(tab, run):
    ap = {row["label"]: float(row["AP"]) for row in table(run, "per_class.csv") if row["split"] == "test"}
    by_ap = sorted(NAMES, key=lambda name: -ap[name])
    assert _sorted(tab, "AP") == by_ap
    assert _sorted(tab, "AP") == by_ap[::-1]
    assert _sorted(tab, "label")[-1] == "pears & </script> plums"
    state = tab.run("[...document.querySelectorAll('#label-table th[aria-sort]')].map(h => h.ariaSort)")
    assert state.count("ascending") == 1


def test_the_gates_of_a_chosen_label_are_shown(tab, run):
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


def test_attention_is_painted_over_the_image_that_is_chosen(tab):
    painted = "document.querySelector('#widget-attention .detail canvas').toDataURL()"
    before = tab.run(painted)
    tab.run("document.querySelectorAll('#widget-attention .cards .card')[1].click()")
    assert len(before) > 1000
    assert tab.run(painted) != before


def test_the_curve_of_a_chosen_label_is_shown(tab):
    chosen = "views['precision-recall'].data('chosen').map(row => row.curve)"
    assert set(tab.run(chosen)) == {NAMES[0]}
    tab.run(
        "(select => { select.value = 2; select.dispatchEvent(new Event('change')); })"
        "(document.querySelector('#widget-curves select'))"
    )
    assert set(tab.run(chosen)) == {NAMES[2]}


def test_phones_and_dark_colours_are_served(tab):
    assert _contrast(tab) > 7
    light = tab.run("getComputedStyle(document.body).backgroundColor")
    tab.look(width=360, dark=True, phone=True)
    assert tab.run("getComputedStyle(document.body).backgroundColor") != light
    assert _contrast(tab) > 7
    assert tab.run("document.documentElement.scrollWidth") == 360
    tab.look(width=1300)


def test_no_name_of_a_label_ran_and_nothing_was_loaded(tab):
    """After all that the tests above have clicked."""
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
    colours = tab.run("(style => [style.color, style.backgroundColor])(getComputedStyle(document.body))")
    light = []
    for colour in colours:
        channels = np.array([int(part) for part in re.findall(r"\d+", colour)[:3]]) / 255
        linear = np.where(channels <= 0.03928, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        light.append(float(linear @ [0.2126, 0.7152, 0.0722]) + 0.05)
    return max(light) / min(light)


# ------------------------------------------------------------------------------------------------------ safe and whole
def test_the_page_has_no_external_address_and_only_its_own_scripts(text):
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert re.findall(r"(?:https?:)?//[\w.]+", markup) == []
    assert re.findall(r"url\(|@import", markup) == []
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; img-src data:")
    scripts = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(scripts) == 2
    assert all(f"'sha256-{digest}'" in html.unescape(policy) for digest in hashes)


def test_names_that_contain_markup_stay_text(text):
    assert "window.hurt" in text
    assert "<script>window" not in text
    assert "<img src=x" not in text
    for cells, name in zip(data_block(text, "label-table")["rows"], NAMES, strict=True):
        assert cells[0] == name


def test_the_content_of_a_script_cannot_close_it():
    page_text = page._inline('a = "</script><!-- b";')
    assert "</script" not in page_text
    assert "<!--" not in page_text


# ---------------------------------------------------------------------------------------------------- missing, damaged
def test_missing_files_are_explained_in_one_line(tmp_path, run, no_bundle):
    folder = RunFolder(tmp_path / "empty")
    folder.write_text("config.json", run.read_text("config.json"))
    found = page.sections(RunFiles(folder))
    missing = {part.name: part.missing for part in found}
    assert [name for name in SECTIONS if not missing[name]] == ["summary", "config"]
    assert all(line.endswith(".") and "\n" not in line for line in missing.values() if line)
    text = page.write_report(folder).read_text()
    assert "metrics.jsonl is written from the first logged step on." in section(text, "curves")


def test_the_output_can_be_another_folder(run, tmp_path, no_bundle):
    target = page.write_report(run, output=tmp_path / "pages" / "a.html")
    assert target.read_text().startswith("<!doctype html>")


def test_an_output_that_cannot_be_written_is_a_user_error(run, tmp_path, refusal, no_bundle):
    (tmp_path / "file").write_text("")
    assert "cannot write" in refusal(page.write_report, run, output=tmp_path / "file" / "a.html")


def test_missing_runs_and_damaged_files_are_user_errors(tmp_path, run, refusal, no_bundle):
    assert "there is no run folder" in refusal(page.write_report, RunFolder(tmp_path / "none"))
    for name, content in (
        ("scores.npz", b"PK"),
        ("results.json", b"{"),
        ("label_space.npz", b"nothing"),
        ("samples/index.json", b'{"samples": [{}]}'),
        ("samples/explained.npz", b"PK\x03\x04"),
        ("per_class.csv", b"a,b\n1,2\n"),
    ):
        folder = RunFolder(tmp_path / name.replace("/", "-"))
        folder.adopt(run)
        (folder / page.REPORT).unlink(missing_ok=True)
        folder.write_bytes(name, content)
        assert name in refusal(page.write_report, folder)
        assert not (folder / page.REPORT).exists()


def test_runs_without_scores_cannot_be_compared(run, tmp_path, refusal, no_bundle):
    bare = RunFolder(tmp_path / "bare")
    for name in ("config.json", "labels.txt"):
        bare.write_text(name, run.read_text(name))
    assert "scores.npz" in refusal(page.write_report, run, against=bare)


# ------------------------------------------------------------------------------------------------------------- sections
def test_summary_names_the_selected_step(text, run):
    found = section(text, "summary")
    assert "ema weights of step 40 (best mAP on val, 60.00 %)" in found
    mean_ap = run.read_json("results.json")["test"]["mAP"]
    assert f"mAP % {100 * mean_ap:.2f} on test" in found
    assert "5 labels, 40 training images" in found
    assert "Selected on test" not in found


def test_selection_on_test_is_reported(tmp_path, no_bundle):
    folder = make_run(tmp_path / "run", samples=0, eval__select_on="test")
    assert "Selected on test, as published" in section(page.write_report(folder).read_text(), "summary")


def test_the_last_weights_and_runs_without_a_selection(run, tmp_path):
    assert training.selected(RunFiles(make_run(tmp_path / "a", samples=0, eval__select_on="none"))).startswith(
        "the last ema"
    )
    folder = make_run(tmp_path / "b", samples=0)
    (folder / "metrics.jsonl").unlink()
    assert training.selected(RunFiles(folder)) == ""


def test_long_curves_are_means_of_neighbours():
    rows = [{"step": step, "loss": float(step)} for step in range(1, 1001)]
    points = training._thinned(rows, "loss")
    assert len(points) == training.MOST_POINTS
    assert points[0] == {"step": 2, "value": 1.5, "series": "loss"}
    assert training._thinned([*rows[:2], {"step": 3}], "loss")[-1]["step"] == 2


def test_metrics_are_in_percent_with_their_definitions(text, run):
    found, results = section(text, "metrics"), run.read_json("results.json")
    for name in ("mAP", "AUC_macro", "ECE_pooled"):
        assert f"{name} {100 * results['val'][name]:.2f} {100 * results['test'][name]:.2f}" in found
    cut = [f"{100 * results['test'][f'{name}@top3']:.2f}" for name in ("CP", "CR", "CF1")]
    assert f"top3 test {' '.join(cut)}" in found
    assert "the 3 highest labels of each image are predicted" in found
    assert "Other values" not in found  # all metrics have a meaning


def test_differences_are_those_of_the_comparison(text, run, other):
    comparison = compare_runs(other, run, resamples=20)
    rows = {row[0]: row for row in data_block(text, "difference-table")["rows"]}
    assert set(rows) == set(NAMES)
    for name, change in comparison.ap.items():
        np.testing.assert_allclose(rows[name][2:], [change.difference, change.low, change.high, change.b, change.a])
    mean_ap = comparison.metrics["mAP"]
    assert f"mAP {100 * mean_ap.b:.2f} {100 * mean_ap.a:.2f} {100 * mean_ap.difference:+.2f}" in section(
        text, "differences"
    )
    drawn = [row["label"] for row in data_block(text, "ap-differences")["datasets"]["rows"]]
    assert drawn == sorted(NAMES, key=lambda name: -comparison.ap[name].difference)


def test_thresholds_and_their_origin(text):
    assert "split val" in section(text, "thresholds")
    assert "from 0.1 to 0.4" in section(text, "thresholds")
    assert data_block(text, "threshold-table")["rows"][-1] == [NAMES[-1], None]


def test_cost_is_read_from_the_file(text):
    found = section(text, "cost")
    assert "parameters, trainable 1,022,230 1.17 % of all" in found
    assert "GMACs as the papers count 24.51" in found


def test_cost_is_counted_on_request(run, tmp_path, monkeypatch, no_bundle):
    folder, counted = RunFolder(tmp_path / "run"), run.read_json("cost.json")
    folder.write_text("config.json", run.read_text("config.json"))
    counter = types.SimpleNamespace(summarize=lambda config: counted | {"name": config.data.name})
    monkeypatch.setitem(sys.modules, "mlmoe_jax.training.preflight.cost", counter)  # which is tested elsewhere
    assert "24.51" in section(page.write_report(folder, cost=True).read_text(), "cost")
    assert folder.read_json("cost.json")["name"] == "digits"


def test_config_shows_changed_keys_first(text):
    found = section(text, "config")
    assert "0 keys differ" in found
    assert "data.test_splits ('test',)" in found


def test_starts_and_the_versions_that_changed_between_them(text):
    found = section(text, "config")
    assert "2026-01-02T03:04:05+00:00: from step 20 on 16 × TPU v5e in 4 process(es)" in found
    assert "library from step 0 from step 40 this page" in found
    assert f"jax 0.8.0 0.9.1 {jax.__version__}" in found


def test_generic_table_of_cooccurrence(text):
    assert data_block(text, "cooccurrence-table") == {
        "columns": [["split", "text"], ["a", "text"], ["b", "text"], ["gap", "number"]],
        "rows": [["test", "cat", "dog", 0.25], ["test", "dog", "cat", None]],
    }


# -------------------------------------------------------------------------------------------------------------- numbers
def test_precision_recall_points_equal_scikit_learn():
    draw = np.random.default_rng(0)
    positive, values = draw.random(300) < 0.3, draw.random(300).round(2)
    ranking = rank(values[positive], [values[~positive]])
    points = scores.precision_recall_points(ranking, values[positive], most=1000)
    precision, recall, cuts = precision_recall_curve(positive, values)
    at = np.searchsorted(cuts, points[:, 2])
    np.testing.assert_allclose(points, np.stack([recall[at], precision[at], cuts[at]], axis=1))
    few = scores.precision_recall_points(ranking, values[positive], most=10)
    assert len(few) == 10
    np.testing.assert_array_equal(few[[0, -1]], points[[0, -1]])


def test_calibration_equals_the_metrics(text, run):
    error = run.read_json("results.json")["test"]["ECE_pooled"]
    assert f"error of all scores: {100 * error:.2f} %" in section(text, "scores")
    bins = np.array(
        [[row["score"], row["share"], row["count"]] for row in data_block(text, "reliability")["datasets"]["pooled"]]
    )
    np.testing.assert_allclose(np.abs(bins[:, 0] - bins[:, 1]) @ bins[:, 2] / bins[:, 2].sum(), error, atol=1e-4)


def test_worst_mistakes_match_a_plain_loop():
    draw = np.random.default_rng(1)
    codes, values = draw.choice([0, 1, -1, 2], (30, 4)).astype(np.int8), draw.random((30, 4)).round(2)
    split = SplitScores("test", image_ids("test", 30), values, codes)
    for code, sign in ((0, -1), (1, 1)):
        entries = [(sign * values[n, k], n, k) for n in range(30) for k in range(4) if codes[n, k] == code]
        expected = [(n, k) for _, n, k in sorted(entries)][: scores.MOST_MISTAKES]
        assert scores.worst(split, code, -sign) == expected
    assert scores.worst(SplitScores("", split.ids, values, np.full_like(codes, -1)), 0, 1) == []


def test_mistakes_leave_out_unknown_and_difficult_labels(text, run):
    rows = data_block(text, "mistakes-false-positives")["rows"]
    with np.load(run / "scores.npz") as stored:
        test = stored["split"] == "test"
        negative = np.where(stored["labels"][test] == 0, stored["scores"][test], 0)
    assert rows[0][1] == pytest.approx(negative.max(), abs=1e-4)
    gallery = data_block(text, "widget-mistakes")
    assert [group["title"].split(" among")[0] for group in gallery] == ["False positives", "False negatives"]
    assert {row["image"] for group in gallery for row in group["rows"]} == {0, 1, 2}


def test_conditional_probabilities_and_the_graph():
    space = LabelSpace(
        ("a", "b", "c", "d"),
        np.array([[0, 6, 1, 0], [6, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]),
        np.array([10, 8, 4, 0]),
        20,
        np.array([0, 1, 0, 1]),
        np.zeros(4, int),
    )
    given = labels.conditional_probability(space, np.arange(4))
    np.testing.assert_allclose(given[0], [0, 0.6, 0.1, 0])
    np.testing.assert_allclose(given[:, 0], [0, 0.75, 0.25, 0])
    graph = labels.label_graph("g", "groups", space, np.arange(4), space.co_group, given)
    assert [(edge["source"], edge["target"], edge["p"]) for edge in graph.edges] == [(1, 0, 0.75)]
    assert graph.edges[0]["text"] == "p(a | b) = 0.75, reverse 0.60"
    assert graph.edges[0]["color"] is None  # between two groups
    assert [node["group"] for node in graph.nodes] == [1, 2, 1, 2]
    assert all(node["x"] ** 2 + node["y"] ** 2 == pytest.approx(1, abs=1e-3) for node in graph.nodes)
    around = sorted(graph.nodes, key=lambda node: node["angle"])
    assert [node["name"] for node in around] == ["a", "c", "b", "d"]  # group by group


def test_the_heat_map_shows_the_conditional_probabilities(text, run):
    space = RunFiles(run).label_space
    cells = {(cell["y"], cell["x"]): cell["value"] for cell in data_block(text, "heat-co")["datasets"]["rows"]}
    for a, b in ((0, 1), (1, 0)):
        expected = space.counts[a, b] / space.positives[a]
        assert cells[NAMES[a], NAMES[b]] == pytest.approx(expected, abs=1e-3)


# -------------------------------------------------------------------------------------------------------------- samples
def test_gates_and_their_summaries(text, run):
    weights = np.load(run / "samples/explained.npz")
    packed = {gate["name"]: gate for gate in data_block(text, "widget-gates")["gates"]}
    for name, images in (("co", 3), ("experts", 1)):
        values = np.frombuffer(base64.b64decode(packed[name]["weights"]), np.uint8) / 255
        assert packed[name]["images"] == images
        np.testing.assert_allclose(values, weights[f"gates/{name}"].ravel(), atol=0.003)
    cells = data_block(text, "gate-co-mean")["datasets"]["rows"]
    expected = weights["gates/co"].astype(float).mean(axis=0).ravel()
    np.testing.assert_allclose([cell["value"] for cell in cells], expected, atol=1e-4)
    assert "The weights of experts are the same for every image" in section(text, "gates")
    assert 'id="data-gate-experts-deviation"' not in text


def test_attention_maps_and_their_peaks(text, run):
    maps = np.load(run / "samples/explained.npz")["attention/labels"].astype(float)
    packed = {kind["name"]: kind for kind in data_block(text, "widget-attention")["maps"]}
    values = np.frombuffer(base64.b64decode(packed["labels"]["maps"]), np.uint8).reshape(maps.shape) / 255
    np.testing.assert_allclose(values, maps / maps.max(-1, keepdims=True), atol=0.003)
    np.testing.assert_allclose(packed["labels"]["peaks"], maps.max(-1) * GRID[0] * GRID[1], atol=0.006)
    assert packed["prompts"]["queries"]["1"] == "co group 2, expert 1"


def test_attention_maps_are_bounded(run, monkeypatch):
    monkeypatch.setattr(samples, "MOST_BYTES", 3 * 2 * GRID[0] * GRID[1])
    files = RunFiles(run)
    packed = samples._pack(files, files.samples, "labels", files.samples.attention["labels"])
    assert packed["kept"] == [samples.image_labels(files.samples, s, 2) for s in range(3)]
    assert packed["left_out"] == len(NAMES)


def test_the_labels_of_an_image_come_first(run):
    found = RunFiles(run).samples
    for s in range(3):
        order = samples.image_labels(found, s, 5)
        expected = sorted(range(5), key=lambda k: (found.codes[s, k] != 1, -found.scores[s, k]))
        assert order == expected


# ----------------------------------------------------------------------------------------------------------- very large
def test_a_page_with_twenty_thousand_labels_stays_small(tmp_path, run, no_bundle):
    count, images, draw = 20_000, 4, np.random.default_rng(0)
    folder = RunFolder(tmp_path / "huge")
    folder.write_text("config.json", run.read_text("config.json"))
    folder.write_text("labels.txt", "".join(f"label {k}\n" for k in range(count)))
    codes, values = (draw.random((images, count)) < 0.3).astype(np.int8), draw.random((images, count)).round(3)
    folder.write_json("results.json", {"test": {"mAP": 0.3}})
    rows = [["test", f"label {k}", 3, k / count] for k in range(count)]
    folder.write_csv("per_class.csv", ["split", "label", "positives", "AP"], rows)
    split = np.full(images, "test")
    folder.write_npz("scores.npz", ids=image_ids("test", images), scores=values, labels=codes, split=split)
    write_samples(folder, codes[:2], values[:2], draw)
    text = page.write_report(folder).read_text()
    assert len(text) < 4_000_000
    assert len(data_block(text, "label-table")["rows"]) == count
    assert len(data_block(text, "ap-bars")["datasets"]["rows"]) == 100
    assert len(data_block(text, "widget-curves")) == scores.MOST_LABELS
    assert len(data_block(text, "widget-gates")["labels"]) == samples.MOST_LABELS
    maps = {kind["name"]: kind for kind in data_block(text, "widget-attention")["maps"]}
    assert [len(kept) for kept in maps["labels"]["kept"]] == [samples.MOST_QUERIES] * 2
    for name in ("labels", "gates", "attention", "scores"):
        assert "Of 20,000" in section(text, name)


def test_many_labels_of_a_label_space(tmp_path, run):
    count = 300
    counts = np.triu(np.ones((count, count), np.int64), 1)
    group = np.arange(count) % 4
    space = LabelSpace(tuple(map(str, range(count))), counts + counts.T, np.arange(count) + 1, 1000, group, group)
    with open(tmp_path / "label_space.npz", "wb") as file:
        space.save(file)
    (tmp_path / "config.json").write_text(run.read_text("config.json"))
    parts = labels.groups(RunFiles(RunFolder(tmp_path))).parts
    graphs = [part for part in parts if part.kind == "graph"]
    assert "Of 300 labels, the 80 most frequent" in parts[0].text
    assert [node["name"] for node in graphs[0].nodes] == [str(k) for k in range(220, 300)]


def test_images_are_embedded_from_the_files_of_the_folder(text, run):
    block = data_block(text, "samples")
    for n, image in enumerate(block["images"]):
        assert base64.b64decode(image.partition(",")[2]) == (run / f"samples/{n:04}.jpg").read_bytes()
    assert block["ids"] == image_ids("test", 3).tolist()
    assert json.dumps(block["labels"]).count("[") > 3 * len(NAMES)


def test_unreadable_images_are_left_out(tmp_path, no_bundle):
    folder = make_run(tmp_path / "run", samples=0)
    with np.load(folder / "scores.npz") as stored:
        arrays = dict(stored)
    arrays["scores"][np.flatnonzero(arrays["split"] == "test")[5]] = np.nan
    folder.write_npz("scores.npz", **arrays)
    assert len(RunFiles(folder).splits["test"].scores) == IMAGES - 1
    assert f"of all {IMAGES - 1} images" in page.write_report(folder).read_text()


def test_a_folder_needs_a_config(tmp_path):
    with pytest.raises(UserError, match="it has no config"):
        RunFiles(RunFolder(tmp_path))
