"""The sections about pairs of labels and about shared experts, and the images that runs differ on."""

import base64
import io
import re
from dataclasses import replace

import numpy as np
import pytest
from helpers.made_run import NAMES, data_block, make_run, section
from PIL import Image
from scipy.stats import spearmanr

from mlmoe_jax.apps.report import page, pairs, routing
from mlmoe_jax.apps.report import thumbnails as thumbnails_module
from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.apps.report.thumbnails import thumbnails
from mlmoe_jax.apps.tools.compare import ComparedRun, match_images
from mlmoe_jax.apps.tools.compare_pairs import pairs_of_run, pairs_of_runs
from mlmoe_jax.data.images import ArrayImages, ImageFiles
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.folder import RunFolder


@pytest.fixture
def no_data(monkeypatch):
    """A data set that cannot be opened."""

    def open_split(data, split, **how):
        raise UserError("data.root is empty")

    monkeypatch.setattr(thumbnails_module, "open_split", open_split)


def gallery(part) -> list:
    return [image for item in part.parts if item.kind == "gallery" for image in item.images]


# --------------------------------------------------------------------------------------------------------------- pairs
def test_the_rates_of_one_run(run):
    part = pairs.pairs(RunFiles(run), wanted="cat:dog")
    [measured] = pairs_of_run(ComparedRun.of(run), "test", pairs="cat:dog").pairs
    [table] = [item for item in part.parts if item.kind == "table"]
    assert table.columns == ("images", "number", run.path.name)
    row = next(row for row in table.rows if row[0] == "with cat, without dog")
    rate = measured.rates[0]["false_with_a"]
    share, low, high = (f"{100 * value:.2f}" for value in (rate.share, *rate.interval))
    assert row[1:] == [str(rate.images), f"{share} [{low}, {high}]"]
    assert f"p(b|a) {measured.training.p_b_given_a:.2f}" in table.caption
    assert "Thresholds: those of thresholds.json, fitted on val." in part.parts[0].text
    assert gallery(part) == []
    assert any("--against=FOLDER" in getattr(item, "text", "") for item in part.parts)


def test_images_on_which_two_runs_differ(run, other, no_data):
    part = pairs.pairs(RunFiles(run), RunFiles(other), wanted="cat:dog")
    there, here = ComparedRun.of(other), ComparedRun.of(run)
    [measured] = pairs_of_runs(there, here, match_images(there, here, "test"), pairs="cat:dog").pairs
    assert measured.differing, "the made-up runs differ"
    shown = gallery(part)
    assert [one.alt for one in shown] == [f"Image {i.id}" for i in measured.differing[: pairs.MOST_IMAGES]]
    better = sum(i.better for i in measured.differing)
    text = " ".join(item.text for item in part.parts if item.kind == "note")
    assert f"{run.path.name} is right in {better} and other in {len(measured.differing) - better}" in text
    for one, image in zip(shown, measured.differing, strict=False):
        name = run.path.name if image.better else "other"
        assert one.lines[0] == f"{'present' if image.present else 'absent'}: {name} is right"
        in_samples = image.id in RunFiles(run).samples.ids
        assert (one.jpeg is not None) == in_samples
    assert "cannot be read: data.root is empty." in text


def test_pairs_on_the_page(run, other, no_data, no_bundle, tmp_path, refusal):
    text = page.write_report(run, against=other, output=tmp_path / "a.html", wanted_pairs="cat:dog").read_text()
    assert "cat → dog" in section(text, "pairs")
    assert "not shown" in section(text, "pairs")
    hurtful = f'"{NAMES[2]}:{NAMES[3]}"'
    assert "<script>window" not in page.write_report(run, output=tmp_path / "b.html", wanted_pairs=hurtful).read_text()
    sentence = refusal(page.write_report, run, output=tmp_path / "c.html", wanted_pairs="cat:dgo")
    assert "did you mean 'dog'?" in sentence
    assert not (tmp_path / "c.html").exists()


# ----------------------------------------------------------------------------------------------------------- thumbnails
@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run without samples whose data set has image files, of which 000 is a link out of data.root."""
    root = tmp_path / "data"
    (root / "test").mkdir(parents=True)
    made = make_run(tmp_path / "run", samples=0, data__root=str(root))
    scored = ComparedRun.of(made).splits["test"]
    for n, name in enumerate(scored.ids):
        Image.fromarray(np.full((300, 200, 3), n, np.uint8)).save(root / name)
    (root / "test/000.jpg").rename(tmp_path / "private.jpg")
    (root / "test/000.jpg").symlink_to(tmp_path / "private.jpg")
    split = Split("test", NAMES, scored.codes.copy(), scored.ids.tolist(), ImageFiles(root, scored.ids.tolist()))
    monkeypatch.setattr(thumbnails_module, "open_split", lambda data, name, **how: split)
    return RunFiles(made), scored, split


def test_thumbnails_are_read_from_the_data_set(folder):
    files, scored, _ = folder
    found = thumbnails(files, scored, ["test/007.jpg", "test/003.jpg"])
    assert sorted(found.shown) == ["test/003.jpg", "test/007.jpg"]
    assert found.left_out == []
    shown = Image.open(io.BytesIO(found.shown["test/007.jpg"]))
    assert max(shown.size) == thumbnails_module.SIDE
    assert np.abs(np.asarray(shown).astype(int) - 7).max() <= 2


def test_no_file_outside_the_data_root_is_embedded(folder, monkeypatch):
    files, scored, split = folder
    found = thumbnails(files, scored, ["test/000.jpg", "test/001.jpg"])
    assert list(found.shown) == ["test/001.jpg"]
    assert found.left_out == ["1 images are not shown, since their files are outside data.root."]
    # also for a part of a split, as with data.val_fraction
    part = split.take(np.arange(5), "test")
    monkeypatch.setattr(thumbnails_module, "open_split", lambda data, name, **how: part)
    assert list(thumbnails(files, scored, ["test/000.jpg", "test/001.jpg"]).shown) == ["test/001.jpg"]


def test_other_data_in_the_same_place_are_not_embedded(folder):
    files, scored, split = folder
    split.labels[3, 0] = 1 - np.clip(split.labels[3, 0], 0, 1)
    (RunFolder(files.config.data.root) / "test/004.jpg").write_bytes(b"no image")
    found = thumbnails(files, replace(scored), ["test/003.jpg", "test/004.jpg", "test/005.jpg"])
    assert list(found.shown) == ["test/005.jpg"]
    assert found.left_out == [
        "1 images are not shown, since the data set has no such image with these labels.",
        "1 images are not shown, since they cannot be read.",
    ]


def test_images_in_memory_have_no_path(folder, monkeypatch):
    files, scored, split = folder
    arrays = ArrayImages(np.zeros((len(scored), 8, 8, 3), np.uint8))
    assert arrays.path(0) is None
    memory = Split("test", NAMES, scored.codes, split.ids, arrays)
    monkeypatch.setattr(thumbnails_module, "open_split", lambda data, name, **how: memory)
    assert list(thumbnails(files, scored, ["test/000.jpg"]).shown) == ["test/000.jpg"]


def test_an_image_is_embedded_once_per_card(folder, other, no_bundle, tmp_path):
    files, *_ = folder
    text = page.write_report(
        files.folder, against=other, output=tmp_path / "a.html", wanted_pairs="cat:dog"
    ).read_text()
    cards = re.findall(r'<img src="data:image/jpeg;base64,([^"]+)" alt="Image (test/\d+.jpg)"', text)
    assert cards
    for content, _ in cards:
        assert Image.open(io.BytesIO(base64.b64decode(content))).size == (107, 160)


# ------------------------------------------------------------------------------------------------------------- routing
def test_the_claim_about_shared_experts(text, run):
    with np.load(run / "gates.npz") as stored:
        test = stored["split"] == "test"
        shares, codes = stored["shared/experts"][test].astype(float), stored["labels"][test]
    positive = codes == 1
    rho = spearmanr(shares.mean(axis=1), positive.sum(axis=1))
    assert f"image, all labels number of labels {rho.statistic:+.2f}" in section(text, "routing")
    space = RunFiles(run).label_space
    given = space.counts / space.positives[:, None]
    rho = spearmanr(shares.mean(axis=0), given.sum(axis=1) / 4)
    assert f"label, all images mean p(other | label) {rho.statistic:+.2f}" in section(text, "routing")
    rows = data_block(text, "routing-table-experts")["rows"]
    for k, row in enumerate(rows):
        expected = [
            shares[:, k].mean(),
            shares[positive[:, k], k].mean(),
            positive[:, k].sum(),
            given[k].sum() / 4,
            given[k].max(),
        ]
        assert row[0] == NAMES[k]
        np.testing.assert_allclose(row[1:], expected, atol=1e-6)
    points = data_block(text, "routing-labels-experts")["datasets"]["rows"]
    np.testing.assert_allclose([point["share"] for point in points], shares.mean(axis=0), atol=1e-6)
    for row in data_block(text, "routing-images-experts")["datasets"]["rows"]:
        of_number = shares.mean(axis=1)[positive.sum(axis=1) == row["labels"]]
        assert row["images"] == len(of_number)
        np.testing.assert_allclose(
            [row["low"], row["share"], row["high"]], np.percentile(of_number, [25, 50, 75]), atol=1e-6
        )


def test_static_gates_compare_no_images(tmp_path):
    folder = make_run(tmp_path / "run", samples=0)
    with np.load(folder / "gates.npz") as stored:
        arrays = dict(stored)
    arrays["shared/experts"] = arrays["shared/experts"][:1]
    folder.write_npz("gates.npz", **arrays)
    part = routing.routing(RunFiles(folder))
    assert any("The gates are static" in getattr(item, "text", "") for item in part.parts)
    assert [chart.name for item in part.parts if item.kind == "charts" for chart in item.charts] == [
        "routing-labels-experts"
    ]
    [table] = [item for item in part.parts if item.kind == "table"]
    assert {row[-1] for row in table.rows} == {"5 labels"}


def test_old_runs_say_how_the_shares_are_made(tmp_path):
    folder = make_run(tmp_path / "run", samples=0, **{"data__root": "x"})
    (folder / "gates.npz").unlink()
    assert "This model has no gates over shared and task experts" in routing.routing(RunFiles(folder)).missing
    config = folder.read_json("config.json")
    config["model"]["head"]["kind"] = "routed_experts"
    folder.write_json("config.json", config)
    assert routing.routing(RunFiles(folder)).command.endswith(f"--mode=eval --workdir={folder}")


def test_a_run_without_a_label_space(tmp_path):
    folder = make_run(tmp_path / "run", samples=0)
    (folder / "label_space.npz").unlink()
    part = routing.routing(RunFiles(folder))
    assert any("label_space.npz is missing" in getattr(item, "text", "") for item in part.parts)
    assert "No two labels are known" in pairs.pairs(RunFiles(folder)).parts[0].text
    [table] = [item for item in pairs.pairs(RunFiles(folder), wanted="cat:dog").parts if item.kind == "table"]
    assert "training" not in table.caption


def test_files_of_another_run_are_refused(tmp_path, refusal):
    folder = make_run(tmp_path / "run", samples=0)
    with np.load(folder / "gates.npz") as stored:
        arrays = {name: values[:, :3] if values.ndim == 2 else values for name, values in stored.items()}
    folder.write_npz("gates.npz", **arrays)
    assert "gates.npz has 3 labels, the run has 5" in refusal(routing.routing, RunFiles(folder))
    folder.write_text("labels.txt", "cat\ndog\n3\n4\n5\n")
    sentence = refusal(pairs.pairs, RunFiles(folder), wanted="cat:dog")
    assert sentence.endswith("label_space.npz is damaged: its labels are not those of labels.txt")
