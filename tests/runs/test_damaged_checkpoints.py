import gc
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers.checkpoints import damage, identical, make_state, save_steps

from mlmoe_jax.runs.checkpoint import open_manager, restore, save
from mlmoe_jax.runs.folder import CHECKPOINTS, RunFolder

# Orbax leaves coroutines unfinished if a file cannot be read.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module", autouse=True)
def _no_warning_in_later_files():
    yield
    gc.collect()


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def test_every_exception_from_orbax_counts_as_damage(folder, capsys, monkeypatch):
    """For an array on several devices it raises a bare Exception with the reason as its cause."""
    save_steps(folder, 1, 2)
    undamaged = ocp.CheckpointManager.restore

    def fails(manager, step, **arguments):
        if step == 2:
            raise Exception("see <bound method of TensorStore") from ValueError("OUT_OF_RANGE: in d/a file")
        return undamaged(manager, step, **arguments)

    monkeypatch.setattr(ocp.CheckpointManager, "restore", fails)
    with open_manager(folder) as manager:
        assert restore(manager, selected=make_state(0).ema, state=make_state(0)).step == 1
    assert capsys.readouterr().err == "checkpoint 2 is damaged and was skipped: OUT_OF_RANGE: in d/a file\n"


def test_metadata_without_end_is_one_sentence(folder, refusal):
    save_steps(folder, 1)
    (folder / "checkpoints" / "1" / "_CHECKPOINT_METADATA").write_text("[" * 100_000)

    def opened() -> None:
        with open_manager(folder, writing=False):
            pass

    assert "_CHECKPOINT_METADATA" in refusal(opened)


@pytest.mark.parametrize("item", ["selected", "state"])
def test_flipped_bits_are_detected_although_orbax_does_not_detect_them(folder, capsys, item):
    noise = np.random.default_rng(0).bytes(4 * 4096)  # incompressible, so a file contains these bytes
    values = {"w": jnp.asarray(np.frombuffer(noise, np.float32)), "b": jnp.ones(2)}
    with open_manager(folder) as manager:
        for step in (1, 2):
            save(manager, step, values, values, {})
            manager.wait_until_finished()
    flipped = 0
    for file in (Path(folder.path) / CHECKPOINTS / "2" / item).rglob("d/*"):
        content = file.read_bytes()
        at = content.find(noise[8000:8016])
        if at >= 0:
            file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            flipped += 1
    assert flipped
    like = ocp.args.PyTreeRestore(values, restore_args=ocp.checkpoint_utils.construct_restore_args(values))
    args = ocp.args.Composite(**{item: like})
    with open_manager(folder) as manager:
        stored = np.asarray(manager.restore(2, args=args)[item]["w"]).tobytes()
        assert sum(a != b for a, b in zip(stored, noise, strict=True)) == 1, "Orbax alone returns the flipped bit"
        restored = restore(manager, selected=values, state=values)
    assert restored.step == 1
    identical(restored.state, values)
    assert f"1 arrays differ from the saved ones, the first is {item}: w" in capsys.readouterr().err


def test_training_skips_a_damaged_checkpoint_with_a_message_and_saves_it_again(folder, capsys):
    save_steps(folder, 10, 20)
    damage(folder, 20)
    with open_manager(folder) as manager:
        identical(restore(manager, selected=make_state(0).ema, state=make_state(0)).state, make_state(10))
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("checkpoint 20 is damaged and was skipped: ")
        assert "tensorstore_spec" not in line
        for step in (15, 20):
            save(manager, step, make_state(step), make_state(step).ema, {"step": step})
            manager.wait_until_finished()
        assert 20 in manager.all_steps()
    with open_manager(folder) as manager:
        identical(restore(manager, selected=make_state(0).ema, state=make_state(0)).state, make_state(20))


@pytest.mark.parametrize(
    "notes",
    [b'{"best": {"ema": 0.9999}, "step": 9}', b"[1]", b"{", b"null", b"\xff", b"[" * 100_000],
    ids=["another score", "a list", "no JSON", "null", "not UTF-8", "nested"],
)
def test_damaged_notes_are_a_damaged_checkpoint(folder, capsys, notes):
    save_steps(folder, 4, 9)
    path = Path(folder.path) / CHECKPOINTS / "9" / "notes" / "metadata"
    path.write_bytes(notes)
    with open_manager(folder, writing=False) as manager:
        restored = restore(manager, selected=make_state(0).ema)
    assert (restored.step, restored.newest) == (4, 9)
    assert restored.notes == {"best": {"ema": 0.5}, "step": 4}
    identical(restored.selected, make_state(4).ema)
    assert "checkpoint 9 is damaged and was skipped: " in capsys.readouterr().err


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_checkpoint_under_another_number_is_not_used(folder, capsys, training):
    save_steps(folder, 6, 12)
    checkpoints = Path(folder.path) / CHECKPOINTS
    (checkpoints / "12").rename(checkpoints / "9999")
    state = make_state(0)
    with open_manager(folder, writing=training) as manager:
        restored = restore(manager, selected=state.ema, state=state if training else None)
        assert restored.step == 6
        assert sorted(manager.all_steps()) == ([6] if training else [6, 9999])
    assert "checkpoint 9999 is damaged and was skipped: it is the checkpoint of step 12" in capsys.readouterr().err


def test_the_values_at_the_end_and_those_of_a_step_can_be_restored(folder, capsys, refusal):
    steps = (3, 5, 8)
    with open_manager(folder, keep=5) as manager:
        for step in steps:
            selected = make_state(100 + step).ema
            save(manager, step, make_state(step), selected, {"step": step - 1, "kind": "raw", "split": "val"})
            manager.wait_until_finished()
    with open_manager(folder, writing=False) as manager:
        latest = restore(manager, state={"ema": make_state(0).ema})
        identical(latest.state["ema"], make_state(8).ema)
        assert latest.step == 8
    with open_manager(folder, writing=False) as manager:
        earlier = restore(manager, step=5, selected=make_state(0).ema)
        identical(earlier.selected, make_state(105).ema)
        assert (earlier.step, earlier.newest, earlier.notes["step"]) == (5, 5, 4), "it was asked for"
        sentence = refusal(restore, manager, step=6, selected=make_state(0).ema)
        assert sentence.endswith("has checkpoints of steps 3, 5, 8, not of 6")
    damage(folder, 8, "state")
    with open_manager(folder, writing=False) as manager:
        latest = restore(manager, state={"ema": make_state(0).ema})
        identical(latest.state["ema"], make_state(5).ema)
        assert (latest.step, latest.newest) == (5, 8)
    damage(folder, 5, "selected")
    with open_manager(folder, writing=False) as manager:
        sentence = refusal(restore, manager, step=5, selected=make_state(0).ema)
        assert "is damaged; name another one of steps 3, 8, or leave --checkpoint out" in sentence


def test_it_is_an_error_if_all_checkpoints_are_damaged(folder, refusal, capsys):
    save_steps(folder, 1, 2)
    damage(folder, 1)
    damage(folder, 2)
    with open_manager(folder) as manager:
        sentence = refusal(restore, manager, selected=make_state(0).ema, state=make_state(0))
        assert sentence.startswith(f"every checkpoint in {manager.directory} is damaged (2, 1); restore a copy")
        assert sorted(manager.all_steps()) == [1, 2]


def test_missing_files_count_as_damage(folder):
    save_steps(folder, 1, 2, 3)
    (Path(folder.path) / CHECKPOINTS / "3" / "digests" / "metadata").unlink()
    for file in (Path(folder.path) / CHECKPOINTS / "2" / "state").rglob("manifest.ocdbt"):
        file.unlink()
    with open_manager(folder) as manager:
        assert restore(manager, selected=make_state(0).ema, state=make_state(0)).step == 1


def test_a_model_of_another_shape_is_not_restored(folder, refusal):
    save_steps(folder, 1)
    with open_manager(folder) as manager:
        other = make_state(0, size=5)
        assert "is damaged" in refusal(restore, manager, selected=other.ema, state=other)
