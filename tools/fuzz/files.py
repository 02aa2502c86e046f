"""Files of weights, images, and lists of images."""

import contextlib
import io
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import save

from mlmoe_jax.apps.tools.image_list import find_images
from mlmoe_jax.data.decoding import IMAGE_FORMATS, Decoding, has_frames, read_image
from mlmoe_jax.pretrained.load import read_tensors
from tools.fuzz.data_sets import own_images
from tools.fuzz.hostile import (
    NAMES,
    TEXTS,
    Case,
    damaged,
    damaged_json,
    damaged_npz,
    encoded,
    read_all,
    write,
)


def weights(draw: st.DrawFn, base: Path, place: Path) -> Case:
    """Files of tensors. Pickles have tests of their own, pretrained/test_torch_file_hostile.py."""
    kind = draw(st.sampled_from(("safetensors", "npz")))
    arrays = {"a/b": np.ones((2, 3), np.float32), "c": np.zeros(4, np.float32)}
    if kind == "npz":
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        content = damaged_npz(draw, buffer.getvalue())
    elif draw(st.booleans()):
        content = save(arrays)
        size = struct.unpack("<Q", content[:8])[0]
        header = damaged_json(draw, content[8 : 8 + size])
        length = len(header) if draw(st.integers(0, 3)) else draw(st.sampled_from((0, 2**63, 2**64 - 1, 10**9)))
        content = struct.pack("<Q", length) + header + content[8 + size :]
    else:
        content = damaged(draw, save(arrays))
    path = write(place / f"w.{kind}", content)
    return f"{kind} {content[:150]!r}", partial(read_tensors, path)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, mode: int, depth: int, *chunks: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, mode, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks) + chunk(b"IEND", b"")


ZIPPED = zlib.compress(bytes(50_000_000), 9)
KINDS_OF_IMAGES = [(kind, mode) for kind in IMAGE_FORMATS for mode in ("RGB", "L", "RGBA", "P", "CMYK")]


def prepare_images(base: Path) -> None:
    for kind, mode in KINDS_OF_IMAGES:
        with contextlib.suppress(OSError, KeyError, ValueError):  # not every format has every mode
            write(base / f"{kind}-{mode}", encoded(kind, mode))


def images(draw: st.DrawFn, base: Path, place: Path) -> Case:
    if draw(st.integers(0, 5)) == 0:
        side = st.sampled_from((0, 1, 3000, 12_000, 50_000, 2**31 - 1, 2**32 - 1))
        extra = draw(st.sampled_from((b"", chunk(b"zTXt", b"a\0\0" + ZIPPED), chunk(b"iCCP", b"a\0\0" + ZIPPED))))
        pixels = chunk(b"IDAT", ZIPPED)
        mode, depth = draw(st.sampled_from((0, 2, 3, 4, 6, 9))), draw(st.sampled_from((1, 8, 16, 99)))
        content = png(draw(side), draw(side), mode, depth, extra, pixels)
    else:
        path = draw(st.sampled_from(sorted(base.iterdir())))
        content = damaged(draw, path.read_bytes())
    return repr(content[:100]), partial(read_image, content, decoding=Decoding(draw(st.sampled_from((0, 4)))))


def containers(draw: st.DrawFn, base: Path, place: Path) -> Case:
    """Whole images whose containers have parts again and again, and lengths and offsets that do not fit."""
    kind = draw(st.sampled_from(("PNG", "JPEG", "WEBP", "AVIF", "JPEG2000", "TIFF", "GIF")))
    content = (base / f"{kind}-RGB").read_bytes() if (base / f"{kind}-RGB").exists() else encoded(kind, "RGB")
    name = draw(st.sampled_from((b"iCCP", b"eXIf", b"zTXt", b"EXIF", b"free", b"Exif", b"uuid")))
    body = draw(st.sampled_from((b"", b"a\0\0" + zlib.compress(bytes(2**20 - 1)), b"Exif\0\0" + bytes(60_000))))
    part = {
        "PNG": chunk(name, body),
        "JPEG": b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body,
        "WEBP": name + struct.pack("<I", len(body)) + body + bytes(len(body) % 2),
        "GIF": b"!\xfe" + (b"\xff" + bytes(255)) * 4 + b"\0",
    }.get(kind, struct.pack(">I", len(body) + 8) + name + body)
    times, at = draw(st.sampled_from((1, 100, 2_000, 20_000))), draw(st.integers(0, len(content)))
    times = min(times, 2**24 // len(part))
    content = bytearray(content[:at] + part * times + content[at:])
    for _ in range(draw(st.integers(0, 3))):  # a length, an offset or a count
        place_of_number = draw(st.integers(0, min(len(content), 400) - 4))
        content[place_of_number : place_of_number + 4] = draw(
            st.sampled_from((b"\0" * 4, b"\xff" * 4, b"\0\0\xff\xff"))
        )
    data = bytes(content)

    def act() -> None:
        has_frames(data)
        read_image(data)

    return f"{kind} {name!r} × {times} at {at}", act


def lists(draw: st.DrawFn, base: Path, place: Path) -> Case:
    own_images(place)
    odd = (
        "~nosuchuser/x",
        "://",
        "s3://x",
        "file:///etc",
        "/dev/zero",
        "x" * 5000,
        "a\0b",
        "[",
        "**",
        "~",
        "-",
    )
    listed = draw(st.lists(st.one_of(st.sampled_from((*odd, *NAMES)), TEXTS), max_size=4))
    items = draw(
        st.lists(
            st.one_of(
                st.sampled_from((*odd[:-1], f"{place}/b", f"{place}/*.png", f"{place}/?.p[", f"@{place}/l")), TEXTS
            ),
            min_size=1,
            max_size=3,
        )
    )
    write(place / "l", damaged(draw, "\n".join(listed).encode(errors="surrogatepass")))
    items = [item for item in items if item != "-"]

    def act() -> None:
        read_all(find_images(items).images)

    return str((items, listed))[:300], act
