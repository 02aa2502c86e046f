"""Tar files with small images, as tests and programs write them."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

Members = Iterable[tuple[str, bytes | str]]


def picture(shade: int = 0) -> bytes:
    """Return a PNG of one color."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (shade % 256, shade // 256, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def write_tar(path: Path, members: Members, *, pack_format: int = tarfile.USTAR_FORMAT) -> Path:
    """Write a tar file with (name, content) of each member, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=pack_format) as archive:
        for name, content in members:
            data = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path
