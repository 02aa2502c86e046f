"""Hostile values, damage to the content of files, and valid files."""

import contextlib
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from mlmoe_jax.data.decoding import BadImage
from mlmoe_jax.data.images import Images

Case = tuple[str, Callable[[], object]]  # a description, and the action


class Silent(Exception):
    """Input was lost, added or changed, and nothing was said."""


@dataclass(frozen=True)
class Group:
    """A kind of input.

    Attributes:
      draw: makes a case in a folder.
      share: its share of all cases, which is small for slow cases.
      prepare: writes the valid inputs of all cases to a folder, once.
    """

    draw: Callable[[st.DrawFn, Path, Path], Case]
    share: float
    prepare: Callable[[Path], None] = lambda base: None


NAMES = ("a.png", "../a.png", "/etc/passwd", "", ".", "a\0b", "\ud800.png", "\udcff.png", "x" * 5000, "a\nb", "=1+1")
TEXTS = st.one_of(st.sampled_from(NAMES), st.text(max_size=12))
NUMBERS = st.sampled_from(
    (0, 1, -1, 2, 3, 255, 2**31, -(2**31), 2**63, 10**12, 10**23, 10**400, 0.5, 1e308, -1e-320, math.inf, math.nan)
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
WHOLE = (
    b"",
    b"\xff\xfe\xfa",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"5",
    b"[]",
    b"{}",
    b"null",
    b'"x"',
    b"\0" * 4096,
    b"NaN",
)


def with_changed_value(draw: st.DrawFn, value: object) -> object:
    """Return JSON in which one value at any depth is replaced, removed or doubled."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 5)) == 0:
        return draw(VALUES)
    key = draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
    changed = value.copy()
    if draw(st.integers(0, 5)) == 0:
        del changed[key]
    elif isinstance(value, list) and draw(st.integers(0, 8)) == 0:
        changed.append(value[key])
    else:
        changed[key] = with_changed_value(draw, value[key])
    return changed


def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Return the content of a file with damage: truncated, with other bytes, with a repeated part, or replaced."""
    how = draw(st.integers(0, 9))
    if how == 0:
        return draw(st.sampled_from(WHOLE))
    if how == 1:
        return draw(st.binary(max_size=200))
    if how == 2 or not content:
        return content[: draw(st.integers(0, len(content)))]
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(changed)))
        piece = draw(
            st.one_of(
                st.binary(min_size=1, max_size=8), st.sampled_from((b"\0", b"\xff\xff\xff\xff", b"[" * 99, b'"', b"\n"))
            )
        )
        changed[at : at + draw(st.integers(0, 8))] = piece
    return bytes(changed)


def damaged_json(draw: st.DrawFn, content: bytes) -> bytes:
    if draw(st.integers(0, 3)) == 0:
        return damaged(draw, content)
    try:
        return json.dumps(with_changed_value(draw, json.loads(content))).encode()
    except ValueError:  # an integer of more digits than Python writes
        return damaged(draw, content)


def damaged_csv(draw: st.DrawFn, content: bytes) -> bytes:
    rows = [line.split(",") for line in content.decode().splitlines()]
    if draw(st.integers(0, 3)) == 0 or not rows:
        return damaged(draw, content)
    row = draw(st.sampled_from(rows))
    row[draw(st.integers(0, len(row) - 1))] = str(draw(st.one_of(NUMBERS.filter(lambda n: n != 10**400), TEXTS)))
    return "\n".join(",".join(row) for row in rows).encode(errors="surrogatepass")


def array(draw: st.DrawFn) -> np.ndarray:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    kind = draw(st.sampled_from(("f2", "f4", "f8", "i1", "i8", "u8", "?", "U3", "S3", "c8", "M8[s]", "V2")))
    value = draw(st.sampled_from((0, 1, -1, 200)))
    if kind == "V2":
        return np.zeros(shape, "V2")
    with np.errstate(all="ignore"):
        filled = np.full(shape, value).astype(kind)
    return filled * np.array(math.nan, kind) if kind[0] == "f" and draw(st.booleans()) else filled


def damaged_npz(draw: st.DrawFn, content: bytes) -> bytes:
    """Return the content of an npz file with damage, or with an array that is gone, shorter, deeper or another one."""
    if draw(st.integers(0, 3)) == 0:
        return damaged(draw, content)
    with np.load(io.BytesIO(content)) as stored:
        arrays = dict(stored)
    name = draw(st.sampled_from(sorted(arrays)))
    changed, choice = arrays[name], draw(st.integers(0, 4))
    if choice == 0:
        del arrays[name]
    elif choice == 1 and changed.ndim:
        arrays[name] = changed[: draw(st.integers(0, 3))]
    elif choice == 2:
        arrays[name] = changed[None]
    else:
        arrays[name] = array(draw)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def encoded(kind: str = "PNG", mode: str = "RGB", size: tuple[int, int] = (12, 9), **options: bytes) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), np.uint8)
    Image.fromarray(pixels, "RGBA").convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def read_all(images: Images) -> None:
    for row in range(min(3, len(images))):
        with contextlib.suppress(BadImage):
            images.read(row)
