"""Code in pickles is refused and never run, and damaged PyTorch files are refused in one sentence."""

import copy
import copyreg
import os
import pickle
import resource
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from helpers.torch_pickles import (
    DAMAGED,
    FILES,
    FOUR,
    LAYOUTS,
    MAGIC,
    PROTOCOL,
    SYSTEM,
    named,
    number,
    numbers,
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
    imported = named("builtins.__import__") + row(text("os")) + b"R"
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
        "looked up": (
            named("builtins.getattr") + row(imported, text("system")) + b"R" + row(text(command)) + b"R",
            "builtins.getattr",
        ),
        "evaluated": (
            named("builtins.eval") + row(text(f"__import__('os').system('{command}')")) + b"R",
            "builtins.eval",
        ),
    }


@pytest.fixture
def extension():
    copyreg.add_extension("os", "system", 240)
    yield
    copyreg.remove_extension("os", "system", 240)


EMPTIED = (
    "argparse.Namespace",
    "builtins.set",
    "collections.deque",
    "numpy.ndarray",
    "pathlib.PosixPath",
    "torch.Size",
)


@pytest.mark.parametrize("way", payload(Path()))
def test_code_in_a_pickle_is_refused_by_name_and_not_run(why, extension, tmp_path, way):
    marker = tmp_path / "was_run"
    pickled, name = payload(marker)[way]
    refused = {"extension": f"its pickle has the instruction {name}"}.get(way, f"it refers to {name}, which is neither")
    # First the proof that the payload works; for an extension this also fills Python's cache of extensions.
    pickle.loads(b"\x80\x04" + pickled + b".")
    assert marker.exists()
    marker.unlink()

    path, tensors = tmp_path / "w.pth", table(w=tensor())
    for content in (pickled, table(model=tensors, args=pickled), table(args=pickled, model=tensors)):
        assert why(write_zip(path, content)).startswith(refused)
        assert why(write_legacy(path, content)).startswith(refused)
    # in each of the other pickles of a legacy file; the first is only compared
    good = [pickle.dumps(part, 2) for part in (MAGIC, PROTOCOL, SYSTEM)] + [b"\x80\x02" + tensors + b"."]
    for count in range(1, 5):
        path.write_bytes(b"".join(good[:count]) + b"\x80\x04" + pickled + b".")
        assert why(path).startswith(refused)
    assert not marker.exists()


def test_modules_that_a_pickle_refers_to_are_not_imported(reason, tmp_path, monkeypatch):
    (tmp_path / "imported_by_pickle.py").write_text("raise SystemExit\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert reason(named("imported_by_pickle.thing")).startswith("it refers to imported_by_pickle.thing, which is ")
    assert reason(named("__builtin__.exec")).startswith("it refers to builtins.exec, which is neither a tensor nor")
    assert reason(named("imported_by_pickle.a b")).startswith("it refers to 'imported_by_pickle.a b', which is ")
    assert "imported_by_pickle" not in sys.modules


def test_admitted_names_have_no_effect_when_called(tmp_path):
    for name in (*torch_pickle._NAMES, *EMPTIED):
        for arguments in (row(), row(text("echo")), row(b"]", b"}", b"N", b"N")):
            for instruction in (b"R", b"\x81"):
                pickled = table(w=tensor(), x=named(name) + arguments + instruction)
                result = outcome(write_zip(tmp_path / "w.pth", pickled))
                assert result == DAMAGED or list(result) == ["w"], name


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


@pytest.mark.parametrize(
    "pickled",
    [
        *(b"R", b"t", b"s", b"u", b"a", b"e", b"b", b"h\1", b"]s", b"\x85", b"\x93", b"Q", b"00000", b"(0t", b"]]s"),
        # calls of what is not an admitted name
        *(
            function + instruction
            for function in (text("os.system"), b"}", storage(), tensor(), b"N", named("builtins.set") + b")R")
            for instruction in (b")R", b")\x81")
        ),
        named("builtins.set") + b"]R",
        # references to what is not a storage
        *(text("storage") + b"Q", row(text("storage")) + b"Q", b"NQ"),
        row(text("module"), text("a"), text("b"), text("c"), text("d")) + b"Q",
        row(text("storage"), named("torch.Size"), text("0"), text("cpu"), number(4)) + b"Q",
        row(text("storage"), named("torch.FloatStorage"), text("0"), text("cpu"), number(-4)) + b"Q",
        row(text("storage"), named("torch.FloatStorage"), number(0), text("cpu"), number(4)) + b"Q",
        row(text("storage"), named("torch.FloatStorage"), text("0"), text("cpu"), number(4), number(4)) + b"Q",
        # a view that is not inside its storage, and a storage of two sizes
        *(
            storage(view=row(text("v"), number(start), number(count)))
            for start, count in ((3, 2), (-1, 2), (0, 5), (0, -1))
        ),
        table(a=tensor(), b=tensor(storage(kind="torch.DoubleStorage"))),
        named("torch._utils._rebuild_tensor_v2") + row(storage()) + b"R",
        named("torch._utils._rebuild_tensor_v2") + row(*[number(0)] * 4) + b"R",
        named("torch._utils._rebuild_tensor_v3") + row(storage(), *[number(0)] * 7) + b"R",
        b"}]" + number(1) + b"s",
        b"}(" + number(1) + b"u",
        b"\xff",
    ],
)
def test_invalid_pickles_are_refused(reason, pickled):
    assert reason(pickled) == DAMAGED


def test_deep_nesting_is_read_or_refused(why, tmp_path):
    path, deep = tmp_path / "w.pth", 10_000
    lists = b"]" * deep + b"a" * (deep - 1)
    dicts = (b"}" + text("a")) * deep + b"}" + b"s" * deep
    tensors = (named("torch._utils._rebuild_tensor") + b"(" + storage()) * deep + b"N" + b"NNtR" * deep
    for nested in (lists, dicts, tensors):
        assert list(read_tensors(write_zip(path, table(model=table(w=tensor()), x=nested)))) == ["w"]
    assert why(write_zip(path, table(w=tensors))) == "its tensor 'w' does not fit into its storage and the file"
    assert why(write_zip(path, table(model=table(w=tensor()), x=b")" + b"\x85" * deep))) == DAMAGED


@pytest.mark.parametrize(
    "bomb",
    {
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
    }.items(),
    ids=lambda bomb: bomb[0],
)
def test_bombs_are_refused_before_they_take_memory_or_time(reason, bomb, monkeypatch):
    monkeypatch.setattr(torch_pickle, "_MOST", 1000)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert reason(bomb[1]) == DAMAGED
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < used + 2**20, "less than 1 GB"


def test_copies_of_a_list_of_python_2_are_empty(read):
    pair = b"](U\x04fc.a" + tensor() + b"e"
    pickled = (
        named("collections.OrderedDict") + b"](" + pair + b"eq\1\x85R0" + named("collections.OrderedDict") + b"h\1\x85R"
    )
    assert list(read(table(w=tensor(), x=pickled))) == ["w"]


# -------------------------------------------------------------------------------------------------------- damaged files
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_that_is_cut_off_or_has_a_flipped_bit_is_refused_or_gives_arrays(refusal, tmp_path, layout):
    original = (FILES / f"kinds_{layout}.pth").read_bytes()
    draw, path, refused = np.random.default_rng(0), tmp_path / "w.pth", 0
    for length in {*range(0, 200, 7), *range(200, len(original), 97), len(original) - 1}:
        path.write_bytes(original[:length])
        refusal(read_tensors, path)
    for _ in range(200):
        content = bytearray(original)
        content[draw.integers(len(content))] ^= 1 << draw.integers(8)
        path.write_bytes(content)
        refused += isinstance(outcome(path), str)
    assert refused > 50


def test_changed_bytes_in_a_pickle_lead_to_one_sentence_or_to_arrays(tmp_path):
    with zipfile.ZipFile(FILES / "training_zip.pth") as archive:
        original = archive.read("training_zip/data.pkl")[2:-1]
    draw = np.random.default_rng(0)
    for _ in range(200):
        pickled = bytearray(original)
        for place in draw.integers(len(pickled), size=3):
            pickled[place] = draw.integers(256)
        outcome(write_zip(tmp_path / "changed.pth", bytes(pickled)))


def test_damage_in_a_zip_is_detected_by_its_checksum(why, tmp_path):
    path = write_zip(tmp_path / "w.pth", table(w=tensor()))
    content = path.read_bytes()
    for damaged in (content.replace(FOUR.tobytes(), FOUR[::-1].tobytes()), content.replace(b"PK\3\4", b"PK\3\5")):
        path.write_bytes(damaged)
        assert why(path) == DAMAGED


def test_records_that_are_compressed_or_overlap_are_refused(why, tmp_path):
    path = tmp_path / "w.pth"
    write_zip(path, table(w=tensor()), {"0": FOUR.tobytes(), "1": os.urandom(4000)}, zipfile.ZIP_DEFLATED)
    assert why(path).startswith("its records are compressed or overlap")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + table(w=tensor()) + b".")
        archive.writestr("archive/data/0", bytes(10**6))
        for key in range(1, 100):
            again = copy.copy(archive.infolist()[1])
            again.filename = f"archive/data/{key}"
            archive.filelist.append(again)
    assert why(path).startswith("its records are compressed or overlap")


def test_a_zip_must_have_one_pickle_and_each_storage(why, tmp_path):
    path = tmp_path / "w.pth"
    assert list(read_tensors(write_zip(path, table(w=tensor()), root="any name"))) == ["w"]
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other/data.pkl", b"")
    assert why(path) == "it is a zip archive without the data.pkl of torch.save"
    for contents in ({"1": b""}, {"0": FOUR.tobytes()[:-1]}):
        write_zip(path, table(w=tensor()), contents)
        assert why(path) == "it has no storage '0' with the 16 bytes that its tensors need"
    write_zip(path, table(w=tensor(storage("../../data.pkl"))))
    assert "it has no storage '../../data.pkl'" in why(path)


def test_big_endian_files_are_refused(why, tmp_path):
    assert "big-endian" in why(write_zip(tmp_path / "w.pth", table(w=tensor()), byteorder=b"big"))
    system = SYSTEM | {"little_endian": False}
    assert "big-endian" in why(write_legacy(tmp_path / "w.pth", table(w=tensor()), head=(MAGIC, PROTOCOL, system)))


def test_a_legacy_file_must_have_each_storage(why, tmp_path):
    path, pickled = tmp_path / "w.pth", table(w=tensor())
    assert why(write_legacy(path, pickled, {})) == DAMAGED
    for content in ((3, FOUR.tobytes()), (4, FOUR.tobytes()[:-3])):
        assert why(write_legacy(path, pickled, {"0": content})) == "it is cut off or damaged at its storage '0'"
    for keys in (["0", "1"], [["0"]], "x", 3):
        assert why(write_legacy(path, pickled, keys=keys)) == DAMAGED
    assert "unknown version of PyTorch's legacy layout" in why(write_legacy(path, pickled, head=(MAGIC, 1002, SYSTEM)))
    assert why(write_legacy(path, pickled, head=(MAGIC, PROTOCOL, []))) == DAMAGED


# ----------------------------------------------------------------------------------------- tensors beyond their storage
@pytest.mark.parametrize(
    "pickled",
    [
        *(tensor(shape=(5,)), tensor(offset=1), tensor(shape=(2, 2), strides=(3, 1))),
        tensor(shape=(), strides=(), offset=4),
        *(tensor(shape=(10**6,), strides=(0,)), tensor(shape=(0, 2**61), strides=(1, 1))),
        *(tensor(**wrong) for wrong in ({"offset": -1}, {"strides": (-1,)}, {"shape": (-4,)}, {"shape": (2**62,)})),
        *(tensor(offset=2**64), tensor(strides=()), tensor(storage(view=row(text("v"), number(2), number(2))))),
        named("torch._utils._rebuild_tensor") + row(storage(), number(0), text("4"), text("1")) + b"R",
        named("torch._utils._rebuild_tensor") + row(storage(), number(0), row(text("4")), numbers(1)) + b"R",
    ],
)
def test_a_tensor_stays_inside_its_storage(reason, pickled):
    assert reason(table(w=pickled)) == "its tensor 'w' does not fit into its storage and the file"
