"""Read the pickle inside a PyTorch file as a description of tensors.

Python's unpickler is not used: a small interpreter executes the instructions on plain data. Names are looked up in
ADMITTED and never imported, none of the interpreter's objects can be called, and anything other than tensors and
their dicts and lists becomes an object without content.
"""

import mmap
import pickletools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

_INTEGERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
_REALS = ("float16", "float32", "float64", "complex64", "complex128")
_SHORT = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_DTYPES = {
    **{name: np.dtype(name) for name in ("bool", *_INTEGERS, *_REALS)},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _SHORT},
}
_STORAGE_KINDS = {
    **{"Bool": "bool", "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64"},
    **{"Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64"},
    **{"ComplexFloat": "complex64", "ComplexDouble": "complex128", "Untyped": "uint8"},
}
_STORAGE_TYPES = {
    f"{module}.{kind}Storage": _DTYPES[dtype]
    for module in ("torch", "torch.cuda", "torch.storage")
    for kind, dtype in _STORAGE_KINDS.items()
}
_DICTS = frozenset({"collections.OrderedDict", "collections.defaultdict", "builtins.dict"})
_REBUILD = frozenset(f"torch._utils._rebuild_tensor{version}" for version in ("", "_v2", "_v3"))
# Each takes a tensor as its first argument and only wraps it.
_WRAP = frozenset(
    {
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
        "torch.nn.parameter.Parameter",
    }
)
_REBUILD_WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"
# Settings and counters that checkpoints hold besides tensors.
_BUILTINS = ("bool", "bytearray", "complex", "float", "frozenset", "int", "list", "set", "str", "tuple")
_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
_WITHOUT_CONTENT = frozenset(
    [
        "_codecs.encode",
        "argparse.Namespace",
        "collections.Counter",
        "collections.deque",
        "numpy.dtype",
        "numpy.ndarray",
        "torch.Size",
        "torch.Tensor",
        "torch.device",
        "torch.serialization._get_layout",
        *(f"numpy.{package}.multiarray.{name}" for package in ("core", "_core") for name in ("scalar", "_reconstruct")),
        *(f"builtins.{name}" for name in _BUILTINS),
        *(f"pathlib.{name}" for name in _PATHS),
        *(f"torch.{name}" for name in _DTYPES),
    ]
)
ADMITTED = frozenset({*_STORAGE_TYPES, *_DICTS, *_REBUILD, *_WRAP, _REBUILD_WITH_ATTRIBUTES, *_WITHOUT_CONTENT})

_NUMBER_CODES = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
_TEXT_CODES = ("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_BYTES_CODES = ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8")
_LITERALS = frozenset({*_NUMBER_CODES, *_TEXT_CODES, *_BYTES_CODES})
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_CONTAINERS = {"EMPTY_LIST": list, "EMPTY_SET": list, "EMPTY_DICT": dict}


class Unreadable(Exception):
    """The reason why a file cannot be read, as the end of the error message."""


class Damaged(Unreadable):
    """The pickle ends early, or does something that torch.save never writes."""

    def __init__(self):
        super().__init__("its pickled part is damaged or cut off")


@dataclass(frozen=True)
class Storage:
    """A range of `nbytes` bytes in the file, of which a tensor may use `count` elements starting at element `start`."""

    key: str
    dtype: np.dtype
    nbytes: int
    start: int
    count: int


@dataclass(frozen=True)
class Tensor:
    """A tensor as the pickle describes it; `offset`, `shape` and `strides` are unchecked and of any type."""

    storage: Storage
    dtype: np.dtype
    offset: Any
    shape: Any
    strides: Any


@dataclass(frozen=True)
class _Name:
    """A name from ADMITTED, in place of the object that torch would import."""

    full: str


class _Empty:
    """An admitted object without tensors; anything put into it is dropped."""


# Hashing any other key, such as deeply nested tuples, could be made to take arbitrarily long.
_KEYS = frozenset({str, bytes, int, float, bool, type(None), _Name, _Empty})


class TensorUnpickler:
    """Reader of pickles of numbers, strings, lists, dicts and Tensors; `storages` has every storage they refer to."""

    def __init__(self):
        self.storages: dict[str, Storage] = {}
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def load(self, source: bytes | mmap.mmap) -> Any:
        """Return the content of the next pickle in the source; a mapped file is left at the byte after it.

        Raises Unreadable for a name or an instruction that is not admitted, and Damaged for a broken pickle.
        """
        self._stack, self._marks, self._memo = [], [], {}
        try:
            for opcode, argument, _ in pickletools.genops(source):
                if opcode.name == "STOP":
                    return self._stack.pop()
                self._run(opcode.name, argument)
        except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            raise Damaged from error
        raise Damaged

    def _run(self, instruction: str, argument: Any) -> None:
        stack = self._stack
        if instruction in _LITERALS:
            stack.append(argument)
            return
        if instruction in _CONSTANTS:
            stack.append(_CONSTANTS[instruction])
            return
        match instruction:
            case "BINPUT" | "LONG_BINPUT" | "PUT":
                self._memo[argument] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET" | "GET":
                stack.append(self._memo[argument])
            case "MARK":
                self._marks.append(len(stack))
            case "EMPTY_LIST" | "EMPTY_SET" | "EMPTY_DICT":
                stack.append(_CONTAINERS[instruction]())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._pop_from(len(stack) - int(instruction[-1]))))
            case "TUPLE":
                stack.append(tuple(self._pop_from(self._marks.pop())))
            case "LIST" | "FROZENSET":
                stack.append(self._pop_from(self._marks.pop()))
            case "APPEND" | "APPENDS" | "ADDITEMS":
                items = self._pop_from(len(stack) - 1 if instruction == "APPEND" else self._marks.pop())
                _extend(stack[-1], items)
            case "SETITEM" | "SETITEMS":
                items = self._pop_from(len(stack) - 2 if instruction == "SETITEM" else self._marks.pop())
                _update(stack[-1], zip(items[::2], items[1::2], strict=True))
            case "GLOBAL":
                module, _, name = argument.partition(" ")
                stack.append(_admit(module, name))
            case "STACK_GLOBAL":
                stack.append(_admit(*self._pop_from(len(stack) - 2)))
            case "REDUCE" | "NEWOBJ":
                stack.append(_make(*self._pop_from(len(stack) - 2)))
            case "BUILD":
                owner, _ = self._pop_from(len(stack) - 2)
                if type(owner) not in (dict, Tensor, _Empty):
                    raise Damaged
                stack.append(owner)  # ignoring the state: a dict's metadata, a parameter's hooks, settings
            case "BINPERSID":
                stack.append(self._storage(stack.pop()))
            case "PROTO" | "FRAME":
                pass
            case _:
                about = f"{instruction} {argument!r}" if isinstance(argument, str | int) else instruction
                raise Unreadable(f"its pickle has the instruction {about[:100]}, which no file of tensors needs")

    def _pop_from(self, start: int) -> list[Any]:
        if not 0 <= start <= len(self._stack):
            raise Damaged
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _storage(self, identity: Any) -> Storage:
        if type(identity) is not tuple or len(identity) not in (5, 6) or identity[0] != "storage":
            raise Unreadable("its pickle refers to something outside it that is not a storage")
        _, kind, key, _, size, *view = identity
        if type(kind) is not _Name or type(key) is not str or type(size) is not int or not 0 <= size < 2**62:
            raise Damaged
        start, count = 0, size
        if view and view[0] is not None:
            _, start, count = view[0]
            if type(start) is not int or type(count) is not int or not 0 <= start <= start + count <= size:
                raise Damaged
        dtype = _STORAGE_TYPES[kind.full]
        storage = Storage(key, dtype, size * dtype.itemsize, start, count)
        if self.storages.setdefault(key, storage).nbytes != storage.nbytes:
            raise Unreadable(f"its storage {key[:100]!r} is given two sizes")
        return storage


def _admit(module: Any, name: Any) -> _Name:
    if type(module) is not str or type(name) is not str:
        raise Damaged
    full = f"{'builtins' if module == '__builtin__' else module}.{name}"
    if full not in ADMITTED:
        shown = full if full.isprintable() and " " not in full else repr(full)
        raise Unreadable(
            f"it refers to {shown[:200]}, which is neither a tensor nor a plain container and is not loaded: "
            "save only the state_dict(), or use a file that has nothing else"
        )
    return _Name(full)


def _make(function: Any, arguments: Any) -> Any:
    """Return a stand-in for the object that torch makes by calling an admitted name."""
    if type(function) is not _Name or type(arguments) is not tuple:
        raise Damaged
    name = function.full
    if name == _REBUILD_WITH_ATTRIBUTES:
        function, _, arguments, _ = arguments
        if type(function) is not _Name or function.full not in _REBUILD or type(arguments) is not tuple:
            raise Damaged
        name = function.full
    if name in _REBUILD:
        storage, offset, shape, strides = arguments[:4]
        if type(storage) is not Storage:
            raise Damaged
        dtype = storage.dtype
        if name.endswith("_v3"):
            if type(arguments[6]) is not _Name:
                raise Damaged
            dtype = _DTYPES[arguments[6].full.removeprefix("torch.")]
        return Tensor(storage, dtype, offset, shape, strides)
    if name in _WRAP:
        if type(arguments[0]) is not Tensor:
            raise Damaged
        return arguments[0]
    if name in _DICTS:
        made: dict[Any, Any] = {}
        # Python 2 passes an OrderedDict's items as a list; cleared here, it cannot be copied again and again.
        if arguments and type(arguments[0]) is list:
            _update(made, arguments[0])
            arguments[0].clear()
        return made
    return _Empty()


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) not in (list, _Empty):
        raise Damaged
    if type(target) is list:
        target.extend(items)


def _update(target: Any, items: Iterable[Any]) -> None:
    if type(target) not in (dict, _Empty):
        raise Damaged
    for key, value in items:
        if not all(type(part) in _KEYS for part in (key if type(key) is tuple else (key,))):
            raise Damaged
        if type(target) is dict:
            target[key] = value
