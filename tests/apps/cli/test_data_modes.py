"""`--mode=data` and `--mode=pack` as a user runs them, on a reduced digits."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny
from helpers.commands import refused
from PIL import Image

from mlmoe_jax.data.sources import packed


@pytest.fixture
def run(command, monkeypatch):
    """Return a function that runs a command in this process, on few scenes."""
    tiny.use_scenes(monkeypatch, train=150, val=40, test=50, test_shift=50)
    return command


def test_the_report_of_the_data_as_text_and_as_json(run):
    done = run("--mode=data", "--config=mlvpt_digits")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("data set digits: 10 classes\n")
    assert "no problems found" in done.stdout
    done = run("--mode=data", "--config=mlvpt_digits", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {name: split["images"] for name, split in report["splits"].items()} == {
        "train": 150,
        "val": 40,
        "test": 50,
        "test_shift": 50,
    }
    assert report["problems"] == []


def test_a_sample_limits_the_number_of_decoded_images(run):
    done = run("--mode=data", "--config=mlvpt_digits", "--json", "--sample=10")
    assert {split["decoded"] for split in json.loads(done.stdout)["splits"].values()} == {10}


def test_packed_data_pass_the_check_until_they_are_damaged(run, tmp_path):
    output = tmp_path / "packed"
    command = ("--mode=pack", "--config=mlvpt_digits", f"--output={output}")
    done = run(*command, "--config.data.workers=2")
    assert done.returncode == 0, done.stderr
    assert "train: 150 images in 1 files" in done.stdout
    use = done.stdout.splitlines()[-1].partition(": ")[2].split()
    assert use == ["--config.data.name=packed", f"--config.data.root={output}"]

    checked = run("--mode=data", "--config=mlvpt_digits", *use)
    assert checked.returncode == 0, checked.stderr
    assert "no problems found" in checked.stdout
    shard = Path(output / "train-00000-of-00001.arrayrecord")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    checked = run("--mode=data", "--config=mlvpt_digits", *use)
    assert checked.returncode == 1, checked.stderr
    assert f"problem: {shard} has changed since it was packed" in checked.stdout

    shard.unlink()
    packed._reader.cache_clear()
    refused(run("--mode=data", "--config=mlvpt_digits", *use), "is missing")
    assert run(*command).returncode == 0
    assert run("--mode=data", "--config=mlvpt_digits", *use).returncode == 0


def test_an_unreadable_image_is_reported(run, tmp_path):
    for row in range(3):
        Image.fromarray(np.full((9, 9, 3), 80 * row, np.uint8)).save(tmp_path / f"{row}.png")
    (tmp_path / "0.png").write_bytes(b"not an image")
    for name, row in (("train", 0), ("val", 1), ("test", 2)):
        (tmp_path / f"{name}.csv").write_text(f"image,labels\n{row}.png,cat\n")
    own = (
        "--config=mlvpt_digits",
        "--config.data.name=csv",
        f"--config.data.root={tmp_path}",
        "--config.data.test_splits=test",
    )
    done = run("--mode=data", *own)
    assert done.returncode == 1, done.stderr
    assert "1 of the 1 images of split train cannot be read: cannot read 0.png as an image" in done.stdout
    refused(run("--mode=pack", *own, f"--output={tmp_path / 'out'}"), "0.png as an image")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--mode=data"], ["needs --config"]),
        (["--mode=pack", "--output={tmp}/out"], ["needs --config"]),
        (["--mode=pack", "--config=mlvpt_digits"], ["--output"]),
        (["--mode=pack", "--config=mlvpt_digits", "--output={tmp}/file"], ["file"]),
        (["--mode=pack", "--config=mlvpt_digits", "--output={tmp}"], ["contains other files, such as file"]),
        (
            ["--mode=pack", "--config=mlvpt_digits", "--output={tmp}/o", "--config.pack.short_side=-1"],
            ["pack.short_side"],
        ),
        (["--mode=pack", "--config=mlvpt_digits", "--output={tmp}/o", "--config.pack.side=2"], ["pack.side"]),
        (["--mode=data", "--config=mlvpt_digits", "--config.data.train_split=trian"], ["trian"]),
        (
            ["--mode=data", "--config=mlvpt_digits", "--config.data.name=packed", "--config.data.root={tmp}"],
            ["manifest.json"],
        ),
        (["--mode=data", "--config=mlvpt_digits", "--config.data.name=packed"], ["data.root is empty"]),
    ],
    ids=lambda value: " ".join(value)[:70] if isinstance(value, list) else None,
)
def test_user_errors_are_one_sentence(run, tmp_path, arguments, parts):
    (tmp_path / "file").write_text("")
    refused(run(*(argument.format(tmp=tmp_path) for argument in arguments)), *parts)
