"""Images of one's own: the backbone that `configs/own_csv.py` chooses, and the commands of the README on real files."""

import csv
import shlex

import numpy as np
import pytest
from helpers.documents import Block, blocks
from helpers.paths import REPOSITORY
from PIL import Image

from mlmoe_jax.config import load_config, to_json, validate
from mlmoe_jax.main import main
from mlmoe_jax.models.backbones.catalog import CATALOG
from mlmoe_jax.pretrained.weights import has_weights
from mlmoe_jax.runs.folder import RunFolder

CONFIG = str(REPOSITORY / "configs" / "own_csv.py")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def fetch_nothing_but(cache, name: str) -> None:
    path = cache / CATALOG[name].file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"as if it had been downloaded")


# ------------------------------------------------------------------------------------------------------- the backbone
def test_without_a_download_it_is_the_one_that_is_installed(cache, capsys):
    config = load_config(CONFIG, [])
    validate(config)
    assert config.model.backbone.name == "efficientnet_lite0"
    assert config.model.backbone.normalization == "auto"
    assert (config.model.head.kind, config.data.cache_features) == ("linear", "float32")
    assert capsys.readouterr().err.splitlines() == [
        "backbone: efficientnet_lite0, which is installed; a better one, which is downloaded once, is "
        ":backbone=dinov2_vits14"
    ]


@pytest.mark.parametrize("name", ["dinov2_vits14", "dinov2_vitb14"])
def test_dinov2_is_taken_if_it_is_there(cache, capsys, name):
    fetch_nothing_but(cache, "dinov2_vits14")
    fetch_nothing_but(cache, name)
    config = load_config(CONFIG, [])
    validate(config)
    assert (config.model.backbone.name, config.model.prompts.kind) == (name, "group")
    assert config.data.cache_features == "no"
    assert f"backbone: {name}, whose weights are on this machine" in capsys.readouterr().err


@pytest.mark.usefixtures("cache")
def test_one_that_is_named_is_taken_silently(capsys):
    config = load_config(f"{CONFIG}:backbone=resnet50", [])
    validate(config)
    assert (config.model.backbone.name, config.model.prompts.kind) == ("resnet50", "none")
    assert capsys.readouterr().err == ""


def test_a_run_keeps_its_backbone(cache, tmp_path, monkeypatch):
    folder, trained = RunFolder(tmp_path / "run"), []
    folder.write_text("config.json", to_json(load_config(CONFIG, [])))
    folder.write_json("results.json", {})
    fetch_nothing_but(cache, "dinov2_vits14")
    monkeypatch.setattr("mlmoe_jax.training.loop.train", lambda config, *_, **__: trained.append(config) or {"val": {}})
    monkeypatch.setattr("mlmoe_jax.inference.explain.write_requested_samples", lambda folder, config: None)
    assert main([f"--config={CONFIG}", f"--workdir={folder}"]) == 0
    assert main([f"--config={CONFIG}", f"--workdir={tmp_path / 'new'}"]) == 0
    assert [config.model.backbone.name for config in trained] == ["efficientnet_lite0", "dinov2_vits14"]


def test_weights_are_found_in_the_package_in_an_installed_one_and_in_the_cache(cache):
    assert has_weights("vit_digits")
    assert has_weights("efficientnet_lite0")
    assert not has_weights("dinov2_vits14")
    fetch_nothing_but(cache, "dinov2_vits14")
    assert has_weights("dinov2_vits14")


# ------------------------------------------------------------------------------------------------- the README's section
def section() -> list[Block]:
    page = REPOSITORY / "README.md"
    text = page.read_text()
    first, last = (text.count("\n", 0, text.index(f"## {name}")) for name in ("Your own images", "Features"))
    return [block for block in blocks(page, "bash") if first < block.line < last]


def draw_images(folder, count: int = 40) -> None:
    """Draw images with red squares, green discs or both."""
    (folder / "photos").mkdir()
    (folder / "new_photos").mkdir()
    generator, rows = np.random.default_rng(0), [["image", "labels"]]
    y, x = np.mgrid[:240, :320]
    for number in range(count + 4):
        pixels = generator.integers(90, 170, (240, 320, 3), dtype=np.uint8)
        labels = [name for bit, name in enumerate(("square", "disc")) if number % 4 >> bit & 1]
        top, left = generator.integers(20, 120, 2)
        if "square" in labels:
            pixels[top : top + 90, left : left + 90] = (220, 20, 20)
        if "disc" in labels:
            pixels[(y - top - 50) ** 2 + (x - 310 + left) ** 2 < 45**2] = (20, 220, 20)
        place = "photos" if number < count else "new_photos"
        Image.fromarray(pixels).save(folder / place / f"{number}.jpg")
        if number < count:
            rows.append([f"{number}.jpg", ";".join(labels)])
    with open(folder / "photos" / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)


def follow(folder) -> list[dict[str, str]]:
    """Run the section's commands in a folder; return the predictions."""
    (folder / "configs").symlink_to(REPOSITORY / "configs")
    lines = "\n".join(block.text for block in section()).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    commands = [words for words in commands if words]
    assert len(commands) >= 7
    for python, m, program, *arguments in commands:
        assert [python, m, program] == ["python", "-m", "mlmoe_jax.main"]
        assert main(arguments) == 0, arguments
    with open(folder / "runs" / "photos" / "predictions.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_the_commands_of_the_readme_label_drawn_images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw_images(tmp_path)
    rows = follow(tmp_path)
    assert len(rows) == 4
    assert (tmp_path / "runs" / "photos" / "report.html").is_file()
    assert (tmp_path / "runs" / "packed" / "results.json").is_file()
    assert RunFolder(tmp_path / "runs" / "photos").read_json("results.json")["val"]["mAP"] > 0.9
