"""`--mode=data` and `--mode=pack` as a user runs them, on a reduced digits."""

from pathlib import Path

import pytest
from helpers import tiny
from helpers.commands import printed, refused, succeeded

from mlmoe_jax.data.sources import packed


@pytest.fixture
def run(command, monkeypatch):
    """Return a function that runs a command in this process, on few scenes."""
    tiny.use_scenes(monkeypatch, train=150, val=40, test=50, test_shift=50)
    return command


def test_the_report_of_the_data_as_text_and_as_json(run):
    done = succeeded(run("--mode=data", "--config=mlvpt_digits"))
    assert done.stdout.startswith("data set digits: 10 classes\n")
    assert "no problems found" in done.stdout
    done = run("--mode=data", "--config=mlvpt_digits", "--json", "--sample=10", "--config.loss.gamma=3")
    assert "warning: loss.gamma has no effect, because loss.kind is asymmetric" in done.stderr
    report = printed(done)
    assert [split["images"] for split in report["splits"].values()] == [150, 40, 50, 50]
    assert {split["decoded"] for split in report["splits"].values()} == {10}
    assert report["problems"] == []


def test_packed_data_pass_the_check_until_they_are_damaged(run, tmp_path):
    output = tmp_path / "packed"
    command = ("--mode=pack", "--config=mlvpt_digits", f"--output={output}")
    done = succeeded(run(*command, "--config.data.workers=2"))
    assert done.stdout.splitlines()[1].split()[:3] == ["train", "150", "1"]
    use = done.stdout.splitlines()[-1].partition(": ")[2].split()
    assert use == ["--config.data.name=packed", f"--config.data.root={output}"]

    checked = succeeded(run("--mode=data", "--config=mlvpt_digits", *use))
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
