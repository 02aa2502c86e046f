"""Pickles and PyTorch files made by hand, in the layouts of torch.save."""

import functools
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from helpers.paths import PARITY
from helpers.refusals import Refusal
from mlmoe_jax.errors import UserError
from mlmoe_jax.pretrained.load import read_tensors

FILES = PARITY / "torch_files"
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
SYSTEM = {"protocol_version": PROTOCOL, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
FOUR = np.arange(4, dtype=np.float32)
DAMAGED = "damaged"


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def number(value: int) -> bytes:
    encoded = pickle.encode_long(value)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def named(full: str) -> bytes:
    module, _, name = full.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def row(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def numbers(*values: int) -> bytes:
    return row(*map(number, values))


def table(**items: bytes) -> bytes:
    return b"}" + b"".join(text(name) + value + b"s" for name, value in items.items())


def storage(key="0", kind="torch.FloatStorage", size=4, view=None) -> bytes:
    extra = () if view is None else (view,)
    return row(text("storage"), named(kind), text(key), text("cpu"), number(size), *extra) + b"Q"


def tensor(on=None, offset=0, shape=(4,), strides=(1,), function="torch._utils._rebuild_tensor_v2") -> bytes:
    hooks = named("collections.OrderedDict") + b")R"
    place = (number(offset), numbers(*shape), numbers(*strides))
    return named(function) + row(on or storage(), *place, b"\x89", hooks) + b"R"


def write_zip(
    path: Path, pickled: bytes, contents=None, compression=zipfile.ZIP_STORED, root="archive", **more
) -> Path:
    """Write a file in the zip layout; `more` are records beside the pickle and the storages."""
    storages = {f"data/{key}": content for key, content in (contents or {"0": FOUR.tobytes()}).items()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in {"data.pkl": b"\x80\x02" + pickled + b".", **storages, **more}.items():
            archive.writestr(f"{root}/{name}", content)
    return path


def write_legacy(path: Path, pickled: bytes, contents=None, *, keys=None, head=(MAGIC, PROTOCOL, SYSTEM)) -> Path:
    """Write a file in the legacy layout; `contents` are {key: (count, bytes)}."""
    if contents is None:
        contents = {"0": (4, FOUR.tobytes())} if b"Storage" in pickled else {}
    parts = [pickle.dumps(part, 2) for part in head]
    parts += [b"\x80\x02" + pickled + b".", pickle.dumps(list(contents) if keys is None else keys, 2)]
    parts += [count.to_bytes(8, "little", signed=True) + content for count, content in contents.values()]
    path.write_bytes(b"".join(parts))
    return path


WRITE = {"zip": write_zip, "legacy": write_legacy}


def outcome(path: Path) -> dict[str, np.ndarray] | str:
    """Return the tensors of a file, or the sentence with which it is refused, DAMAGED if a parser has raised."""
    try:
        return read_tensors(path)
    except UserError as error:
        return DAMAGED if f"{path} is damaged: " in str(error) else str(error)


def of_file(name: str, make: Callable[[Path], object], reason: str = DAMAGED) -> Refusal:
    """The file w.pth that `make` writes, and the reason why it is refused."""
    says = "{at}/w.pth is damaged: " if reason is DAMAGED else f"cannot read weights from {{at}}/w.pth: {reason}"
    return Refusal(name, lambda at: (make(at / "w.pth"), at / "w.pth")[1], read_tensors, says)


def of_pickle(name: str, pickled: bytes, reason: str = DAMAGED) -> list[Refusal]:
    """A handmade pickle in each layout."""
    return [
        of_file(f"{name}, {layout}", functools.partial(write, pickled=pickled), reason)
        for layout, write in WRITE.items()
    ]
