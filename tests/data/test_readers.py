import numpy as np
import pytest
from helpers.tables import data_settings

from mlmoe_jax.data import pipeline
from mlmoe_jax.data.images import ArrayImages
from mlmoe_jax.data.pipeline import Readers, build_loader, plan_for_few_images, plan_readers
from mlmoe_jax.data.split import Split
from mlmoe_jax.runtime.files import MIB

AUTO = -1
SMALL = MIB  # bytes of a batch


def choice(monkeypatch, usable: int, *, batch: int = SMALL, accelerator: bool = True, **changes) -> Readers:
    monkeypatch.setattr(pipeline, "cores", lambda: usable)
    monkeypatch.setattr(pipeline, "_has_accelerator", lambda: accelerator)
    options = {"threads": AUTO, "workers": AUTO, "decodes": True} | changes
    return plan_readers(batch_bytes=batch, **options)


@pytest.mark.parametrize(
    ("cores", "changes", "expected"),
    [
        (1, {}, Readers(1, 0)),
        (2, {}, Readers(2, 0)),
        (4, {}, Readers(4, 0)),
        (16, {}, Readers(4, 4)),
        (16, {"accelerator": False}, Readers(4, 0)),  # the step needs the other cores
        (16, {"decodes": False}, Readers(4, 0)),  # images in memory
        (208, {}, Readers(4, 16)),
        (16, {"batch": 512 * MIB}, Readers(2, 0)),  # of which no more than four fit into MOST_AHEAD
        (16, {"batch": 5000 * MIB}, Readers(1, 0)),
        (16, {"threads": 2}, Readers(2, 8)),
        (16, {"workers": 8}, Readers(2, 8)),
        (16, {"workers": 0}, Readers(4, 0)),
        (16, {"threads": 3, "workers": 5}, Readers(3, 5)),
    ],
)
def test_threads_and_processes_follow_cores_batch_and_images(monkeypatch, cores, changes, expected):
    assert choice(monkeypatch, cores, **changes) == expected


def split_of(count: int) -> Split:
    array = np.arange(count * 12, dtype=np.uint8).reshape(count, 2, 2, 3)
    return Split("made", ("a",), np.zeros((count, 1), np.int8), [str(row) for row in range(count)], ArrayImages(array))


def load(count: int = 5, **changes) -> list:
    data = data_settings("made", image_size=2, **changes)
    return list(build_loader(data, split_of(count), batch_size=4))


def test_batches_do_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(pipeline, "cores", lambda: 2)
    batches = load()
    for explicit in ({"threads": 1, "workers": 0}, {"threads": 3, "workers": 0}):
        for batch, other in zip(load(**explicit), batches, strict=True):
            assert all(np.array_equal(batch[name], other[name]) for name in other)
    assert load(count=0) == []


def test_few_images_are_read_by_threads(monkeypatch):
    monkeypatch.setattr(pipeline, "cores", lambda: 64)
    assert plan_for_few_images(AUTO, AUTO) == {"threads": 8, "workers": 0}
    assert plan_for_few_images(3, 2) == {"threads": 3, "workers": 2}
