"""Read tensors from files of torch.save, without torch and without executing code from a file."""

import functools
import io
import math
import mmap
import re
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

from mlmoe_jax.pretrained.torch_pickle import Storage, Tensor, Unreadable, read_pickle

SUFFIXES = (".pth", ".pth.tar", ".pt", ".bin")
# Keys under which training scripts store the state dict; the first key with tensors is used.
STATE_KEYS = ("model", "state_dict", "model_state_dict", "teacher")

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C.to_bytes(10, "little"), 1001

# A function that takes the key and the size of a storage and returns its bytes.
Read = Callable[[str, int], bytes]


def read_torch_file(file: BinaryIO) -> dict[str, np.ndarray]:
    """Return name -> array of a state dict that torch.save wrote, in its zip layout or its legacy layout.

    If the content is a dict, the tensors come from the first of its keys STATE_KEYS that has tensors, or else from the
    dict itself. Entries that are not tensors are ignored. If all names begin with `module.`, this prefix is removed.
    Only the storages of these tensors are read, each once. Arrays are read-only, because tensors may share a storage.

    Raises:
      Unreadable: the file has another format, or its pickle has a name that is not in the whitelist.
      Exception: any other exception, if the file is damaged.
    """
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        content, read = _open_zip(file, len(data)) if data[:2] == b"PK" else _open_legacy(data)
        read = functools.cache(read)
        return {name: _array(name, tensor, read, len(data)) for name, tensor in _state_dict(content).items()}


# ---------------------------------------------------------------------------------------------------- the two layouts
def _open_zip(file: BinaryIO, size: int) -> tuple[Any, Read]:
    """Return the unpickled content of a zip archive of `size` bytes, and a function that reads its storages."""
    archive = zipfile.ZipFile(file)
    sizes = {record.filename: record.file_size for record in archive.infolist()}
    roots = [name.removesuffix("data.pkl") for name in sizes if re.fullmatch("[^/]+/data\\.pkl", name)]
    if len(roots) != 1:
        raise Unreadable("it is a zip archive without the data.pkl of torch.save")
    root = roots[0]
    # Compressed and overlapping records can be much larger than the file.
    stored = all(not record.compress_type and record.compress_size == record.file_size for record in archive.infolist())
    if not stored or sum(sizes.values()) > size:
        raise Unreadable("its records are compressed or overlap, unlike the records of torch.save")
    if f"{root}byteorder" in sizes and archive.read(f"{root}byteorder") != b"little":
        raise Unreadable("it was written on a big-endian machine: save it again on a little-endian machine")

    def read(key: str, nbytes: int) -> bytes:
        name = f"{root}data/{key}"
        if sizes.get(name) != nbytes:
            raise Unreadable(f"it has no storage {key[:100]!r} with the {nbytes} bytes that its tensors need")
        return archive.read(name)

    return read_pickle(io.BytesIO(archive.read(f"{root}data.pkl")), {}), read


def _open_legacy(data: mmap.mmap) -> tuple[Any, Read]:
    """Return the unpickled content of a file in the legacy layout, and a function that reads storages."""
    # Without this check for a binary pickle, text would be read as instructions.
    if data[:1] != b"\x80" or _MAGIC not in data[:32]:
        raise Unreadable("it is no file of torch.save, but perhaps a web page, a Git LFS pointer or a safetensors file")
    storages: dict[str, Storage] = {}
    _, protocol, system, content, keys = (read_pickle(data, storages) for _ in range(5))
    if protocol != _PROTOCOL or not system["little_endian"]:
        raise Unreadable("it is of an unknown version of PyTorch's legacy layout, or from a big-endian machine")
    starts, position = {}, data.tell()
    for key in keys:
        count, starts[key] = int.from_bytes(data[position : position + 8], "little"), position + 8
        position = starts[key] + storages[key].nbytes
        if position > len(data) or count * storages[key].dtype.itemsize != storages[key].nbytes:
            raise Unreadable(f"it is cut off or damaged at its storage {key[:100]!r}")
    return content, lambda key, nbytes: data[starts[key] : starts[key] + nbytes]


# ------------------------------------------------------------------------------------------------- state dict, arrays
def _state_dict(content: Any) -> dict[str, Tensor]:
    """Return the tensors of the first of STATE_KEYS that has some, or of `content` itself; Unreadable without any."""
    content = content if isinstance(content, dict) else {}
    found = (_named_tensors(value) for value in (*map(content.get, STATE_KEYS), content))
    tensors = next(filter(None, found), None)
    if tensors is None:
        keys = ", ".join(repr(key)[:60] for key in content if type(key) is str)[:200]
        known = ", ".join(STATE_KEYS)
        raise Unreadable(f"it has no tensors, neither directly nor under {known}; its keys are {keys or 'none'}")
    while all(name.startswith("module.") for name in tensors):
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return tensors


def _named_tensors(value: Any) -> dict[str, Tensor]:
    """Return the entries of a dict whose keys are strings and whose values are tensors; {} if `value` is not a dict."""
    items = value.items() if isinstance(value, dict) else ()
    return {name: item for name, item in items if type(name) is str and type(item) is Tensor}


def _array(name: str, tensor: Tensor, read: Read, file_size: int) -> np.ndarray:
    """Return a tensor as a NumPy view of its storage; Unreadable if the tensor exceeds the storage or the file."""
    if not _fits(tensor, file_size):
        raise Unreadable(f"its tensor {name[:100]!r} does not fit into its storage and the file")
    storage, shape, item = tensor.storage, tensor.shape, tensor.dtype.itemsize
    if 0 in shape:
        return np.empty(shape, tensor.dtype)
    start = storage.start * storage.dtype.itemsize + tensor.offset * item
    # The stride of an axis of size 1 is never used, so it may be any number, even if numpy cannot represent it.
    steps = tuple(stride * item if size > 1 else 0 for size, stride in zip(shape, tensor.strides, strict=True))
    return np.ndarray(shape, tensor.dtype, read(storage.key, storage.nbytes), start, steps)


def _fits(tensor: Tensor, file_size: int) -> bool:
    storage, offset, shape, strides = tensor.storage, tensor.offset, tensor.shape, tensor.strides
    if type(shape) is not tuple or type(strides) is not tuple or len(shape) != len(strides):
        return False
    if not all(type(number) is int and 0 <= number < 2**62 for number in (offset, *shape, *strides)):
        return False
    # A stride of zero makes a large tensor of few bytes. A real tensor is never larger than its file.
    small = math.prod(size for size in shape if size) * tensor.dtype.itemsize <= max(file_size, 2**20)
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return small and (0 in shape or last < storage.count * storage.dtype.itemsize // tensor.dtype.itemsize)
