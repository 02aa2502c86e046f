"""npz files that somebody else may have written.

`numpy.load` allocates whatever a header asks for, and unpacks a file of 2 MB to 2 GB. Here the size of every array is
compared with that of its member, and the sum of all with the size of the file, before anything is allocated.
"""

from __future__ import annotations

import math
import os
import zipfile
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy

from mlmoe_jax.runtime.files import MIB

USUAL = 256 * MIB  # unpacked; also of a file that is much smaller, such as the labels of a data set, mostly zeros
PACKED = 100  # larger ones unpack to at most this many times the size of the file
_MEMBER = ".npy"
_LONGEST_HEADER = 10_000  # bytes; numpy's own limit for headers that are not trusted
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def read_npz(file: BinaryIO, *, usual: int = USUAL) -> dict[str, np.ndarray]:
    """Return all arrays of an npz file that is open for reading; nothing is unpickled.

    usual: the number of bytes to which any file may unpack; beyond it, at most PACKED times the size of the file.
    Raises the errors that `storage.damage_explained` turns into a sentence, before anything is allocated.
    """
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        most = max(usual, PACKED * file.seek(0, os.SEEK_END))
        if (unpacked := sum(member.file_size for member in members)) > most:
            raise ValueError(f"it would unpack to {unpacked:,} bytes, more than {most:,}")
        return {member.filename.removesuffix(_MEMBER): _array(archive, member, most) for member in members}


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, most: int) -> np.ndarray:
    name = repr(member.filename[:100])
    if not member.filename.endswith(_MEMBER) or member.compress_type not in _METHODS or member.flag_bits & 1:
        raise ValueError(f"its member {name} is not one that numpy writes")
    with archive.open(member) as file:
        read_header = _HEADERS.get(version := npy.read_magic(file))
        if read_header is None:
            raise ValueError(f"its array {name} has the unknown version {version}")
        shape, fortran_order, dtype = read_header(file, max_header_size=_LONGEST_HEADER)
        if dtype.hasobject or dtype.fields or dtype.subdtype or not dtype.itemsize or min(shape, default=0) < 0:
            raise ValueError(f"its array {name} is not one of numbers or text")
        # Sides next to one of 0 need no memory, but make lists and loops as long as they say.
        size, sides = math.prod(shape) * dtype.itemsize, math.prod(side or 1 for side in shape)
        if size != member.file_size - file.tell() or sides * dtype.itemsize > most:
            raise ValueError(f"its array {name} has not the size that its header gives")
        content = bytearray(size)
        if _fill(file, memoryview(content)) != size:
            raise EOFError(f"its array {name} is cut short")
        return np.ndarray(shape, dtype, content, order="F" if fortran_order else "C")


def _fill(file: BinaryIO, place: memoryview) -> int:
    """Read into `place` until it is full or the file ends; return the number of bytes."""
    filled = 0
    while filled < len(place) and (count := file.readinto(place[filled : filled + MIB])):
        filled += count
    file.read(1)  # zipfile compares its checksum at the end of the member
    return filled
