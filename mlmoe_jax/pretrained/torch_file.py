"""Read tensors from files of torch.save, without torch and without executing any code that a file contains."""

import functools
import math
import mmap
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mlmoe_jax.errors import UserError
from mlmoe_jax.pretrained.torch_pickle import Damaged, Tensor, TensorUnpickler, Unreadable
from mlmoe_jax.runtime.files import open_regular

SUFFIXES = (".pth", ".pth.tar", ".pt", ".bin")
# Keys under which training scripts store the state dict beside other things; the first one with tensors is used.
STATE_KEYS = ("model", "state_dict", "model_state_dict", "teacher")

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_DAMAGED_ZIP = "it is a zip archive that is cut off or damaged"

# A function that takes the key and the size of a storage and returns its bytes.
Read = Callable[[str, int], bytes]


def read_torch_file(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a state dict that torch.save wrote, in its zip layout or in the legacy one.

    If the file holds more than the state dict, the first of STATE_KEYS that has tensors is used; entries that are not
    tensors are left out, and a prefix `module.` that all names share is removed. Only the storages that are needed
    are read, each once; tensors that share one in the file also share it here, so the arrays are read-only. Raises
    UserError for a file that is missing, damaged or of another kind, or that refers to a name not in ADMITTED.
    """
    try:
        with open_regular(path) as file:
            if not file.read(1):
                raise Unreadable("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                content, read = _open_zip(file, data) if data[:2] == b"PK" else _open_legacy(data)
                read = functools.cache(read)
                return {name: _array(name, tensor, read, len(data)) for name, tensor in _state_dict(content).items()}
    except FileNotFoundError as error:
        raise UserError(f"there is no weights file {path}") from error
    except (Unreadable, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read weights from {path}: {reason}") from error


# ---------------------------------------------------------------------------------------------------- the two layouts
def _open_zip(file: BinaryIO, data: mmap.mmap) -> tuple[Any, Read]:
    """Return the content of the archive's pickle, and the function that reads storages."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = {record.filename: record for record in archive.infolist()}
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error) as error:
        raise Unreadable(_DAMAGED_ZIP) from error
    roots = [name.removesuffix("data.pkl") for name in records if re.fullmatch("[^/]+/data\\.pkl", name)]
    if len(roots) != 1:
        raise Unreadable("it is a zip archive without the data.pkl of torch.save")
    root = roots[0]
    if any(name == f"{root}constants.pkl" or name.startswith(f"{root}code/") for name in records):
        raise Unreadable("it is a TorchScript archive, a program and not only weights: save its state_dict() instead")
    # torch.save neither compresses nor overlaps records, so the bytes read can never be more than the file has.
    if (declared := sum(record.file_size for record in records.values())) > len(data):
        raise Unreadable(f"its records claim to hold {declared} bytes, but the whole file has {len(data)}")
    order = records.get(f"{root}byteorder")
    _check_byte_order(order is None or _record(data, order) == b"little")
    content = TensorUnpickler().load(_record(data, records[f"{root}data.pkl"]))

    def read(key: str, nbytes: int) -> bytes:
        record = records.get(f"{root}data/{key}")
        if record is None:
            raise Unreadable(f"it has no record of its storage {key[:100]!r}")
        _check_size(key, record.file_size, nbytes)
        return _record(data, record)

    return content, read


def _record(data: mmap.mmap, record: zipfile.ZipInfo) -> bytes:
    if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
        raise Unreadable(
            f"its record {record.filename[:100]!r} is compressed or encrypted, which torch.save never does"
        )
    start = max(record.header_offset, 0)
    header = data[start : start + _LOCAL_HEADER.size]
    if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\3\4"):
        raise Unreadable(_DAMAGED_ZIP)
    _, name, extra = _LOCAL_HEADER.unpack(header)
    start += _LOCAL_HEADER.size + name + extra
    content = data[start : start + record.file_size]
    if len(content) != record.file_size or zlib.crc32(content) != record.CRC:
        # torch can write files without checksums; that cannot be distinguished from damage.
        raise Unreadable(
            f"its record {record.filename[:100]!r} does not have the checksum that the archive gives for it: "
            "the file is damaged, or was saved with checksums turned off"
        )
    return content


def _open_legacy(data: mmap.mmap) -> tuple[Any, Read]:
    """Return the content of the file's main pickle, and the function that reads storages."""
    # Without this check for a binary pickle, text would be read as instructions, which the error would then name.
    if data[:1] != b"\x80":
        raise Unreadable(_other_kind(data[:1024]))
    pickles = TensorUnpickler()
    try:
        magic = pickles.load(data)
    except Damaged:
        magic = None
    if type(magic) is not int or magic != _MAGIC:
        raise Unreadable(_other_kind(data[:1024]))
    protocol, system = pickles.load(data), pickles.load(data)
    if type(protocol) is not int or protocol != _PROTOCOL or type(system) is not dict:
        raise Unreadable("it has an unknown version of PyTorch's legacy layout")
    _check_byte_order(system.get("little_endian") is True)
    content, keys = pickles.load(data), pickles.load(data)
    if type(keys) is not list or not all(type(key) is str and key in pickles.storages for key in keys):
        raise Damaged
    places, position = {}, data.tell()
    for key in keys:
        storage = pickles.storages[key]
        places[key] = position + 8
        count = int.from_bytes(data[position : places[key]], "little", signed=True)
        position = places[key] + storage.nbytes
        if position > len(data):
            raise Unreadable(
                f"it is cut off: storage {key[:100]!r} ends at byte {position} and the file at {len(data)}"
            )
        _check_size(key, count * storage.dtype.itemsize, storage.nbytes)

    def read(key: str, nbytes: int) -> bytes:
        if key not in places:
            raise Unreadable(f"it has no record of its storage {key[:100]!r}")
        return data[places[key] : places[key] + nbytes]

    return content, read


def _check_size(key: str, found: int, needed: int) -> None:
    if found != needed:
        raise Unreadable(f"its storage {key[:100]!r} has {found} bytes, but its tensors need {needed}")


def _check_byte_order(little: bool) -> None:
    if not little:
        raise Unreadable("it was written on a big-endian machine: save it again on a little-endian one")


def _other_kind(head: bytes) -> str:
    """Return the kind of a file that torch.save did not write, judging by its first bytes, and the remedy."""
    if head.lstrip().startswith(b"<"):
        return "it is a web page and not a checkpoint: download the file itself"
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer and not the file itself: run git lfs pull"
    if head[8:10] == b'{"':
        return "it is a safetensors file: give it the suffix .safetensors"
    if head[257:262] == b"ustar":
        return "it is a tar archive: unpack it, or save it again with a newer PyTorch if version 0.1 wrote it so"
    if not re.search(rb"[^\t\r\n -~\x80-\xff]", head):
        return "it is a text file and not a checkpoint"
    return "it has neither layout of torch.save, a zip archive or pickles that begin with PyTorch's magic number"


# ------------------------------------------------------------------------------------------------- state dict, arrays
def _state_dict(content: Any) -> dict[str, Tensor]:
    if type(content) is not dict:
        kind = {list: "a list", tuple: "a tuple", Tensor: "one tensor without a name"}.get(type(content), "an object")
        raise Unreadable(f"it holds {kind} instead of a dict of tensors")
    for candidate in (*(content.get(key) for key in STATE_KEYS), content):
        if type(candidate) is dict:
            tensors = {name: x for name, x in candidate.items() if type(name) is str and type(x) is Tensor}
            if tensors:
                break
    else:
        keys = ", ".join(repr(key)[:60] for key in content if type(key) is str)[:200]
        places = ", ".join(STATE_KEYS)
        raise Unreadable(f"it has no tensors, neither directly nor under {places}; its keys are {keys or 'none'}")
    while all(name.startswith("module.") for name in tensors):
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return tensors


def _array(name: str, tensor: Tensor, read: Read, file_size: int) -> np.ndarray:
    """Return an array on the bytes of the tensor's storage, after checking that it stays inside them."""
    about = f"its tensor {name[:100]!r}"
    storage, offset, shape, strides = tensor.storage, tensor.offset, tensor.shape, tensor.strides
    if type(shape) is not tuple or type(strides) is not tuple or len(shape) != len(strides) or len(shape) > 64:
        raise Unreadable(f"{about} has no proper shape and strides")
    if not all(type(number) is int and 0 <= number < 2**62 for number in (offset, *shape, *strides)):
        raise Unreadable(f"{about} has a size, stride or offset that is negative or far too large")
    item = tensor.dtype.itemsize
    # A stride of zero makes a large tensor of few bytes; a real one is never larger than its own file.
    nbytes = math.prod(size for size in shape if size) * item
    if nbytes > max(file_size, 2**20):
        raise Unreadable(f"{about} needs {nbytes} bytes, but the whole file has {file_size}")
    if 0 in shape:
        return np.empty(shape, tensor.dtype)
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    held = storage.count * storage.dtype.itemsize // item
    if last >= held:
        raise Unreadable(f"{about} uses element {last} of a storage with {held}")
    start = storage.start * storage.dtype.itemsize + offset * item
    # The stride of an axis of size 1 is never used, so it may be any number, even one that numpy cannot represent.
    steps = tuple(stride * item if size > 1 else 0 for size, stride in zip(shape, strides, strict=True))
    return np.ndarray(shape, tensor.dtype, read(storage.key, storage.nbytes), start, steps)
