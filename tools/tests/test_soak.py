"""`python -m tools.faults.soak`: the slopes of given samples, and a short training."""

import json
import sys

import pytest

from tools.faults import soak


def samples(steps: int, *, every: int = 100, slope: float = 0.0, start: float = 300.0) -> list[soak.Sample]:
    return [soak.Sample(step, start + slope * step / 1000, 12, 7) for step in range(every, steps + 1, every)]


def test_the_slope_is_that_of_the_samples_after_the_first_three_tenths():
    settled = samples(20_000, slope=1.25)
    drawn = [sample._replace(megabytes=10.0) if sample.step <= 6000 else sample for sample in settled]
    found = soak.summary(drawn)
    assert found["megabytes per 1,000 steps"] == 1.25
    assert found["descriptors per 1,000 steps"] == found["threads per 1,000 steps"] == 0
    assert (found["steps"], found["samples"]) == (20_000, 140)
    assert found["megabytes, first"] == pytest.approx(300 + 1.25 * 6.4, abs=0.06)
    assert found["megabytes, last"] == pytest.approx(300 + 1.25 * 19.7, abs=0.06)


def test_a_thread_per_save_is_a_slope():
    found = soak.summary([sample._replace(threads=k) for k, sample in enumerate(samples(10_000))])
    assert found["threads per 1,000 steps"] == 10


@pytest.mark.parametrize("flag", ["--config.seed", "--stepz=3"])
def test_an_unknown_or_incomplete_flag_is_refused(flag, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["soak", flag])
    with pytest.raises(SystemExit):
        soak.main()
    assert f"{flag} is neither a flag nor --config.KEY=VALUE" in capsys.readouterr().err


def test_a_short_training_is_sampled_between_saves(monkeypatch, tmp_path):
    path = tmp_path / "soak.json"
    monkeypatch.setattr(sys, "argv", ["soak", "--steps=120", "--saves=4", f"--json={path}"])
    soak.main()
    written = json.loads(path.read_text())
    steps = [step for step, *_ in written["samples"]]
    assert len(steps) >= 4
    assert steps == sorted(steps)
    assert all(step % 30 for step in steps)
    assert written["summary"]["steps"] == steps[-1]
