"""The page docs/corpus.md, followed from a data set of the hub to the labels of a corpus, on small local copies."""

import io
import shlex

import numpy as np
import pyarrow.dataset as ds
import pytest
from helpers import hub_site
from helpers.documents import blocks
from helpers.parquet_files import IMAGE, class_label, content, sequence
from helpers.paths import REPOSITORY
from huggingface_hub import constants
from PIL import Image

from mlmoe_jax.main import main

PAGE = REPOSITORY / "docs" / "corpus.md"
CLASSES = ("red", "green", "blue")
SMALL = ["--config.data.image_size=32", "--config.data.workers=0"]


def shard(count: int, seed: int) -> bytes:
    """Return a Parquet file as the datasets library writes it: each label adds its color to noise."""
    draw = np.random.default_rng(seed)
    labels = draw.random((count, 3)) < 0.5
    pixels = draw.integers(0, 60, (count, 40, 48, 3)) + 180 * labels[:, None, None, :]
    images = []
    for image in pixels.astype(np.uint8):
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "PNG")
        images.append({"bytes": buffer.getvalue(), "path": None})
    names = [np.flatnonzero(row).tolist() for row in labels]
    return content({"image": images, "labels": names}, {"image": IMAGE, "labels": sequence(class_label(*CLASSES))})


def follow(block: str, hub) -> None:
    """Run the commands of a block. A folder stands for the bucket; after the first command, there is no network."""
    for line in block.splitlines():
        program, *words = shlex.split(line.replace("USER/NAME", "ada/colors").replace("gs://BUCKET", "bucket"))
        assert program == "mlmoe"
        assert main(words + (SMALL if words[0] in ("data", "train", "features") else [])) == 0, line
        hub.fail["api"] = hub.fail["resolve"] = (503, "")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with hub_site.running(monkeypatch) as running:
        files = {"data/train-00000-of-00001.parquet": shard(48, 0), "data/test-00000-of-00001.parquet": shard(24, 1)}
        running.repositories["datasets/ada/colors"] = {"main": {"README.md": b"# Colors\n", **files}}
        yield running


@pytest.mark.budget(90)
def test_the_page_leads_from_the_hub_to_labels(hub, tmp_path):
    images = tmp_path / "bucket" / "images"
    images.mkdir(parents=True)
    (images / "0.parquet").write_bytes(shard(24, 2))
    labeled, packed = (block.text for block in blocks(PAGE, "bash", "From a data set of the hub to labels in a bucket"))
    follow(labeled, hub)
    table = ds.dataset("bucket/labels", format="parquet").to_table()
    assert table.column("image").to_pylist() == [f"bucket/images/0.parquet#{row}" for row in range(24)]
    expected = (np.random.default_rng(2).random((24, 3)) < 0.5).tolist()
    found = [[name in labels for name in CLASSES] for labels in table.column("labels").to_pylist()]
    assert np.mean(np.array(found) == expected) > 0.8
    (features,) = (block.text for block in blocks(PAGE, "bash", "Features"))
    follow(features, hub)
    table = ds.dataset("bucket/features", format="parquet").to_table()
    assert table.column("image").to_pylist() == [f"bucket/images/0.parquet#{row}" for row in range(24)]
    assert len(table.column("features")[0]) == 1280
    follow(packed, hub)
    assert (tmp_path / "runs" / "packed" / "results.json").is_file()
