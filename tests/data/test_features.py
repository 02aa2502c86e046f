"""Features in files: their parts, their types, their key, and what is said about a full disk or a damaged file."""

import errno
import os

import numpy as np
import pytest
from PIL import Image

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
        if row == 4:
            assert found is None
            continue
        for kind, value in values.items():
            assert found[kind].dtype == np.float32
            np.testing.assert_array_equal(found[kind], value[row])
    assert {kind: value.shape for kind, value in table.blank().items()} == {"cls": (3,), "patches": (2, 2, 3)}
    assert features._mapped.cache_info().currsize == 3 * (1 + len(KINDS))
    assert features._mapped.cache_info().maxsize < 1000, "each mapped file has a descriptor"


def test_float16_halves_the_space_and_is_read_in_the_computed_type(tmp_path, refusal):
    half, values = FeatureTable(tmp_path / "half", ROWS, KINDS, "float16"), drawn()
    fill(half, values, np.ones(ROWS, bool))
    assert half.row_bytes == 15 * 2
    assert half[2]["cls"].dtype == np.float32
    np.testing.assert_array_equal(half[2]["cls"], values["cls"][2].astype(np.float16))
    values["cls"][5] = 1e5
    assert "not finite in float16" in refusal(half.write, 0, values, np.ones(ROWS, bool))
    unread = np.arange(ROWS) != 5
    half.write(0, values, unread)  # an image that was not read may hold anything


def test_a_damaged_file_is_named(table, refusal):
    fill(table, drawn(), np.ones(ROWS, bool))
    path = table.folder / "00000.patches.npy"
    path.write_bytes(path.read_bytes()[:-20])
    assert f"{path} of the cache, which may be deleted, is damaged: " in refusal(table.__getitem__, 0)


def test_a_file_that_cannot_be_opened_is_not_called_damaged(table, refusal, monkeypatch):
    fill(table, drawn(), np.ones(ROWS, bool))

    def full(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(np, "load", full)
    sentence = refusal(table.__getitem__, 0)
    assert sentence.startswith(f"cannot read {table.folder / '00000.read.npy'}")
    assert sentence.endswith(": Too many open files")


def test_images_that_could_not_be_read_are_known_and_can_be_replaced(table):
    values, read = drawn(), ~np.isin(np.arange(ROWS), (1, 4))
    fill(table, values, read)
    assert table.unread() == [1, 4]
    assert table.find_parts(table.unread()) == [0, 1]
    rows = table.list_rows(1)
    table.write(1, {kind: value[rows] for kind, value in values.items()}, np.ones(3, bool))
    np.testing.assert_array_equal(table[4]["cls"], values["cls"][4])
    assert table.unread() == [1]


# -------------------------------------------------------------------------------------------------------------- its key
def test_the_key_depends_on_the_settings_and_the_ids():
    images = ArrayImages(np.zeros((2, 4, 4, 3), np.uint8))

    def folder(ids=("a", "b"), kinds=KINDS, stored="float32", settings=None):
        return open_feature_table(images, ids, kinds, stored, settings or {"backbone": "x"}).folder

    assert folder() == folder()
    others = [
        folder(ids=("a", "c")),
        folder(kinds={"cls": KINDS["cls"]}),
        folder(stored="float16"),
        folder(settings={"backbone": "y"}),
    ]
    assert len({folder(), *others}) == 5


def test_the_key_depends_on_the_images(tmp_path):
    """By size and time for files, by content for all others; also through `take`."""

    def folder(images):
        return open_feature_table(images, ["a"] * len(images), KINDS, "float32", {}).folder

    pixels = np.zeros((2, 4, 4, 3), np.uint8)
    before = folder(ArrayImages(pixels))
    changed = pixels.copy()
    changed[1, 0, 0, 0] = 1
    assert folder(ArrayImages(changed)) != before
    assert folder(ArrayImages(changed).take(np.array([0, 0]))) == folder(ArrayImages(pixels).take(np.array([1, 0])))

    for name in ("a.png", "b.png"):
        Image.fromarray(pixels[0]).save(tmp_path / name)
    files = ImageFiles(tmp_path, ["a.png", "b.png"])
    before = folder(files)
    assert folder(files) == before
    os.utime(tmp_path / "b.png", (1, 1))
    after = folder(files)
    assert after != before
    (tmp_path / "b.png").unlink()
    assert folder(files) not in (before, after)


def test_stored_bytes_are_stamped_without_decoding():
    class Stored(EncodedImages):
        __len__ = None

        def encoded(self, row):
            return b"no image %d" % row

    stamps = {Stored().stamp(row) for row in (0, 1, 0)}
    assert len(stamps) == 2
