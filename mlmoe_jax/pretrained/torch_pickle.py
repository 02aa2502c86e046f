"""Read the pickles of a PyTorch file as descriptions of tensors.

Python's unpickler reads them, with `find_class` from a whitelist: every name stands for a class of this file, and
nothing is imported. `_check` runs first, because the unpickler allocates and hashes everything in a pickle.
"""

import io
import pickle
import pickletools
import re
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from mlmoe_jax.errors import UserError

_MOST = 8 << 20  # bytes of a pickle; a ViT-g with optimizer state has less than 1 MB
_MOST_ITEMS = 1 << 20  # of a tuple and the tuples in it; hashing takes one step per item
_MOST_DEPTH = 100  # of tuples in tuples; hashing is recursive
_PUTS, _GETS = ("PUT", "BINPUT", "LONG_BINPUT"), ("GET", "BINGET", "LONG_BINGET")
_TUPLES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET")

_SHORT = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_DTYPES = {name: np.dtype(name) for name in ("bool", "float16", "float32", "float64", "complex64", "complex128")}
_DTYPES |= {f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}
_DTYPES |= {name: np.dtype(getattr(ml_dtypes, name)) for name in _SHORT}
_STORAGES = {"Bool": "bool", "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64"}
_STORAGES |= {"Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64", "Untyped": "uint8"}
_STORAGES |= {"ComplexFloat": "complex64", "ComplexDouble": "complex128"}
# Settings and counters in checkpoints, which are read as empty objects.
_WITHOUT_CONTENT = re.compile(
    r"_codecs\.encode|argparse\.Namespace|collections\.(Counter|deque)|numpy\.(dtype|ndarray)"
    r"|numpy\.(core|_core)\.multiarray\.(scalar|_reconstruct)|pathlib\.(Pure)?(Posix|Windows)?Path"
    r"|builtins\.(bool|bytearray|complex|float|frozenset|int|list|set|str|tuple)"
    r"|torch\.(Size|Tensor|device|serialization\._get_layout)"
)


class Unreadable(UserError):
    """An error: a file cannot be read. Its text is the reason, to be appended to a message."""


# ------------------------------------------------------------------------------------------------ values of a pickle
class _StandIn:
    """The base of the classes that replace the classes in a pickle. A pickle cannot set their attributes."""

    def __setstate__(self, state: Any) -> None:
        pass


@dataclass(frozen=True, eq=False)
class Storage(_StandIn):
    """A storage of a PyTorch file: a range of bytes that tensors share.

    Attributes:
      key: the name of the storage in the file.
      nbytes: the size of the storage in bytes.
      start: the first element that a tensor may use.
      count: the number of elements from `start` that a tensor may use.
    """

    key: str
    dtype: np.dtype
    nbytes: int
    start: int
    count: int


@dataclass(frozen=True, eq=False)
class Tensor(_StandIn):
    """A tensor as the pickle describes it. Fields other than `dtype` are unchecked and may have any type.

    `offset` is the index of the tensor's first element in its storage, and `strides` are in elements, not bytes.
    """

    storage: Any
    dtype: np.dtype
    offset: Any
    shape: Any
    strides: Any


@dataclass(frozen=True, eq=False)
class _Kind(_StandIn):
    """The replacement of a tensor type, storage type or dtype of PyTorch: its NumPy dtype."""

    dtype: np.dtype


class _Rebuilt(_StandIn):
    def __new__(cls, storage: Any, offset: Any, shape: Any, strides: Any, *more: Any) -> Any:
        dtype = more[2].dtype if len(more) > 2 else storage.dtype  # _rebuild_tensor_v3 has its own type
        return Tensor(storage, dtype, offset, shape, strides)


class _RebuiltWithAttributes(_StandIn):
    def __new__(cls, function: Any, kind: Any, arguments: Any, state: Any) -> Any:
        return _Rebuilt(*arguments)


class _Wrapped(_StandIn):
    def __new__(cls, tensor: Any, *more: Any) -> Any:
        return tensor


class _Dict(_StandIn, dict):
    def __init__(self, items: Any = (), *more: Any):
        super().__init__(items if type(items) is list else ())
        if type(items) is list:  # an OrderedDict of Python 2; a cleared list cannot be copied again and again
            items.clear()


class _Empty(_StandIn):
    """The replacement of an object that contains no tensors. It discards all arguments and items."""

    def __init__(self, *arguments: Any):
        pass

    def append(self, item: Any) -> None:
        pass

    extend = add = append

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


_NAMES: dict[str, Any] = {
    **dict.fromkeys(("collections.OrderedDict", "collections.defaultdict", "builtins.dict"), _Dict),
    **{f"torch._utils._rebuild_tensor{version}": _Rebuilt for version in ("", "_v2", "_v3")},
    **{f"torch._utils._rebuild_parameter{state}": _Wrapped for state in ("", "_with_state")},
    "torch.nn.parameter.Parameter": _Wrapped,
    "torch._tensor._rebuild_from_type_v2": _RebuiltWithAttributes,
    **{f"torch.{name}": _Kind(dtype) for name, dtype in _DTYPES.items()},
    **{
        f"{module}.{kind}Storage": _Kind(_DTYPES[dtype])
        for module in ("torch", "torch.cuda", "torch.storage")
        for kind, dtype in _STORAGES.items()
    },
}


# --------------------------------------------------------------------------------------------------------- unpickler
class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, storages: dict[str, Storage]):
        super().__init__(io.BytesIO(content), encoding="latin-1")  # texts of Python 2
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full in _NAMES:
            return _NAMES[full]
        if _WITHOUT_CONTENT.fullmatch(full):
            return _Empty
        text = full if full.isprintable() and " " not in full else repr(full)
        raise Unreadable(
            f"it refers to {text[:200]}, which is neither a tensor nor a plain container and is not loaded: "
            "save only the state_dict(), or use a file that has nothing else"
        )

    def persistent_load(self, identity: Any) -> Storage:
        _, kind, key, _, size, *view = identity
        start, count = view[0][1:] if view and view[0] is not None else (0, size)
        numbers = all(type(number) is int for number in (size, start, count))
        storage = Storage(key, kind.dtype, size * kind.dtype.itemsize, start, count)
        valid = type(kind) is _Kind and type(key) is str and numbers and 0 <= start <= start + count <= size
        if not valid or self._storages.setdefault(key, storage).nbytes != storage.nbytes:
            raise ValueError("a storage has no valid size, or two")
        return storage


def read_pickle(data: Any, storages: dict[str, Storage]) -> Any:
    """Unpickle the next pickle of a memory map or io.BytesIO, and leave its position after the pickle.

    Every storage of the pickle is added to `storages`, by key.

    Raises:
      Unreadable: the pickle has a name that is not in the whitelist.
      Exception: any other exception, if the pickle is damaged.
    """
    start = data.tell()
    _check(data)
    end = data.tell()
    data.seek(start)
    return _Unpickler(data.read(end - start), storages).load()


def _check(data: Any) -> None:
    """Read the instructions of a pickle without building its values; ValueError if they could need much memory or time.

    A small pickle can request a memo of 2**32 entries, or the hash of a tuple that contains one tuple in 2**n ways.
    Therefore an index of the memo must not exceed the length of the pickle, and the size of nested tuples is limited.
    """
    start, stack = data.tell(), _StackOfSizes()
    for opcode, argument, position in pickletools.genops(data):
        if opcode.name.startswith("EXT"):  # the unpickler would look it up in a cache of the process
            raise Unreadable(f"its pickle has the instruction {opcode.name} {argument}, which no file of tensors needs")
        if position - start > _MOST or (opcode.name in _PUTS and argument > position - start):
            raise ValueError("the pickle is too large")
        stack.apply(opcode, argument)


class _StackOfSizes:
    """A simulation of the unpickler's stack, with the number of nested items and the depth of tuples for each value."""

    def __init__(self):
        self.values: list[tuple[int, int]] = []
        self.marks = [0]
        self.memo: dict[int, tuple[int, int]] = {}

    def apply(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        """Update the stack for one instruction; ValueError if the instruction takes more values than the stack has."""
        name = opcode.name
        if name == "MARK":
            self.marks.append(len(self.values))
        elif name in _PUTS or name == "MEMOIZE":
            self.memo[len(self.memo) if argument is None else argument] = self.values[-1]
        elif name in _GETS:
            self.values.append(self.memo[argument])
        elif name == "DUP":
            self.values.append(self.values[-1])
        else:
            first = self._first_taken(opcode.stack_before)
            result = _tuple_size(self.values[first:]) if name in _TUPLES else (1, 0)
            self.values[first:] = [result] * len(opcode.stack_after)

    def _first_taken(self, before: list[pickletools.StackObject]) -> int:
        """Return the index on the stack of the first value that an instruction takes.

        `before` is the list of stack objects that the instruction takes, as `pickletools` documents it.
        """
        if pickletools.markobject in before:
            first = self.marks.pop() - before.index(pickletools.markobject)
        else:
            first = len(self.values) - len(before)
        if first < self.marks[-1]:
            raise ValueError("an instruction of the pickle takes too many values")
        return first


def _tuple_size(items: list[tuple[int, int]]) -> tuple[int, int]:
    """Return (size, depth) of a tuple, given (size, depth) of each item; ValueError if a result exceeds its limit."""
    size, depth = 1 + sum(size for size, _ in items), 1 + max((depth for _, depth in items), default=0)
    if size > _MOST_ITEMS or depth > _MOST_DEPTH:
        raise ValueError("a tuple of the pickle is too large")
    return size, depth
