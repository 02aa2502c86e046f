"""Images in Parquet files: every way to store them, in order and at random."""

import io
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mlmoe_jax.data.containers import parquet
from mlmoe_jax.data.containers.catalog import open_images
from mlmoe_jax.data.usage import Usage


def encode(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (shade % 256, shade // 256, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def open_all(address, column=""):
    return open_images(str(address), Usage(str(address), "file"), column=column)


@pytest.fixture
def small_parts(monkeypatch, tmp_path):
    """Parts of a few images, of which few are kept, and an empty cache folder."""
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    for name, value in {"PART_BYTES": 500, "KEPT_BYTES": 2000, "SMALL": 20}.items():
        monkeypatch.setattr(parquet, name, value)


@pytest.fixture
def folder(tmp_path):
    """300 images in two files, in groups of 70."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for file in range(2):
        images = [{"bytes": encode(k), "path": f"{k}.png"} for k in range(150 * file, 150 * file + 150)]
        pq.write_table(pa.table({"image": images}), folder / f"train-{file}.parquet", row_group_size=70)
    return folder


def test_rows_in_order_are_decoded_once(folder, small_parts):
    images = open_all(folder)
    assert [images.encoded(row) for row in range(300)] == [encode(k) for k in range(300)]
    assert images._reader.decoded == 300
    assert not (folder.parent / "cache").exists()
    assert images.name(0) == f"{folder}/train-0.parquet#0"
    assert images.name(299) == f"{folder}/train-1.parquet#149"


def test_rows_at_random_are_read_from_a_copy_that_is_made_once(folder, small_parts, monkeypatch):
    order = np.random.default_rng(0).permutation(300)
    images = open_all(folder)
    assert all(images.encoded(int(row)) == encode(int(row)) for row in order)
    assert images._reader.decoded < 900  # 300 rows of about 70 would be 21,000
    assert len(list((folder.parent / "cache" / "parquet").glob("*.arrow"))) == 6
    others = pickle.loads(pickle.dumps(open_all(folder)))
    monkeypatch.setattr(parquet._Reader, "_write", None)
    assert all(others.encoded(int(row)) == encode(int(row)) for row in order)


def test_a_worker_receives_few_bytes(folder):
    assert len(pickle.dumps(open_all(folder))) < 2000
