"""The images that `--images` names."""

import io
import os
from types import SimpleNamespace

import pytest

from mlmoe_jax.apps.tools import image_list
from mlmoe_jax.apps.tools.image_list import find_images
from mlmoe_jax.data.images import BadImage
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


def stdin(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(image_list.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))


def test_a_folder_is_searched_recursively(tree):
    assert find_images(["photos"]).paths == [f"photos/{name}" for name in IN_DEPTH]
    assert find_images([f"{tree}/photos/"]).paths == [f"{tree}/photos/{name}" for name in IN_DEPTH]


def test_order_and_duplicates_are_kept(tree, caplog):
    given = ["photos/c/notes.txt", "photos/b.jpg", "photos/c", "photos/b.jpg"]
    found = [*given[:2], "photos/c/d.webp", "photos/c/e/f.tiff", "photos/b.jpg"]
    assert find_images(given).paths == found
    assert caplog.messages[-1] == "--images names 1 image again, with a row for each time"
    assert find_images(given, repeats=False).paths == found[:-1]
    assert caplog.messages[-1] == "--images: 1 of 5 images is not used: 1 named again"


def test_folders_follow_links_but_no_cycles(tree):
    (tree / "elsewhere").mkdir()
    (tree / "elsewhere" / "z.jpg").write_bytes(b"-")
    for name in ("up", "down"):
        (tree / "photos" / "c" / name).symlink_to(tree / "photos")
    (tree / "photos" / "linked").symlink_to(tree / "elsewhere")
    expected = [*IN_DEPTH[:-1], "linked/z.jpg", IN_DEPTH[-1]]
    assert find_images(["photos"]).paths == [f"photos/{name}" for name in expected]


def test_patterns(tree):
    assert find_images(["photos/**/*.jpg"]).paths == [f"photos/{n}" for n in ("b.jpg", "gone.jpg", "x[1].jpg")]
    assert find_images(["photos/[ab].*"]).paths == ["photos/a.PNG", "photos/b.jpg"]
    assert find_images(["photos/c/*"]).paths == ["photos/c/d.webp", "photos/c/notes.txt"], "all files, but not folders"
    assert "photos/c/e/f.tiff" in find_images(["photos/**"]).paths
    assert find_images(["photos/x[1].jpg"]).paths == ["photos/x[1].jpg"], "the name of a file is not a pattern"


@pytest.mark.parametrize(
    ("item", "images", "unused"),
    [
        (
            "photos",
            ["a.PNG", "b.jpg", "c/d.webp", "c/e/f.tiff", "c/plain", "gone.jpg", "x[1].jpg"],
            ["notes.txt", "up"],
        ),
        ("photos/**/[bx]*.jpg", ["b.jpg", "x[1].jpg"], [".hidden.jpg", ".thumbs/t.jpg", "c/up"]),
        ("photos/**/e/**", ["c/e/f.tiff"], ["c/up"]),
        ("**/c/*", ["c/d.webp", "c/notes.txt", "c/plain"], ["c/up"]),
        ("photos/c*", None, ["photos/c"]),
        ("photos/[cx]*", ["x[1].jpg"], ["photos/c"]),
    ],
)
def test_what_is_left_out_is_said_and_no_link_is_followed_in_a_circle(tree, caplog, refusal, item, images, unused):
    (tree / "photos" / "c" / "up").symlink_to(tree)
    (tree / "photos" / "c" / "plain").write_bytes(b"P5 1 1 255 -")
    if images is None:
        assert all(name in refusal(find_images, [item]) for name in unused)
        return
    assert find_images([item]).paths == [f"photos/{name}" for name in images]
    (warning,) = caplog.messages
    assert warning.startswith(f"{item}: ")
    assert all(name in warning for name in unused)


def test_names_are_found_composed_and_decomposed(tree):
    """As a Mac's archive has them, and as a person types them."""
    (tree / "e\u0301").mkdir()
    (tree / "e\u0301" / "\xfc.png").write_bytes(b"-")
    for item in ("\xe9", "e\u0301", "\xe9/u\u0308.png", "\xe9/*.png", "\xe9/**"):
        (path,) = find_images([item]).paths
        assert (
            MixedImages([path]).problem(0).endswith("is none of JPEG, PNG, WEBP, GIF, BMP, TIFF, PPM, JPEG2000, AVIF")
        )


def test_paths_in_a_list_are_relative_to_its_folder(tree):
    (tree / "photos" / "list.txt").write_text(f"b.jpg\r\n\nc/missing.jpg\n{tree}/x.jpg\ngs://bucket/y.jpg\nb.jpg")
    expected = ["photos/b.jpg", "photos/c/missing.jpg", f"{tree}/x.jpg", "gs://bucket/y.jpg", "photos/b.jpg"]
    assert find_images(["@photos/list.txt"]).paths == expected
    (tree / "photos" / "list.txt").write_text("b.jpg\n", encoding="utf-8-sig")  # as some editors write it
    assert find_images(["@photos/list.txt"]).paths == ["photos/b.jpg"]


def test_paths_on_standard_input_are_relative_to_the_working_directory(tree, monkeypatch):
    stdin(monkeypatch, b"photos/b.jpg\nmissing.jpg\n")
    assert find_images(["photos/a.PNG", "-"]).paths == ["photos/a.PNG", "photos/b.jpg", "missing.jpg"]
    stdin(monkeypatch, b"\xff.jpg\n")
    assert find_images(["-"]).paths == [os.fsdecode(b"\xff.jpg")]


@pytest.mark.parametrize(
    ("item", "part"),
    [
        ("photos/missing.jpg", "--images=photos/missing.jpg contains no images"),
        ("photos/*.gif", "--images=photos/*.gif contains no images"),
        (
            "photos/folder.jpg",
            "--images=photos/folder.jpg contains no images; give image files, folders with images, ",
        ),
        ("@missing.txt", "cannot read the list @missing.txt: No such file"),
        ("@photos/c/e", "cannot read the list @photos/c/e: Is a directory"),
        ("@utf16.txt", "the list @utf16.txt is not UTF-8; save it as UTF-8, with one path per line"),
        ("@empty.txt", "--images=@empty.txt contains no images"),
        ("-", "--images=- contains no images"),
        ("", "--images= contains no images"),
    ],
)
def test_items_without_images_are_user_errors(tree, monkeypatch, refusal, item, part):
    (tree / "empty.txt").write_text("\n \n")
    (tree / "utf16.txt").write_text("photos/b.jpg\n", encoding="utf-16")
    stdin(monkeypatch, b"\n")
    assert refusal(find_images, ["photos/b.jpg", item]).startswith(part)


@pytest.mark.parametrize(
    "item", ["~nosuchuser/x", "x" * 5000, "a\0b", "@/dev/zero", "@pipe", "@a\0b", "@nosuchstore://x"]
)
def test_places_that_cannot_be_read_are_one_sentence(item, tree, refusal):
    os.mkfifo("pipe")
    assert refusal(find_images, [item])


def test_a_folder_with_a_pipe_is_searched_and_the_pipe_cannot_be_read(tree):
    os.mkfifo("photos/z.jpg")
    assert find_images(["photos"]).paths[-1] == "photos/z.jpg"
    with pytest.raises(BadImage, match="it is not a regular file"):
        MixedImages(["photos/z.jpg"]).read(0)


def test_a_list_has_a_limit(tree, monkeypatch, refusal):
    monkeypatch.setattr(image_list, "MOST_LIST", 5)
    (tree / "list").write_text("123456")
    stdin(monkeypatch, b"123456")
    for item in ("@list", "-"):
        assert refusal(find_images, [item]).endswith("it has more than 5 bytes")
