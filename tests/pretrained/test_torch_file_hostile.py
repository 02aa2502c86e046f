"""Code in pickles is refused and never run, and damaged PyTorch files are refused in one sentence."""

import copy
import copyreg
import io
import os
import pickle
import resource
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.refusals import Refusal, each
from helpers.torch_pickles import (
    DAMAGED,
    FOUR,
    MAGIC,
    PROTOCOL,
    SYSTEM,
    WRITE,
    named,
    number,
    numbers,
    of_file,
    of_pickle,
    outcome,
    row,
    storage,
    table,
    tensor,
    text,
    write_legacy,
    write_zip,
)

from mlmoe_jax.pretrained import torch_pickle
from mlmoe_jax.pretrained.load import read_tensors

W = table(w=tensor())


# -------------------------------------------------------------------------------------------------- pickles with code
class Payload:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def payload(marker: Path) -> dict[str, tuple[bytes, str]]:
    """Return pickles, without their end, that create the marker file when Python's unpickler reads them.

    With each, the name in the sentence that refuses it.
    """
    command = f"touch {marker}"
    line = f"S'{command}'\n".encode()
    called = named("os.system") + row(text(command)) + b"R"
    in_containers = {"model": [({"w": {1: (Payload(marker),)}},)]}
    return {
        "called": (called, "os.system"),
        "as Python writes it": (pickle.dumps(Payload(marker), 2)[2:-1], "posix.system"),
        "named on the stack": (pickle.dumps(Payload(marker), 4)[2:-1], "posix.system"),
        "newest protocol": (pickle.dumps({"w": Payload(marker)}, 5)[2:-1], "posix.system"),
        "in containers": (pickle.dumps(in_containers, 2)[2:-1], "posix.system"),
        "as state": (named("collections.OrderedDict") + b")R" + table(a=called) + b"b", "os.system"),
        "as an argument": (
            named("collections.OrderedDict") + row(b"](" + text("a") + called + b"la") + b"R",
            "os.system",
        ),
        "instance": (b"(" + line + b"ios\nsystem\n", "os.system"),
        "object": (b"(" + named("os.system") + line + b"o", "os.system"),
        "extension": (b"\x82\xf0" + row(text(command)) + b"R", "EXT1 240"),
        "dotted": (text("shutil") + text("os.system") + b"\x93" + row(text(command)) + b"R", "shutil.os.system"),
    }


@pytest.fixture
def extension():
    copyreg.add_extension("os", "system", 240)
    yield
    copyreg.remove_extension("os", "system", 240)


@pytest.mark.parametrize("way", payload(Path()))
def test_code_in_a_pickle_is_refused_by_name_and_not_run(extension, tmp_path, way):
    marker = tmp_path / "was_run"
    pickled, name = payload(marker)[way]
    refused = {"extension": f"its pickle has the instruction {name}"}.get(way, f"it refers to {name}, which is neither")
    # First the proof that the payload works; for an extension this also fills Python's cache of extensions.
    pickle.loads(b"\x80\x04" + pickled + b".")
    assert marker.exists()
    marker.unlink()

    path, tensors = tmp_path / "w.pth", table(w=tensor())
    for content in (pickled, table(model=tensors, args=pickled), table(args=pickled, model=tensors)):
        for write in WRITE.values():
            assert refused in outcome(write(path, content))
    # in each of the other pickles of a legacy file; the first is only compared
    good = [pickle.dumps(part, 2) for part in (MAGIC, PROTOCOL, SYSTEM)] + [b"\x80\x02" + tensors + b"."]
    for count in range(1, 5):
        path.write_bytes(b"".join(good[:count]) + b"\x80\x04" + pickled + b".")
        assert refused in outcome(path)
    assert not marker.exists()


@pytest.mark.parametrize("write", WRITE.values())
def test_modules_that_a_pickle_refers_to_are_not_imported(tmp_path, monkeypatch, write):
    (tmp_path / "imported_by_pickle.py").write_text("raise SystemExit\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, shown in (
        ("imported_by_pickle.thing", "imported_by_pickle.thing"),
        ("__builtin__.exec", "builtins.exec"),
        ("builtins.getattr", "builtins.getattr"),
        ("builtins.__import__", "builtins.__import__"),
        ("imported_by_pickle.a b", "'imported_by_pickle.a b'"),
    ):
        assert f"it refers to {shown}, which is neither a tensor nor" in outcome(write(tmp_path / "w.pth", named(name)))
    assert "imported_by_pickle" not in sys.modules


def test_no_state_is_set(tmp_path):
    names = ("torch._utils._rebuild_tensor_v2", "builtins.set", "argparse.Namespace", "torch.float32")
    values = [value for value in vars(torch_pickle).values() if isinstance(value, type)]
    before = [dict(vars(value)) for value in values]
    state = table(__code__=text("x"), __new__=text("os.system"), key=text("x"))
    for owner in (*map(named, names), storage(), tensor(), b"}", b"]", b"N", row(), text("x"), number(1)):
        for given in (state, b"N" + state + b"\x86"):
            result = outcome(write_zip(tmp_path / "w.pth", table(w=tensor(), x=owner + given + b"b")))
            assert result == DAMAGED or result["w"].tolist() == [0, 1, 2, 3]
    assert [dict(vars(value)) for value in values] == before
    assert torch_pickle._NAMES["torch.float32"].dtype == "float32"


# -------------------------------------------------------------------------------------------------------- damaged files
DEEP = 10_000
NESTED = (
    b"]" * DEEP + b"a" * (DEEP - 1),
    (b"}" + text("a")) * DEEP + b"}" + b"s" * DEEP,
    (named("torch._utils._rebuild_tensor") + b"(" + storage()) * DEEP + b"N" + b"NNtR" * DEEP,
)
CALLED = (text("os.system"), b"}", storage(), tensor(), b"N", named("builtins.set") + b")R")
STORAGE, FLOATS, CPU = text("storage"), named("torch.FloatStorage"), text("cpu")
BEYOND = "its tensor 'w' does not fit into its storage and the file"
ZEROS = [number(0)] * 7
INVALID = [
    *(b"R", b"t", b"s", b"u", b"a", b"e", b"b", b"h\1", b"]s", b"\x85", b"\x93", b"Q", b"00000", b"(0t", b"]]s"),
    # calls of what is not an admitted name
    *(function + instruction for function in CALLED for instruction in (b")R", b")\x81")),
    named("builtins.set") + b"]R",
    # references to what is not a storage
    *(STORAGE + b"Q", row(STORAGE) + b"Q", b"NQ", row(text("module"), *map(text, "abcd")) + b"Q"),
    *(
        row(STORAGE, *items) + b"Q"
        for items in (
            (named("torch.Size"), text("0"), CPU, number(4)),
            (FLOATS, text("0"), CPU, number(-4)),
            (FLOATS, number(0), CPU, number(4)),
            (FLOATS, text("0"), CPU, number(4), number(4)),
        )
    ),
    # a view that is not inside its storage, and a storage of two sizes
    *(storage(view=row(text("v"), *map(number, view))) for view in ((3, 2), (-1, 2), (0, 5), (0, -1))),
    table(a=tensor(), b=tensor(storage(kind="torch.DoubleStorage"))),
    *(
        named(f"torch._utils._rebuild_tensor_{version}") + row(*items) + b"R"
        for version, items in (("v2", [storage()]), ("v2", ZEROS[:4]), ("v3", [storage(), *ZEROS]))
    ),
    *(b"}]" + number(1) + b"s", b"}(" + number(1) + b"u", b"\xff"),
    table(model=W, x=b")" + b"\x85" * DEEP),
]
OUTSIDE = [
    *(tensor(shape=(5,)), tensor(offset=1), tensor(shape=(2, 2), strides=(3, 1))),
    tensor(shape=(), strides=(), offset=4),
    *(tensor(shape=(10**6,), strides=(0,)), tensor(shape=(0, 2**61), strides=(1, 1))),
    *(tensor(**wrong) for wrong in ({"offset": -1}, {"strides": (-1,)}, {"shape": (-4,)}, {"shape": (2**62,)})),
    *(tensor(offset=2**64), tensor(strides=()), tensor(storage(view=row(text("v"), number(2), number(2))))),
    *(
        named("torch._utils._rebuild_tensor") + row(storage(), number(0), *shape) + b"R"
        for shape in ((text("4"), text("1")), (row(text("4")), numbers(1)))
    ),
    NESTED[2],
]


def overlapping(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + W + b".")
        archive.writestr("archive/data/0", bytes(10**6))
        for key in range(1, 100):
            again = copy.copy(archive.infolist()[1])
            again.filename = f"archive/data/{key}"
            archive.filelist.append(again)


def two_pickles(path: Path) -> None:
    with zipfile.ZipFile(write_zip(path, W), "a") as archive:
        archive.writestr("other/data.pkl", b"")


def with_bytes(old: bytes, new: bytes):
    return lambda path: path.write_bytes(write_zip(path, W).read_bytes().replace(old, new))


def of_zip(name: str, reason: str, pickled: bytes = W, *more, **records) -> Refusal:
    return of_file(f"{name}, zip", lambda path: write_zip(path, pickled, *more, **records), reason)


def of_legacy(name: str, reason: str, *contents, **more) -> Refusal:
    return of_file(f"{name}, legacy", lambda path: write_legacy(path, W, *contents, **more), reason)


LACKS = "it has no storage '{}' with the 16 bytes that its tensors need"
OTHER_RECORDS = "its records are compressed or overlap"
BIG_ENDIAN = "it was written on a big-endian machine"
UNKNOWN = "it is of an unknown version of PyTorch's legacy layout, or from a big-endian machine"
DAMAGE = [
    *(row for place, pickled in enumerate(INVALID) for row in of_pickle(f"invalid {place}", pickled)),
    *(row for place, one in enumerate(OUTSIDE) for row in of_pickle(f"outside {place}", table(w=one), BEYOND)),
    of_file("checksum", with_bytes(FOUR.tobytes(), FOUR[::-1].tobytes())),
    of_file("header", with_bytes(b"PK\3\4", b"PK\3\5")),
    of_zip("compressed", OTHER_RECORDS, W, {"0": FOUR.tobytes(), "1": os.urandom(4000)}, zipfile.ZIP_DEFLATED),
    of_file("overlapping", overlapping, OTHER_RECORDS),
    of_file("two pickles", two_pickles, "it is a zip archive without the data.pkl of torch.save"),
    of_zip("no storage", LACKS.format(0), W, {"1": b""}),
    of_zip("a short storage", LACKS.format(0), W, {"0": FOUR.tobytes()[:-1]}),
    of_zip("another file", LACKS.format("../../data.pkl"), table(w=tensor(storage("../../data.pkl")))),
    of_zip("big-endian", BIG_ENDIAN, byteorder=b"big"),
    of_legacy("big-endian", UNKNOWN, head=(MAGIC, PROTOCOL, SYSTEM | {"little_endian": False})),
    of_legacy("version", UNKNOWN, head=(MAGIC, 1002, SYSTEM)),
    of_legacy("system", DAMAGED, head=(MAGIC, PROTOCOL, [])),
    of_legacy("no storage", DAMAGED, {}),
    of_legacy("count", "it is cut off or damaged at its storage '0'", {"0": (3, FOUR.tobytes())}),
    of_legacy("cut", "it is cut off or damaged at its storage '0'", {"0": (4, FOUR.tobytes()[:-3])}),
    *(of_legacy(f"keys {keys}", DAMAGED, keys=keys) for keys in (["0", "1"], [["0"]], "x", 3)),
]


@each(DAMAGE)
def test_damaged_files_are_refused(case, tmp_path):
    case.check(tmp_path)


BOMBS = {
    "memo": b"Nr\xff\xff\xff\x7f",
    "hash of 2**60 tuples": b"})" + b"2\x86" * 60 + b"Ns",
    "hash of 10**12 tuples": b"}(N"
    + b"2" * 9
    + b"t"
    + b"".join(b"q%c(" % n + b"h%c" % n * 10 + b"t" for n in range(11))
    + b"Ns",
    "bytes": b"\x8e" + (2**40).to_bytes(8, "little"),
    "bytearray": b"\x96" + (2**40).to_bytes(8, "little"),
    "number": b"\x8b" + (2**31 - 1).to_bytes(4, "little"),
    "text": b"\x8d" + (2**40).to_bytes(8, "little"),
    "frame": b"\x95" + (2**40).to_bytes(8, "little"),
    "length": b"N0" * 501,
}


@each(row for name, bomb in BOMBS.items() for row in of_pickle(name, bomb))
def test_bombs_are_refused_before_they_take_memory_or_time(case, tmp_path, monkeypatch):
    monkeypatch.setattr(torch_pickle, "_MOST", 1000)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    case.check(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < used + 2**20, "less than 1 GB"


@pytest.mark.parametrize("nested", NESTED, ids=["lists", "dicts", "tensors"])
def test_deep_nesting_beside_the_tensors_is_read(tmp_path, nested):
    assert list(read_tensors(write_zip(tmp_path / "w.pth", table(model=W, x=nested)))) == ["w"]


def test_the_folder_in_a_zip_has_any_name(tmp_path):
    assert list(read_tensors(write_zip(tmp_path / "w.pth", W, root="any name"))) == ["w"]


def test_copies_of_a_list_of_python_2_are_empty():
    """Otherwise a small pickle could hold very many copies."""
    ordered, pair = named("collections.OrderedDict"), b"](U\x04fc.a" + tensor() + b"e"
    both = row(ordered + b"](" + pair + b"eq\1\x85R", ordered + b"h\1\x85R")
    first, second = torch_pickle.read_pickle(io.BytesIO(b"\x80\x02" + both + b"."), {})
    assert (list(first), list(second)) == (["fc.a"], [])
