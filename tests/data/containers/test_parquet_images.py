"""Images in Parquet files: every way to store them, in order and at random."""

import errno
import io
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mlmoe_jax.data.containers import parquet_images as parquet
from mlmoe_jax.data.containers.catalog import open_images
from mlmoe_jax.data.decoding import BadImage
from mlmoe_jax.data.usage import Usage
from mlmoe_jax.errors import DiskError, UserError


def encode(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (shade % 256, shade // 256, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def open_all(address, column=""):
    return open_images(str(address), Usage(str(address), "file"), column=column)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """An empty cache folder, and no copies that are open."""
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    parquet._open_copy.cache_clear()
    return tmp_path / "cache" / "parquet"


@pytest.fixture
def folder(tmp_path):
    """300 images in two files, in groups of 70."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for file in range(2):
        images = [{"bytes": encode(k), "path": f"{k}.png"} for k in range(150 * file, 150 * file + 150)]
        pq.write_table(pa.table({"image": images}), folder / f"train-{file}.parquet", row_group_size=70)
    return folder


def test_rows_in_any_order_are_read_from_copies_that_are_made_once(folder, cache, monkeypatch):
    images = open_all(folder)
    assert (images.name(0), images.name(299)) == (f"{folder}/train-0.parquet#0", f"{folder}/train-1.parquet#149")
    order = np.random.default_rng(0).permutation(300)
    assert all(images.encoded(int(row)) == encode(int(row)) for row in order)
    assert len(list(cache.glob("*.arrow"))) == 6
    others = pickle.loads(pickle.dumps(open_all(folder)))
    parquet._open_copy.cache_clear()
    monkeypatch.setattr(parquet, "_read_group", lambda *_: None)
    assert all(others.encoded(int(row)) == encode(int(row)) for row in order)


def test_a_changed_file_has_other_copies(folder):
    open_all(folder).encoded(0)
    pq.write_table(pa.table({"image": [encode(7)] * 150}), folder / "train-0.parquet")
    parquet._open_copy.cache_clear()
    assert open_all(folder).encoded(0) == encode(7)


def test_a_file_that_changes_while_it_is_open_is_refused(folder):
    """Labels of one version would be joined to images of another."""
    images = open_all(folder)
    images.encoded(0)
    cells = [{"bytes": encode(7), "path": None}] * 150
    pq.write_table(pa.table({"image": cells}), folder / "train-0.parquet", row_group_size=70)
    with pytest.raises(UserError, match=r"train-0\.parquet has changed since it was opened") as raised:
        images.encoded(149)
    assert not isinstance(raised.value, BadImage)
    assert (images.encoded(1), images.encoded(299)) == (encode(1), encode(299))


def test_the_version_of_an_image_is_known_without_reading_it(folder, cache):
    before = [*map(open_all(folder).stamp, range(300))]
    assert len({*before}) == 300
    assert not cache.exists()
    pq.write_table(pa.table({"image": [encode(7)] * 150}), folder / "train-1.parquet")
    after = [*map(open_all(folder).stamp, range(300))]
    assert after[:150] == before[:150]
    assert not {*after} & {*before[150:]}


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "gone"]),
        pa.array([{"path": "a"}, {"path": "gone"}], pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
    ],
)
def test_the_version_of_an_image_at_a_path_is_that_of_its_file(folder, column):
    (folder / "a").write_bytes(encode(1))
    pq.write_table(pa.table({"image": column}), folder / "train-2.parquet")
    images = open_all(folder / "train-2.parquet")
    before = images.stamp(0)
    os.utime(folder / "a", (1, 1))
    assert images.stamp(0) != before
    assert images.stamp(1) == "missing"


def test_a_path_is_relative_to_its_file_before_the_folder_of_all_files(folder):
    (folder / "x").mkdir()
    for place, shade in ((folder / "x/a.png", 1), (folder / "a.png", 2), (folder / "b.png", 3)):
        place.write_bytes(encode(shade))
    pq.write_table(pa.table({"image": ["a.png", "b.png"]}), folder / "x/train.parquet")
    images = parquet.open_parquet(str(folder), ["x/train.parquet"], "")
    assert [images.encoded(row) for row in range(2)] == [encode(1), encode(3)]


def test_a_further_link_to_a_file_does_not_change_it(folder, cache):
    """Backups make such links while a program runs."""
    images = open_all(folder)
    (folder / "train-0.parquet").chmod(0o444)
    os.link(folder / "train-0.parquet", folder / "backup")
    assert images.encoded(149) == encode(149)
    open_all(folder / "train-0.parquet").encoded(149)
    assert len(list(cache.glob("*.arrow"))) == 1


def test_a_full_disk_is_no_damage_of_an_image(folder, monkeypatch):
    """Otherwise, data.bad_images=skip would leave all images out."""

    def read(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(parquet, "_read_group", read)
    with pytest.raises(DiskError, match="free disk space"):
        open_all(folder).encoded(0)


def test_old_copies_are_removed_when_little_of_the_disk_is_free(folder, cache, monkeypatch):
    images = open_all(folder)
    for row in range(300):
        images.encoded(row)
    copies = sorted(cache.glob("*.arrow"))
    for copy in copies[:4]:
        os.utime(copy, (1, 1))
    monkeypatch.setattr(parquet, "FREE", 1.1)
    pq.write_table(pa.table({"image": [encode(7)]}), folder / "train-2.parquet")
    assert open_all(folder).encoded(300) == encode(7)
    assert set(copies[4:]) < set(cache.glob("*.arrow"))
    assert len(list(cache.glob("*.arrow"))) == 4
    parquet._open_copy.cache_clear()
    assert all(images.encoded(row) == encode(row) for row in range(300))


def test_threads_and_an_empty_group(folder):
    with pq.ParquetWriter(folder / "train-0b.parquet", pa.schema([("image", pa.binary())])) as writer:
        for cells in ([], [encode(1)], [], [encode(2), None]):
            writer.write_table(pa.table({"image": pa.array(cells, pa.binary())}))
    pq.write_table(pa.table({"image": pa.array([], pa.binary())}), folder / "train-0a.parquet")
    images = open_all(folder)
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(images.encoded, [*range(152), *range(153, 303)]))
    assert read == [encode(k) for k in (*range(150), 1, 2, *range(150, 300))]
    assert images.problem(152) == f"{folder}/train-0b.parquet#2 has no image"
    rows = images.find_rows(["train-1.parquet#5", "train-0b.parquet#1", "train-0.parquet#9"])
    assert rows.tolist() == [158, 151, 9]


def test_a_worker_receives_few_bytes(folder):
    assert len(pickle.dumps(open_all(folder))) < 2000


def test_a_cache_that_cannot_be_made_is_no_damage_of_an_image(folder, tmp_path, monkeypatch):
    """With data.bad_images=skip, all images would be left out."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DiskError, match="for the cache: Not a directory; let MLMOE_CACHE name another folder"):
        open_all(folder).problem(0)
