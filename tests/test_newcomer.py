"""The commands of docs/getting-started.md on own images, in their order, on 40 images in an empty folder."""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.devices import environment_of
from helpers.documents import blocks, programs
from helpers.paths import REPOSITORY
from helpers.ports import free_port
from PIL import Image, ImageDraw

PAGE = REPOSITORY / "docs" / "getting-started.md"
SHAPES = ("circle", "square", "line")
PORT = 8000  # of the page
NEEDED_BY = {"--mode=serve": "fastapi", "--format=onnx": "jax2onnx"}


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


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder with 40 labeled images, and 3 new ones."""
    random = np.random.default_rng(0)
    rows = ["image,labels"]
    for folder, count in (("photos", 40), ("new_photos", 3)):
        (tmp_path / folder).mkdir()
        for number in range(1, count + 1):
            labels = {shape for bit, shape in enumerate(SHAPES) if number >> bit & 1}
            draw(tmp_path / folder / f"{number}.jpg", labels, random)
            rows += [f"{number}.jpg,{';'.join(sorted(labels))}"] if folder == "photos" else []
    (tmp_path / "photos" / "labels.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


def run(words: list[str], place: Path, environment: dict[str, str]) -> str:
    """Run a command of the page to its end and return what it printed."""
    done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def started(words: list[str], place: Path, environment: dict[str, str]) -> subprocess.Popen:
    """Start a server and return it when it is ready."""
    log = place / "server.log"
    server = subprocess.Popen(words, cwd=place, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT)
    while "ready:" not in log.read_text():
        assert server.poll() is None, log.read_text()
        time.sleep(0.2)
    return server


@pytest.mark.slow
def test_the_commands_of_the_page_lead_from_images_to_onnx_runtime(place, tmp_path_factory, capsys):
    for needed in (*NEEDED_BY.values(), "onnxruntime"):
        pytest.importorskip(needed, reason="the page needs the extras serve and onnx")
    shown, port = tmp_path_factory.mktemp("shown"), free_port()
    commands = [words for block in blocks(PAGE, "bash", "Your own images") for words in programs(block, shown)]
    environment = environment_of(PYTHONPATH=os.pathsep.join([str(REPOSITORY), *sys.path]))
    server, said, times = None, {}, {}
    for words in commands:
        before, name = (
            time.perf_counter(),
            " ".join(re.findall(r"--mode=\w+|--format=\w+|load\.py|^curl", " ".join(words))),
        )
        words = [word.replace(str(PORT), str(port)) for word in words]
        if words[0] == "pip":
            continue
        if words[0] == "python":
            words = [sys.executable, *words[1:]]
        if "--mode=serve" in words:
            server = started([*words, f"--port={port}"], place, environment)
            continue
        said[name] = run(words, place, environment)
        times[name] = round(time.perf_counter() - before, 1)
        if words[0] == "curl":
            server.terminate()
            assert server.wait(60) == 0
    with capsys.disabled():
        print("\nseconds of each step:", json.dumps(times))

    assert server is not None
    assert "circle" in said["--mode=data"]
    assert (place / "runs/photos/report.html").stat().st_size > 50_000
    with (place / "labels.csv").open() as table:
        rows = list(csv.reader(table))
    assert len(rows) == 1 + 3
    [served] = json.loads(said["curl"])["results"]
    assert set(served["scores"]) == set(SHAPES)
    assert (place / "exported" / "model.stablehlo").exists()
    labels = said["load.py"]
    assert "1.jpg" in labels
    assert {path.name for path in (place / "packed").iterdir()} >= {"manifest.json"}
