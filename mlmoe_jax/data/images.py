"""Pictures from files: one decoder for every source, with one named error for whatever is wrong with a file."""

import functools
import io
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.Image import Transpose

from mlmoe_jax.errors import UserError

# Decoded, the largest picture takes 450 MB. Pillow's own warning would come at 89 million pixels, where many a camera
# is by now, and catching it around each call is not safe in the threads of a loader: our limit speaks instead of it.
MAX_PIXELS = 150_000_000
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

# Named, because Pillow's full list reaches for programs outside Python (EPS runs Ghostscript) on untrusted files.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")

EXIF_ORIENTATION = 0x0112
UPRIGHT = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}


class BadImage(UserError):
    """A file, or a byte string, that cannot be read as a picture."""


def read_image(source: str | os.PathLike | bytes) -> np.ndarray:
    """Decode a file, or the bytes of one, to u8[h,w,3]: RGB, upright as its EXIF says.

    Grey, palette and CMYK become RGB; 16 bits a channel keep their upper 8; the first frame stands for an animation;
    colour profiles are not applied (nor did the authors of the methods here). Transparent pixels are laid over white,
    as a page shows them: the colour stored below them is arbitrary.

    Raises BadImage for what is missing, empty, cut short, damaged, above MAX_PIXELS or in none of FORMATS.
    """
    name = f"{len(source):,} bytes" if isinstance(source, bytes) else os.fspath(source)
    try:
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        return _decode(data)
    except OSError as error:
        raise BadImage(f"cannot read {name} as an image: {error.strerror}") from error
    except _Unreadable as error:
        raise BadImage(f"cannot read {name} as an image: {error}") from error


class _Unreadable(Exception):
    """Why some bytes are no picture, to follow 'cannot read … as an image:'."""


def _decode(data: bytes) -> np.ndarray:
    if not data:
        raise _Unreadable("it is empty")
    too_large = f"it has more than {MAX_PIXELS:,} pixels; store it smaller"
    try:
        image = Image.open(io.BytesIO(data), formats=_formats())
        if image.width * image.height > MAX_PIXELS:
            raise _Unreadable(too_large)
        image.load()
        return np.array(_rgb(_upright(image)))
    except _Unreadable:
        raise
    except Image.DecompressionBombError as error:
        raise _Unreadable(too_large) from error
    except UnidentifiedImageError as error:
        raise _Unreadable(f"its content is none of {', '.join(_formats())}") from error
    except (
        Exception
    ) as error:  # Pillow's decoders raise many kinds on damaged data, SyntaxError and IndexError among them
        raise _Unreadable(f"it is damaged or cut short ({error or type(error).__name__})") from error


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)  # Pillow learnt AVIF in 11.3


def _upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(EXIF_ORIENTATION)
    except Exception:  # damaged notes beside a picture do not make it a bad one
        return image
    return image.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else image


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        return _from_deep(np.asarray(image))
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


def _from_deep(grey: np.ndarray) -> Image.Image:
    """Make RGB of a grey picture in 16 bits, which Pillow's own conversion would clip at 255."""
    if grey.dtype.kind == "f" or grey.min() < 0 or grey.max() > 0xFFFF:
        raise _Unreadable(f"its pixels are {grey.dtype} without a known white; store it with 8 or 16 bits a channel")
    return Image.fromarray((grey >> 8).astype(np.uint8)).convert("RGB")


class ImageFiles:
    """Pictures read from files when asked for: row -> u8[h,w,3]; picklable."""

    def __init__(self, paths: Iterable[str | os.PathLike]):
        self.paths = [os.fspath(path) for path in paths]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> np.ndarray:
        return read_image(self.paths[row])


def image_files(folder: Path, names: Sequence[str]) -> ImageFiles:
    """Return the files `names` of `folder`, whose presence is checked by listing the folder once.

    Raises UserError when the folder or any of the files is missing.
    """
    try:
        present = set(os.listdir(folder))
    except OSError as error:
        raise UserError(
            f"there is no folder {folder} with the {len(names):,} listed images; unpack the images there"
        ) from error
    missing = [name for name in names if name not in present]
    if missing:
        raise UserError(
            f"{len(missing):,} of the {len(names):,} listed images are not in {folder}, the first is {missing[0]}; "
            "unpack the images there"
        )
    return ImageFiles(folder / name for name in names)


def data_folder(root: str | os.PathLike, data_set: str, holds: str) -> Path:
    """Return the folder `root` that the user named for `data_set`; `holds` says, for the errors, which one is meant.

    Raises UserError when it is empty or no folder.
    """
    if not os.fspath(root):
        raise UserError(f"data.root is empty; set it to the folder that holds {holds} of {data_set}")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"data.root is '{folder}', which is no folder; set it to the one that holds {holds} of {data_set}"
        )
    return folder
