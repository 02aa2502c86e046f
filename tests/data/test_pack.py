"""Packing: what comes out is what went in, whatever happens on the way."""

import hashlib
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from etils import epath
from etils.epath import testing as epath_testing
from PIL import Image

from mlmoe_jax.config import default_config
from mlmoe_jax.data import pack as packing
from mlmoe_jax.data import shards
from mlmoe_jax.data.images import ArrayImages, BadImage
from mlmoe_jax.data.pack import pack
from mlmoe_jax.data.sources import digits, packed
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.sources.packed import open_packed, source_of, verify
from mlmoe_jax.data.sources.voc import CLASSES
from mlmoe_jax.data.split import Split

SIZES = [(50, 30), (30, 50), (64, 64), (20, 20), (300, 31), (31, 47), (92, 60)]  # width, height


def config_of(root="", name="voc2012", **settings):
    config = default_config()
    config.data.name, config.data.root, config.data.test_splits = name, str(root), ()
    config.pack.shard_images, config.pack.processes = 3, 1
    for key, value in settings.items():
        (config.data if key in config.data else config.pack)[key] = value
    return config


def picture(width, height, seed):
    smooth = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(smooth).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def voc(tmp_path):
    """A VOC folder: 7 training images, the last one in need of turning, and 2 for validation."""
    folder = tmp_path / "voc" / "VOC2012"
    (folder / "ImageSets" / "Main").mkdir(parents=True)
    (folder / "JPEGImages").mkdir()
    names = {"train": [f"t{n}" for n in range(len(SIZES))], "val": ["v0", "v1"]}
    for split, members in names.items():
        for k, label in enumerate(CLASSES):
            marks = [
                f"{name} {'1' if (row + k) % 5 == 0 else '0' if k == 3 else '-1'}" for row, name in enumerate(members)
            ]
            (folder / "ImageSets" / "Main" / f"{label}_{split}.txt").write_text("\n".join(marks))
        for row, name in enumerate(members):
            exif = Image.Exif()
            exif[0x0112] = 6 if name == "t6" else 1
            picture(*SIZES[row], len(split) * 100 + row).save(folder / "JPEGImages" / f"{name}.jpg", exif=exif)
    return folder.parent


def files_of(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def assert_same_split(ours: Split, theirs: Split, rows=None):
    assert (ours.name, ours.classes) == (theirs.name, theirs.classes)
    assert list(ours.ids) == list(theirs.ids)
    assert ours.labels.dtype == np.int8
    np.testing.assert_array_equal(ours.labels, theirs.labels)
    for row in range(len(theirs)) if rows is None else rows:
        np.testing.assert_array_equal(ours.images.read(row), theirs.images.read(row))


# --------------------------------------------------------------------------------------------------------- round trip
def test_files_are_kept_as_they_are(voc, tmp_path, capsys):
    config, output = config_of(voc), tmp_path / "out"
    assert pack(config, output) == 0
    out = capsys.readouterr().out
    assert "train: 7 images in 3 files, 0.4 MB" in out
    assert f"to use it: --config.data.name=packed --config.data.root={output}" in out
    for name in ("train", "val"):
        source, ours = open_split(config.data, name), open_packed(output, name)
        assert_same_split(ours, source)
        assert [ours.images.encoded(row) for row in range(len(ours))] == [
            source.images.encoded(row) for row in range(len(source))
        ]
    assert source_of(output) == "voc2012"
    assert list(verify(output)) == [""] * 6
    assert (open_packed(output, "train").labels == 2).any(), "difficult marks are kept"
    assert open_packed(output, "train").images[6].shape == (92, 60, 3), "turned as its EXIF says"
    assert set(files_of(output)) == {
        *(".lock", "manifest.json", "train.npz", "val.npz", "val-00000-of-00001.arrayrecord"),
        *(f"train-{number:05d}-of-00003.arrayrecord" for number in range(3)),
    }


def test_pictures_without_files_are_stored_without_loss(monkeypatch, tmp_path):
    monkeypatch.setattr(digits, "SCENES", {"train": 10, "val": 25, "test": 5, "test_shift": 5})
    config = config_of(name="digits", test_splits=("test", "test_shift"))
    pack(config, tmp_path / "out")
    for name in digits.SCENES:
        assert_same_split(open_packed(tmp_path / "out", name), open_split(config.data, name))


def test_real_images(shared_data, tmp_path):
    config = config_of(shared_data, shard_images=128, processes=2)
    pack(config, tmp_path / "out")
    for name in ("train", "val"):
        source = open_split(config.data, name)
        assert_same_split(open_packed(tmp_path / "out", name), source, rows=range(0, len(source), 7))


def test_only_larger_images_are_stored_anew_and_smaller(voc, tmp_path):
    config = config_of(voc, short_side=31)
    pack(config, tmp_path / "out")
    ours, source = open_packed(tmp_path / "out", "train"), open_split(config.data, "train")
    shapes = [image.shape[:2] for image in ours.images]
    assert shapes == [(30, 50), (50, 30), (31, 31), (20, 20), (31, 300), (47, 31), (48, 31)]
    for row, (width, height) in enumerate(SIZES):
        kept = ours.images.encoded(row) == source.images.encoded(row)
        assert kept == (min(width, height) <= 31)
        image = Image.open(io.BytesIO(ours.images.encoded(row)))
        assert image.format == "JPEG"
        resized = Image.fromarray(source.images[row]).resize(shapes[row][::-1], Image.Resampling.LANCZOS)
        assert np.abs(ours.images[row].astype(int) - np.asarray(resized)).mean() < 2


def test_quality_is_that_of_the_stored_file(voc, tmp_path):
    for quality in (30, 95):
        pack(config_of(voc, short_side=25, quality=quality), tmp_path / str(quality))
    small, large = (open_packed(tmp_path / str(q), "train").images.encoded(2) for q in (30, 95))
    assert len(small) < len(large)


def test_any_number_of_processes_gives_the_same_files(voc, tmp_path):
    for processes in (1, 3):
        assert pack(config_of(voc, short_side=25, processes=processes), tmp_path / str(processes)) == 0
    assert files_of(tmp_path / "1") == files_of(tmp_path / "3")


def test_a_held_out_validation_split_is_drawn_from_the_packed_images_as_from_the_source(voc, tmp_path):
    config = config_of(voc, val_fraction=0.3)
    pack(config, tmp_path / "out")
    assert list(json.loads((tmp_path / "out" / "manifest.json").read_text())["splits"]) == ["train"]
    there = config.data.copy_and_resolve_references()
    there.name, there.root = "packed", str(tmp_path / "out")
    for name in ("train", "val"):
        assert_same_split(open_split(there, name, seed=5), open_split(config.data, name, seed=5))


def test_names_of_splits_and_images_may_hold_any_character(monkeypatch, tmp_path):
    name, ids = "train[:50%]/ä", ["a b.jpg", "ü/日本.png", "x" * 300]
    images = ArrayImages(np.random.default_rng(0).integers(0, 256, (3, 8, 9, 3), dtype=np.uint8))
    split = Split(name, ("one", "zwei/ß"), np.array([[1, 0], [-1, 2], [0, 1]], np.int8), ids, images)
    monkeypatch.setattr("mlmoe_jax.data.sources.open.open_split", lambda data, wanted, **_: split)
    pack(config_of(train_split=name, val_split=""), tmp_path / "out")
    assert_same_split(open_packed(tmp_path / "out", name), split)


# -------------------------------------------------------------------------------------------------------- interruption
SLOWLY = """
import sys, time
from mlmoe_jax.data import pack as packing, shards
from test_pack import config_of
shards.SAVE_EVERY = 0
at_once = shards.stored_bytes
def stored_bytes(*arguments):
    time.sleep(0.1)
    return at_once(*arguments)
shards.stored_bytes = stored_bytes
if __name__ == "__main__":
    sys.exit(packing.pack(config_of(sys.argv[1], processes=int(sys.argv[3]), shard_images=2), sys.argv[2]))
"""


def start_slowly(voc, tmp_path, processes):
    """Start packing into `out` at ten images a second, in a process group of its own."""
    (tmp_path / "slowly.py").write_text(SLOWLY)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, tmp_path / "slowly.py", voc, tmp_path / "out", str(processes)]
    options = {"env": environment, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(command, **options), tmp_path / "out"


def children(process: int) -> list[int]:
    """Return the packing workers of a process."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("number", "processes"),
    [(signal.SIGKILL, 1), pytest.param(signal.SIGTERM, 1, marks=pytest.mark.slow), (signal.SIGKILL, 2)],
)
def test_a_stopped_command_goes_on(voc, tmp_path, number, processes):
    config = config_of(voc, shard_images=2)
    process, output = start_slowly(voc, tmp_path, processes)
    unfinished, deadline = output / "unfinished.json", time.monotonic() + 100

    def finished() -> list[dict]:
        splits = json.loads(unfinished.read_text())["splits"].values() if unfinished.exists() else ()
        return [entry for split in splits for entry in split["shards"] if entry]

    while time.monotonic() < deadline and process.poll() is None and not finished():
        time.sleep(0.02)
    process.send_signal(number)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == (130 if number == signal.SIGTERM else -number), err
    assert ("the same command goes on" in err) == (number == signal.SIGTERM)
    while lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lives(process.pid), "a worker has outlived its parent"
    kept = {entry["file"]: (output / entry["file"]).stat().st_mtime_ns for entry in finished()}
    assert 0 < len(kept) < 5

    assert pack(config, output) == 0
    assert {file: (output / file).stat().st_mtime_ns for file in kept} == kept
    assert pack(config, tmp_path / "fresh") == 0
    assert files_of(output) == files_of(tmp_path / "fresh")


def test_a_killed_worker_is_one_sentence(voc, tmp_path):
    process, output = start_slowly(voc, tmp_path, 2)
    while process.poll() is None and not (workers := children(process.pid)):
        time.sleep(0.02)
    os.kill(workers[0], signal.SIGKILL)
    err = process.communicate(timeout=60)[1]
    assert "UserError: a packing process was killed, perhaps for lack of memory" in err
    assert pack(config_of(voc, shard_images=2), output) == 0


def test_the_same_command_again_changes_nothing(voc, tmp_path):
    output = tmp_path / "out"
    pack(config_of(voc), output)
    before, times = files_of(output), {path: path.stat().st_mtime_ns for path in output.glob("*.arrayrecord")}
    assert pack(config_of(voc), output) == 0
    assert files_of(output) == before
    assert {path: path.stat().st_mtime_ns for path in output.glob("*.arrayrecord")} == times


def test_a_lost_shard_is_written_again(voc, tmp_path):
    output = tmp_path / "out"
    pack(config_of(voc), output)
    before = files_of(output)
    (output / "train-00001-of-00003.arrayrecord").unlink()
    with open(output / "val-00000-of-00001.arrayrecord", "ab") as file:
        file.write(b"more")
    pack(config_of(voc), output)
    assert files_of(output) == before


def test_further_splits_join_those_that_are_there(voc, tmp_path):
    output = tmp_path / "out"
    pack(config_of(voc, val_split=""), output)
    assert set(json.loads((output / "manifest.json").read_text())["splits"]) == {"train"}
    pack(config_of(voc), output)
    pack(config_of(voc), tmp_path / "fresh")
    assert files_of(output) == files_of(tmp_path / "fresh")


def test_a_split_that_was_begun_stays_begun_while_another_is_finished(voc, tmp_path, refusal):
    output, broken = tmp_path / "out", voc / "VOC2012" / "JPEGImages" / "v1.jpg"
    whole = broken.read_bytes()
    broken.write_bytes(b"")
    refusal(pack, config_of(voc), output, error=BadImage)
    assert "is packed only in part" in refusal(open_packed, output, "train")
    assert pack(config_of(voc, val_split=""), output) == 0
    assert len(open_packed(output, "train")) == 7
    assert "no split 'val'; it has train" in refusal(open_packed, output, "val")
    broken.write_bytes(whole)
    pack(config_of(voc), output)
    assert len(open_packed(output, "val")) == 2
    assert not (output / "unfinished.json").exists()


# ------------------------------------------------------------------------------------------------------- what is wrong
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("content", [b"", b"no picture", None])
def test_an_unreadable_image_is_named_or_left_out(voc, tmp_path, refusal, processes, content):
    broken, output = voc / "VOC2012" / "JPEGImages" / "t4.jpg", tmp_path / "out"
    broken.write_bytes(content if content is not None else broken.read_bytes()[:-200])
    assert "t4.jpg as an image: it" in refusal(pack, config_of(voc, processes=processes), output, error=BadImage)
    assert not (output / "manifest.json").exists()

    skipping = config_of(voc, processes=processes, bad_images="skip")
    assert pack(skipping, output) == 0
    ours, source = open_packed(output, "train"), open_split(skipping.data, "train")
    assert_same_split(ours, source.take(np.array([0, 1, 2, 3, 5, 6]), "train"))
    entry = json.loads((output / "manifest.json").read_text())["splits"]["train"]["shards"][1]
    assert entry["records"] == 2
    assert [(item["row"], item["id"]) for item in entry["left_out"]] == [(4, "JPEGImages/t4.jpg")]
    assert "t4.jpg as an image" in entry["left_out"][0]["why"]
    refusal(pack, config_of(voc), output, error=BadImage)


def test_a_missing_image_is_left_out(voc, tmp_path):
    (voc / "VOC2012" / "JPEGImages" / "t0.jpg").unlink()
    pack(config_of(voc, bad_images="skip"), tmp_path / "out")
    assert list(open_packed(tmp_path / "out", "train").ids) == [f"JPEGImages/t{n}.jpg" for n in range(1, 7)]


def test_nothing_readable(voc, tmp_path, refusal):
    for path in (voc / "VOC2012" / "JPEGImages").glob("v*.jpg"):
        path.write_bytes(b"")
    sentence = refusal(pack, config_of(voc, bad_images="skip"), tmp_path / "out")
    assert sentence.startswith("no image of split val can be read")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"short_side": 9}, ["pack.short_side=0, not 9", "another --output"]),
        ({"shard_images": 5}, ["pack.shard_images=3, not 5"]),
        ({"quality": 90}, ["pack.quality=95, not 90"]),
        ({"name": "digits"}, ["holds images of voc2012, not digits"]),
        ({"keep_empty": True}, ["other images or labels (split val)"]),
    ],
)
def test_a_folder_is_for_one_data_set_with_one_setting(voc, tmp_path, refusal, monkeypatch, changes, parts):
    monkeypatch.setattr(digits, "SCENES", {"train": 2, "val": 2})
    # an image without a positive label, which keep_empty brings in
    lists = voc / "VOC2012" / "ImageSets" / "Main"
    for path in lists.glob("*_val.txt"):
        path.write_text(path.read_text() + "\nv2 -1")
    picture(9, 9, 0).save(voc / "VOC2012" / "JPEGImages" / "v2.jpg")
    pack(config_of(voc), tmp_path / "out")
    before = files_of(tmp_path / "out")
    sentence = refusal(pack, config_of(voc, **changes), tmp_path / "out")
    for part in parts:
        assert part in sentence
    assert files_of(tmp_path / "out") == before


def test_a_folder_with_something_else_is_left_alone(voc, tmp_path, refusal):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "holiday.jpg").write_bytes(b"mine")
    assert "holds other files, such as holiday.jpg" in refusal(pack, config_of(voc), tmp_path / "out")
    assert "cannot make" in refusal(pack, config_of(voc), tmp_path / "out" / "holiday.jpg")


@pytest.mark.parametrize("changes", [{"short_side": -1}, {"processes": -1}, {"quality": 101}])
def test_settings_out_of_range(voc, tmp_path, refusal, changes):
    assert next(iter(changes)) in refusal(pack, config_of(voc, **changes), tmp_path / "out")


def test_a_full_disk_is_one_sentence_and_the_rest_is_kept(voc, tmp_path, refusal, monkeypatch):
    class FullDisk:
        def __init__(self, path, options):
            self.path, self.file = path, real(path, options)

        def write(self, record):
            if "00002" in self.path:
                raise RuntimeError("write() failed: No space left on device; writing x; at byte 0")
            self.file.write(record)

        def close(self):
            self.file.close()

    real = shards.ArrayRecordWriter
    monkeypatch.setattr(shards, "ArrayRecordWriter", FullDisk)
    sentence = refusal(pack, config_of(voc), tmp_path / "out")
    assert sentence.startswith(f"cannot write to {tmp_path / 'out'}: write() failed: No space left on device;")
    monkeypatch.undo()
    assert not list((tmp_path / "out").glob(".*.tmp"))
    kept = {path.name for path in (tmp_path / "out").glob("train-*.arrayrecord")}
    assert kept == {f"train-0000{number}-of-00003.arrayrecord" for number in range(2)}
    assert pack(config_of(voc), tmp_path / "out") == 0


# -------------------------------------------------------------------------------------------------------------- reading
@pytest.fixture
def whole(voc, tmp_path):
    pack(config_of(voc), tmp_path / "out")
    return tmp_path / "out"


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_flipped_byte_is_found(whole, refusal):
    shard = whole / "train-00001-of-00003.arrayrecord"
    image = open_packed(whole, "train").images.encoded(4)
    flip(shard, shard.read_bytes().index(image) + len(image) // 2)
    assert [sentence for sentence in verify(whole) if sentence] == [
        f"{shard} has another content than when it was packed (its sha256 differs); copy it again, or delete it and "
        "give the --mode=pack command again"
    ]
    images = open_packed(whole, "train").images
    assert images.encoded(0)
    sentence = refusal(images.read, 4, error=BadImage)
    assert sentence.startswith(f"cannot read JPEGImages/t4.jpg in {shard} as an image: the shard is damaged")


def test_damage_in_the_labels_is_found_on_opening(whole, refusal):
    flip(whole / "train.npz", 100)
    assert "train.npz has another content" in refusal(open_packed, whole, "train")
    assert len(open_packed(whole, "val")) == 2


def test_missing_and_shortened_shards(whole, refusal):
    first, second = (whole / f"train-0000{n}-of-00003.arrayrecord" for n in range(2))
    second.write_bytes(second.read_bytes()[:100])
    assert f"{second} has 100 bytes instead of 131,072" in refusal(open_packed, whole, "train")
    first.unlink()
    assert f"{first} is missing" in refusal(open_packed, whole, "train")
    assert sum(bool(sentence) for sentence in verify(whole)) == 2


def test_a_shard_that_goes_while_it_is_used(whole, refusal):
    images = open_packed(whole, "train").images
    (whole / "train-00000-of-00003.arrayrecord").unlink()
    assert "has 0 images instead of 3" in refusal(images.read, 0)


def test_what_is_no_packed_data_set(whole, tmp_path, refusal):
    assert refusal(open_packed, "", "train") == "data.root is empty; set it to the folder that --mode=pack wrote"
    assert "is no folder" in refusal(open_packed, tmp_path / "nothing", "train")
    assert "there is no manifest.json in" in refusal(open_packed, tmp_path, "train")
    assert refusal(open_packed, whole, "nope") == "data set packed has no split 'nope'; it has train, val"
    manifest = (whole / "manifest.json").read_text()
    (whole / "manifest.json").write_text(manifest.replace('"format": 1', '"format": 2'))
    assert "is not in format 1" in refusal(open_packed, whole, "train")
    (whole / "manifest.json").write_text(manifest[:50])
    assert "manifest.json is damaged" in refusal(open_packed, whole, "train")


def test_readers_open_lazily_close_early_and_travel(whole, monkeypatch):
    monkeypatch.setattr(packed, "OPEN_SHARDS", 2)
    images = open_packed(whole, "train").images
    assert not images._readers
    expected = [images.encoded(row) for row in range(7)]
    assert list(images._readers) == [1, 2]
    copy = pickle.loads(pickle.dumps(images))
    assert not copy._readers
    assert [copy.encoded(row) for row in range(7)] == expected
    rows = np.random.default_rng(0).integers(0, 7, 2000).tolist()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(images.encoded, rows)) == [expected[row] for row in rows]
    assert images.encoded(-1) == expected[6]
    with pytest.raises(IndexError):
        images.encoded(7)


# -------------------------------------------------------------------------------------------------------- object stores
@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """Lets gs:// addresses lie below a folder; like an object store it knows neither appending nor renaming."""
    store = tmp_path / "store"
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))

    def here(path) -> str:
        return os.fspath(path).replace("gs://", f"{store}/")

    def mapped(original, path, *arguments, **options):
        return original(here(path), *arguments, **options)

    def open_file(original, path, mode):
        assert "a" not in mode
        Path(here(path)).parent.mkdir(parents=True, exist_ok=True)
        return original(here(path), mode)

    def copy(original, path, target, overwrite):
        copies.append((str(path), str(target)))
        return original(here(path), here(target), overwrite=overwrite)

    def impossible(*_, **__):
        raise AssertionError("an object store cannot do this")

    copies: list[tuple[str, str]] = []
    same = dict.fromkeys(("exists", "isdir", "listdir", "makedirs", "mkdir", "remove", "stat"), mapped)
    with epath_testing.mock_epath(**same, open=open_file, copy=copy, rename=impossible, replace=impossible):
        yield copies


def test_an_object_store_holds_the_same_files(voc, tmp_path, bucket):
    pack(config_of(voc), tmp_path / "local")
    assert pack(config_of(voc), "gs://bucket/packed") == 0
    local, remote = files_of(tmp_path / "local"), files_of(tmp_path / "store" / "bucket" / "packed")
    local.pop(".lock")  # an object store has no locks
    assert remote == local
    assert len(bucket) == 4
    assert pack(config_of(voc), "gs://bucket/packed") == 0
    assert len(bucket) == 4


def test_shards_are_fetched_once_and_checked(voc, tmp_path, bucket, refusal):
    pack(config_of(voc), "gs://bucket/packed")
    bucket.clear()
    source = open_split(config_of(voc).data, "train")
    ours = open_packed("gs://bucket/packed", "train")
    assert not bucket
    for _ in range(2):
        assert_same_split(pickle.loads(pickle.dumps(ours)), source)
    assert len(bucket) == 3
    assert not any(verify("gs://bucket/packed"))
    cache = tmp_path / "cache" / "packed"
    assert {path.stem for path in cache.iterdir()} == {shard.sha256 for shard in ours.images.shards}

    for path in cache.iterdir():
        path.unlink()
    stored = tmp_path / "store" / "bucket" / "packed" / "train-00000-of-00003.arrayrecord"
    flip(stored, 5)
    fresh = open_packed(epath.Path("gs://bucket/packed"), "train").images
    assert "gs://bucket/packed/train-00000-of-00003.arrayrecord has another content" in refusal(fresh.read, 0)
    assert not list(cache.iterdir())
    stored.unlink()
    assert "cannot fetch gs://bucket/packed/train-00000" in refusal(fresh.read, 0)
    assert "is missing" in refusal(open_packed, "gs://bucket/packed", "train")


def test_an_object_store_that_cannot_be_reached(voc, monkeypatch, refusal):
    def not_installed(*_, **__):
        raise ImportError("Please install gcsfs to access Google Storage")

    with epath_testing.mock_epath(isdir=not_installed, mkdir=not_installed, makedirs=not_installed):
        assert refusal(open_packed, "gs://bucket/packed", "train") == (
            "cannot read data.root gs://bucket/packed: Please install gcsfs to access Google Storage"
        )
        monkeypatch.setattr(packing, "_open_splits", lambda config: [])
        assert "cannot write to gs://bucket/packed: Please install" in refusal(
            pack, config_of(voc), "gs://bucket/packed"
        )


def test_the_manifest_states_what_is_there(whole):
    manifest = json.loads((whole / "manifest.json").read_text())
    files = files_of(whole)
    for split in manifest["splits"].values():
        assert split["images"] == sum(shard["records"] for shard in split["shards"])
        for entry in (split["labels"], *split["shards"]):
            assert entry["bytes"] == len(files[entry["file"]])
            assert entry["sha256"] == hashlib.sha256(files[entry["file"]]).hexdigest()
    assert manifest["settings"] == {"shard_images": 3, "short_side": 0, "quality": 95}
