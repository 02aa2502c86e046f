"""Packed data sets whose manifest, or a link beside it, points somewhere else."""

import json
from pathlib import Path

import pytest
from helpers.packing import config_of, files_of

from mlmoe_jax.apps.tools.pack import pack
from mlmoe_jax.data.sources.packed import open_packed, verify

HOSTILE = [
    ("file", "../../../escaped.txt", "manifest.json names the file '../../../escaped.txt', which is not in its folder"),
    ("file", "/etc/passwd", "manifest.json names the file '/etc/passwd', which is not in its folder"),
    ("file", "..", "manifest.json names the file '..', which is not in its folder"),
    ("file", "a\0b", "manifest.json names the file 'a\\x00b', which is not in its folder"),
    ("file", None, "manifest.json names the file None, which is not in its folder"),
    ("sha256", "0" * 63, "manifest.json has no sha256 of 64 hex digits for "),
    ("sha256", "../" * 21 + "a", "manifest.json has no sha256 of 64 hex digits for "),
    ("sha256", "0" * 64 + "\n", "manifest.json has no sha256 of 64 hex digits for "),
    ("sha256", None, "manifest.json has no sha256 of 64 hex digits for "),
]


def alter(manifest: Path, part: str, key: str, value) -> None:
    content = json.loads(manifest.read_text())
    of_split = content["splits"]["train"]
    (of_split["labels"] if part == "labels" else of_split["shards"][1])[key] = value
    manifest.write_text(json.dumps(content))


@pytest.mark.parametrize("part", ["labels", "shards"])
@pytest.mark.parametrize(("key", "value", "sentence"), HOSTILE)
def test_a_manifest_names_only_files_in_its_folder(small_voc, packed_folder, refusal, part, key, value, sentence):
    alter(packed_folder / "manifest.json", part, key, value)
    before = files_of(packed_folder)
    assert f"{packed_folder}/{sentence}" in refusal(open_packed, packed_folder, "train")
    assert f"{packed_folder}/{sentence}" in refusal(lambda: list(verify(packed_folder)))
    if part == "shards":
        assert f"{packed_folder}/{sentence}" in refusal(pack, config_of(small_voc), packed_folder)
        assert files_of(packed_folder) == before


def test_links_are_replaced_when_a_data_set_is_packed(small_voc, tmp_path, packed_folder, precious):
    expected = files_of(packed_folder)
    output = tmp_path / "other"
    output.mkdir()
    (output / ".manifest.json.tmp").symlink_to(precious)
    (output / ".unfinished.json.tmp").symlink_to(precious)
    (output / ".train-00000-of-00003.arrayrecord.tmp").symlink_to(precious)
    assert pack(config_of(small_voc), output) == 0
    assert files_of(output) == expected
    (output / "train-00001-of-00003.arrayrecord").unlink()
    for name in ("train-00001-of-00003.arrayrecord", "train.npz"):
        (output / name).unlink(missing_ok=True)
        (output / name).symlink_to(precious)
    assert pack(config_of(small_voc), output) == 0
    assert files_of(output) == expected
    assert not any(path.is_symlink() for path in output.iterdir())


@pytest.mark.parametrize(("key", "value", "sentence"), HOSTILE)
def test_a_bucket_writes_nothing_outside_the_cache(small_voc, tmp_path, bucket, refusal, key, value, sentence):
    pack(config_of(small_voc), "gs://bucket/packed")
    (tmp_path / "store" / "escaped.txt").write_text("of the bucket")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    bucket.clear()
    alter(tmp_path / "store" / "bucket" / "packed" / "manifest.json", "shards", key, value)
    assert f"gs://bucket/packed/{sentence}" in refusal(open_packed, "gs://bucket/packed", "train")
    assert not bucket, "nothing is fetched"
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_shard_is_checked_before_it_leaves_a_temporary_file(small_voc, tmp_path, bucket, refusal):
    pack(config_of(small_voc), "gs://bucket/packed")
    shard = "train-00001-of-00003.arrayrecord"
    alter(tmp_path / "store" / "bucket" / "packed" / "manifest.json", "shards", "sha256", "0" * 64)
    bucket.clear()
    images = open_packed("gs://bucket/packed", "train").images
    assert f"gs://bucket/packed/{shard} has changed since it was packed" in refusal(images.read, 4)
    ((source, target),) = bucket
    assert source == f"gs://bucket/packed/{shard}"
    cache = tmp_path / "cache" / "packed"
    assert Path(target).parent.parent == cache
    assert Path(target).parent.name.startswith("fetching-")
    assert not list(cache.iterdir())
