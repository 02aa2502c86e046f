"""`--mode=data` and `--mode=pack` as a user runs them, on a reduced digits."""

import pytest
from helpers import tiny
from helpers.commands import printed, succeeded


@pytest.fixture
def run(command, monkeypatch):
    """Return a function that runs a command in this process, on few scenes."""
    tiny.use(monkeypatch)
    return lambda mode, *flags: command(mode, "--config=mlvpt_digits", *flags)


def test_a_sample_of_the_data_is_checked(run):
    done = run("data", "--json", "--sample=10", "--config.loss.gamma=3")
    assert "warning: loss.gamma has no effect, because loss.kind is asymmetric" in done.stderr
    splits = printed(done)["splits"].values()
    assert [(split["images"], split["decoded"]) for split in splits] == [(60, 10), *[(40, 10)] * 3]


def test_packed_data_are_used_as_the_command_says(run, tmp_path):
    done = succeeded(run("pack", f"--output={tmp_path / 'packed'}", "--config.data.workers=2"))
    assert done.stdout.splitlines()[1].split()[:3] == ["train", "60", "1"]
    use = done.stdout.splitlines()[-1].partition(": ")[2].split()
    assert use == ["--config.data.name=packed", f"--config.data.root={tmp_path / 'packed'}"]
    checked = succeeded(run("data", *use)).stdout
    assert checked.startswith("data set packed in ")
    assert checked.endswith("no problems found\n")
