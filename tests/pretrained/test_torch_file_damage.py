"""Damaged PyTorch files are refused in one sentence."""

import copy
import os
import zipfile

import numpy as np
import pytest
from helpers.torch_pickles import (
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

from mlmoe_jax.pretrained.load import read_tensors


# -------------------------------------------------------------------------------------------------------- damaged files
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_cut_off_anywhere_is_refused(refusal, tmp_path, layout):
    content = (FILES / f"kinds_{layout}.pth").read_bytes()
    path = tmp_path / "cut.pth"
    for length in {*range(0, 200, 7), *range(200, len(content), 97), len(content) - 1}:
        path.write_bytes(content[:length])
        refusal(read_tensors, path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flipped_bits_lead_to_one_sentence_or_to_arrays(tmp_path, layout):
    original = (FILES / f"kinds_{layout}.pth").read_bytes()
    draw, path, refused = np.random.default_rng(0), tmp_path / "flipped.pth", 0
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
    path.write_bytes(content.replace(FOUR.tobytes(), FOUR[::-1].tobytes()))
    assert why(path) == "its record 'archive/data/0' is damaged, or was saved with checksums turned off"
    path.write_bytes(content.replace(b"PK\3\4", b"PK\3\5"))
    assert why(path).startswith("its record 'archive/data.pkl' is damaged, or compressed")


def test_a_zip_that_torch_did_not_write_is_refused(why, tmp_path):
    path = tmp_path / "w.pth"
    zeros = {"0": bytes(10**7)}
    pickled = table(w=tensor(storage(size=10**7 // 4), shape=(10**7 // 4,)))
    write_zip(path, pickled, zeros, zipfile.ZIP_DEFLATED)
    assert why(path).startswith("its records claim to hold 10000")
    write_zip(path, table(w=tensor()), {"0": FOUR.tobytes(), "1": os.urandom(4000)}, zipfile.ZIP_DEFLATED)
    assert "compressed or encrypted, which torch.save never does" in why(path)


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
    assert list(read_tensors(write_zip(path, table(w=tensor()), root="any name"))) == ["w"]
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other/data.pkl", b"")
    assert why(path) == "it is a zip archive without the data.pkl of torch.save"
    for contents in ({"1": b""}, {"0": FOUR.tobytes()[:-1]}):
        write_zip(path, table(w=tensor()), contents)
        assert why(path) == "its storage '0' is not there with the 16 bytes that its tensors need"
    write_zip(path, table(w=tensor()), constants_pkl=b"")
    assert "TorchScript" in why(path)
    write_zip(path, table(w=tensor(storage("../../data.pkl"))))
    assert "its storage '../../data.pkl' is not there" in why(path)


def test_big_endian_files_are_refused(why, tmp_path):
    assert "big-endian" in why(write_zip(tmp_path / "w.pth", table(w=tensor()), byteorder=b"big"))
    system = SYSTEM | {"little_endian": False}
    assert "big-endian" in why(write_legacy(tmp_path / "w.pth", table(w=tensor()), head=(MAGIC, PROTOCOL, system)))


def test_a_legacy_file_must_have_each_storage(refusal, why, tmp_path):
    path, pickled = tmp_path / "w.pth", table(w=tensor())
    assert why(write_legacy(path, pickled, {})) == "its storage '0' is not there"
    for content in ((3, FOUR.tobytes()), (4, FOUR.tobytes()[:-3])):
        assert why(write_legacy(path, pickled, {"0": content})) == "it is cut off or damaged at its storage '0'"
    for keys in (["0", "1"], [["0"]], "x", 3):
        assert f"{path} is damaged: " in refusal(read_tensors, write_legacy(path, pickled, keys=keys))
    assert "unknown version of PyTorch's legacy layout" in why(write_legacy(path, pickled, head=(MAGIC, 1002, SYSTEM)))
    assert "is damaged" in refusal(read_tensors, write_legacy(path, pickled, head=(MAGIC, PROTOCOL, [])))


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


def test_a_view_stays_inside_its_storage(reason):
    for start, count in ((3, 2), (-1, 2), (0, 5), (0, -1)):
        view = row(text("v"), number(start), number(count))
        assert reason(table(w=tensor(storage(view=view)))) == "its pickled part is damaged or cut off"


def test_a_storage_has_one_size(reason):
    both = table(a=tensor(), b=tensor(storage(kind="torch.DoubleStorage")))
    assert reason(both) == "its storage '0' is given two sizes"
