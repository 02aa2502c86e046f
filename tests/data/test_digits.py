"""`digits-v1` stands for exactly these scenes: a change of any label or pixel fails here."""

import csv
import functools
import zlib

import numpy as np
import pytest

from mlmoe_jax.data.decoding import read_image
from mlmoe_jax.data.sources import digits
from mlmoe_jax.data.sources.digits import SCENES, SINGLES, open_scenes, open_single

LABEL_CHECKSUM = {"train": 4131376806, "val": 4095059040, "test": 3475433322, "test_shift": 1978861616}
MEAN_COLOR = {
    "train": (127.6385, 128.1927, 127.5940),
    "val": (126.2906, 127.4783, 127.2113),
    "test": (127.0038, 127.7177, 127.4406),
    "test_shift": (128.4484, 127.9534, 127.5956),
}
SINGLE_MEAN_COLOR = {  # of the first 200
    "train": (124.6438, 130.7835, 124.2821),
    "val": (127.8201, 126.8999, 125.2185),
    "test": (123.9579, 128.6307, 131.4893),
}


# ------------------------------------------------------------------------------------------------------------ cache
@pytest.fixture
def few_scenes(monkeypatch, tmp_path):
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digits, "SCENES", {"train": 12, "val": 4, "test": 6, "test_shift": 6})
    digits._scenes.cache_clear()
    yield
    digits._scenes.cache_clear()


@pytest.mark.usefixtures("few_scenes")
def test_scenes_are_rendered_once_for_all_programs(monkeypatch):
    render = functools.partial(digits._scenes.__wrapped__, "val", 4)
    labels, images = render()
    monkeypatch.setattr(digits, "_render_scenes", None)
    again, kept = render()
    np.testing.assert_array_equal(again, labels)
    np.testing.assert_array_equal(kept, images)
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 0
    monkeypatch.setattr(digits.Path, "read_bytes", lambda _: b"another state of the file")
    with pytest.raises(TypeError):
        render()


# ----------------------------------------------------------------------------------------------------------- labels
@pytest.mark.parametrize("name", SCENES)
def test_labels_have_not_changed(name):
    assert zlib.crc32(digits.scene_labels(name).astype(np.int8).tobytes()) == LABEL_CHECKSUM[name]


# ----------------------------------------------------------------------------------------------------- source scans
def test_scans_are_disjoint_between_parts_and_complete():
    parts = [{scan.tobytes() for of_digit in part for scan in of_digit} for part in digits.source_scans().values()]
    assert [len(part) for part in parts] == [1_078, 269, 450]
    assert len(set.union(*parts)) == 1_797  # no scan occurs twice, not even under another row


# ----------------------------------------------------------------------------------------------------------- pixels
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "val" else pytest.mark.slow) for name in SCENES]
)
def test_pixels_have_not_changed_and_all_scenes_differ(name):
    split = open_scenes(name)
    assert split.classes == tuple("0123456789")
    images = split.images.array
    assert (images.shape, images.dtype) == ((SCENES[name], 64, 64, 3), np.uint8)
    np.testing.assert_allclose(images.mean(axis=(0, 1, 2)), MEAN_COLOR[name], atol=1e-3)
    assert len({image.tobytes() for image in images}) == SCENES[name]


@pytest.mark.variants(name=("val",))
@pytest.mark.parametrize("name", SINGLES)
def test_single_digits(name):
    split = open_single(name)
    assert len(split) == SINGLES[name]
    assert (split.labels[:].sum(axis=1) == 1).all()
    assert split.labels[:][13, 3] == 1
    images = np.stack([split.images.read(row) for row in range(200)])
    np.testing.assert_allclose(images.mean(axis=(0, 1, 2)), SINGLE_MEAN_COLOR[name], atol=1e-3)
    np.testing.assert_array_equal(open_single(name).images.read(150), images[150])


# --------------------------------------------------------------------------------------------------------- as files
@pytest.mark.usefixtures("few_scenes")
def test_written_files_hold_the_scenes(tmp_path, capsys):
    digits.write_files(tmp_path)
    assert f"{tmp_path}/train.csv: 12 images" in capsys.readouterr().err.splitlines()
    for name, count in digits.SCENES.items():
        split = open_scenes(name)
        with open(tmp_path / f"{name}.csv", newline="") as table:
            rows = list(csv.DictReader(table))
        assert len(rows) == count
        for row, image, labels in zip(rows, map(split.images.read, range(len(split))), split.labels, strict=True):
            assert row["labels"].split(";") == [str(digit) for digit in np.flatnonzero(labels)]
            np.testing.assert_array_equal(read_image(tmp_path / row["image"]), image)
