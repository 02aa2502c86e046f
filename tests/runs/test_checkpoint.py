"""Checkpoints, and the one before in place of a damaged one."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers.checkpoints import damage, identical, make_state, save_steps

from mlmoe_jax.config import default_config
from mlmoe_jax.runs.checkpoint import (
    newest_notes,
    open_manager,
    restore,
    save,
)
from mlmoe_jax.runs.folder import CHECKPOINTS, RunFolder
from mlmoe_jax.runtime.sharding import make_mesh, shard_tree
from mlmoe_jax.training.step import initial_state


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


# ----------------------------------------------------------------------------------------------------- round trip
def test_a_checkpoint_restores_bit_for_bit(folder):
    mesh = make_mesh(default_config().mesh)
    state, notes = make_state(7), {"best": {"raw": 0.1 + 0.2}, "kind": "ema", "finished": False}
    state.trainable["head/bias"] = jnp.array([jnp.nan, -0.0, 1e-42])  # not a number, a signed zero, a subnormal
    selected = {"head/kernel": state.ema["head/kernel"] * 3}
    with open_manager(folder) as manager:
        save(manager, 7, state, selected, notes)
    like = shard_tree(jax.tree.map(jnp.zeros_like, state), mesh)
    with open_manager(folder) as manager:
        restored = restore(manager, selected=shard_tree(selected, mesh), state=like)
    assert restored.step == 7
    assert restored.notes == notes
    identical(restored.state, state)
    identical(restored.selected, selected)
    for value, wanted in zip(jax.tree.leaves(restored.state), jax.tree.leaves(like), strict=True):
        assert value.sharding == wanted.sharding
    assert int(restored.state.opt[1].count) == 7, "the optimizer's own step counter"


def test_the_notes_of_the_newest_checkpoint_can_be_read_alone(folder, monkeypatch):
    assert newest_notes(folder) == {}
    save_steps(folder, 2, 9)
    damage(folder, 9)
    # One process of a job may ask while others do something else, but Orbax makes all of them wait for one another.
    monkeypatch.setattr(ocp, "CheckpointManager", None)
    assert newest_notes(folder) == {"best": {"ema": 0.5}, "step": 9}
    notes = Path(folder.path) / CHECKPOINTS / "9" / "notes" / "metadata"
    for damaged in (notes.read_text().replace("0.5", "0.6"), "[" * 100_000, "[1]"):
        notes.write_text(damaged)
        assert newest_notes(folder) == {"best": {"ema": 0.5}, "step": 2}, "those of the checkpoint before it"
    notes.unlink()
    assert newest_notes(folder) == {"best": {"ema": 0.5}, "step": 2}


def test_the_newest_is_restored_and_the_newest_are_kept(folder):
    save_steps(folder, 2, 9, 10, keep=2)
    with open_manager(folder, keep=2) as manager:
        assert sorted(manager.all_steps()) == [9, 10]
        restored = restore(manager, selected=make_state(0).ema, state=make_state(0))
        assert restored.notes["step"] == 10
        identical(restored.state, make_state(10))


def test_a_state_has_no_averages_for_a_decay_of_0():
    params, stats = {"a": jnp.ones(2)}, {"b": jnp.ones(1)}
    without = initial_state(params, {}, stats, (), averages=False)
    assert without.ema == {}
    assert without.latest().keys() == initial_state(params, {}, stats, ()).ema.keys() == {"a", "b"}


def test_an_existing_step_is_not_saved_again(folder):
    save_steps(folder, 4)
    with open_manager(folder) as manager:
        save(manager, 4, make_state(5), make_state(5).ema, {"step": 5})
    with open_manager(folder) as manager:
        identical(restore(manager, selected=make_state(0).ema).selected, make_state(4).ema)


def test_saving_before_a_donating_step_stores_the_values_of_that_step(folder):
    """The following steps overwrite the memory that is donated to them."""
    train = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = train({"a": jnp.zeros((512, 1024)), "b": jnp.zeros((1024, 512))})
    with open_manager(folder, keep=10) as manager:
        for step in range(1, 13):
            if step % 4 == 1:
                save(manager, step, state, {"x": jnp.zeros(2)}, {})
            before, state = state, train(state)
            if step % 4 == 3:  # at the saved step, pending writes may still hold the memory
                assert before["a"].is_deleted(), "a step reuses the memory of its input"
    with open_manager(folder) as manager:
        for step in (1, 5, 9):
            stored = restore(manager, state=jax.tree.map(jnp.zeros_like, state), step=step).state
            assert all(np.all(np.asarray(value) == step) for value in stored.values()), step


# ----------------------------------------------------------------------------------------------- half-written ones
@pytest.mark.parametrize("training", [True, False])
def test_a_half_written_checkpoint_is_ignored_and_removed_by_the_next_training(folder, training):
    """Evaluation keeps it: it may be one that is being written."""
    save_steps(folder, 1)
    half = Path(folder.path) / CHECKPOINTS / "2.orbax-checkpoint-tmp"
    (half / "state").mkdir(parents=True)
    with open_manager(folder, writing=training) as manager:
        assert restore(manager, selected=make_state(0).ema).step == 1
    assert half.exists() != training


# ------------------------------------------------------------------------------------------------------------- damage
@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_steps(RunFolder(folder), 4, 9)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
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
    "a bit of an array": (flip, "{} files differ from the saved ones, the first is selected/"),
    "no files of the values": (remove("selected/**/manifest.ocdbt"), ""),
    "no digests": (remove("digests/metadata"), ""),
    "a bare exception": (fail, "OUT_OF_RANGE: in d/a file"),
    "notes with another score": (
        notes(b'{"best": {"ema": 0.9999}, "step": 9}'),
        "1 files differ from the saved ones, the first is notes/metadata",
    ),
    "notes of another kind": (notes(b"[1]"), "1 files differ from the saved ones, the first is notes/metadata"),
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
def test_the_checkpoint_before_is_used(copied, case, training, capsys, monkeypatch):
    """A training removes the damaged one, an evaluation leaves it."""
    how, says = DAMAGE[case]
    how(copied.path / CHECKPOINTS / "9", monkeypatch)
    newest = max(int(entry.name) for entry in (copied / CHECKPOINTS).iterdir())
    state = make_state(0)
    with open_manager(copied, writing=training) as manager:
        restored = restore(manager, selected=state.ema, state=state if training else None)
        assert sorted(manager.all_steps()) == ([4] if training else [4, newest])
    assert (restored.step, restored.newest) == (4, newest)
    assert restored.notes == {"best": {"ema": 0.5}, "step": 4}
    identical(restored.selected, make_state(4).ema)
    identical(restored.state, make_state(4) if training else None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"checkpoint {newest} is damaged and was skipped: {says.format(1 + training)}")
    assert "tensorstore_spec" not in line


def test_the_values_at_the_end_and_those_of_a_step_can_be_restored(copied):
    with open_manager(copied, keep=5) as manager:
        save(manager, 12, make_state(12), make_state(112).ema, {"step": 11})
    with open_manager(copied, writing=False) as manager:
        latest = restore(manager, state={"ema": make_state(0).ema})
        identical(latest.state["ema"], make_state(12).ema)
        earlier = restore(manager, step=9, selected=make_state(0).ema)
        identical(earlier.selected, make_state(9).ema)
        assert (earlier.step, earlier.newest) == (9, 9), "it was asked for"
    damage(copied, 12, "state")
    with open_manager(copied, writing=False) as manager:
        latest = restore(manager, state={"ema": make_state(0).ema})
        identical(latest.state["ema"], make_state(9).ema)
        assert (latest.step, latest.newest) == (9, 12)
        identical(restore(manager, selected=make_state(0).ema).selected, make_state(112).ema)
