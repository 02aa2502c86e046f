"""Reading packed data sets from disk and from object stores, whatever their manifest names."""

import functools
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from etils import epath
from helpers.packing import assert_same_split, config_of, files_of, shard_of, write_packed

from mlmoe_jax.apps.tools.pack import pack
from mlmoe_jax.data.sources import packed
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.sources.packed import open_packed, verify


def test_readers_open_lazily_are_limited_and_can_be_pickled(tmp_path, monkeypatch):
    write_packed(tmp_path)
    opened = functools.lru_cache(maxsize=2)(packed._reader.__wrapped__)
    monkeypatch.setattr(packed, "_reader", opened)
    images = open_packed(tmp_path, "train").images
    assert opened.cache_info().currsize == 0
    expected = [images.encoded(row) for row in range(7)]
    assert opened.cache_info()[1:] == (3, 2, 2), "three shards, of which two stay open"
    rows = np.random.default_rng(0).integers(0, 7, 2000).tolist()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(pickle.loads(pickle.dumps(images)).encoded, rows)) == [expected[row] for row in rows]
    assert images.encoded(-1) == expected[6]


# ------------------------------------------------------------------------------------------------------- object stores
def test_packing_into_an_object_store_writes_the_same_files(small_voc, tmp_path, bucket):
    pack(config_of(small_voc), tmp_path / "local")
    assert pack(config_of(small_voc), "gs://bucket/packed").exit_code == 0
    local, remote = files_of(tmp_path / "local"), files_of(tmp_path / "store" / "bucket" / "packed")
    local.pop(".lock")  # object stores have no locks
    assert remote == local
    assert len(bucket) == 4
    assert pack(config_of(small_voc), "gs://bucket/packed").exit_code == 0
    assert len(bucket) == 4


def test_shards_are_copied_once_and_verified(small_voc, tmp_path, bucket, refusal):
    pack(config_of(small_voc), "gs://bucket/packed")
    bucket.clear()
    source = open_split(config_of(small_voc).data, "train")
    ours = open_packed("gs://bucket/packed", "train")
    assert not bucket
    for _ in range(2):
        assert_same_split(pickle.loads(pickle.dumps(ours)), source)
    assert len(bucket) == 3
    assert not any(verify("gs://bucket/packed"))
    cache = tmp_path / "cache" / "packed"
    assert {path.stem for path in cache.iterdir()} == {shard.sha256 for shard in ours.images.shards}

    for path in cache.glob("*.arrayrecord"):
        path.unlink()
    packed._reader.cache_clear()
    stored = shard_of(tmp_path / "store" / "bucket" / "packed", "train")
    stored.write_bytes(stored.read_bytes()[:-1] + b"x")
    fresh = open_packed(epath.Path("gs://bucket/packed"), "train").images
    assert f"gs://bucket/packed/{stored.name} has changed since it was packed" in refusal(fresh.read, 0)
    assert {path.suffix for path in cache.iterdir()} == {".lock"}
    stored.unlink()
    assert "cannot read gs://bucket/packed/train-00000" in refusal(fresh.read, 0)


def test_a_machine_copies_a_shard_once_for_all_its_processes(small_voc, bucket, monkeypatch):
    """Threads open the file of the lock separately, as processes do."""
    pack(config_of(small_voc), "gs://bucket/packed")
    bucket.clear()
    fetch = packed._fetch
    monkeypatch.setattr(packed, "_fetch", lambda *shard: (time.sleep(0.05), fetch(*shard)))
    shards = open_packed("gs://bucket/packed", "train").images.shards
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda number: packed._cached("gs://bucket/packed", shards[number % 3]), range(24)))
    assert len(set(paths)) == 3
    assert sorted(bucket) == sorted(f"gs://bucket/packed/{shard.file}" for shard in shards)
