import time

import numpy as np
import pytest
from helpers.tables import data_settings

from mlmoe_jax.data import readers
from mlmoe_jax.data.images import ArrayImages, BadImage
from mlmoe_jax.data.pipeline import build_loader
from mlmoe_jax.data.readers import Readers, plan, plan_for_few_images, seconds_per_image
from mlmoe_jax.data.split import Split
from mlmoe_jax.runtime.files import MIB

AUTO = -1
SMALL = MIB  # bytes of a batch


@pytest.fixture(autouse=True)
def _nothing_timed(monkeypatch):
    monkeypatch.setattr(readers, "_SECONDS", {})


def choice(cores: int, *, milliseconds: float = 3, batch: int = SMALL, **changes) -> Readers:
    options = {"accelerator": True, "threads": AUTO, "workers": AUTO} | changes
    return plan(milliseconds / 1e3, cores, batch, **options)


@pytest.mark.parametrize(
    ("cores", "changes", "expected"),
    [
        (1, {}, Readers(1, 0)),
        (2, {}, Readers(2, 0)),
        (4, {}, Readers(4, 0)),
        (16, {}, Readers(4, 4)),
        (16, {"accelerator": False}, Readers(4, 0)),  # the step needs the other cores
        (16, {"milliseconds": 0.02}, Readers(4, 0)),  # one process delivers 200,000 images/s
        (208, {}, Readers(4, 15)),  # 1,333 images/s each, together ENOUGH
        (16, {"batch": 512 * MIB}, Readers(2, 0)),  # of which no more than four fit into MOST_AHEAD
        (16, {"batch": 5000 * MIB}, Readers(1, 0)),
        (16, {"threads": 2}, Readers(2, 8)),
        (16, {"workers": 8}, Readers(2, 8)),
        (16, {"workers": 0}, Readers(4, 0)),
        (16, {"threads": 3, "workers": 5}, Readers(3, 5)),
    ],
)
def test_threads_and_processes_follow_cores_batch_and_time(cores, changes, expected):
    assert choice(cores, **changes) == expected


def test_a_few_images_are_timed(monkeypatch):
    seen = []

    def read(row: int) -> None:
        seen.append(row)
        time.sleep(0.02)
        if row == 1:
            raise BadImage("cannot read it")

    assert 0.02 <= seconds_per_image(read, [0, 1, 2]) < 1
    assert seen == [0, 0, 1, 2]
    monkeypatch.setattr(readers, "TIMED_SECONDS", 0.01)
    seconds_per_image(read, [5, 6])
    assert seen[4:] == [5, 5], "a sample of large images ends early"


def split_of(count: int) -> Split:
    array = np.arange(count * 12, dtype=np.uint8).reshape(count, 2, 2, 3)
    return Split("made", ("a",), np.zeros((count, 1), np.int8), [str(row) for row in range(count)], ArrayImages(array))


def load(count: int = 5, **changes) -> list:
    data = data_settings("made", image_size=2, **changes)
    return list(build_loader(data, split_of(count), batch_size=4))


def test_a_loader_says_once_how_it_reads(capsys, monkeypatch):
    monkeypatch.setattr(readers, "cores", lambda: 2)
    batches = load()
    load(count=7)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("data: 2 threads, no worker processes (2 cores, ")
    assert line.endswith(" ms per image)")
    for explicit in ({"threads": 1, "workers": 0}, {"threads": 3, "workers": 0}):
        for batch, other in zip(load(**explicit), batches, strict=True):
            assert all(np.array_equal(batch[name], other[name]) for name in other)
    assert not capsys.readouterr().err, "nothing is chosen"
    assert load(count=0) == []
    assert str(Readers(5, 3)) == "3 worker processes with 5 threads each"


def test_few_images_are_read_without_timing(monkeypatch):
    monkeypatch.setattr(readers, "cores", lambda: 64)
    assert plan_for_few_images(AUTO, AUTO) == {"threads": 8, "workers": 0}
    assert plan_for_few_images(3, 2) == {"threads": 3, "workers": 2}
