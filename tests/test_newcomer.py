"""The commands of docs/getting-started.md on own images, and of docs/labels.md, in their order, in an empty folder."""

import contextlib
import csv
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.devices import environment_of
from helpers.documents import blocks, programs
from helpers.paths import REPOSITORY
from helpers.ports import free_port
from PIL import Image, ImageDraw

PAGE = REPOSITORY / "docs" / "getting-started.md"
LABELS = REPOSITORY / "docs" / "labels.md"
SHAPES = ("circle", "square", "line")
PORT = 8000  # of the page
PROGRAMS = {"mlmoe": [sys.executable, "-m", "mlmoe_jax.main"], "python": [sys.executable]}
NEEDED = ("fastapi", "jax2onnx", "onnxruntime")


def draw(path: Path, labels: set[str], random: np.random.Generator) -> None:
    """Write a photograph-sized JPEG of simple shapes on a noisy ground."""
    ground = random.integers(60, 120, (180, 240, 3)).astype(np.uint8)
    image = Image.fromarray(ground)
    pen = ImageDraw.Draw(image)
    for label in sorted(labels):
        left, top = random.integers(10, 90, 2).tolist()
        box, color = (left, top, left + 70, top + 70), tuple(random.integers(150, 256, 3).tolist())
        {"circle": pen.ellipse, "square": pen.rectangle, "line": pen.line}[label](box, fill=color)
    image.save(path)


def labels_of(number: int) -> set[str]:
    """Return the shapes in an image."""
    return {shape for bit, shape in enumerate(SHAPES) if number >> bit & 1}


def draw_all(place: Path, labeled: int, new: int, wrong: Collection[int] = ()) -> None:
    """Write labeled images, some with the label `circle` inverted, their table, and new images."""
    random = np.random.default_rng(0)
    rows = ["image,labels"]
    for folder, count in (("photos", labeled), ("new_photos", new)):
        (place / folder).mkdir()
        for number in range(1, count + 1):
            draw(place / folder / f"{number}.jpg", labels_of(number), random)
            given = labels_of(number) ^ ({"circle"} if number in wrong else set())
            rows += [f"{number}.jpg,{';'.join(sorted(given))}"] if folder == "photos" else []
    (place / "photos" / "labels.csv").write_text("\n".join(rows) + "\n")


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder with 40 labeled images, and 3 new ones."""
    draw_all(tmp_path, 40, 3)
    return tmp_path


def startable(words: list[str]) -> list[str]:
    """Return a command of a page as it starts without the package installed."""
    return [*PROGRAMS.get(words[0], [words[0]]), *words[1:]]


def run(words: list[str], place: Path, environment: dict[str, str]) -> str:
    """Run a command of the page to its end and return what it printed."""
    done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@contextlib.contextmanager
def server(words: list[str], place: Path, environment: dict[str, str]) -> Iterator[None]:
    """Start a server, and let it stop at the end of the block."""
    log = place / "server.log"
    with log.open("w") as file:
        started = subprocess.Popen(words, cwd=place, env=environment, stdout=file, stderr=subprocess.STDOUT)
    while "ready:" not in log.read_text():
        assert started.poll() is None, log.read_text()
        time.sleep(0.2)
    yield
    started.terminate()
    assert started.wait(60) == 0


@pytest.mark.slow
def test_the_commands_of_the_page_lead_from_images_to_onnx_runtime(place):
    for needed in NEEDED:
        pytest.importorskip(needed, reason="the page needs the extras serve and onnx")
    port, said = str(free_port()), {}
    environment = environment_of(PYTHONPATH=os.pathsep.join([str(REPOSITORY), *sys.path]))
    commands = [words for block in blocks(PAGE, "bash", "Your own images") for words in programs(block)]
    with contextlib.ExitStack() as servers:
        for words in commands:
            name = " ".join(re.findall(r"(?<=^mlmoe )\w+|--format=\w+|load\.py|^curl", " ".join(words)))
            words = [word.replace(str(PORT), port) for word in startable(words)]
            if name == "serve":
                servers.enter_context(server([*words, f"--port={port}"], place, environment))
            elif words[0] != "pip":
                said[name] = run(words, place, environment)

    assert "circle" in said["data"]
    assert (place / "runs/photos/report.html").stat().st_size > 50_000
    with (place / "new_labels.csv").open() as table:
        rows = list(csv.reader(table))
    assert len(rows) == 1 + 3
    [served] = json.loads(said["curl"])["results"]
    assert set(served["scores"]) == set(SHAPES)
    assert (place / "exported" / "model.stablehlo").exists()
    labels = said["load.py"]
    assert "1.jpg" in labels
    assert {path.name for path in (place / "packed").iterdir()} >= {"manifest.json"}


@pytest.mark.slow
def test_the_path_of_the_page_leads_from_wrong_labels_to_integers(tmp_path):
    for needed in ("jax2onnx", "onnxruntime"):
        pytest.importorskip(needed, reason="the page needs the extra onnx")
    wrong = set(range(7, 188, 19))
    draw_all(tmp_path, 200, 40, wrong)
    suggestions = tmp_path / "photos" / "audit" / "suggestions.csv"
    environment = environment_of(PYTHONPATH=os.pathsep.join([str(REPOSITORY), *sys.path]))
    for words in [words for block in blocks(LABELS, "bash", "The whole path") for words in programs(block)]:
        said = run(startable(words), tmp_path, environment)
        if "--audit" in words:
            found = accept(suggestions)

    assert len(found & wrong) >= 8
    corrected, columns = tmp_path / "runs" / "corrected", sorted(SHAPES)
    with np.load(corrected / "scores" / "out_of_fold.npz") as stored:
        trained_on = {int(Path(name).stem): codes for name, codes in zip(stored["ids"], stored["labels"], strict=True)}
    differ = {
        number for number, codes in trained_on.items() if {columns[k] for k in codes.nonzero()[0]} != labels_of(number)
    }
    assert len(trained_on) == 200
    assert differ == wrong - found
    assert "calibration" in json.loads((corrected / "thresholds.json").read_text())
    with (corrected / "selected.csv").open() as table:
        assert [row["rank"] for row in csv.DictReader(table)] == [str(rank) for rank in range(1, 11)]
    assert "new_photos/1.jpg  circle " in said


def accept(suggestions: Path) -> set[int]:
    """Write yes beside the suggestions that are right, as a person does; return the numbers of their images."""
    with suggestions.open() as file:
        header, *rows = list(csv.reader(file))
    right = set()
    for row in rows:
        number, shape, suggested = int(Path(row[0]).stem), row[1], row[3]
        if suggested == str(int(shape in labels_of(number))):
            row[-1] = "yes"
            right.add(number)
    with suggestions.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return right
