"""Batches of images: their content, order, augmentation and readers."""

import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from helpers.devices import environment_of
from helpers.tables import data_settings

from mlmoe_jax.config import default_config
from mlmoe_jax.data import pipeline
from mlmoe_jax.data.decoding import STRICT, BadImage, Decoding
from mlmoe_jax.data.image_reader import ImageReader
from mlmoe_jax.data.images import ArrayImages, Images
from mlmoe_jax.data.label_codes import DIFFICULT, NEGATIVE, POSITIVE, UNKNOWN
from mlmoe_jax.data.pipeline import (
    Readers,
    _Examples,
    build_loader,
    plan_for_few_images,
    plan_readers,
    rows_of_step,
    steps_per_epoch,
)
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.data.split import SkippedImages, Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime import workers
from mlmoe_jax.runtime.files import MIB
from mlmoe_jax.runtime.preemption import stop_requests

SIDE, CLASSES = 4, ("a", "b", "c")


class PlainImages(Images):
    """Images that are not square; all values of image `row` are `row`."""

    def __init__(self, count: int, broken: int = -1):
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def open(self, row: int, decoding: Decoding = STRICT) -> np.ndarray:
        if row == self.broken:
            raise BadImage(f"cannot read image {row} as an image: it is empty")
        return np.full((SIDE, 6, 3), row, np.uint8)


def make_split(count: int, broken: int = -1) -> Split:
    labels = np.random.default_rng(0).integers(-1, 3, (count, len(CLASSES))).astype(np.int8)
    return Split("made", CLASSES, labels, [f"image {row}" for row in range(count)], PlainImages(count, broken))


def settings(**changes):
    return data_settings("made", **{"image_size": SIDE, **changes})


def augmentation(**changes):
    augment = default_config().augment
    augment.update(changes)
    return augment


TRAIN = augmentation()


def take(count: int, split: Split, *, data=None, **options) -> list[dict[str, np.ndarray]]:
    loader = build_loader(data or settings(), split, **options)
    return [next(loader) for _ in range(count)]


def training_rows(count: int, split: Split, **options) -> list[list[int]]:
    return [batch["id"].tolist() for batch in take(count, split, augment=TRAIN, **options)]


# ------------------------------------------------------------------------------------------------------------- batches
def test_a_batch_has_the_documented_arrays():
    split = make_split(11)
    (batch,) = take(1, split, batch_size=8, augment=TRAIN)
    assert {name: f"{value.dtype}{value.shape}" for name, value in batch.items()} == {
        "image": f"uint8(8, {SIDE}, {SIDE}, 3)",
        "label": "float32(8, 3)",
        "label_mask": "float32(8, 3)",
        "mask": "float32(8,)",
        "id": "int32(8,)",
    }
    rows = batch["id"]
    assert (batch["image"] == rows[:, None, None, None]).all()
    assert batch["mask"].all()


@pytest.mark.parametrize("workers", [0, 2])
def test_given_rows_are_read_in_order_without_batches_of_padding(workers):
    config = default_config().data
    config.update(image_size=SIDE, threads=2, workers=workers, bad_images="skip")
    rows = [4, 2, -1, -1, -1, -1, 0, 1, 5, -1]
    batches = list(build_loader(config, make_split(6, broken=1), batch_size=2, labels=False, rows=rows))
    assert [batch["id"].tolist() for batch in batches] == [[4, 2], [0, 1], [5, -1]]
    assert [batch["mask"].tolist() for batch in batches] == [[1, 1], [1, 0], [1, 0]]
    assert [int(batch["image"][0].max()) for batch in batches] == [4, 0, 5]


@pytest.mark.parametrize(
    ("difficult", "label", "known"),
    [("negative", "0100", "1101"), ("ignore", "0100", "1100"), ("positive", "0101", "1101")],
)
def test_label_codes_become_labels_and_masks(difficult, label, known):
    codes = np.array([[NEGATIVE, POSITIVE, UNKNOWN, DIFFICULT]], np.int8)
    split = Split("made", tuple("abcd"), codes, ["x"], PlainImages(1))
    (batch,) = take(1, split, data=settings(difficult_train=difficult), batch_size=1)
    np.testing.assert_array_equal(batch["label"], [[*map(int, label)]])
    np.testing.assert_array_equal(batch["label_mask"], [[*map(int, known)]])


def test_prepare_normalizes_each_channel():
    image, mean, std = noise(2).images.array[:, :, :SIDE], (0.5, 0.4, 0.3), (0.25, 0.2, 0.1)
    ready = Preprocess(SIDE, mean, std)(image)
    assert ready.dtype == np.float32
    np.testing.assert_allclose(ready, (image / 255 - mean) / std, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------ training
@pytest.mark.parametrize("images", [24, 22, 7])
def test_epochs_are_different_permutations(images):
    """Of 22 images, a batch can contain images of two epochs, as it must of 7."""
    rows = np.concatenate(training_rows(12, make_split(images), batch_size=8, seed=3))[: 4 * images].reshape(4, images)
    for epoch in rows:
        assert sorted(epoch) == list(range(images))
    assert len({tuple(epoch) for epoch in rows}) == 4


def test_the_order_depends_on_the_seed():
    split = make_split(30)
    one, again, other = (training_rows(3, split, batch_size=8, seed=seed) for seed in (1, 1, 2))
    assert one == again != other


def test_steps_per_epoch():
    assert [steps_per_epoch(images, 8) for images in (0, 7, 8, 15, 16)] == [1, 1, 1, 1, 2]


# ---------------------------------------------------------------------------------------------------------- evaluation
@pytest.mark.parametrize("images", [1, 11, 12, 13])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_evaluation_returns_every_image_exactly_once(processes, images):
    parts = [
        list(build_loader(settings(), make_split(images), batch_size=6, process=(k, processes)))
        for k in range(processes)
    ]
    assert {len(batches) for batches in parts} == {-(-images // 6)}, "all processes have the same number of batches"
    batches = [batch for part in parts for batch in part]
    assert {len(batch["id"]) for batch in batches} == {6 // processes}
    row, mask, label_mask, image = (
        np.concatenate([batch[name] for batch in batches]) for name in ("id", "mask", "label_mask", "image")
    )
    padding = -images % 6
    assert sorted(row.tolist()) == [-1] * padding + list(range(images))
    if processes == 1:
        assert row.tolist() == [*range(images), *[-1] * padding], "in order"
    np.testing.assert_array_equal(mask, row >= 0)
    assert not label_mask[row < 0].any()
    assert (image[row >= 0] == row[row >= 0, None, None, None]).all()


# ----------------------------------------------------------------------------------------------------------- processes
HOST = augmentation(flip=True, brightness=0.5, cutout=0.5, randaugment="uda")


def noise(count: int) -> Split:
    """Return images of random values, on which augmentation is visible."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, SIDE, 6, 3), np.uint8)
    return replace(make_split(count), images=ArrayImages(pixels))


def some_steps(*, hosts: int = 1, first_step: int = 0, **changes):
    """Return the global batches of 20 steps, concatenated from those of all hosts."""
    options = {"batch_size": 8, "augment": HOST, "seed": 7, "first_step": first_step}
    loaders = [build_loader(settings(**changes), noise(23), process=(host, hosts), **options) for host in range(hosts)]
    return [
        {name: np.concatenate([part[name] for part in share]) for name in share[0]}
        for share in itertools.islice(zip(*loaders, strict=True), 20 - first_step)
    ]


@pytest.fixture(scope="module")
def alone():
    return some_steps(threads=1)


def assert_same(batches, expected):
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        for name, value in other.items():
            np.testing.assert_array_equal(batch[name], value)


@pytest.mark.parametrize(
    ("workers", "hosts", "first"), [(0, 2, 1), (0, 4, 17), pytest.param(2, 2, 12, marks=pytest.mark.slow)]
)
def test_augmented_batches_are_the_same_for_any_number_of_hosts_and_workers(alone, workers, hosts, first):
    assert_same(some_steps(workers=workers, hosts=hosts, first_step=first), alone[first:])


def test_augmentation_is_drawn_by_seed_step_and_position(alone):
    read, images = ImageReader.from_config(settings(), HOST), noise(23).images
    for step, batch in enumerate(alone):
        for position, row in enumerate(batch["id"].tolist()):
            expected = read(images, row, np.random.default_rng([7, step, position]))
            np.testing.assert_array_equal(batch["image"][position], expected)


def test_a_worker_is_handed_a_small_argument():
    """A process that dies at its start blocks its parent if more than 64 kB wait for it in a pipe."""
    split = make_split(100_000)
    examples = _Examples(split, settings(image_size=448), TRAIN, 0, True, (0, 1))
    with tempfile.TemporaryFile() as file:
        examples.store(file)
        text = pickle.dumps(examples)
        assert len(text) < 2**15
        assert pickle.loads(text).split.fingerprint == split.fingerprint


@pytest.fixture
def other_children():
    """The processes of other tests in this one, such as the decoders of a server."""
    return set(multiprocessing.active_children())


def end_worker(number: int, other_children: set) -> None:
    worker, *_ = set(multiprocessing.active_children()) - other_children
    os.kill(worker.pid, number)


def test_workers_return_the_same_batches_until_one_is_killed(alone, other_children):
    loader = build_loader(settings(workers=2), noise(23), batch_size=8, augment=HOST, seed=7, first_step=12)
    assert_same(list(itertools.islice(loader, 8)), alone[12:])
    end_worker(signal.SIGKILL, other_children)
    with pytest.raises(UserError, match="a process that reads images has died"):
        list(loader)


def test_a_stop_ends_the_wait_for_a_worker_that_hangs(other_children):
    loader, began = build_loader(settings(workers=1), noise(50), batch_size=5, augment=TRAIN), time.monotonic()
    next(loader)
    end_worker(signal.SIGSTOP, other_children)
    with stop_requests() as request:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        list(request.until_set(loader))
        assert request.is_set()
    assert time.monotonic() - began < 20
    assert set(multiprocessing.active_children()) <= other_children


@pytest.mark.parametrize(
    ("file", "start", "said"),
    [
        ("script.py", "can_start()", "a worker process ended while it imported"),
        (
            "script.py",
            "if __name__ == '__main__': can_start()\nraise SystemExit(0)",
            "(exit code 0); put the code that trains",
        ),
        ("-", "raise SystemExit(not can_start())", "worker processes cannot import the program"),
    ],
)
def test_a_script_that_workers_cannot_import_never_hangs(tmp_path, file, start, said):
    """The name - stands for a program without a file."""
    program = f"from mlmoe_jax.runtime.workers import can_start\n{start}"
    (tmp_path / "script.py").write_text(program)
    options = {"cwd": tmp_path, "env": environment_of(), "capture_output": True, "text": True, "timeout": 120}
    ended = subprocess.run([sys.executable, file], input=program, **options)
    assert ended.returncode == 1
    assert said in ended.stderr


def test_without_workers_images_are_read_by_threads(alone, monkeypatch, other_children):
    monkeypatch.setattr(workers, "can_start", lambda: False)
    loader = build_loader(settings(workers=2), noise(23), batch_size=8, augment=HOST, seed=7)
    assert_same([next(loader)], alone[:1])
    assert set(multiprocessing.active_children()) <= other_children


# -------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.variants("augment")
@pytest.mark.parametrize(("augment", "workers"), [(TRAIN, 0), (None, 0), (None, 1)])
def test_a_bad_image_raises_its_error(augment, workers):
    loader = build_loader(settings(workers=workers), make_split(5, broken=3), batch_size=5, augment=augment)
    with pytest.raises(Exception if workers else BadImage, match="cannot read image 3 as an image: it is empty"):
        next(loader)


@pytest.mark.variants("workers")
@pytest.mark.parametrize("workers", [0, 1])
def test_skipped_images_are_masked_and_listed(workers):
    split = make_split(10, broken=3)
    skipped = SkippedImages(split)
    loader = build_loader(settings(bad_images="skip", workers=workers), split, batch_size=5, augment=TRAIN, seed=1)
    watched = skipped.watch(loader)
    for batch in (next(watched) for _ in range(6)):
        bad = batch["id"] == 3
        np.testing.assert_array_equal(batch["mask"], ~bad)
        assert not batch["label_mask"][bad].any()
    assert skipped.rows == {3}
    assert skipped.table() == [["made", "image 3", "cannot read image 3 as an image: it is empty"]]


def test_padding_is_not_a_skipped_image():
    assert list(build_loader(settings(), make_split(0), batch_size=5)) == []
    skipped = SkippedImages(make_split(3))
    assert len(list(skipped.watch(build_loader(settings(), make_split(3), batch_size=5)))) == 1
    assert skipped.rows == set()
    reason = "it could not be read before, but now it can"
    assert SkippedImages(make_split(3), [1]).table() == [["made", "image 1", reason]]


# -------------------------------------------------------------------------------------------------------------- readers
AUTO = -1


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
        (16, {"batch_bytes": 512 * MIB}, Readers(2, 0)),  # of which no more than four fit into MOST_AHEAD
        (16, {"batch_bytes": 5000 * MIB}, Readers(1, 0)),
        (16, {"threads": 2}, Readers(2, 8)),
        (16, {"workers": 8}, Readers(2, 8)),
        (16, {"workers": 0}, Readers(4, 0)),
        (16, {"threads": 3, "workers": 5}, Readers(3, 5)),
    ],
)
def test_threads_and_processes_follow_cores_batch_and_images(monkeypatch, cores, changes, expected):
    changes = {"accelerator": True} | changes
    accelerator = changes.pop("accelerator")
    monkeypatch.setattr(pipeline, "cores", lambda: cores)
    monkeypatch.setattr(pipeline, "_has_accelerator", lambda: accelerator)
    options = {"threads": AUTO, "workers": AUTO, "decodes": True, "batch_bytes": MIB}
    assert plan_readers(**options | changes) == expected


def test_few_images_are_read_by_threads(monkeypatch):
    monkeypatch.setattr(pipeline, "cores", lambda: 64)
    assert plan_for_few_images(AUTO, AUTO) == {"threads": 8, "workers": 0}
    assert plan_for_few_images(3, 2) == {"threads": 3, "workers": 2}


# ---------------------------------------------------------------------------------------------------------- repetition
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("first_step", [0, 3])
def test_images_with_rare_labels_are_repeated_in_the_rows_of_each_step(processes, first_step):
    """For any number of processes and any first step, and in training only."""
    codes = np.zeros((40, 3), np.int8)
    codes[:, 0], codes[5, 1] = 1, 1
    split, data = replace(make_split(40), labels=codes), settings(repeat_factor=0.4)
    parts = [
        take(9, split, data=data, batch_size=8, augment=TRAIN, seed=2, first_step=first_step, process=(k, processes))
        for k in range(processes)
    ]
    found = [np.concatenate([part[step]["id"] for part in parts]).tolist() for step in range(9)]
    expected = [rows_of_step(split, batch_size=8, seed=2, step=first_step + 1 + k, repeat=0.4) for k in range(9)]
    assert found == expected
    assert list(itertools.chain(*found)).count(5) in range(4, 10), "√(0.4 · 40) is 4, and there are 72 images"
    for part in parts:
        for batch in part:
            np.testing.assert_array_equal(batch["label"], codes[batch["id"]])
            assert (batch["image"][:, 0, 0, 0] == batch["id"]).all()
    evaluated = take(5, split, data=data, batch_size=8)
    assert np.concatenate([batch["id"] for batch in evaluated]).tolist() == list(range(40))
