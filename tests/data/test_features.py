"""Features in files: their parts, their types, their key, and what is computed again."""

import os

import numpy as np
import pytest
from helpers.tables import write_images

from mlmoe_jax.data import features
from mlmoe_jax.data.features import FeatureTable, open_feature_table
from mlmoe_jax.data.images import ArrayImages, EncodedImages, ImageFiles

KINDS = {"cls": ((3,), "float32"), "patches": ((2, 2, 3), "float32")}
ROWS = 7


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table of parts of three images."""
    monkeypatch.setattr(features, "PART_BYTES", 3 * 15 * 4)
    return FeatureTable(tmp_path / "table", ROWS, KINDS, "float32")


def drawn(rows: int = ROWS) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {kind: draw.normal(size=(rows, *shape)).astype(np.float32) for kind, (shape, _) in KINDS.items()}


def fill(table: FeatureTable, values: dict[str, np.ndarray], read: np.ndarray) -> None:
    for part in table.missing():
        rows = table.list_rows(part)
        table.write(part, {kind: value[rows] for kind, value in values.items()}, read[rows])


def test_parts_are_written_and_read_by_row(table):
    values, read = drawn(), np.arange(ROWS) != 4
    assert table.missing() == [0, 1, 2]
    assert [list(table.list_rows(part)) for part in range(3)] == [[0, 1, 2], [3, 4, 5], [6]]
    fill(table, values, read)
    assert table.missing() == []
    assert not list(table.folder.glob(".*")), "no half-written file remains"
    features._mapped.cache_clear()
    for row in range(ROWS):
        found = table[row]
        assert (found is None) == (row == 4)
        for kind, value in (found or {}).items():
            assert value.dtype == np.float32
            np.testing.assert_array_equal(value, values[kind][row])
    assert {kind: value.shape for kind, value in table.blank().items()} == {"cls": (3,), "patches": (2, 2, 3)}
    assert features._mapped.cache_info().currsize == 3 * (1 + len(KINDS))
    assert features._mapped.cache_info().maxsize < 1000, "each mapped file has a descriptor"


def test_float16_halves_the_space_and_is_read_in_the_computed_type(tmp_path):
    half, values = FeatureTable(tmp_path / "half", ROWS, KINDS, "float16"), drawn()
    fill(half, values, np.ones(ROWS, bool))
    assert half.row_bytes == 15 * 2
    assert half[2]["cls"].dtype == np.float32
    np.testing.assert_array_equal(half[2]["cls"], values["cls"][2].astype(np.float16))
    values["cls"][5] = 1e5
    unread = np.arange(ROWS) != 5
    half.write(0, values, unread)  # an image that was not read may hold anything


def test_images_that_could_not_be_read_are_known_and_can_be_replaced(table):
    values, read = drawn(), ~np.isin(np.arange(ROWS), (1, 4))
    fill(table, values, read)
    asked = []
    assert table.missing(lambda row: asked.append(row) or row == 4) == [1]
    assert asked == [1, 4]
    rows = table.list_rows(1)
    table.write(1, {kind: value[rows] for kind, value in values.items()}, np.ones(3, bool))
    np.testing.assert_array_equal(table[4]["cls"], values["cls"][4])
    assert table.missing(lambda row: True) == [0]


# -------------------------------------------------------------------------------------------------------------- its key
def test_the_key_depends_on_the_settings_and_the_ids():
    images, given = ArrayImages(np.zeros((2, 4, 4, 3), np.uint8)), ("ab", KINDS, "float32", {"backbone": "x"})
    changes = ("ac", {"cls": KINDS["cls"]}, "float16", {"backbone": "y"})
    others = [(*given[:k], change, *given[k + 1 :]) for k, change in enumerate(changes)]
    folders = [open_feature_table(images, *keys).folder for keys in (given, given, *others)]
    assert folders[0] == folders[1]
    assert len(set(folders)) == 5


def test_the_key_depends_on_the_images(tmp_path):
    """By size and time for files, by content for all others; also through `take`."""

    def folder(images):
        return open_feature_table(images, ["a"] * len(images), KINDS, "float32", {}).folder

    pixels = np.zeros((2, 4, 4, 3), np.uint8)
    before, changed = ArrayImages(pixels), ArrayImages(pixels + np.arange(2, dtype=np.uint8)[:, None, None, None])
    assert folder(changed) != folder(before)
    assert folder(changed.take(np.array([0, 0]))) == folder(before.take(np.array([1, 0])))

    write_images(tmp_path, ("a.png", "b.png"))
    files = ImageFiles(tmp_path, ["a.png", "b.png"])
    keys = [folder(files), folder(files)]
    os.utime(tmp_path / "b.png", (1, 1))
    keys.append(folder(files))
    (tmp_path / "b.png").unlink()
    keys.append(folder(files))
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_stored_bytes_are_stamped_without_decoding():
    class Stored(EncodedImages):
        __len__ = None

        def encoded(self, row):
            return b"no image %d" % row

    stamps = {Stored().stamp(row) for row in (0, 1, 0)}
    assert len(stamps) == 2
