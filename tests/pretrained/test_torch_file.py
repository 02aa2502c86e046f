"""Files of torch.save read without PyTorch: layouts, older names, and the location of the state dict."""

import functools
import pickle
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers.refusals import each
from helpers.torch_pickles import (
    DAMAGED,
    FILES,
    FOUR,
    WRITE,
    named,
    number,
    of_file,
    of_pickle,
    row,
    storage,
    table,
    tensor,
    text,
    write_zip,
)

from mlmoe_jax.pretrained.load import read_tensors


# -------------------------------------------------------------------------------------------------- files of torch.save
@pytest.mark.parametrize("layout", WRITE)
@pytest.mark.parametrize("content", ["kinds", "training"])
def test_files_of_torch_save_give_the_saved_tensors(content, layout):
    tensors = read_tensors(FILES / f"{content}_{layout}.pth")
    with np.load(FILES / f"{content}.npz") as expected:
        assert list(tensors) == expected["names"].tolist()
        assert [x.dtype.name for x in tensors.values()] == expected["dtypes"].tolist()
        for name, value in tensors.items():
            assert value.shape == expected[name].shape
            np.testing.assert_array_equal(value.astype(expected[name].dtype), expected[name], err_msg=name)


@pytest.mark.parametrize("layout", WRITE)
def test_tensors_on_one_storage_share_its_memory(layout):
    tensors = read_tensors(FILES / f"kinds_{layout}.pth")
    assert np.shares_memory(tensors["tied"], tensors["float32"])
    base = tensors["base"]
    for name in ("transposed", "window", "every_other", "expanded", "last", "parameter"):
        assert np.shares_memory(tensors[name], base), name
    assert tensors["transposed"].strides == (4, 96, 24)
    assert tensors["expanded"].strides == (0, 0, 0)
    assert not any(x.flags.writeable for x in tensors.values() if x.size)
    assert all(x.flags.aligned for x in tensors.values())


def test_only_needed_storages_are_read_and_each_once(monkeypatch):
    seen, original = [], zipfile.ZipFile.read
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda archive, name: seen.append(name) or original(archive, name))
    read_tensors(FILES / "kinds_zip.pth")
    storages = [name for name in seen if "/data/" in name]
    with zipfile.ZipFile(FILES / "kinds_zip.pth") as archive:
        # all except one that holds only an empty tensor
        assert len(storages) == len(set(storages)) == sum("/data/" in name for name in archive.namelist()) - 1
    seen.clear()
    assert len(read_tensors(FILES / "training_zip.pth")) == sum("/data/" in name for name in seen) == 9


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
    values = read_tensors(write_zip(tmp_path / "w.bin", pickled, {"0": bits.tobytes()}))["w"]
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


# ------------------------------------------------------------------------------------------------- files of other kinds
def write_npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, w=FOUR)


OTHER = "it is no file of torch.save, but perhaps a web page, a Git LFS pointer or a safetensors file"
NO_TENSORS = "it has no tensors, neither directly nor under model, state_dict, model_state_dict, teacher; its keys are "
OTHER_KINDS = [
    *of_pickle("an empty dict", b"}", f"{NO_TENSORS}none"),
    *of_pickle("a tensor", tensor(), f"{NO_TENSORS}none"),
    *of_pickle("a list", b"]" + tensor() + b"a", f"{NO_TENSORS}none"),
    *of_pickle("a number", number(3), f"{NO_TENSORS}none"),
    *of_pickle("a deep dict", table(encoder=table(w=tensor()), epoch=number(3)), f"{NO_TENSORS}'encoder', 'epoch'"),
    *(
        of_file(name, functools.partial(Path.write_bytes, data=content), reason)
        for name, content, reason in (
            ("nothing", b"", DAMAGED),
            ("a web page", b"\n<!DOCTYPE html><html>Sign in</html>", OTHER),
            ("a pointer of LFS", b"version https://git-lfs.github.com/spec/v1\noid sha256:12\n", OTHER),
            ("a pickle of text", b"cposix\nsystem\n(S'touch x'\ntR.", OTHER),
            ("safetensors", b'\x80\0\0\0\0\0\0\0{"w":{}}', OTHER),
            ("another pickle", pickle.dumps({"w": [1, 2]}), OTHER),
            ("bytes", bytes(range(255)), OTHER),
            ("a cut archive", b"PK\3\4 and no more", DAMAGED),
            ("a script", (FILES / "script.pt").read_bytes(), "its records are compressed or overlap, unlike"),
            (
                "a module",
                (FILES / "module.pth").read_bytes(),
                "it refers to torch.nn.modules.linear.Linear, which is neither a tensor nor a plain container and is "
                "not loaded: save only the state_dict(), or use a file that has nothing else",
            ),
        )
    ),
    of_file("a npz file", write_npz, "it is a zip archive without the data.pkl of torch.save"),
]


@each(OTHER_KINDS)
def test_other_kinds_of_file_are_recognized(case, tmp_path):
    case.check(tmp_path)
