"""The images that `--images` names."""

import io
import os
from types import SimpleNamespace

import pytest

from mlmoe_jax.apps.tools import path_list
from mlmoe_jax.apps.tools.image_list import find_images
from mlmoe_jax.data.images import ImageNames
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.inputs import MixedImages


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A folder `photos` with images and other files, below the working directory."""
    for name in ("b.jpg", "a.PNG", "c/d.webp", "c/e/f.tiff", "c/notes.txt", ".hidden.jpg", ".thumbs/t.jpg", "x[1].jpg"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"-")
    (tmp_path / "photos" / "folder.jpg").mkdir()
    (tmp_path / "photos" / "gone.jpg").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    return tmp_path


IN_DEPTH = ["a.PNG", "b.jpg", "c/d.webp", "c/e/f.tiff", "gone.jpg", "x[1].jpg"]


def test_order_and_duplicates_are_kept(tree, caplog):
    given = ["photos/c/notes.txt", "photos/b.jpg", "photos/c", "photos/b.jpg"]
    found = [*given[:2], "photos/c/d.webp", "photos/c/e/f.tiff", "photos/b.jpg"]
    assert list(ImageNames(find_images(given).images)) == found
    assert caplog.messages[-1] == "--images names 1 image again, with a row for each time"
    assert list(ImageNames(find_images(given, repeats=False).images)) == found[:-1]
    assert caplog.messages[-1] == "--images: 1 of 5 images is not used: 1 named again"


def test_folders_follow_links_but_no_cycles(tree):
    (tree / "elsewhere").mkdir()
    (tree / "elsewhere" / "z.jpg").write_bytes(b"-")
    for name in ("up", "down"):
        (tree / "photos" / "c" / name).symlink_to(tree / "photos")
    (tree / "photos" / "linked").symlink_to(tree / "elsewhere")
    expected = [*IN_DEPTH[:-1], "linked/z.jpg", IN_DEPTH[-1]]
    assert list(ImageNames(find_images(["photos"]).images)) == [f"photos/{name}" for name in expected]


@pytest.mark.parametrize(
    ("item", "images"),
    [
        ("{tree}/photos/", IN_DEPTH),
        ("photos/**", [*IN_DEPTH[:3], "c/e/f.tiff", "c/notes.txt", *IN_DEPTH[4:]]),
        ("photos/[ab].*", ["a.PNG", "b.jpg"]),
        ("photos/x[1].jpg", ["x[1].jpg"]),  # the name of a file is not a pattern
    ],
)
def test_folders_are_searched_and_patterns_match(tree, item, images):
    folder = f"{tree}/photos" if "{tree}" in item else "photos"
    assert list(ImageNames(find_images([item.format(tree=tree)]).images)) == [f"{folder}/{name}" for name in images]


def test_links_to_themselves_and_entries_that_cannot_be_read_are_counted(tree, caplog, monkeypatch):
    for name, target in (("self", "self"), ("one.jpg", "two.jpg"), ("two.jpg", "one.jpg")):
        (tree / "photos" / name).symlink_to(target)
    assert list(ImageNames(find_images(["photos"]).images)) == [
        f"photos/{name}" for name in sorted([*IN_DEPTH, "one.jpg", "two.jpg"])
    ]
    assert "in no image format (c/notes.txt, self)" in caplog.messages[-1]

    class Entry:  # of a network drive
        name, path = "c", "photos/c"

        def is_dir(self):
            raise PermissionError

    monkeypatch.setattr(os, "scandir", lambda folder: [Entry()])
    with pytest.raises(UserError, match="1 in no image format \\(c\\)"):
        find_images(["photos"])


@pytest.mark.parametrize(
    ("item", "images", "unused"),
    [
        (
            "photos",
            ["a.PNG", "b.jpg", "c/d.webp", "c/e/f.tiff", "c/plain", "gone.jpg", "pipe.jpg", "x[1].jpg"],
            ["notes.txt", "up"],
        ),
        ("photos/**/[bx]*.jpg", ["b.jpg", "x[1].jpg"], [".hidden.jpg", ".thumbs/t.jpg", "c/up"]),
        ("photos/**/e/**", ["c/e/f.tiff"], ["c/up"]),
        ("**/c/*", ["c/d.webp", "c/notes.txt", "c/plain"], ["c/up"]),  # all files, but not folders
        ("photos/[cx]*", ["x[1].jpg"], ["photos/c"]),
    ],
)
def test_what_is_left_out_is_said_and_no_link_is_followed_in_a_circle(tree, caplog, item, images, unused):
    (tree / "photos" / "c" / "up").symlink_to(tree)
    os.mkfifo("photos/pipe.jpg")
    (tree / "photos" / "c" / "plain").write_bytes(b"P5 1 1 255 -")
    assert list(ImageNames(find_images([item]).images)) == [f"photos/{name}" for name in images]
    (warning,) = caplog.messages
    assert warning.startswith(f"{item}: ")
    assert all(name in warning for name in unused)


def test_names_are_found_composed_and_decomposed(tree):
    """As a Mac's archive has them, and as a person types them."""
    (tree / "e\u0301").mkdir()
    (tree / "e\u0301" / "\xfc.png").write_bytes(b"-")
    for item in ("\xe9", "e\u0301", "\xe9/u\u0308.png", "\xe9/*.png", "\xe9/**"):
        (path,) = list(ImageNames(find_images([item]).images))
        assert (
            MixedImages([path]).problem(0).endswith("is none of JPEG, PNG, WEBP, GIF, BMP, TIFF, PPM, JPEG2000, AVIF")
        )


def test_paths_in_a_list_are_relative_to_its_folder(tree):
    (tree / "photos" / "list.txt").write_text(f"b.jpg\r\n\nc/missing.jpg\n{tree}/x.jpg\ngs://bucket/y.jpg\nb.jpg")
    expected = ["photos/b.jpg", "photos/c/missing.jpg", f"{tree}/x.jpg", "gs://bucket/y.jpg", "photos/b.jpg"]
    assert list(ImageNames(find_images(["@photos/list.txt"]).images)) == expected
    (tree / "photos" / "list.txt").write_text("b.jpg\n", encoding="utf-8-sig")  # as some editors write it
    assert list(ImageNames(find_images(["@photos/list.txt"]).images)) == ["photos/b.jpg"]


def test_paths_on_standard_input_are_relative_to_the_working_directory(tree, monkeypatch):
    stdin = SimpleNamespace(buffer=io.BytesIO(b"photos/b.jpg\nmissing\xff.jpg\n"))
    monkeypatch.setattr(path_list.sys, "stdin", stdin)
    names = ["photos/a.PNG", "photos/b.jpg", os.fsdecode(b"missing\xff.jpg")]
    assert list(ImageNames(find_images(["photos/a.PNG", "-"]).images)) == names
