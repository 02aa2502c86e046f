import contextlib
import io
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.drawn_images import encoded
from helpers.tables import write_images
from PIL import ExifTags, Image, ImageFile

from mlmoe_jax.data import decoding, images
from mlmoe_jax.data.decoding import BadImage, Decoding, has_frames, read_image, read_size
from mlmoe_jax.data.images import ArrayImages, ImageFiles, ImageNames, JoinedImages
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.split_checks import list_usages
from mlmoe_jax.data.usage import unused_input
from mlmoe_jax.inference.inputs import MixedImages

LOSSLESS = ("PNG", "TIFF", "BMP", "PPM", "WEBP", "JPEG2000")


def random_image(height=6, width=9, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


# --------------------------------------------------------------------------------------------------------- decoding
@pytest.mark.parametrize("file_format", LOSSLESS)
def test_lossless_formats_give_the_stored_pixels(file_format, tmp_path):
    path, options = tmp_path / "of_any_name.jpg", {"lossless": True} if file_format == "WEBP" else {}
    path.write_bytes(encoded(random_image(), file_format, **options))
    for source in (path, str(path), path.read_bytes()):
        image = read_image(source)
        assert image.dtype == np.uint8
        assert image.flags.c_contiguous
        np.testing.assert_array_equal(image, random_image())


@pytest.mark.parametrize(
    ("mode", "file_format"),
    [("1", "PNG"), ("L", "PNG"), ("L", "JPEG"), ("P", "PNG"), ("P", "GIF"), ("YCbCr", "JPEG"), ("CMYK", "TIFF")],
)
def test_every_opaque_mode_becomes_rgb_as_pillow_converts_it(mode, file_format):
    data = encoded(Image.fromarray(random_image()).convert(mode), file_format)
    np.testing.assert_array_equal(read_image(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    red = Image.new("RGB", (16, 16), (200, 30, 30)).convert("CMYK")
    np.testing.assert_allclose(read_image(encoded(red, "JPEG"))[5, 5].astype(int), (200, 30, 30), atol=4)


@pytest.mark.parametrize("pixels", [decoding._STRIP, 50, 1])
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
def test_transparency_is_blended_onto_white_in_strips(mode, file_format, pixels, monkeypatch):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (37, 11, 4), np.uint8), "RGBA").convert(mode)
    whole = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")
    monkeypatch.setattr(decoding, "_STRIP", pixels)
    found = read_image(encoded(image, file_format))
    np.testing.assert_array_equal(found, np.asarray(whole))
    assert not found.flags.writeable


def test_transparent_palette_entries_and_a_transparent_color_are_blended_onto_white():
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 90, 80, 70])
    palette.putpixel((1, 0), 1)
    for file_format in ("PNG", "GIF"):
        pixels = read_image(encoded(palette, file_format, transparency=0))
        np.testing.assert_array_equal(pixels, [[[255, 255, 255], [90, 80, 70]]])
    color = np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8)
    np.testing.assert_array_equal(read_image(encoded(color, transparency=(1, 2, 3))), [[[255, 255, 255], [4, 5, 6]]])


@pytest.mark.parametrize(
    ("bits", "file_format"), [(8, "PNG"), (10, "PNG"), (12, "PNG"), (16, "PNG"), (16, "TIFF"), (16, "PPM")]
)
def test_of_the_bits_that_gray_images_use_the_upper_eight_are_kept(bits, file_format):
    gray = np.array([[0, 7, 2**bits // 3], [2**7, 2**8 - 1, 2**bits - 1]], np.uint16)
    decoding = Decoding(gray_bits=bits)
    image = read_image(encoded(gray, file_format), decoding=decoding)
    np.testing.assert_array_equal(image, np.repeat((gray >> bits - 8)[..., None], 3, axis=2))
    np.testing.assert_array_equal(read_image(encoded(random_image()), decoding=decoding), random_image())


@pytest.mark.parametrize("file_format", ["GIF", "PNG", "TIFF", "WEBP"])
def test_an_animation_becomes_its_first_frame(file_format):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    options = {"lossless": True} if file_format == "WEBP" else {}
    image = read_image(encoded(frames[0], file_format, save_all=True, append_images=frames[1:], **options))
    np.testing.assert_array_equal(image, np.asarray(frames[0]))


@pytest.mark.parametrize("file_format", ["GIF", "PNG", "TIFF", "WEBP", "AVIF"])
def test_images_with_several_frames_are_counted(file_format, tmp_path):
    """In a folder, as bytes and as Pillow images, and in a part of a data set."""
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    suffix = ".gif" if file_format == "GIF" else f".{file_format.lower()}"
    one, several = (
        encoded(frames[0], file_format),
        encoded(frames[0], file_format, save_all=True, append_images=frames[1:]),
    )
    names = [f"one{suffix}", f"several{suffix}"]
    for name, content in zip(names, (one, several), strict=True):
        (tmp_path / name).write_bytes(content)
    files = ImageFiles(tmp_path, names)
    mixed = MixedImages([one, several, Image.open(io.BytesIO(several)), np.asarray(frames[0])])
    said = "with several frames, of which the first is used:"
    assert files.frames_note() == [f"has 1 image {said} {tmp_path / names[1]}"]
    assert mixed.frames_note() == [f"has 2 images {said} image 1, image 2"]
    assert files.take(np.array([0])).frames_note() == []
    split = Split("train", ("sea",), np.ones((2, 1), np.int8), names, files)
    assert unused_input(list_usages([split])) == [f"split train has 1 image {said} {tmp_path / names[1]}"]


def test_joined_images_are_those_of_each_source_in_turn(tmp_path):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime")]
    (tmp_path / "a.gif").write_bytes(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    pixels = np.arange(3, dtype=np.uint8).reshape(3, 1, 1, 1).repeat(3, axis=3)
    joined = JoinedImages([ArrayImages(pixels[:2]), ImageFiles(tmp_path, ["a.gif"]), ArrayImages(pixels[2:])])
    names = ["image 0", "image 1", f"{tmp_path}/a.gif", "image 0"]
    assert list(ImageNames(joined)) == names
    assert ImageNames(joined)[-2] == names[2]
    assert [joined.read(row).max() for row in (0, 1, 3)] == [0, 1, 2]
    assert joined.read(2).shape == (8, 8, 3)
    assert joined.frames_note() == [f"has 1 image with several frames, of which the first is used: {tmp_path}/a.gif"]
    assert len(JoinedImages([])) == 0


def test_only_some_files_are_opened_to_see_their_frames(monkeypatch):
    opened = []
    monkeypatch.setattr(ImageFiles, "most_opened", 3)
    monkeypatch.setattr(images, "MOST_FAR", 2)
    monkeypatch.setattr(ImageFiles, "has_frames", lambda self, row: opened.append(row))
    for folder, count in {"photos": 3, "gs://bucket/photos": 2}.items():
        opened.clear()
        [note] = ImageFiles(folder, [f"{row}.png" for row in range(5)]).frames_note()
        assert note == f"may have further images with several frames: {count} files of 5 opened to see"
        assert sorted(opened) == list(range(count))


def test_smaller_copies_and_masks_are_no_frames(tmp_path):
    image = Image.new("RGB", (8, 8), "red")
    preview = Image.new("RGB", (4, 4), "red")
    preview.encoderinfo = {"tiffinfo": {254: 1}}
    assert not has_frames(encoded(image, "TIFF", save_all=True, append_images=[preview]))
    assert not has_frames(encoded(image, "MPO", save_all=True, append_images=[image]))
    assert not has_frames(tmp_path / "missing.gif")
    assert not has_frames(b"no image")


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_once(file_format, orientation, tmp_path):
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :8] = 255  # a corner, so that each of the eight differs
    upright[:8, 8:16] = 128
    stored = upright.swapaxes(0, 1) if orientation > 4 else upright
    stored = stored[:: -1 if orientation in (3, 4, 6, 7) else 1, :: -1 if orientation in (2, 3, 7, 8) else 1]
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = encoded(np.ascontiguousarray(stored), file_format, exif=exif)
    np.testing.assert_allclose(read_image(data).astype(int), upright, atol=12)  # JPEG and WEBP are lossy
    (tmp_path / "image").write_bytes(data)
    assert read_size(tmp_path / "image") == (32, 16)
    published = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))  # as the authors of the methods read an image
    np.testing.assert_array_equal(read_image(data, decoding=Decoding(exif="ignore")), published)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize(
    "exif", [b"Exif\0\0nonsense", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\0\x09"]
)
def test_an_image_with_exif_that_is_none_is_read(exif):
    plain = encoded(random_image(16, 16), "JPEG")
    np.testing.assert_array_equal(read_image(encoded(random_image(16, 16), "JPEG", exif=exif)), read_image(plain))


@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_cut_short_is_read_as_pillow_reads_it_leniently(progressive, monkeypatch):
    data = encoded(random_image(64, 48), "JPEG", progressive=progressive)
    cuts = [len(data) - 1, len(data) - 2, *range(len(data) - 3, 700, -97)]
    lenient, read = Decoding(truncated="read"), {}
    for cut in cuts:
        with contextlib.suppress(*[BadImage] if progressive else []):  # a cut in the header of a later scan
            read[cut] = read_image(data[:cut], decoding=lenient)
    assert len(read) > 0.8 * len(cuts)
    assert not ImageFile.LOAD_TRUNCATED_IMAGES, "it would hold for all threads"
    with monkeypatch.context() as patch:
        patch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        for cut, image in read.items():
            np.testing.assert_array_equal(image, np.asarray(Image.open(io.BytesIO(data[:cut])).convert("RGB")))
    np.testing.assert_array_equal(read_image(data, decoding=lenient), read_image(data))


@pytest.mark.parametrize(
    "options", [{"progressive": True}, {"comment": b"\xff\xda\0\1" * 900}, {"icc": 900}, {"after": 900}]
)
def test_what_only_looks_like_a_scan_is_none(options):
    icc, after = b"\xff\xda" * options.pop("icc", 0), options.pop("after", 0)
    data = encoded(random_image(64, 64), "JPEG", icc_profile=icc, **options)
    assert decoding.count_scans(data, 10_000) == (10 if options.get("progressive") else 1)
    assert read_image(data + data * after).shape == (64, 64, 3)  # as with photographs that hold several


def test_a_large_jpeg_may_have_the_scans_that_encoders_write(monkeypatch):
    monkeypatch.setattr(decoding, "_MOST_SCANNED", 1)
    data = encoded(Image.new("CMYK", (64, 64)), "JPEG", progressive=True)
    assert decoding.count_scans(data, 100) == 18
    assert read_image(data).shape == (64, 64, 3)


# --------------------------------------------------------------------------------------------------------- image files
def test_image_files_that_are_missing(tmp_path):
    write_images(tmp_path, ("b.jpg", "below/a.jpg"))
    files = ImageFiles(tmp_path, ["a.jpg", "below/a.jpg", "b.jpg", "below/b.jpg", "no/a.jpg"])
    assert files.missing().tolist() == [0, 3, 4]
    assert files.take(np.array([3, 2, 4])).missing().tolist() == [0, 2]


def test_a_name_is_found_composed_and_decomposed(tmp_path):
    """Archives of a Mac have é as e and an accent, and tables as one character, or the reverse."""
    for folder, name, given in (
        ("e\u0301", "\xfc.png", "\xe9/u\u0308.png"),
        ("\xf1", "o\u0302.png", "n\u0303/\xf4.png"),
    ):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (3, 2)).save(tmp_path / folder / name)
        files = ImageFiles(tmp_path, [given, "\xe9/no.png"])
        assert files.missing().tolist() == [1]
        assert files.read(0).shape == (2, 3, 3)
        assert files.stamp(0) == ImageFiles(tmp_path, [f"{folder}/{name}"]).stamp(0)
        assert read_size(tmp_path / given) == (3, 2)
        assert files.name(0) == f"{tmp_path}/{given}", "as it was given"
        (tmp_path / given).parent.mkdir()  # in both forms on one disk
        assert files.missing().tolist() == [1]


def test_heic_is_read_if_pillow_heif_is_installed(tmp_path, monkeypatch):
    def register_heif_opener(**options):
        Image.register_open("HEIF", lambda file, name: Image.new("RGB", (3, 2)), lambda start: start[4:8] == b"ftyp")

    (tmp_path / "phone").write_bytes(b"\0\0\0\x24ftypheic\0\0\0\0mif1heic")
    monkeypatch.setitem(sys.modules, "pillow_heif", SimpleNamespace(register_heif_opener=register_heif_opener))
    monkeypatch.setattr(Image, "OPEN", dict(Image.OPEN))
    monkeypatch.setattr(Image, "ID", list(Image.ID))
    decoding.readable_formats.cache_clear()
    assert read_image(tmp_path / "phone").shape == (2, 3, 3)
    monkeypatch.undo()
    decoding.readable_formats.cache_clear()


# -------------------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize(("kind", "per_pixel"), [("WEBP", 20), ("PNG", 8)])
def test_the_limit_of_pixels_depends_on_the_memory_that_the_format_needs(kind, per_pixel, monkeypatch):
    data = encoded(random_image(6, 10), kind)
    monkeypatch.setattr(decoding, "MAX_DECODED", 60 * per_pixel)
    assert read_image(data).shape == (6, 10, 3)
    monkeypatch.setattr(decoding, "MAX_DECODED", 60 * per_pixel - 1)
    with pytest.raises(BadImage, match="more than 59 pixels"):
        read_image(data)


@pytest.mark.skipif(sys.platform != "linux", reason="the memory is read from /proc")
@pytest.mark.variants("kind")
@pytest.mark.parametrize(("kind", "mode"), [("WEBP", "RGBA"), ("PNG", "LA")])
def test_decoding_takes_no_more_memory_than_the_limit_assumes(kind, mode, tmp_path):
    side, path = 2500, tmp_path / "a"
    Image.new("RGBA", (side, side), (9, 200, 3, 100)).convert(mode).save(path, kind)
    code = (  # in a separate process, whose memory is that of the decoding
        "import sys\n"
        "from mlmoe_jax.data import decoding\n"
        "memory = lambda kind: int(open('/proc/self/status').read().split(kind)[1].split()[0]) * 1024\n"
        "decoding.readable_formats(); before = memory('VmRSS:')\n"
        "decoding.read_image(sys.argv[1]); print(memory('VmHWM:') - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    per_pixel = decoding._BYTES_PER_PIXEL.get(kind, 8)
    assert int(done.stdout) / side**2 < per_pixel + 3  # and libraries that are loaded on first use
