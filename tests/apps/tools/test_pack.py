"""Packing: round trips, interruptions and errors."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from helpers.packing import SIZES, assert_same_split, config_of, files_of, shard_of, smooth_image
from PIL import Image

from mlmoe_jax.apps.tools.pack import pack
from mlmoe_jax.data.decoding import BadImage
from mlmoe_jax.data.images import ArrayImages, EncodedImages
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.sources.packed import open_packed, read_manifest, verify
from mlmoe_jax.data.split import Split


# ---------------------------------------------------------------------------------------------------------- round trip
def test_files_are_stored_unchanged(small_voc, tmp_path):
    config, output = config_of(small_voc), tmp_path / "out"
    pack(config, output)
    for name in ("train", "val"):
        source, ours = open_split(config.data, name), open_packed(output, name)
        assert_same_split(ours, source)
        assert [ours.images.encoded(row) for row in range(len(ours))] == [
            source.images.encoded(row) for row in range(len(source))
        ]
    assert read_manifest(output).source == "voc2012"
    assert list(verify(output)) == [""] * 6
    assert (open_packed(output, "train").labels[:] == 2).any(), "difficult labels are kept"
    assert open_packed(output, "train").images.read(6).shape == (92, 60, 3), "rotated according to its EXIF data"
    assert sorted(re.sub("-[0-9a-f]{16}", "", name) for name in files_of(output)) == [
        *(".lock", "manifest.json"),
        *(f"train-{number:05d}.arrayrecord{end}" for number in range(3) for end in ("", ".json")),
        *("train.npz", "val-00000.arrayrecord", "val-00000.arrayrecord.json", "val.npz"),
    ]


def test_only_images_above_the_short_side_are_resized(small_voc, tmp_path):
    config = config_of(small_voc, short_side=31)
    pack(config, tmp_path / "out")
    ours, source = open_packed(tmp_path / "out", "train"), open_split(config.data, "train")
    shapes = [ours.images.read(row).shape[:2] for row in range(len(ours))]
    assert shapes == [(30, 50), (50, 30), (31, 31), (20, 20), (31, 300), (47, 31), (48, 31)]
    for row, size in enumerate(SIZES):
        file = ours.images.encoded(row)
        assert (file == source.images.encoded(row)) == (min(size) <= 31)
        assert Image.open(io.BytesIO(file)).format == "JPEG"
        resized = Image.fromarray(source.images.read(row)).resize(shapes[row][::-1], Image.Resampling.LANCZOS)
        assert np.abs(ours.images.read(row).astype(int) - np.asarray(resized)).mean() < 2


def test_any_number_of_processes_gives_the_same_files(small_voc, tmp_path):
    for processes in (1, 2):
        assert pack(config_of(small_voc, short_side=25, workers=processes), tmp_path / str(processes)).exit_code == 0
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")


def test_a_copy_of_the_images_gives_the_same_packed_data(small_voc, tmp_path):
    """Whatever the times of its files are."""
    pack(config_of(small_voc), tmp_path / "one")
    for path in (small_voc / "VOC2012" / "JPEGImages").iterdir():
        os.utime(path, (1, 1))
    pack(config_of(small_voc), tmp_path / "two")
    one, two = (files_of(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert {name for name in one if one[name] != two[name]} == {name for name in one if name.endswith("record.json")}


def test_packed_data_has_the_groups_of_its_table(tmp_path, caplog):
    rows = [f"{row}.png,{'xy'[row % 2]},{'' if row == 4 else f'ü{row // 3}'},-\n" for row in range(12)]
    for row in range(12):
        smooth_image(8, 8, row).save(tmp_path / f"{row}.png")
    (tmp_path / "train.csv").write_text("".join(["image,labels,patient,note\n", *rows]))
    config = config_of(tmp_path, "csv", val_fraction=0.3, group_column="patient", bad_images="skip")
    (tmp_path / "7.png").write_bytes(b"")
    pack(config, tmp_path / "out")
    assert list(read_manifest(tmp_path / "out").splits) == ["train"], "with those held out"
    assert "train.csv has 1 column that no key of the config names: note" in caplog.text
    assert open_packed(tmp_path / "out", "train").groups == [*["ü0"] * 3, "ü1", "", "ü1", "ü2", "ü2", *["ü3"] * 3]


def test_arrays_and_all_names_of_splits_and_images_are_stored_without_loss(monkeypatch, tmp_path):
    names, ids = ("train[:50%]/ä", "test"), ["a b.jpg", "ü/日本.png", "x" * 300]
    images = ArrayImages(np.random.default_rng(0).integers(0, 256, (3, 8, 9, 3), dtype=np.uint8))
    split = Split("", ("one", "zwei/ß"), np.array([[1, 0], [-1, 2], [0, 1]], np.int8), ids, images)
    opened = lambda data, wanted, **_: replace(split, name=wanted)  # noqa: E731
    monkeypatch.setattr("mlmoe_jax.data.sources.open.open_split", opened)
    pack(config_of(train_split=names[0], val_split="", test_splits=names[1:]), tmp_path / "out")
    for name in names:
        assert_same_split(open_packed(tmp_path / "out", name), replace(split, name=name))


# -------------------------------------------------------------------------------------------------------- interruption
SLOWLY = """
import sys, time
from mlmoe_jax.apps.tools import shards
from mlmoe_jax.apps.tools import pack as packing
from helpers.packing import config_of
packing.SHARD_IMAGES = 2
at_once = shards.shrink
def shrink_slowly(*arguments):
    time.sleep(0.1)
    return at_once(*arguments)
shards.shrink = shrink_slowly
if __name__ == "__main__":
    sys.exit(packing.pack(config_of(sys.argv[1], workers=int(sys.argv[3])), sys.argv[2]).exit_code)
"""


@pytest.fixture
def pairs(small_voc, monkeypatch):
    """A VOC folder that is packed in shards of 2 images."""
    monkeypatch.setattr("mlmoe_jax.apps.tools.pack.SHARD_IMAGES", 2)
    return small_voc


def start_slowly(small_voc, tmp_path, processes):
    """Start packing into `out` at ten images a second, in a separate process group."""
    (tmp_path / "slowly.py").write_text(SLOWLY)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, tmp_path / "slowly.py", small_voc, tmp_path / "out", str(processes)]
    options = {"env": environment, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(command, **options), tmp_path / "out"


def is_alive(group: int) -> bool:
    """Return whether any process of a group is running."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "processes", "changed"),
    [(signal.SIGKILL, 1, ["t1.jpg"]), (signal.SIGTERM, 1, []), (signal.SIGKILL, 2, ["t1.jpg"])],
)
def test_an_interrupted_command_resumes(pairs, tmp_path, number, processes, changed):
    config = config_of(pairs)
    process, output = start_slowly(pairs, tmp_path, processes)
    deadline = time.monotonic() + 100

    def finished() -> list[str]:
        return [path.name.removesuffix(".json") for path in output.glob("*.arrayrecord.json")]

    while time.monotonic() < deadline and process.poll() is None and not finished():
        time.sleep(0.02)
    process.send_signal(number)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == (130 if number == signal.SIGTERM else -number), err
    assert ("the same command resumes" in err) == (number == signal.SIGTERM)
    while is_alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(process.pid), "a worker outlived its parent"
    kept = {file: (output / file).stat().st_mtime_ns for file in finished()}
    assert 0 < len(kept) < 5

    images = pairs / "VOC2012" / "JPEGImages"
    for name in changed:
        smooth_image(40, 40, 1).save(images / name)
    kept = {file: time for file, time in kept.items() if not (changed and file.startswith("train-00000"))}
    assert pack(config, output).exit_code == 0
    assert {file: (output / file).stat().st_mtime_ns for file in kept} == kept
    assert pack(config, tmp_path / "fresh").exit_code == 0
    assert files_of(output) == files_of(tmp_path / "fresh")


def test_lost_and_changed_shards_and_those_of_changed_images_are_written_again(pairs, tmp_path):
    output, images = tmp_path / "out", pairs / "VOC2012" / "JPEGImages"
    pack(config_of(pairs), output)
    before = files_of(output)
    shard_of(output, "train", 1).unlink()
    with open(shard_of(output, "val"), "ab") as file:
        file.write(b"more")
    pack(config_of(pairs), output)
    assert files_of(output) == before
    times = {path.name: path.stat().st_mtime_ns for path in output.glob("*.arrayrecord*")}
    smooth_image(40, 40, 1).save(images / "t3.jpg")
    pack(config_of(pairs), output)
    after = {path.name: path.stat().st_mtime_ns for path in output.glob("*.arrayrecord*")}
    assert {name[:11] for name in times.keys() - after.keys()} == {"train-00001"}
    assert {name[:11] for name, _ in after.items() - times.items()} == {"train-00001"}
    for name in ("train", "val"):
        assert_same_split(open_packed(output, name), open_split(config_of(pairs).data, name))
    assert list(verify(output)) == [""] * 7


def test_a_changed_data_set_gives_the_folder_of_a_fresh_one(tmp_path, monkeypatch):
    """Images and labels change, more images come, with a new label, and then there are fewer."""
    monkeypatch.setattr("mlmoe_jax.apps.tools.pack.SHARD_IMAGES", 2)
    config, rows = config_of(tmp_path, "csv", val_split=""), [f"{row}.png,{'xy'[row % 2]}" for row in range(9)]

    def packed(count, output, *more):
        (tmp_path / "train.csv").write_text("\n".join(["image,labels", *rows[:count], *more]))
        pack(config, tmp_path / output)
        (tmp_path / output / ".lock").unlink()
        return files_of(tmp_path / output)

    for row in range(9):
        smooth_image(8, 8, row).save(tmp_path / f"{row}.png")
    assert packed(5, "out") == packed(5, "first")
    smooth_image(9, 9, 1).save(tmp_path / "1.png")
    rows[4] = "4.png,y"
    assert packed(9, "out") == packed(9, "second")
    assert packed(8, "out", "8.png,new") == packed(8, "third", "8.png,new")
    assert open_packed(tmp_path / "out", "train").classes == ("new", "x", "y")
    assert packed(4, "out") == packed(4, "fourth")


def test_a_reader_has_the_old_data_until_the_new_data_is_complete(pairs, tmp_path, refusal):
    output, images = tmp_path / "out", pairs / "VOC2012" / "JPEGImages"
    pack(config_of(pairs), output)
    before = open_packed(output, "train").images
    smooth_image(40, 40, 1).save(images / "t0.jpg")
    whole = (images / "t6.jpg").read_bytes()
    (images / "t6.jpg").write_bytes(b"")
    refusal(pack, config_of(pairs), output, error=BadImage)
    assert_same_split(open_packed(output, "train"), open_split(config_of(pairs).data, "train"), rows=range(1, 6))
    assert not any(verify(output))
    assert open_packed(output, "train").images.encoded(0) == before.encoded(0)
    (images / "t6.jpg").write_bytes(whole)
    pack(config_of(pairs), output)
    assert_same_split(open_packed(output, "train"), open_split(config_of(pairs).data, "train"))
    assert len([*output.glob("*.arrayrecord*")]) == 10


class Counted(EncodedImages):
    """Images in one large file, as of a container. Each read appends the process and the row to a log."""

    def __init__(self, images: EncodedImages, log):
        self.images, self.log = images, log

    def __len__(self):
        return len(self.images)

    def stamp(self, row):
        return f"version {row}"

    def encoded(self, row):
        with open(self.log, "a") as file:
            file.write(f"{os.getpid()} {row}\n")
        return self.images.encoded(row)


@pytest.mark.parametrize("processes", [1, 2])
def test_each_image_is_read_once_and_by_each_process_in_order(pairs, tmp_path, monkeypatch, processes):
    log = tmp_path / "log"

    def opened(*arguments, **options):
        split = open_split(*arguments, **options)
        return replace(split, images=Counted(split.images, log))

    monkeypatch.setattr("mlmoe_jax.data.sources.open.open_split", opened)
    config = config_of(pairs, val_split="", workers=processes, short_side=25)
    pack(config, tmp_path / "out")
    reads = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    assert sorted(row for _, row in reads) == list(range(7))
    of_process = [[row for process, row in reads if process == of] for of in dict(reads)]
    assert sorted(of_process) == ([[*range(4)], [*range(4, 7)]] if processes > 1 else [[*range(7)]])
    log.unlink()
    pack(config, tmp_path / "out")
    assert not log.exists(), "complete shards are not read again"


def test_what_is_found_in_the_images_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("mlmoe_jax.apps.tools.pack.SHARD_IMAGES", 2)
    for row in range(5):
        smooth_image(8, 8, row).save(tmp_path / f"{row}.png")
    gray = Image.fromarray(np.full((8, 8), 700, np.uint16))
    gray.save(tmp_path / "3.png")
    smooth_image(8, 8, 5).save(tmp_path / "4.gif", save_all=True, append_images=[smooth_image(8, 8, 6)])
    (tmp_path / "train.csv").write_text("image,labels\n0.png,x\n1.png,y\n2.png,x\n3.png,y\n4.gif,x\n")
    config = config_of(tmp_path, "csv", val_split="")
    for _ in range(2):
        text = pack(config, tmp_path / "out").text()
        assert "split train has 1 image with several frames, of which the first is used: 4.gif" in text
    (warning,) = [record.message for record in caplog.records if "16-bit" in record.message]
    assert warning.startswith("1 of 2 images of train-00001-")
    assert "they are nearly black; if that is white, set --config.data.gray_bits=10" in warning


def test_an_incomplete_split_remains_while_another_is_finished(small_voc, tmp_path, refusal):
    output, images = tmp_path / "out", small_voc / "VOC2012" / "JPEGImages"
    broken = images / "v1.jpg"
    whole = broken.read_bytes()
    broken.write_bytes(b"")
    refusal(pack, config_of(small_voc), output, error=BadImage)
    assert pack(config_of(small_voc, val_split=""), output).exit_code == 0
    assert "no split 'val'; it has train" in refusal(open_packed, output, "val")
    broken.write_bytes(whole)
    pack(config_of(small_voc), output)
    assert len(open_packed(output, "val")) == 2
    for image in images.glob("v*.jpg"):
        image.write_bytes(b"")
    sentence = refusal(pack, config_of(small_voc, bad_images="skip"), output)
    assert sentence == f"no image of split val can be read; the reasons are beside the shards in {output}"


@pytest.mark.variants("processes", "content")
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("content", [b"", b"not an image", None])
def test_an_unreadable_image_is_refused_or_left_out(small_voc, tmp_path, refusal, processes, content):
    broken, output = small_voc / "VOC2012" / "JPEGImages" / "t4.jpg", tmp_path / "out"
    whole = broken.read_bytes()
    broken.write_bytes(content if content is not None else whole[:-200])
    strict, skipping = (
        config_of(small_voc, workers=processes, bad_images=treatment) for treatment in ("error", "skip")
    )
    assert "t4.jpg as an image: it" in refusal(pack, strict, output, error=BadImage)
    assert "if mlmoe pack has not finished, repeat it" in refusal(open_packed, output, "train")

    assert pack(skipping, output).exit_code == 0
    source = open_split(skipping.data, "train")
    assert_same_split(open_packed(output, "train"), source.take(np.array([0, 1, 2, 3, 5, 6]), "train"))
    entry = json.loads(shard_of(output, "train", 1).with_suffix(".arrayrecord.json").read_text())
    (left_out,) = entry["left_out"]
    assert (entry["records"], left_out["row"], left_out["id"]) == (2, 4, "JPEGImages/t4.jpg")
    assert "t4.jpg as an image" in left_out["why"]

    assert "t4.jpg as an image: it" in refusal(pack, strict, output, error=BadImage)
    broken.write_bytes(whole)
    pack(skipping, output)
    assert len(open_packed(output, "train")) == len(SIZES)
