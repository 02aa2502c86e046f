import copy
import copyreg
import os
import pickle
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers.paths import PARITY

from mlmoe_jax.errors import UserError
from mlmoe_jax.pretrained import torch_file, torch_pickle
from mlmoe_jax.pretrained.torch_file import read_torch_file
from mlmoe_jax.pretrained.torch_pickle import ADMITTED

FILES = PARITY / "torch_files"
LAYOUTS = ("zip", "legacy")
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
SYSTEM = {"protocol_version": PROTOCOL, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
FOUR = np.arange(4, dtype=np.float32)


# ----------------------------------------------------------------------------------------- handmade pickles and files
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
    """Write a file in the zip layout; `more` are records in addition to the pickle and the storages."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(f"{root}/data.pkl", b"\x80\x02" + pickled + b".")
        for key, content in (contents or {"0": FOUR.tobytes()}).items():
            archive.writestr(f"{root}/data/{key}", content)
        for name, content in more.items():
            archive.writestr(f"{root}/{name.replace('__', '/').replace('_pkl', '.pkl')}", content)
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


@pytest.fixture
def why(refusal, tmp_path):
    """A function that returns the reason why a file is refused."""

    def call(path: Path) -> str:
        sentence = refusal(read_torch_file, path)
        assert sentence.startswith(f"cannot read weights from {path}: ")
        return sentence.removeprefix(f"cannot read weights from {path}: ")

    return call


def outcome(path: Path) -> dict[str, np.ndarray] | str:
    """Return the tensors of a file, or the reason why it is refused; any other exception is raised."""
    try:
        return read_torch_file(path)
    except UserError as error:
        return str(error).removeprefix(f"cannot read weights from {path}: ")


@pytest.fixture(params=LAYOUTS)
def read(request, tmp_path):
    """A function that reads a handmade pickle, in each layout."""
    return lambda pickled, **more: read_torch_file(WRITE[request.param](tmp_path / "w.pth", pickled, **more))


@pytest.fixture(params=LAYOUTS)
def reason(request, tmp_path, why):
    """A function that returns the reason why a handmade pickle is refused, in each layout."""
    return lambda pickled, **more: why(WRITE[request.param](tmp_path / "w.pth", pickled, **more))


# -------------------------------------------------------------------------------------------------- files of torch.save
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("content", ["kinds", "training"])
def test_files_of_torch_save_give_the_saved_tensors(content, layout):
    tensors = read_torch_file(FILES / f"{content}_{layout}.pth")
    with np.load(FILES / f"{content}.npz") as expected:
        assert list(tensors) == expected["names"].tolist()
        assert [x.dtype.name for x in tensors.values()] == expected["dtypes"].tolist()
        for name, value in tensors.items():
            assert value.shape == expected[name].shape
            np.testing.assert_array_equal(value.astype(expected[name].dtype), expected[name], err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_on_one_storage_share_its_memory(layout):
    tensors = read_torch_file(FILES / f"kinds_{layout}.pth")
    assert np.shares_memory(tensors["tied"], tensors["float32"])
    base = tensors["base"]
    for name in ("transposed", "window", "every_other", "expanded", "last", "parameter"):
        assert np.shares_memory(tensors[name], base), name
    assert tensors["transposed"].strides == (4, 96, 24)
    assert tensors["expanded"].strides == (0, 0, 0)
    assert not any(x.flags.writeable for x in tensors.values() if x.size)
    assert all(x.flags.aligned for x in tensors.values())


def test_only_needed_storages_are_read_and_each_once(monkeypatch):
    seen, original = [], torch_file._record
    monkeypatch.setattr(
        torch_file, "_record", lambda data, record: seen.append(record.filename) or original(data, record)
    )
    read_torch_file(FILES / "kinds_zip.pth")
    storages = [name for name in seen if "/data/" in name]
    with zipfile.ZipFile(FILES / "kinds_zip.pth") as archive:
        # all except one that holds only an empty tensor
        assert len(storages) == len(set(storages)) == sum("/data/" in name for name in archive.namelist()) - 1
    seen.clear()
    assert len(read_torch_file(FILES / "training_zip.pth")) == sum("/data/" in name for name in seen) == 9


def same_as_torch(ours: dict[str, np.ndarray], theirs: dict) -> bool:
    """Return whether names, their order, types, shapes, strides and all values are equal."""
    return list(ours) == list(theirs) and all(
        (str(y.dtype), x.shape) == (f"torch.{x.dtype}", tuple(y.shape))
        and np.array_equal(x.astype(np.complex128), y.detach().cdouble().numpy())
        and (x.size < 2 or 1 in x.shape or x.strides == tuple(stride * x.itemsize for stride in y.stride()))
        for x, y in zip(ours.values(), theirs.values(), strict=True)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_torch_itself_reads_the_same(tmp_path, layout, protocol):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.MultiheadAttention(8, 2))
    state = model.state_dict() | {"half": torch.randn(3, 5).bfloat16().t(), "view": torch.randn(6, 7)[1::2, ::3]}
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16, torch.complex64):
        state[f"of_type.{dtype}"] = torch.arange(6).to(dtype).view(3, 2).t()
    path = tmp_path / "new.pt"
    zipped = layout == "zip"
    torch.save({"model": state, "epoch": 1}, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    ours = read_torch_file(path)
    assert same_as_torch(ours, state)
    if protocol < 4:  # torch.load(weights_only=True) does not support the instructions of newer ones
        assert same_as_torch(ours, torch.load(path, weights_only=True)["model"])


def test_torch_reads_the_stored_file_the_same():
    # not the legacy file, because torch 2.13 writes unsigned integers and float8 in that layout but cannot read them
    torch = pytest.importorskip("torch")
    path = FILES / "kinds_zip.pth"
    assert same_as_torch(read_torch_file(path), torch.load(path, weights_only=True))


def test_torch_agrees_on_handmade_files(tmp_path):
    torch = pytest.importorskip("torch")
    part = tensor(storage(view=row(text("v"), number(1), number(3))), 1, (2,))
    for path, expected in (
        (write_zip(tmp_path / "a.pt", table(w=tensor()), byteorder=b"little", version=b"3\n"), [0, 1, 2, 3]),
        (write_legacy(tmp_path / "b.pt", table(w=tensor(storage(view=b"N")))), [0, 1, 2, 3]),
        (write_legacy(tmp_path / "c.pt", table(w=part)), [2, 3]),
    ):
        assert torch.load(path, weights_only=True)["w"].tolist() == expected
        assert read_torch_file(path)["w"].tolist() == expected


# ------------------------------------------------------------------------------------------------ older ways of saving
@pytest.mark.parametrize("function", ["torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"])
@pytest.mark.parametrize("kind", ["torch.FloatStorage", "torch.cuda.FloatStorage"])
def test_older_names_mean_the_same(read, function, kind):
    pickled = table(w=tensor(storage(kind=kind), 1, (3,), function=function))
    np.testing.assert_array_equal(read(pickled)["w"], FOUR[1:])


def test_an_old_parameter_is_its_tensor(read):
    called = named("torch.nn.parameter.Parameter") + row(tensor()) + b"R" + row(b"\x88", b"\x89", b"}") + b"b"
    made = named("torch.nn.parameter.Parameter") + row(tensor(), b"\x88") + b"\x81"
    with_state = named("torch._utils._rebuild_parameter_with_state") + row(tensor(), b"\x88", b"}", b"}") + b"R"
    tensors = read(table(called=called, made=made, with_state=with_state))
    assert list(tensors) == ["called", "made", "with_state"]
    assert all(value.tolist() == FOUR.tolist() for value in tensors.values())


def test_an_ordered_dict_of_python_2_is_read(read):
    pair = b"](U\x04fc.a" + tensor() + b"e"
    pickled = named("collections.OrderedDict") + row(b"](" + pair + b"e") + b"R"
    assert list(read(pickled)) == ["fc.a"]


def test_a_storage_can_be_part_of_another(read):
    view = row(text("v"), number(1), number(3))
    pickled = table(w=tensor(storage(view=view), 1, (2,)), all=tensor(storage(view=b"N")))
    tensors = read(pickled)
    assert tensors["w"].tolist() == [2, 3]
    assert tensors["all"].tolist() == [0, 1, 2, 3]


def test_strides_along_one_element_do_not_matter(read):
    tensors = read(table(w=tensor(shape=(1, 4, 1), strides=(2**61, 1, 2**61))))
    assert tensors["w"].shape == (1, 4, 1)
    assert tensors["w"].ravel().tolist() == FOUR.tolist()


def test_bfloat16_keeps_its_bits(tmp_path):
    bits = np.array([0x3F80, 0xC000, 0x7F80, 0x0001], np.uint16)
    pickled = table(w=tensor(storage(kind="torch.BFloat16Storage")))
    values = read_torch_file(write_zip(tmp_path / "w.bin", pickled, {"0": bits.tobytes()}))["w"]
    assert values.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(values.view(np.uint16), bits)


# ------------------------------------------------------------------------------------------ location of the state dict
@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict", "teacher"])
def test_the_state_dict_is_found_and_its_wrapper_prefix_removed(read, key):
    state = table(**{"module.head.bias": tensor(), "module.norm.bias": tensor(offset=2, shape=(2,)), "step": number(3)})
    tensors = read(table(loss=tensor(shape=(), strides=()), **{key: state}, optimizer=table(m=tensor())))
    assert {name: value.tolist() for name, value in tensors.items()} == {"head.bias": [0, 1, 2, 3], "norm.bias": [2, 3]}


def test_the_first_key_with_tensors_is_used(read):
    first, second = table(a=tensor()), table(b=tensor())
    assert list(read(table(teacher=first, state_dict=first, model=second))) == ["b"]
    assert list(read(table(model=table(name=text("vit")), state_dict=first))) == ["a"]
    assert list(read(table(model=text("vit"), w=tensor()))) == ["w"]
    assert list(read(table(model=tensor(), w=tensor()))) == ["model", "w"]


def test_a_prefix_is_removed_only_if_all_names_have_it(read):
    assert list(read(table(**{"module.a": tensor(), "b": tensor()}))) == ["module.a", "b"]
    assert list(read(table(**{"module.module.a": tensor(), "module.module.module.b": tensor()}))) == ["a", "module.b"]


def test_the_content_of_files_without_a_state_dict_is_reported(reason):
    assert reason(tensor()) == "it holds one tensor without a name instead of a dict of tensors"
    assert reason(b"]" + tensor() + b"a") == "it holds a list instead of a dict of tensors"
    assert reason(number(3)) == "it holds an object instead of a dict of tensors"
    places = "it has no tensors, neither directly nor under model, state_dict, model_state_dict, teacher; its keys are"
    assert reason(b"}") == f"{places} none"
    assert reason(table(encoder=table(w=tensor()), epoch=number(3))) == f"{places} 'encoder', 'epoch'"


# ------------------------------------------------------------------------------------------------- files of other kinds
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "it is empty"),
        (b"\n<!DOCTYPE html><html>Sign in</html>", "it is a web page and not a checkpoint: download the file itself"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:12\n",
            "it is a Git LFS pointer and not the file itself: run git lfs pull",
        ),
        (b"config\nhere. And more\n", "it is a text file and not a checkpoint"),
        ("Gew\u00f6hnlicher Text".encode(), "it is a text file and not a checkpoint"),
        (b"cposix\nsystem\n(S'touch x'\ntR.", "it is a text file and not a checkpoint"),
        (b'\x80\0\0\0\0\0\0\0{"w":{}}', "it is a safetensors file: give it the suffix .safetensors"),
        (
            b"pickle".ljust(257, b"\0") + b"ustar\0",
            "it is a tar archive: unpack it, or save it again with a newer PyTorch if version 0.1 wrote it so",
        ),
        (
            pickle.dumps({"w": [1, 2]}),
            "it has neither layout of torch.save, a zip archive or pickles that begin with PyTorch's magic number",
        ),
        (
            bytes(range(255)),
            "it has neither layout of torch.save, a zip archive or pickles that begin with PyTorch's magic number",
        ),
        (b"PK\3\4 and no more", "it is a zip archive that is cut off or damaged"),
    ],
)
def test_other_kinds_of_file_are_recognised(why, tmp_path, content, expected):
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    assert why(path) == expected


def test_a_file_that_cannot_be_opened_is_one_sentence(refusal, why, tmp_path):
    assert refusal(read_torch_file, tmp_path / "w.pth") == f"there is no weights file {tmp_path / 'w.pth'}"
    assert "Is a directory" in why(tmp_path)


def test_an_npz_under_another_name_is_detected(why, tmp_path):
    np.savez(tmp_path / "w.npz", w=FOUR)
    path = (tmp_path / "w.npz").rename(tmp_path / "w.pth")
    assert why(path) == "it is a zip archive without the data.pkl of torch.save"


def test_programs_and_modules_are_refused_by_name(why):
    assert why(FILES / "script.pt") == (
        "it is a TorchScript archive, a program and not only weights: save its state_dict() instead"
    )
    assert why(FILES / "module.pth") == (
        "it refers to torch.nn.modules.linear.Linear, which is neither a tensor nor a plain container and is not "
        "loaded: save only the state_dict(), or use a file that has nothing else"
    )


# -------------------------------------------------------------------------------------------------------- damaged files
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_cut_off_anywhere_is_refused(refusal, tmp_path, layout):
    content = (FILES / f"kinds_{layout}.pth").read_bytes()
    path = tmp_path / "cut.pth"
    for length in {*range(0, 200, 7), *range(200, len(content), 97), len(content) - 1}:
        path.write_bytes(content[:length])
        refusal(read_torch_file, path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flipped_bits_give_a_sentence_or_arrays_and_nothing_else(tmp_path, layout):
    original = (FILES / f"kinds_{layout}.pth").read_bytes()
    draw, path, refused = np.random.default_rng(0), tmp_path / "flipped.pth", 0
    for _ in range(200):
        content = bytearray(original)
        content[draw.integers(len(content))] ^= 1 << draw.integers(8)
        path.write_bytes(content)
        refused += isinstance(outcome(path), str)
    assert refused > 50


def test_a_pickle_with_changed_bytes_gives_a_sentence_or_arrays_and_nothing_else(tmp_path):
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
    path.write_bytes(content.replace(FOUR.tobytes(), FOUR[::-1].tobytes()))
    assert why(path) == (
        "its record 'archive/data/0' does not have the checksum that the archive gives for it: "
        "the file is damaged, or was saved with checksums turned off"
    )
    path.write_bytes(content.replace(b"PK\3\4", b"PK\3\5"))
    assert why(path) == "it is a zip archive that is cut off or damaged"


def test_a_zip_that_torch_did_not_write_is_refused(why, tmp_path):
    path = tmp_path / "w.pth"
    zeros = {"0": bytes(10**7)}
    pickled = table(w=tensor(storage(size=10**7 // 4), shape=(10**7 // 4,)))
    write_zip(path, pickled, zeros, zipfile.ZIP_DEFLATED)
    assert why(path).startswith("its records claim to hold 10000")
    write_zip(path, table(w=tensor()), {"0": FOUR.tobytes(), "1": os.urandom(4000)}, zipfile.ZIP_DEFLATED)
    assert why(path) == "its record 'archive/data.pkl' is compressed or encrypted, which torch.save never does"


def test_records_that_overlap_are_refused(why, tmp_path):
    path = tmp_path / "w.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + table(w=tensor()) + b".")
        archive.writestr("archive/data/0", bytes(10**6))
        for key in range(1, 100):
            again = copy.copy(archive.infolist()[1])
            again.filename = f"archive/data/{key}"
            archive.filelist.append(again)
    assert why(path).startswith("its records claim to hold 1000")


def test_a_zip_must_have_one_pickle_and_each_storage(why, tmp_path):
    path = tmp_path / "w.pth"
    assert list(read_torch_file(write_zip(path, table(w=tensor()), root="any name"))) == ["w"]
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other/data.pkl", b"")
    assert why(path) == "it is a zip archive without the data.pkl of torch.save"
    write_zip(path, table(w=tensor()), {"1": b""})
    assert why(path) == "it has no record of its storage '0'"
    write_zip(path, table(w=tensor()), {"0": FOUR.tobytes()[:-1]})
    assert why(path) == "its storage '0' has 15 bytes, but its tensors need 16"
    write_zip(path, table(w=tensor()), constants_pkl=b"")
    assert "TorchScript" in why(path)
    write_zip(path, table(w=tensor(storage("../../data.pkl"))))
    assert why(path) == "it has no record of its storage '../../data.pkl'"


def test_big_endian_files_are_refused(why, tmp_path):
    expected = "it was written on a big-endian machine: save it again on a little-endian one"
    assert why(write_zip(tmp_path / "w.pth", table(w=tensor()), byteorder=b"big")) == expected
    system = SYSTEM | {"little_endian": False}
    assert why(write_legacy(tmp_path / "w.pth", table(w=tensor()), head=(MAGIC, PROTOCOL, system))) == expected


def test_a_legacy_file_must_have_each_storage(why, tmp_path):
    path, pickled = tmp_path / "w.pth", table(w=tensor())
    assert why(write_legacy(path, pickled, {})) == "it has no record of its storage '0'"
    assert why(write_legacy(path, pickled, {"0": (3, FOUR.tobytes())})) == (
        "its storage '0' has 12 bytes, but its tensors need 16"
    )
    size = len(write_legacy(path, pickled).read_bytes())
    assert why(write_legacy(path, pickled, {"0": (4, FOUR.tobytes()[:-3])})) == (
        f"it is cut off: storage '0' ends at byte {size} and the file at {size - 3}"
    )
    damaged = "its pickled part is damaged or cut off"
    assert why(write_legacy(path, pickled, keys=["0", "1"])) == damaged
    assert why(write_legacy(path, pickled, keys=[["0"]])) == damaged
    assert why(write_legacy(path, pickled, keys="0")) == damaged
    for head in ((MAGIC, 1002, SYSTEM), (MAGIC, PROTOCOL, [])):
        assert why(write_legacy(path, pickled, head=head)) == ("it has an unknown version of PyTorch's legacy layout")


# ----------------------------------------------------------------------------------------- tensors beyond their storage
@pytest.mark.parametrize(
    ("pickled", "expected"),
    [
        (tensor(shape=(5,)), "its tensor 'w' uses element 4 of a storage with 4"),
        (tensor(offset=1), "its tensor 'w' uses element 4 of a storage with 4"),
        (tensor(shape=(2, 2), strides=(3, 1)), "its tensor 'w' uses element 4 of a storage with 4"),
        (tensor(shape=(), strides=(), offset=4), "its tensor 'w' uses element 4 of a storage with 4"),
        (
            tensor(shape=(10**6,), strides=(0,)),
            "its tensor 'w' needs 4000000 bytes, but the whole file has",
        ),
        (tensor(shape=(0, 2**61), strides=(1, 1)), "its tensor 'w' needs 9223372036854775808 bytes, but the whole"),
        *(
            (
                tensor(**wrong),
                "its tensor 'w' has a size, stride or offset that is negative or far too large",
            )
            for wrong in ({"offset": -1}, {"strides": (-1,)}, {"shape": (-4,)}, {"shape": (2**62,)}, {"offset": 2**64})
        ),
        (tensor(strides=()), "its tensor 'w' has no proper shape and strides"),
        (tensor(shape=(1,) * 65, strides=(1,) * 65), "its tensor 'w' has no proper shape and strides"),
        (
            named("torch._utils._rebuild_tensor") + row(storage(), number(0), text("4"), text("1")) + b"R",
            "its tensor 'w' has no proper shape and strides",
        ),
        (
            named("torch._utils._rebuild_tensor") + row(storage(), number(0), row(text("4")), numbers(1)) + b"R",
            "its tensor 'w' has a size, stride or offset that is negative or far too large",
        ),
    ],
)
def test_a_tensor_stays_inside_its_storage(reason, pickled, expected):
    assert reason(table(w=pickled)).startswith(expected)


def test_a_view_stays_inside_its_storage(reason):
    for start, count in ((3, 2), (-1, 2), (0, 5), (0, -1)):
        view = row(text("v"), number(start), number(count))
        assert reason(table(w=tensor(storage(view=view)))) == "its pickled part is damaged or cut off"
    view = row(text("v"), number(2), number(2))
    assert reason(table(w=tensor(storage(view=view)))) == "its tensor 'w' uses element 3 of a storage with 2"


def test_a_storage_has_one_size(reason):
    both = table(a=tensor(), b=tensor(storage(kind="torch.DoubleStorage")))
    assert reason(both) == "its storage '0' is given two sizes"


# -------------------------------------------------------------------------------------------------- pickles with code
class Payload:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def payload(marker: Path) -> dict[str, bytes]:
    """Return pickles, without their end, that create the marker file when Python's unpickler reads them."""
    command = f"touch {marker}"
    line = f"S'{command}'\n".encode()
    called = named("os.system") + row(text(command)) + b"R"
    return {
        "called": called,
        "as Python writes it": pickle.dumps(Payload(marker), 2)[2:-1],
        "named on the stack": pickle.dumps(Payload(marker), 4)[2:-1],
        "newest protocol": pickle.dumps({"w": Payload(marker)}, 5)[2:-1],
        "in containers": pickle.dumps({"model": [({"w": {1: (Payload(marker),)}},)]}, 2)[2:-1],
        "as state": named("collections.OrderedDict") + b")R" + table(a=called) + b"b",
        "as an argument": named("collections.OrderedDict") + row(b"](" + text("a") + called + b"la") + b"R",
        "instance": b"(" + line + b"ios\nsystem\n",
        "object": b"(" + named("os.system") + line + b"o",
        "extension": b"\x82\xf0" + row(text(command)) + b"R",
        "dotted": text("shutil") + text("os.system") + b"\x93" + row(text(command)) + b"R",
        "looked up": named("builtins.getattr")
        + row(named("builtins.__import__") + row(text("os")) + b"R", text("system"))
        + b"R"
        + row(text(command))
        + b"R",
        "evaluated": named("builtins.eval") + row(text(f"__import__('os').system('{command}')")) + b"R",
    }


@pytest.fixture
def extension():
    copyreg.add_extension("os", "system", 240)
    yield
    copyreg.remove_extension("os", "system", 240)


WAYS = {
    "called": "it refers to os.system, which is neither a tensor nor",
    "as Python writes it": "it refers to posix.system, which is neither a tensor nor",
    "named on the stack": "it refers to posix.system, which is neither a tensor nor",
    "newest protocol": "it refers to posix.system, which is neither a tensor nor",
    "in containers": "it refers to posix.system, which is neither a tensor nor",
    "as state": "it refers to os.system, which is neither a tensor nor",
    "as an argument": "it refers to os.system, which is neither a tensor nor",
    "instance": "its pickle has the instruction INST 'os system', which no file of tensors needs",
    "object": "it refers to os.system, which is neither a tensor nor",
    "extension": "its pickle has the instruction EXT1 240, which no file of tensors needs",
    "dotted": "it refers to shutil.os.system, which is neither a tensor nor",
    "looked up": "it refers to builtins.getattr, which is neither a tensor nor",
    "evaluated": "it refers to builtins.eval, which is neither a tensor nor",
}


@pytest.mark.parametrize("way", WAYS)
def test_code_in_a_pickle_is_refused_by_name_and_not_run(why, extension, tmp_path, way):
    marker = tmp_path / "was_run"
    pickled = payload(marker)[way]
    # First the proof that the payload works; for an extension this also fills Python's cache of extensions.
    pickle.loads(b"\x80\x04" + pickled + b".")
    assert marker.exists()
    marker.unlink()

    path, tensors = tmp_path / "w.pth", table(w=tensor())
    for content in (pickled, table(model=tensors, args=pickled), table(args=pickled, model=tensors)):
        assert why(write_zip(path, content)).startswith(WAYS[way])
        assert why(write_legacy(path, content)).startswith(WAYS[way])
    # in each of the other pickles of a legacy file
    good = [pickle.dumps(part, 2) for part in (MAGIC, PROTOCOL, SYSTEM)] + [b"\x80\x02" + tensors + b"."]
    for count in range(5):
        path.write_bytes(b"".join(good[:count]) + b"\x80\x04" + pickled + b".")
        assert why(path).startswith(WAYS[way])
    assert not marker.exists()


def test_modules_that_a_pickle_refers_to_are_not_imported(reason, tmp_path, monkeypatch):
    (tmp_path / "imported_by_pickle.py").write_text("raise SystemExit\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert reason(named("imported_by_pickle.thing")).startswith("it refers to imported_by_pickle.thing, which is ")
    assert reason(named("__builtin__.exec")).startswith("it refers to builtins.exec, which is neither a tensor nor")
    assert reason(named("imported_by_pickle.a b")).startswith("it refers to 'imported_by_pickle.a b', which is ")
    assert "imported_by_pickle" not in sys.modules


def test_admitted_names_do_nothing_when_called(tmp_path):
    for name in sorted(ADMITTED):
        for arguments in (row(), row(text("echo")), row(b"]", b"}", b"N", b"N")):
            for instruction in (b"R", b"\x81"):
                pickled = table(w=tensor(), x=named(name) + arguments + instruction)
                result = outcome(write_zip(tmp_path / "w.pth", pickled))
                assert result == "its pickled part is damaged or cut off" or list(result) == ["w"], name


def test_state_is_set_on_nothing(reason):
    before = dict(vars(torch_pickle))
    state = table(__code__=text("x"), full=text("os.system"))
    for owner in (
        *(named(name) for name in ("torch._utils._rebuild_tensor_v2", "builtins.set", "argparse.Namespace")),
        *(storage(), b"]", b"N", row(), text("x"), number(1)),
    ):
        for given in (state, b"N" + state + b"\x86"):
            assert reason(owner + given + b"b") == "its pickled part is damaged or cut off"
    assert dict(vars(torch_pickle)) == before


def test_only_admitted_names_can_be_called(reason):
    for function in (text("os.system"), b"}", storage(), tensor(), b"N", named("builtins.set") + b")R"):
        for instruction in (b")R", b")\x81"):
            assert reason(function + instruction) == "its pickled part is damaged or cut off"
    assert reason(named("builtins.set") + b"]R") == "its pickled part is damaged or cut off"
    nested = named("torch._tensor._rebuild_from_type_v2") + row(
        named("builtins.set"), named("torch.Tensor"), row(text("a")), b"}"
    )
    assert reason(nested + b"R") == "its pickled part is damaged or cut off"


@pytest.mark.parametrize(
    "identity",
    [text("storage"), row(text("module"), text("a"), text("b"), text("c"), text("d")), row(text("storage")), b"N"],
)
def test_only_storages_may_be_referred_to(reason, identity):
    assert reason(identity + b"Q") == "its pickle refers to something outside it that is not a storage"


@pytest.mark.parametrize(
    "pickled",
    [
        *(b"R", b"t", b"s", b"u", b"a", b"e", b"b", b"h\1", b"]s", b"\x85", b"\x93", b"Q", b"00000", b"(0t", b"]]s"),
        row(text("storage"), named("torch.Size"), text("0"), text("cpu"), number(4)) + b"Q",
        row(text("storage"), named("torch.FloatStorage"), text("0"), text("cpu"), number(-4)) + b"Q",
        row(text("storage"), named("torch.FloatStorage"), number(0), text("cpu"), number(4)) + b"Q",
        row(text("storage"), named("torch.FloatStorage"), text("0"), text("cpu"), number(4), number(4)) + b"Q",
        named("torch._utils._rebuild_tensor_v2") + row(storage()) + b"R",
        named("torch._utils._rebuild_tensor_v2") + row(*[number(0)] * 4) + b"R",
        named("torch._utils._rebuild_tensor_v3") + row(storage(), *[number(0)] * 7) + b"R",
        named("torch._utils._rebuild_parameter") + row(text("w")) + b"R",
        b"}" + row(row(number(1))) + number(1) + b"s",
        b"}]" + number(1) + b"s",
        b"}(" + number(1) + b"u",
        b"\xff",
    ],
)
def test_invalid_pickles_are_refused(reason, pickled):
    assert reason(pickled).startswith(("its pickled part is damaged", "its pickle has the instruction POP"))


def test_deep_nesting_is_read_or_refused(why, tmp_path):
    path, deep = tmp_path / "w.pth", 50_000
    lists = b"]" * deep + b"a" * (deep - 1)
    tuples = b")" + b"\x85" * deep
    dicts = (b"}" + text("a")) * deep + b"}" + b"s" * deep
    tensors = (named("torch._utils._rebuild_tensor") + b"(" + storage()) * deep + b"N" + b"NNtR" * deep
    for nested in (lists, tuples, dicts, tensors):
        assert list(read_torch_file(write_zip(path, table(model=table(w=tensor()), x=nested)))) == ["w"]
    assert why(write_zip(path, table(w=tensors))).startswith("its tensor 'w' has no proper shape")
    assert why(write_zip(path, b"}" + tuples + b"Ns")) == "its pickled part is damaged or cut off"
