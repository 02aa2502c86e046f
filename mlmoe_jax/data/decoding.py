"""The decoder of image files, for every source: its limits, and one error for every defect of a file."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import re
import warnings
from dataclasses import dataclass, replace

import numpy as np
from ml_collections import ConfigDict
from PIL import ExifTags, Image, IptcImagePlugin, UnidentifiedImageError
from PIL.Image import Transpose

from mlmoe_jax.errors import UserError, reason_of
from mlmoe_jax.runtime.files import MIB, PathLike, find_file, open_regular, read_bytes

MAX_FILE = 512 * MIB  # bytes of an image as it is stored

# Decoding any file takes at most 1 GB in each thread of a loader, and so does the array of an image at its own size.
# This limit replaces Pillow's warning above 89 million pixels, which many cameras exceed today. Catching the warning
# around each call is not safe in threads. As measured with Pillow 12, most formats need 4 bytes per pixel, and 4 more
# to convert the mode or to rotate the image. The libraries of WebP, JPEG 2000 and AVIF hold additional copies.
MAX_DECODED = 1_000_000_000
_BYTES_PER_PIXEL = {"WEBP": 20, "JPEG2000": 28, "AVIF": 16, "HEIF": 16}
_PROGRESSIVE, _DEEP, _DEFAULT = 13, 16, 8  # a progressive JPEG; gray in 16 or 32 bits; all other formats
_STRIP = 1 << 20  # pixels per conversion
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

# A few kilobytes can ask for minutes of work: each scan of a JPEG visits every pixel in about 1 ns, and Pillow copies a
# megabyte for each comment of a plain PPM. Encoders write up to 18 scans; libjpeg-turbo advises to refuse above 500.
_USUAL_SCANS, MOST_SCANS = 20, 500  # of a JPEG of any size, and of a small one
_MOST_SCANNED = 1_000_000_000  # scans times pixels, if there are more than _USUAL_SCANS
_MOST_COMMENTS = 100
# Pillow joins the segments and chunks before the pixels one by one, with up to 64 kB or an unpacked megabyte each.
_HEADER_READS = 3_000  # a segment of a JPEG takes four, a chunk of a PNG three
_SEGMENT, _PER_READ = 1 << 16, 1 << 13  # bytes: at most of a segment; that count as one more read
_FRAME_READS = 1_000_000  # to the end of the first frame of a GIF, two per 255 bytes
_PROFILE, _PROFILE_READS = b"iCCP", 500  # a chunk of a PNG that Pillow unpacks, and as how many reads it counts
_XMP_IN_PNG = b"XML:com.adobe.xmp"  # the keyword of a chunk
_LENGTHS, _TILE = (279, 325), (322, 323)  # tags of a TIFF: the lengths of strips and tiles, and the sides of a tile
os.environ.setdefault("LIBTIFF_JPEG_MAX_ALLOWED_SCAN_NUMBER", str(_USUAL_SCANS))  # of JPEG in TIFF
_SCAN, _MARKER = b"\xff\xda", re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")  # a marker with a length after it

# An explicit list, because some of Pillow's formats run external programs on untrusted files (EPS runs Ghostscript).
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")

ONE_FRAME = (".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".pbm", ".jp2")  # suffixes of files without further frames
_SUBFILE = 254  # the tag of a page in a TIFF: 0, or how it belongs to another page

JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"
HEIC = tuple(b"ftyp" + brand for brand in (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"))
BRIGHTEST = "brightest"  # of a 16-bit grayscale image, in `info` of the decoded Pillow image
UPRIGHT = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}


IptcRecords = dict[tuple[int, int], bytes | list[bytes]]


class BadImage(UserError):
    """An error: a file or a byte string cannot be read as an image."""


@dataclass(frozen=True)
class Decoding:
    """The settings with which image files are decoded.

    Attributes:
      at_least: if above 0, a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, as long as both sides keep at least
        this number of pixels.
      truncated: `read` decodes a JPEG that ends too early, with gray for the missing pixels. `refuse` raises BadImage.
        Other formats and truncated headers are always refused.
      exif: `apply` the orientation in the EXIF data, or `ignore` it.
      gray_bits: the number of bits that 16-bit grayscale images use; the upper 8 of them are kept.
      most_pixels: images with more pixels are refused before they are decoded.
    """

    at_least: int = 0
    truncated: str = "refuse"
    exif: str = "apply"
    gray_bits: int = 16
    most_pixels: int = MAX_DECODED

    @classmethod
    def from_config(cls, data_config: ConfigDict, at_least: int = 0) -> Decoding:
        """Return the decoding settings of `config.data`."""
        return cls(at_least, data_config.truncated, data_config.exif, data_config.gray_bits)


STRICT = Decoding()  # the defaults of the config, at full size


def read_image(source: PathLike | bytes, *, name: str = "", decoding: Decoding = STRICT) -> np.ndarray:
    """Decode an image file to a read-only RGB array u8[h,w,3].

    Gray, palette and CMYK images are converted to RGB. Images with 16 bits per channel keep the upper 8 bits, or in
    grayscale the upper 8 of the `decoding.gray_bits` bits that are used. An animation becomes its first frame. Color
    profiles are not applied, as in the authors' codes. Transparent pixels are blended onto white, as in web pages,
    because their stored color is arbitrary. Errors call the image `name`, by default its path or its number of bytes.

    Raises:
      BadImage: the file is missing, not a regular file, empty, truncated or damaged. Or its format is not one of
        IMAGE_FORMATS, the file is larger than MAX_FILE bytes, or decoding needs more than MAX_DECODED bytes of
        memory.
    """
    return to_pixels(open_image(source, name=name, decoding=decoding))


def open_image(source: PathLike | bytes | Image.Image, *, name: str = "", decoding: Decoding = STRICT) -> Image.Image:
    """Decode an image file as `read_image` does, but return a Pillow image, which saves two copies in a later resize.

    `source` can also be a Pillow image. It is read at full size, and its mode, transparency and EXIF data are treated
    as in a file.
    """
    if isinstance(source, Image.Image):
        return _decode(source, name, replace(decoding, at_least=0))
    if not isinstance(source, bytes):
        name, source = name or os.fspath(source), read_file(source)
    name = name or f"{len(source):,} bytes"
    try:
        return _decode(source, name, decoding)
    except BadImage:
        if decoding.truncated == "refuse" or not source.startswith(JPEG_START):
            raise
        # Pillow's LOAD_TRUNCATED_IMAGES does this too, but for all threads of the process.
        return _decode(source + JPEG_END, name, decoding)


def to_pixels(image: Image.Image) -> np.ndarray:
    """Convert an RGB image of Pillow to a read-only array u8[h,w,3], in strips to save memory if it is large."""
    strips = _strips(image)
    if len(strips) == 1:
        return np.asarray(image)
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for box in strips:
        pixels[box[1] : box[3]] = image.crop(box)
    pixels.flags.writeable = False
    return pixels


def _strips(image: Image.Image) -> list[tuple[int, int, int, int]]:
    """Return boxes (left, upper, right, lower) of at most _STRIP pixels that cover an image from top to bottom."""
    rows = max(1, _STRIP // image.width)
    return [(0, top, image.width, min(top + rows, image.height)) for top in range(0, image.height, rows)]


def read_file(path: PathLike) -> bytes:
    """Return the bytes of an image file, local or at an address such as gs://; BadImage if it cannot be read."""
    try:
        return read_bytes(find_file(path), MAX_FILE)
    except OSError as error:
        is_folder = "; give the images in it" if os.path.isdir(path) else ""
        raise BadImage(f"cannot read {os.fspath(path)} as an image: {reason_of(error)}{is_folder}") from error


def read_size(path: PathLike) -> tuple[int, int] | None:
    """Return (width, height) of a local image by its header, after EXIF orientation; None if it cannot be read."""
    try:
        with open_metered(path) as file, Image.open(file, formats=readable_formats()) as image:
            across = image.format != "TIFF" and image.getexif().get(ExifTags.Base.Orientation, 1) > 4
            return image.size[::-1] if across else image.size  # the size of a TIFF is upright
    except Exception:  # Pillow raises many types for damaged data
        return None


def read_embedded(path: PathLike) -> tuple[bytes, IptcRecords]:
    """Return the XMP packet of a local image, and IPTC's records by their numbers. Both are empty if it has none.

    They are also empty if the image cannot be read.
    """
    try:
        with open_metered(path) as file, Image.open(file, formats=readable_formats()) as image:
            if image.format == "PNG" and "xmp" not in image.info and _XMP_IN_PNG in (content := read_file(path)):
                file.reads = _pixel_reads(content)
                image.load()  # ExifTool writes the packet after the pixels
            return image.info.get("xmp", b""), IptcImagePlugin.getiptcinfo(image) or {}
    except Exception:  # Pillow raises many types for damaged data
        return b"", {}


class _Refused(ValueError):
    """An error: the text of the exception says why a file is not decoded."""


class _Metered:
    """A mixin for the files that Pillow reads: `reads` more calls of `read` are allowed, fewer if they are large."""

    reads = _HEADER_READS

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(size)
        self.reads = left = self.reads - 1
        if len(content) > 2:  # most reads are of one or two bytes
            self.reads = left - min(len(content), _SEGMENT) // _PER_READ - _PROFILE_READS * (content[4:8] == _PROFILE)
        if left < 0:
            raise _Refused("its metadata have too many parts, which would take long to read; store it without")
        return content


class _MeteredBytes(_Metered, io.BytesIO):
    pass


class _MeteredFile(_Metered, io.BufferedReader):
    pass


def open_metered(source: PathLike | bytes) -> _MeteredBytes | _MeteredFile:
    """Open the bytes of an image file, or a regular local file, for the header of an image."""
    if isinstance(source, bytes):
        return _MeteredBytes(source)
    return _MeteredFile(open_regular(find_file(source)).detach())


def has_frames(source: PathLike | bytes | Image.Image) -> bool:
    """Return whether an image has several frames or pages, as an animation has; False if it cannot be read.

    Smaller copies and masks beside an image do not count: in a TIFF file, and in a JPEG file, where cameras store them.
    """
    if isinstance(source, Image.Image):
        return source.format != "MPO" and getattr(source, "is_animated", False)
    try:
        if not isinstance(source, bytes) and "://" in os.fspath(source):
            source = read_file(source)
        if isinstance(source, bytes) and source.startswith(JPEG_START):
            return False
        with open_metered(source) as file, Image.open(file, formats=readable_formats()) as image:
            file.reads = _FRAME_READS
            if not has_frames(image) or image.format != "TIFF":
                return has_frames(image)
            image.seek(1)
            return image.tag_v2.get(_SUBFILE, 0) == 0
    except Exception:  # Pillow raises many types for damaged data
        return False


def _decode(data: bytes | Image.Image, name: str, decoding: Decoding) -> Image.Image:
    most = MAX_DECODED // _DEFAULT
    try:
        file = open_metered(data) if isinstance(data, bytes) else None
        image = Image.open(file, formats=readable_formats()) if file else data
        most = min(decoding.most_pixels, MAX_DECODED // _bytes_per_pixel(image))
        if image.width * image.height > most or _tile_pixels(image) > most:
            raise Image.DecompressionBombError
        if file:
            _require_quick(image, data)
            file.reads = _pixel_reads(data)
        if decoding.at_least:
            image.draft(None, (decoding.at_least, decoding.at_least))
        image.load()
        return _rgb(_upright(image) if decoding.exif == "apply" else image, decoding.gray_bits)
    except Exception as error:  # Pillow's decoders raise many types for damaged data, such as SyntaxError, IndexError
        reasons = {
            Image.DecompressionBombError: f"it has more than {most:,} pixels; store it smaller",
            UnidentifiedImageError: _why_unknown(data) if isinstance(data, bytes) else "",
            _Refused: str(error),
        }
        reason = reasons.get(type(error), f"it is damaged or cut short ({error or type(error).__name__})")
        raise BadImage(f"cannot read {name} as an image: {reason}") from error


def _pixel_reads(data: bytes) -> int:
    return min(20_000 + len(data) // 512, 300_000)


def _require_quick(image: Image.Image, data: bytes) -> None:
    """Raise _Refused if decoding a file would take much longer than its size and its number of pixels suggest."""
    if data.startswith(JPEG_START):
        most = max(_USUAL_SCANS, min(MOST_SCANS, _MOST_SCANNED // (image.width * image.height)))
        if data.count(_SCAN) > most and count_scans(data, most + 1) > most:  # previews and pixels may look like scans
            raise _Refused(f"it has more than {most} scans, which would take long to decode; store it again with fewer")
    if image.format == "PPM" and data.count(b"#") > _MOST_COMMENTS and data[1:2] in b"123":
        raise _Refused(f"it is plain text with more than {_MOST_COMMENTS} comments; store it without")
    if image.format == "TIFF" and any(sum(image.tag_v2.get(tag, ())) > 2 * len(data) for tag in _LENGTHS):
        raise _Refused("its strips or tiles repeat the same bytes, which would take long to decode; store it again")


def _tile_pixels(image: Image.Image) -> int:
    """Return the number of pixels of a tile of a TIFF; 0 for an image without tiles."""
    return math.prod(image.tag_v2.get(tag, 0) for tag in _TILE) if image.format == "TIFF" else 0


def count_scans(data: bytes, most: int) -> int:
    """Return the number of scans of the first image in the bytes of a JPEG file, or `most` if it has more."""
    scans = at = 0
    while scans < most and (found := _MARKER.search(data, at)) and not data.startswith(JPEG_END, found.start()):
        scans += found[0] == _SCAN
        at = found.end() + int.from_bytes(data[found.end() : found.end() + 2])
    return scans


def _why_unknown(data: bytes) -> str:
    if data.startswith(HEIC, 4) and "HEIF" not in readable_formats():
        return "it is HEIC, the format of phones; install pillow-heif (the extra heif), or convert it to JPEG"
    return f"its content is none of {', '.join(readable_formats())}" if data else "it is empty"


@functools.cache
def readable_formats() -> tuple[str, ...]:
    """Return the formats of Pillow that are read: IMAGE_FORMATS, and HEIF if pillow-heif is installed."""
    Image.init()
    with contextlib.suppress(ImportError):
        import pillow_heif  # the extra heif

        pillow_heif.register_heif_opener(thumbnails=False)
    return tuple(name for name in (*IMAGE_FORMATS, "HEIF") if name in Image.OPEN)  # Pillow reads AVIF since 11.3


def _bytes_per_pixel(image: Image.Image) -> int:
    if image.mode == "F" or image.mode.startswith("I"):
        return _DEEP
    return _PROGRESSIVE if image.info.get("progressive") else _BYTES_PER_PIXEL.get(image.format, _DEFAULT)


def _upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # damaged metadata do not make an image unreadable
        return image
    return image.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else image


def _rgb(image: Image.Image, gray_bits: int) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        return _from_deep(np.asarray(image), gray_bits)
    if image.has_transparency_data:
        return _on_white(image.convert("LA") if image.mode == "La" else image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """Blend a transparent image onto white, in strips, because blending needs three copies. Return an RGB image."""
    blended = Image.new("RGB", image.size)
    for box in _strips(image):
        strip = image.crop(box).convert("RGBA")
        blended.paste(Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip).convert("RGB"), box)
    return blended


def _from_deep(gray: np.ndarray, bits: int) -> Image.Image:
    """Convert a 16-bit gray image, of which `bits` are used, to RGB, without Pillow's clipping at 255.

    `info[BRIGHTEST]` of the result is the largest value of the image.
    """
    if gray.dtype.kind == "f" or gray.min() < 0 or gray.max() > 0xFFFF:
        raise _Refused(f"its pixels are {gray.dtype} without a known white; store it with 8 or 16 bits per channel")
    if (brightest := int(gray.max())) >> bits:
        raise _Refused(f"its brightest value, {brightest:,}, needs more than the {bits} bits of data.gray_bits")
    image = Image.fromarray((gray >> bits - 8).astype(np.uint8)).convert("RGB")
    image.info[BRIGHTEST] = brightest
    return image
