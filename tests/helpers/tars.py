"""Tar files with small images, as programs write them."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

Members = Iterable[tuple[str, bytes | str]]


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
