"""The page docs/tagging.md, followed from keywords of photographs to tags, on small photographs and videos."""

import json
import shlex

import numpy as np
import pytest
from helpers.commands import csv_rows
from helpers.documents import blocks
from helpers.paths import REPOSITORY
from helpers.photographs import LAYOUTS, array, encode, packet, rest, texts
from helpers.videos import STEADY, write_video
from PIL import Image

from mlmoe_jax.main import main

PAGE = REPOSITORY / "docs" / "tagging.md"
NAMES = ("red", "green", "blue")
SMALL = ["--config.data.image_size=32", "--config.data.workers=0"]


def write_photographs(folder, count, seed, *, tagged):
    """Write photographs to which each keyword adds its color, and return their keywords by path."""
    folder.mkdir()
    draw, keywords = np.random.default_rng(seed), {}
    for number in range(count):
        has = draw.random(3) < 0.5
        pixels = draw.integers(0, 60, (36, 48, 3)) + 180 * has
        path = folder / f"{number}.jpg"
        Image.fromarray(pixels.astype(np.uint8)).save(path)
        keywords[path] = [name for name, is_on in zip(NAMES, has, strict=True) if is_on]
        if tagged:
            path.with_suffix(".xmp").write_text(packet(array("dc:subject", *keywords[path])))
    return keywords


def sidecar(path):
    return path.with_name(f"{path.name}.xmp")


def follow(section):
    """Run the commands of a section of the page; that of the first block is ""."""
    parts = blocks(PAGE, "bash", section) if section else blocks(PAGE, "bash")[:1]
    for line in "\n".join(block.text for block in parts).splitlines():
        program, *words = shlex.split(line)
        assert program == "mlmoe"
        assert main(words + (SMALL if words[0] in ("data", "train") else [])) == 0, line


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which the first commands of the page were run, and the keywords of its new photographs."""
    folder = tmp_path_factory.mktemp("tagging")
    write_photographs(folder / "photos", 48, 0, tagged=True)
    keywords = write_photographs(folder / "new_photos", 12, 1, tagged=False)
    (folder / "new_photos" / "0.jpg.xmp").write_bytes(encode(LAYOUTS["darktable"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        follow("")
        yield folder, keywords


@pytest.mark.budget(60)
def test_keywords_become_tags(place):
    _, keywords = place
    first, *others = keywords
    found = [{*texts(sidecar(path).read_bytes(), "subject")} for path in others]
    expected = [{*keywords[path]} for path in others]
    assert (
        np.mean(
            [
                [name in one for name in NAMES] == [name in two for name in NAMES]
                for one, two in zip(found, expected, strict=True)
            ]
        )
        > 0.7
    )
    before, after = encode(LAYOUTS["darktable"]), sidecar(first).read_bytes()
    assert rest(after) == rest(before)
    assert {*texts(after, "subject")} > {"sea", "sand & sun"}


@pytest.mark.budget(60)
def test_corrections_come_back(place):
    _, keywords = place
    path = sidecar(next(path for path in keywords if texts(sidecar(path).read_bytes(), "subject")))
    path.write_text(
        path.read_text().replace("<rdf:li>red</rdf:li>", "").replace("<rdf:li>green</rdf:li>", "<rdf:li>sky</rdf:li>")
    )
    follow("Keywords")
    described = json.loads((place[0] / "runs/corrected/config.json").read_text())
    assert described["data"]["resize"] == "pad"


def test_names_are_those_of_the_files(place):
    folder, _ = place
    (folder / "names.csv").write_text("red,warm\n[g]*,warm\n")
    (folder / "unwanted.txt").write_text("bl?e\n")
    follow("Names")
    rows = csv_rows("tags.csv")
    assert list(rows[0]) == ["image", "labels", "error", "warm"]
    assert len(rows) == 12


def test_videos_have_rows_per_frame_and_per_video(place):
    pytest.importorskip("av")
    folder, _ = place
    (folder / "videos").mkdir()
    for path in (folder / "a.mp4", folder / "videos" / "b.mp4"):
        write_video(path, STEADY)
    follow("Videos")
    assert [row["time"] for row in csv_rows("frames.csv")] == ["0.0"]
    assert [row["image"] for row in csv_rows("videos.csv")] == ["videos/b.mp4"]


@pytest.mark.budget(30)
def test_the_program_has_features_and_maps(place):
    follow("Features and maps")
    described = json.loads((place[0] / "exported" / "model.json").read_text())
    assert [*described["outputs"]] == ["probability", "features", "map"]


@pytest.mark.budget(60)
def test_a_column_becomes_an_attribute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keywords = write_photographs(tmp_path / "new_cars", 12, 1, tagged=False)
    given = write_photographs(tmp_path / "cars", 48, 0, tagged=False)
    colors = [
        path.name + "," + ";".join(names) + f",{'red' if 'red' in names else 'other'}" for path, names in given.items()
    ]
    (tmp_path / "cars" / "labels.csv").write_text("\n".join(["image,labels,color", *colors]) + "\n")
    follow("Attributes")
    rows = csv_rows(tmp_path / "cars.csv")
    assert len(rows) == len(keywords)
    right = [
        row["color"] == ("red" if "red" in names else "other")
        for row, names in zip(rows, keywords.values(), strict=True)
    ]
    assert np.mean(right) > 0.7
    for row in rows:
        values = [float(row["color: red"]), float(row["color: other"])]
        assert sum(values) == pytest.approx(1, abs=1e-5)
        assert row["color"] == ("red" if values[0] > values[1] else "other")
