"""Reading packed data sets from disk and from object stores, whatever their manifest names."""

import functools
import json
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from etils import epath
from etils.epath import testing as epath_testing
from helpers.packing import assert_same_split, config_of, files_of

from mlmoe_jax.apps.tools.pack import pack
from mlmoe_jax.data.images import BadImage
from mlmoe_jax.data.sources import packed
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.sources.packed import open_packed, verify


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_changed_byte_is_detected(packed_folder, refusal):
    shard = packed_folder / "train-00001-of-00003.arrayrecord"
    image = open_packed(packed_folder, "train").images.encoded(4)
    flip(shard, shard.read_bytes().index(image) + len(image) // 2)
    assert [sentence for sentence in verify(packed_folder) if sentence] == [
        f"{shard} has changed since it was packed (its sha256 differs); copy it again, or delete it and repeat the "
        "--mode=pack command"
    ]
    images = open_packed(packed_folder, "train").images
    assert images.encoded(0)
    sentence = refusal(images.read, 4, error=BadImage)
    assert sentence.startswith(f"cannot read JPEGImages/t4.jpg in {shard} as an image: the shard is damaged")


def test_changed_labels_are_detected_when_a_split_is_opened(packed_folder, refusal):
    flip(packed_folder / "train.npz", 100)
    assert "train.npz has changed since it was packed" in refusal(open_packed, packed_folder, "train")
    assert len(open_packed(packed_folder, "val")) == 2


def test_missing_and_shortened_shards_are_refused(packed_folder, refusal):
    first, second = (packed_folder / f"train-0000{n}-of-00003.arrayrecord" for n in range(2))
    second.write_bytes(second.read_bytes()[:100])
    first.unlink()
    images = open_packed(packed_folder, "train").images
    assert f"{first} is missing or damaged: it has 0 images instead of 3" in refusal(images.read, 0)
    assert str(second) in refusal(images.read, 3)
    assert images.read(6).ndim == 3
    assert [str(first) in sentence for sentence in verify(packed_folder) if sentence] == [True, False]


def test_other_folders_splits_and_manifests_are_refused(packed_folder, tmp_path, refusal):
    assert refusal(open_packed, tmp_path, "train").startswith(f"cannot read {tmp_path}/manifest.json: ")
    assert refusal(open_packed, packed_folder, "nope") == "data set packed has no split 'nope'; it has train, val"
    manifest = (packed_folder / "manifest.json").read_text()
    for damaged in (manifest[:50], "[]", '{"source": "csv"}'):
        (packed_folder / "manifest.json").write_text(damaged)
        assert "manifest.json is damaged" in refusal(open_packed, packed_folder, "train")


def test_readers_open_lazily_are_limited_and_can_be_pickled(packed_folder, monkeypatch):
    opened = functools.lru_cache(maxsize=2)(packed._reader.__wrapped__)
    monkeypatch.setattr(packed, "_reader", opened)
    images = open_packed(packed_folder, "train").images
    assert opened.cache_info().currsize == 0
    expected = [images.encoded(row) for row in range(7)]
    assert opened.cache_info()[1:] == (3, 2, 2), "three shards, of which two stay open"
    rows = np.random.default_rng(0).integers(0, 7, 2000).tolist()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(pickle.loads(pickle.dumps(images)).encoded, rows)) == [expected[row] for row in rows]
    assert images.encoded(-1) == expected[6]
    with pytest.raises(IndexError):
        images.encoded(7)


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
    stored = tmp_path / "store" / "bucket" / "packed" / "train-00000-of-00003.arrayrecord"
    flip(stored, 5)
    fresh = open_packed(epath.Path("gs://bucket/packed"), "train").images
    assert "gs://bucket/packed/train-00000-of-00003.arrayrecord has changed since it was packed" in refusal(
        fresh.read, 0
    )
    assert {path.suffix for path in cache.iterdir()} == {".lock"}
    stored.unlink()
    assert "cannot copy gs://bucket/packed/train-00000" in refusal(fresh.read, 0)


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


def test_a_missing_package_for_an_object_store_is_reported(refusal):
    def not_installed(*_, **__):
        raise ImportError("Please install gcsfs to access Google Storage")

    with epath_testing.mock_epath(stat=not_installed):
        assert refusal(open_packed, "gs://bucket/packed", "train") == (
            "cannot read gs://bucket/packed/manifest.json: Please install gcsfs to access Google Storage"
        )


# --------------------------------------------------------- manifests and links of somebody else
HOSTILE = [
    ("file", "../../../escaped.txt"),
    ("file", "/etc/passwd"),
    ("file", ".."),
    ("file", "a\0b"),
    ("file", None),
    ("sha256", "0" * 63),
    ("sha256", "../" * 21 + "a"),
    ("sha256", "0" * 64 + "\n"),
    ("sha256", None),
    ("bytes", "9"),
]


def alter(manifest: Path, part: str, key: str, value) -> None:
    content = json.loads(manifest.read_text())
    of_split = content["splits"]["train"]
    (of_split["labels"] if part == "labels" else of_split["shards"][1])[key] = value
    manifest.write_text(json.dumps(content))


@pytest.mark.parametrize("part", ["labels", "shards"])
@pytest.mark.parametrize(("key", "value"), HOSTILE)
def test_a_manifest_names_only_files_in_its_folder(packed_folder, refusal, part, key, value):
    alter(packed_folder / "manifest.json", part, key, value)
    assert f"{packed_folder}/manifest.json is damaged: " in refusal(open_packed, packed_folder, "train")
    assert f"{packed_folder}/manifest.json is damaged: " in refusal(lambda: list(verify(packed_folder)))
