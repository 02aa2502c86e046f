"""Damaged checkpoints, in whose place the one before is used."""

import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers.checkpoints import damage, identical, make_state, save_steps

from mlmoe_jax.runs.checkpoint import open_manager, restore, save
from mlmoe_jax.runs.folder import CHECKPOINTS, RunFolder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_steps(RunFolder(folder), 4, 9)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return RunFolder(shutil.copytree(saved, tmp_path / "run"))


def notes(content: bytes):
    return lambda newest, patch: (newest / "notes" / "metadata").write_bytes(content)


def remove(pattern: str):
    def how(newest, patch):
        found = list(Path(newest).glob(pattern))
        assert found
        for file in found:
            file.unlink()

    return how


def flip(newest, patch):
    """Flip a bit that Orbax restores without an error: of an array in the values and in the state."""
    kernel, found = np.asarray(make_state(9).ema["head/kernel"]).tobytes(), []
    for file in Path(newest).rglob("d/*"):
        before, kernel_there, after = file.read_bytes().partition(kernel)
        if kernel_there:
            file.write_bytes(before + bytes([kernel[0] ^ 1]) + kernel[1:] + after)
            found.append(file.relative_to(newest).parts[0])
    assert {*found} == {"selected", "state"}


def fail(newest, patch):
    """As Orbax does for an array on several devices."""
    undamaged = ocp.CheckpointManager.restore

    def fails(manager, step, **arguments):
        if step == 9:
            raise Exception("see <bound method of TensorStore") from ValueError("OUT_OF_RANGE: in d/a file")
        return undamaged(manager, step, **arguments)

    patch.setattr(ocp.CheckpointManager, "restore", fails)


# What has happened to the newest checkpoint -> what is said about it.
DAMAGE = {
    "damaged files": (lambda newest, patch: damage(RunFolder(newest.parents[1]), 9, "selected"), ""),
    "a bit of an array": (flip, "{} arrays differ from the saved ones, the first is selected: head/kernel"),
    "no files of the values": (remove("selected/**/manifest.ocdbt"), ""),
    "no digests": (remove("digests/metadata"), ""),
    "a bare exception": (fail, "OUT_OF_RANGE: in d/a file"),
    "notes with another score": (
        notes(b'{"best": {"ema": 0.9999}, "step": 9}'),
        "its notes differ from the saved ones",
    ),
    "notes of another kind": (notes(b"[1]"), "its notes differ from the saved ones"),
    "notes that are null": (notes(b"null"), ""),
    "half the notes": (notes(b"{"), ""),
    "notes in invalid UTF-8": (notes(b"\xff"), ""),
    "notes without end": (notes(b"[" * 100_000), ""),
    "another number": (lambda newest, patch: newest.rename(newest.with_name("9999")), "it is the checkpoint of step 9"),
}


@pytest.mark.parametrize(
    ("case", "training"),
    [
        *((case, True) for case in DAMAGE),
        *((case, False) for case in ("damaged files", "half the notes", "another number")),
    ],
)
def test_the_checkpoint_before_is_used(folder, case, training, capsys, monkeypatch):
    """A training removes the damaged one, an evaluation leaves it."""
    how, says = DAMAGE[case]
    how(folder.path / CHECKPOINTS / "9", monkeypatch)
    newest = max(int(entry.name) for entry in (folder / CHECKPOINTS).iterdir())
    state = make_state(0)
    with open_manager(folder, writing=training) as manager:
        restored = restore(manager, selected=state.ema, state=state if training else None)
        assert sorted(manager.all_steps()) == ([4] if training else [4, newest])
    assert (restored.step, restored.newest) == (4, newest)
    assert restored.notes == {"best": {"ema": 0.5}, "step": 4}
    identical(restored.selected, make_state(4).ema)
    identical(restored.state, make_state(4) if training else None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"checkpoint {newest} is damaged and was skipped: {says.format(1 + training)}")
    assert "tensorstore_spec" not in line


def test_the_values_at_the_end_and_those_of_a_step_can_be_restored(folder):
    with open_manager(folder, keep=5) as manager:
        save(manager, 12, make_state(12), make_state(112).ema, {"step": 11})
    with open_manager(folder, writing=False) as manager:
        latest = restore(manager, state={"ema": make_state(0).ema})
        identical(latest.state["ema"], make_state(12).ema)
        earlier = restore(manager, step=9, selected=make_state(0).ema)
        identical(earlier.selected, make_state(9).ema)
        assert (earlier.step, earlier.newest) == (9, 9), "it was asked for"
    damage(folder, 12, "state")
    with open_manager(folder, writing=False) as manager:
        latest = restore(manager, state={"ema": make_state(0).ema})
        identical(latest.state["ema"], make_state(9).ema)
        assert (latest.step, latest.newest) == (9, 12)
        identical(restore(manager, selected=make_state(0).ema).selected, make_state(112).ema)
