"""Lists of paths that stay on disk."""

import io
import pickle
from types import SimpleNamespace

import pytest

from mlmoe_jax.apps.tools import path_list
from mlmoe_jax.apps.tools.path_list import PathList, read_path_list
from mlmoe_jax.errors import UserError


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [7, 64])
def test_paths_are_read_in_any_order_from_blocks_of_lines(tmp_path, monkeypatch, end, size):
    monkeypatch.setattr(path_list, "BLOCK", size)
    names = [f"é{number}.jpg" * (number % 4 + 1) for number in range(200)]
    names[3:3] = ["/absolute.jpg", "gs://bucket/y.jpg"]
    file = tmp_path / "list.txt"
    file.write_bytes(("\ufeff" + end + end.join(names[:50]) + end * 3 + end.join(names[50:])).encode())
    paths = PathList(str(file), "photos", "@list.txt")
    wanted = [name if name[0] == "/" or "://" in name else f"photos/{name}" for name in names]
    assert len(paths) == len(names)
    assert [paths[row] for row in reversed(range(len(paths)))] == wanted[::-1]
    assert list(pickle.loads(pickle.dumps(paths))) == wanted, "as in a process that reads images"


def test_memory_holds_the_places_of_blocks_and_few_blocks(tmp_path):
    file = tmp_path / "list.txt"
    file.write_text("".join(f"photos/{number:09d}.jpg\n" for number in range(200_000)))
    paths = PathList(str(file), "", "@list.txt")
    assert sum(1 for path in paths if path.endswith(".jpg")) == 200_000
    assert len(paths._starts) < 100
    assert len(paths._blocks) <= path_list._KEPT_BLOCKS


def test_a_list_that_changes_is_refused(tmp_path):
    file = tmp_path / "list.txt"
    file.write_text("a.jpg\nb.jpg\n")
    paths = PathList(str(file), "", "@list.txt")
    file.write_text("a.jpg\nbb.jpg\n")
    with pytest.raises(UserError, match=r"the list @list.txt has changed while it was read; repeat the command"):
        paths[0]


def test_the_copy_of_standard_input_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(path_list.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(path_list.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"a.jpg\nb.jpg\n")))
    paths = read_path_list("-")
    assert list(paths) == ["a.jpg", "b.jpg"]
    assert len(list(tmp_path.iterdir())) == 1
    del paths
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(path_list.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"a\0b\n")))
    with pytest.raises(UserError, match="the list - is not UTF-8"):
        read_path_list("-")
    assert not list(tmp_path.iterdir())
