import io
import os
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from mlmoe_jax.data.images import BadImage, read_image
from mlmoe_jax.inference import inputs
from mlmoe_jax.inference.inputs import GivenImages, find_pictures


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A folder `photos` with pictures and other things in it, below the working directory."""
    for name in ("b.jpg", "a.PNG", "c/d.webp", "c/e/f.tiff", "c/notes.txt", ".hidden.jpg", ".thumbs/t.jpg", "x[1].jpg"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"-")
    (tmp_path / "photos" / "folder.jpg").mkdir()
    (tmp_path / "photos" / "gone.jpg").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    return tmp_path


IN_DEPTH = ["a.PNG", "b.jpg", "c/d.webp", "c/e/f.tiff", "folder.jpg", "gone.jpg", "x[1].jpg"]


def stdin(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(inputs.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))


# -------------------------------------------------------------------------------------------------- what --images names
def test_a_folder_is_searched_in_depth_and_by_name(tree):
    assert find_pictures(["photos"]) == [f"photos/{name}" for name in IN_DEPTH]
    assert find_pictures([f"{tree}/photos/"]) == [f"{tree}/photos/{name}" for name in IN_DEPTH]


def test_order_and_duplicates_are_kept(tree):
    given = ["photos/c/notes.txt", "photos/b.jpg", "photos/c", "photos/b.jpg"]
    assert find_pictures(given) == [*given[:2], "photos/c/d.webp", "photos/c/e/f.tiff", "photos/b.jpg"]


def test_links_are_followed_but_not_in_circles(tree):
    (tree / "elsewhere").mkdir()
    (tree / "elsewhere" / "z.jpg").write_bytes(b"-")
    (tree / "photos" / "c" / "up").symlink_to(tree / "photos")
    (tree / "photos" / "linked").symlink_to(tree / "elsewhere")
    expected = [*IN_DEPTH[:-1], "linked/z.jpg", IN_DEPTH[-1]]
    assert find_pictures(["photos"]) == [f"photos/{name}" for name in expected]


def test_patterns(tree):
    assert find_pictures(["photos/**/*.jpg"]) == [
        f"photos/{n}" for n in ("b.jpg", "folder.jpg", "gone.jpg", "x[1].jpg")
    ]
    assert find_pictures(["photos/[ab].*"]) == ["photos/a.PNG", "photos/b.jpg"]
    assert find_pictures(["photos/c/*"]) == ["photos/c/d.webp", "photos/c/notes.txt"], "all files, but no folder"
    assert find_pictures(["photos/x[1].jpg"]) == ["photos/x[1].jpg"], "the name of a file is no pattern"


def test_a_list_starts_from_its_own_folder(tree):
    (tree / "photos" / "list.txt").write_text(f"b.jpg\r\n\nc/missing.jpg\n{tree}/x.jpg\ngs://bucket/y.jpg\nb.jpg")
    expected = ["photos/b.jpg", "photos/c/missing.jpg", f"{tree}/x.jpg", "gs://bucket/y.jpg", "photos/b.jpg"]
    assert find_pictures(["@photos/list.txt"]) == expected


def test_a_list_on_standard_input_starts_from_here(tree, monkeypatch):
    stdin(monkeypatch, b"photos/b.jpg\nmissing.jpg\n")
    assert find_pictures(["photos/a.PNG", "-"]) == ["photos/a.PNG", "photos/b.jpg", "missing.jpg"]
    stdin(monkeypatch, b"two\nlines.jpg\0\xff.jpg\0")
    assert find_pictures(["-"]) == ["two\nlines.jpg", os.fsdecode(b"\xff.jpg")]


@pytest.mark.parametrize(
    ("item", "part"),
    [
        ("photos/missing.jpg", "there is no picture or folder photos/missing.jpg"),
        ("photos/*.gif", "no file matches the pattern photos/*.gif"),
        ("photos/.thumbs/e", "there is no picture or folder"),
        ("photos/folder.jpg", "folder photos/folder.jpg holds no pictures (.jpg, "),
        ("@missing.txt", "cannot read the list of pictures missing.txt: No such file"),
        ("@photos/c/e", "cannot read the list of pictures photos/c/e: Is a directory"),
        ("@empty.txt", "the list empty.txt names no pictures"),
        ("-", "standard input names no pictures"),
    ],
)
def test_what_is_not_there_is_refused(tree, monkeypatch, refusal, item, part):
    (tree / "empty.txt").write_text("\n \n")
    stdin(monkeypatch, b"\n")
    assert refusal(find_pictures, ["photos/b.jpg", item]).startswith(part)


def test_a_folder_that_cannot_be_listed_is_refused(tree, monkeypatch, refusal):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(inputs.Path, "iterdir", refuse)
    assert refusal(find_pictures, ["photos"]) == "cannot search folder photos: Permission denied"


# --------------------------------------------------------------------------------------------------- given from Python
def test_one_picture_in_every_form(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path)
    given = GivenImages([str(path), path, path.read_bytes(), pixels, Image.fromarray(pixels), Image.open(path)])
    assert len(given) == 6
    for row in range(6):
        np.testing.assert_array_equal(given.read(row), pixels, err_msg=str(row))
    assert [given.name(row) for row in range(4)] == [str(path), str(path), "image 2", "image 3"]


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [("L", "png"), ("LA", "png"), ("P", "gif"), ("RGBA", "png"), ("I;16", "png"), ("CMYK", "tiff"), ("RGB", "tiff")],
)
def test_pillows_pictures_are_read_as_their_files_are(tmp_path, mode, suffix):
    """With grey, transparent, deep and CMYK pixels, and one that its EXIF turns."""
    draw, path = np.random.default_rng(0), tmp_path / f"a.{suffix}"
    if mode == "I;16":
        picture = Image.fromarray(draw.integers(0, 2**16, (4, 6), np.uint16))
    elif mode == "P":
        picture = Image.fromarray(draw.integers(0, 256, (4, 6, 3), np.uint8)).quantize(8)
        picture.info["transparency"] = 3
    else:
        size = 4 * 6 * len(Image.new(mode, (1, 1)).getbands())
        picture = Image.frombytes(mode, (6, 4), draw.integers(0, 256, size, np.uint8).tobytes())
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(path, exif=exif)
    expected = read_image(path)
    assert expected.shape == ((4, 6, 3) if mode == "P" else (6, 4, 3)), "a GIF has no EXIF"
    np.testing.assert_array_equal(GivenImages([Image.open(io.BytesIO(path.read_bytes()))]).read(0), expected)


@pytest.mark.parametrize(
    ("picture", "part"),
    [
        (np.zeros((4, 4, 3)), "image 0 is an array float64[4, 4, 3] and should be uint8[h,w,3]"),
        (np.zeros((4, 4), np.uint8), "uint8[4, 4]"),
        (np.zeros((4, 4, 4), np.uint8), "uint8[4, 4, 4]"),
        (np.zeros((0, 4, 3), np.uint8), "uint8[0, 4, 3]"),
        (None, "image 0 is a NoneType"),
        (b"", "cannot read image 0 as an image: it is empty"),
        ("missing.jpg", "cannot read missing.jpg as an image: No such file"),
        (Image.new("F", (2, 2)), "cannot read image 0 as an image: cannot write mode F"),
    ],
)
def test_what_is_no_picture_is_a_bad_image(refusal, picture, part):
    assert part in refusal(GivenImages([picture]).read, 0, error=BadImage)


def test_a_picture_of_pillows_that_is_cut_short_is_a_bad_image(refusal):
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(buffer, "JPEG")
    cut = Image.open(io.BytesIO(buffer.getvalue()[:1500]))
    assert "truncated" in refusal(GivenImages([cut]).open, 0, error=BadImage)


def test_a_jpeg_may_be_decoded_smaller(tmp_path):
    Image.new("RGB", (64, 48), "red").save(tmp_path / "a.jpg")
    assert GivenImages([tmp_path / "a.jpg"]).read(0, at_least=10).shape == (12, 16, 3)
