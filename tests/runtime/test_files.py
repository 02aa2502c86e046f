"""Files that have no end or are none, and npz files that ask for more memory than they may."""

import io
import os
import socket
import tracemalloc
import zipfile

import numpy as np
import pytest

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime import files, formats
from mlmoe_jax.runtime.files import damage_explained, lines_of, open_regular, read_bytes, read_stream
from mlmoe_jax.runtime.formats import read_npz
from mlmoe_jax.runtime.storage import Folder


@pytest.fixture(params=["pipe", "socket", "device", "folder", "long name", "NUL", "surrogate"])
def no_file(request, tmp_path, monkeypatch):
    """A path that no regular file has."""
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    if request.param == "pipe":
        os.mkfifo("x")
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("x")
            yield "x"
            return
    elif request.param == "folder":
        os.mkdir("x")
    yield {"device": "/dev/zero", "long name": "x" * 5000, "NUL": "a\0b", "surrogate": "\ud800"}.get(request.param, "x")


def test_only_regular_files_are_read(no_file):
    with pytest.raises(OSError) as raised:  # noqa: PT011
        read_bytes(no_file, 10)
    assert raised.value.strerror


def test_a_file_has_a_limit_of_bytes(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_bytes(path, 4)
    os.truncate(path, 40 << 30)  # without taking space
    with pytest.raises(OSError, match="more than 536,870,912 bytes"):
        read_bytes(path, files.MOST_TEXT)
    with open_regular("/proc/self/maps") as file, pytest.raises(OSError, match="more than 4 bytes"):
        read_stream(file, 4)  # its size is stated as 0


def test_a_stream_without_end_is_read_up_to_its_limit():
    with open("/dev/zero", "rb") as file, pytest.raises(OSError, match="more than 3,000,000 bytes"):
        read_stream(file, 3_000_000)


def test_a_store_without_its_library_is_an_os_error():
    with pytest.raises(OSError) as raised:  # noqa: PT011
        read_bytes("nosuchstore://x/y", 10)
    assert raised.value.strerror


def test_a_line_has_a_limit(monkeypatch):
    monkeypatch.setattr(files, "MOST_LINE", 4)
    assert list(lines_of(io.StringIO("abc\nde"))) == ["abc\n", "de"]
    with pytest.raises(ValueError, match="more than 4 letters"):
        list(lines_of(io.StringIO("abc\nabcde\n")))


# ----------------------------------------------------------------------------------------------------------------- npz
def stored(**arrays) -> io.BytesIO:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize(
    "array",
    [np.float32([[1, 2], [3, 4]]), np.array(5), np.array(["a", "größe"]), np.array([b"x"]), np.zeros((0, 3), np.int8)],
)
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_are_read_as_numpy_reads_them(array, order):
    array = np.asarray(array, order=order)
    found = read_npz(stored(a=array))["a"]
    np.testing.assert_array_equal(found, np.load(stored(a=array))["a"])
    assert (found.dtype, found.flags.writeable) == (array.dtype, True)


def member(header: str, content: bytes = b"", version: bytes = b"\1\0") -> io.BytesIO:
    """Return an npz with one array of this header."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        length = len(header).to_bytes(2 if version == b"\1\0" else 4, "little")
        archive.writestr("a.npy", b"\x93NUMPY" + version + length + header.encode() + content)
    return buffer


HEADER = "{{'descr': {}, 'fortran_order': False, 'shape': {}}}"


@pytest.mark.parametrize(
    ("descr", "shape"),
    [
        ("'<f4'", "(1000000000000,)"),
        ("'<f4'", "(10**23,)"),
        ("'<f4'", "(" * 3000),
        ("'<f4'", "(-4,)"),
        ("'<f4'", "(0, 1000000000000)"),
        ("'<f4'", "(3,)"),  # more than there is
        ("'|O'", "(1,)"),
        ("'<U0'", "(9,)"),
        ("'<U999999999'", "()"),
        ("[('a', '<f4')]", "(1,)"),
    ],
)
def test_a_header_that_does_not_fit_is_one_sentence_before_memory_is_taken(descr, shape, refusal):
    def read():
        with damage_explained("scores.npz"):
            read_npz(member(HEADER.format(descr, shape), b"\0" * 8))

    tracemalloc.start()
    assert refusal(read).startswith("scores.npz is damaged: ")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30e6


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_methods_and_members_that_numpy_does_not_write_are_refused(method):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("a.npy", b"")
    with pytest.raises(ValueError, match="not one that numpy writes"):
        read_npz(buffer)
    with pytest.raises(ValueError, match="unknown version"):
        read_npz(member(HEADER.format("'<f4'", "()"), b"\0" * 4, b"\3\0"))


def test_a_file_that_unpacks_to_far_more_than_its_size_is_refused(monkeypatch):
    bomb = stored(a=np.zeros(1_000_000, np.int8))
    assert read_npz(bomb)["a"].nbytes == 1_000_000
    monkeypatch.setattr(formats, "USUAL", 0)
    with pytest.raises(ValueError, match="would unpack to 1,000,128 bytes"):
        read_npz(bomb, usual=0)
    noise = np.random.default_rng(0).bytes(5000)
    assert read_npz(stored(a=np.frombuffer(noise, np.uint8)), usual=0)["a"].tobytes() == noise


def test_a_flipped_bit_is_found():
    content = bytearray(stored(a=np.arange(1000)).getvalue())
    content[len(content) // 2] ^= 1
    with pytest.raises(UserError, match="a is damaged"), damage_explained("a"):
        read_npz(io.BytesIO(content))


def test_a_folder_reads_no_pipes(tmp_path, refusal):
    folder = Folder(tmp_path)
    os.mkfifo(tmp_path / "x")
    for read in (folder.read_text, folder.read_json, folder.read_npz, folder.read_bytes):
        assert refusal(read, "x") == f"cannot read {tmp_path / 'x'}: it is not a regular file"
