import io
import os
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from mlmoe_jax.config import default_config
from mlmoe_jax.data.images import BadImage, Decoding, open_image, read_image
from mlmoe_jax.data.transforms import resize_square
from mlmoe_jax.inference import inputs
from mlmoe_jax.inference.inputs import GivenImages, find_images, read_images


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


IN_DEPTH = ["a.PNG", "b.jpg", "c/d.webp", "c/e/f.tiff", "folder.jpg", "gone.jpg", "x[1].jpg"]


def stdin(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(inputs.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))


# ------------------------------------------------------------------------------------------------- from a command line
def test_a_folder_is_searched_recursively_in_order_of_name(tree):
    assert find_images(["photos"]) == [f"photos/{name}" for name in IN_DEPTH]
    assert find_images([f"{tree}/photos/"]) == [f"{tree}/photos/{name}" for name in IN_DEPTH]


def test_order_and_duplicates_are_kept(tree):
    given = ["photos/c/notes.txt", "photos/b.jpg", "photos/c", "photos/b.jpg"]
    assert find_images(given) == [*given[:2], "photos/c/d.webp", "photos/c/e/f.tiff", "photos/b.jpg"]


def test_links_are_followed_but_cycles_are_not(tree):
    (tree / "elsewhere").mkdir()
    (tree / "elsewhere" / "z.jpg").write_bytes(b"-")
    (tree / "photos" / "c" / "up").symlink_to(tree / "photos")
    (tree / "photos" / "linked").symlink_to(tree / "elsewhere")
    expected = [*IN_DEPTH[:-1], "linked/z.jpg", IN_DEPTH[-1]]
    assert find_images(["photos"]) == [f"photos/{name}" for name in expected]


def test_patterns_follow_links_but_no_cycles(tree):
    (tree / "elsewhere").mkdir()
    (tree / "elsewhere" / "z.jpg").write_bytes(b"-")
    for name in ("up", "down"):  # glob itself would not end
        (tree / "photos" / "c" / name).symlink_to(tree / "photos")
    (tree / "photos" / "linked").symlink_to(tree / "elsewhere")
    found = [f"photos/{n}" for n in ("b.jpg", "folder.jpg", "gone.jpg", "linked/z.jpg", "x[1].jpg")]
    assert find_images(["photos/**/*.jpg"]) == found
    assert find_images([f"{tree}/ph*/**/**/*.jpg"]) == [f"{tree}/{name}" for name in found]
    assert find_images(["**/z.jpg"]) == ["elsewhere/z.jpg", "photos/linked/z.jpg"]
    assert "photos/c/e/f.tiff" in find_images(["photos/**"])


def test_a_closed_standard_input_is_a_user_error(monkeypatch, refusal):
    monkeypatch.setattr(inputs.sys, "stdin", None)
    assert refusal(find_images, ["-"]) == "cannot read the list of images on standard input: it is closed"


def test_patterns(tree):
    assert find_images(["photos/**/*.jpg"]) == [f"photos/{n}" for n in ("b.jpg", "folder.jpg", "gone.jpg", "x[1].jpg")]
    assert find_images(["photos/[ab].*"]) == ["photos/a.PNG", "photos/b.jpg"]
    assert find_images(["photos/c/*"]) == ["photos/c/d.webp", "photos/c/notes.txt"], "all files, but not folders"
    assert find_images(["photos/x[1].jpg"]) == ["photos/x[1].jpg"], "the name of a file is not a pattern"


def test_paths_in_a_list_are_relative_to_its_folder(tree):
    (tree / "photos" / "list.txt").write_text(f"b.jpg\r\n\nc/missing.jpg\n{tree}/x.jpg\ngs://bucket/y.jpg\nb.jpg")
    expected = ["photos/b.jpg", "photos/c/missing.jpg", f"{tree}/x.jpg", "gs://bucket/y.jpg", "photos/b.jpg"]
    assert find_images(["@photos/list.txt"]) == expected
    (tree / "photos" / "list.txt").write_text("b.jpg\n", encoding="utf-8-sig")  # as some editors write it
    assert find_images(["@photos/list.txt"]) == ["photos/b.jpg"]


def test_paths_on_standard_input_are_relative_to_the_working_directory(tree, monkeypatch):
    stdin(monkeypatch, b"photos/b.jpg\nmissing.jpg\n")
    assert find_images(["photos/a.PNG", "-"]) == ["photos/a.PNG", "photos/b.jpg", "missing.jpg"]
    stdin(monkeypatch, b"two\nlines.jpg\0\xff.jpg\0")
    assert find_images(["-"]) == ["two\nlines.jpg", os.fsdecode(b"\xff.jpg")]


@pytest.mark.parametrize(
    ("item", "part"),
    [
        ("photos/missing.jpg", "image or folder photos/missing.jpg does not exist"),
        ("photos/*.gif", "no file matches the pattern photos/*.gif"),
        ("photos/.thumbs/e", "image or folder photos/.thumbs/e does not exist"),
        ("photos/folder.jpg", "folder photos/folder.jpg contains no images (.jpg, "),
        ("@missing.txt", "cannot read the list of images missing.txt: No such file"),
        ("@photos/c/e", "cannot read the list of images photos/c/e: Is a directory"),
        ("@empty.txt", "the list empty.txt contains no images"),
        ("-", "standard input contains no images"),
        ("", "--images has an empty name"),
    ],
)
def test_items_without_images_are_user_errors(tree, monkeypatch, refusal, item, part):
    (tree / "empty.txt").write_text("\n \n")
    stdin(monkeypatch, b"\n")
    assert refusal(find_images, ["photos/b.jpg", item]).startswith(part)


def test_a_folder_that_cannot_be_listed_is_a_user_error(tree, monkeypatch, refusal):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(inputs.Path, "iterdir", refuse)
    assert refusal(find_images, ["photos"]) == "cannot search folder photos: Permission denied"


# --------------------------------------------------------------------------------------------------------- from Python
def test_one_image_in_every_form(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path)
    given = GivenImages([str(path), path, path.read_bytes(), pixels, Image.fromarray(pixels), Image.open(path)])
    assert len(given) == 6
    for row in range(6):
        np.testing.assert_array_equal(given.read(row), pixels, err_msg=str(row))
    assert [given.name(row) for row in range(4)] == [str(path), str(path), "image 2", "image 3"]


def test_modes_that_pillow_does_not_write_as_png(tmp_path, refusal):
    values = np.random.default_rng(0).integers(0, 2**16, (4, 6), np.int32)
    Image.fromarray(values).save(tmp_path / "a.tiff")
    wide = Image.open(tmp_path / "a.tiff")
    assert wide.mode == "I"
    np.testing.assert_array_equal(GivenImages([wide]).read(0), read_image(tmp_path / "a.tiff"))
    assert "its pixels are not from 0 to 65,535" in refusal(GivenImages([Image.fromarray(-values - 1)]).read, 0)
    palette = Image.fromarray(np.zeros((4, 6, 4), np.uint8)).convert("LA").convert("PA")
    others = [Image.new(mode, (6, 4)).convert(to) for mode, to in (("LA", "La"), ("RGBA", "RGBa"), ("RGB", "RGBX"))]
    for image in (palette, *others):
        assert GivenImages([image]).read(0).shape == (4, 6, 3), image.mode


def test_images_are_decoded_as_small_as_in_evaluation(tmp_path):
    ramp = np.broadcast_to(np.arange(1600, dtype=np.uint8)[None, :, None], (1200, 1600, 3))
    Image.fromarray(ramp).save(tmp_path / "a.jpg")
    config = default_config()
    config.data.image_size, config.data.reduced_decoding = 224, True
    expected = resize_square(open_image(tmp_path / "a.jpg", decoding=Decoding(224)), 224)
    np.testing.assert_array_equal(read_images(tmp_path / "a.jpg", config)[0], expected)
    config.data.reduced_decoding = False
    assert (read_images(tmp_path / "a.jpg", config)[0] != expected).any()


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [("L", "png"), ("LA", "png"), ("P", "gif"), ("RGBA", "png"), ("I;16", "png"), ("CMYK", "tiff"), ("RGB", "tiff")],
)
def test_pillow_images_are_read_like_their_files(tmp_path, mode, suffix):
    """Gray, transparent, 16-bit and CMYK pixels, and an EXIF orientation."""
    draw, path = np.random.default_rng(0), tmp_path / f"a.{suffix}"
    if mode == "I;16":
        image = Image.fromarray(draw.integers(0, 2**16, (4, 6), np.uint16))
    elif mode == "P":
        image = Image.fromarray(draw.integers(0, 256, (4, 6, 3), np.uint8)).quantize(8)
        image.info["transparency"] = 3
    else:
        size = 4 * 6 * len(Image.new(mode, (1, 1)).getbands())
        image = Image.frombytes(mode, (6, 4), draw.integers(0, 256, size, np.uint8).tobytes())
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(path, exif=exif)
    expected = read_image(path)
    assert expected.shape == ((4, 6, 3) if mode == "P" else (6, 4, 3)), "a GIF has no EXIF"
    np.testing.assert_array_equal(GivenImages([Image.open(io.BytesIO(path.read_bytes()))]).read(0), expected)


@pytest.mark.parametrize(
    ("given", "part"),
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
def test_unreadable_values_are_bad_images(refusal, given, part):
    assert part in refusal(GivenImages([given]).read, 0, error=BadImage)


def test_a_truncated_pillow_image_is_a_bad_image(refusal):
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(buffer, "JPEG")
    cut = Image.open(io.BytesIO(buffer.getvalue()[:1500]))
    assert "truncated" in refusal(GivenImages([cut]).open, 0, error=BadImage)


def test_a_jpeg_may_be_decoded_smaller(tmp_path):
    Image.new("RGB", (64, 48), "red").save(tmp_path / "a.jpg")
    assert GivenImages([tmp_path / "a.jpg"]).read(0, Decoding(10)).shape == (12, 16, 3)


@pytest.mark.parametrize(
    "item", ["~nosuchuser/x", "://", "nosuchstore://x", "x" * 5000, "a\0b", "@/dev/zero", "@pipe", "@a\0b"]
)
def test_places_that_cannot_be_read_are_one_sentence(item, tree, refusal):
    os.mkfifo("pipe")
    assert refusal(find_images, [item])


def test_a_folder_with_a_pipe_is_searched_and_the_pipe_cannot_be_read(tree):
    os.mkfifo("photos/z.jpg")
    found = find_images(["photos"])
    assert found[-1] == "photos/z.jpg"
    with pytest.raises(BadImage, match="it is not a regular file"):
        GivenImages(found).read(len(found) - 1)


def test_a_list_has_a_limit(tree, monkeypatch, refusal):
    monkeypatch.setattr(inputs, "MOST_LIST", 5)
    (tree / "list").write_text("123456")
    stdin(monkeypatch, b"123456")
    for item in ("@list", "-"):
        assert refusal(find_images, [item]).endswith("it has more than 5 bytes")
