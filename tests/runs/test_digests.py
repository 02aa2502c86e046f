import pytest
from etils import epath
from helpers.checkpoints import save_steps

from mlmoe_jax.runs.digests import damage
from mlmoe_jax.runs.folder import RunFolder

ITEMS = ("notes", "selected", "state")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    save_steps(folder, 3)
    return folder / "checkpoints" / "3"


def test_every_file_of_an_item_is_verified(checkpoint):
    assert damage(checkpoint, 3, ITEMS) == ""
    files = [path for path in RunFolder(checkpoint).files() if path.startswith(ITEMS)]
    assert len(files) > 10
    for name in files:
        content = (checkpoint / name).read_bytes()
        item, others = name.partition("/")[0], [item for item in ITEMS if not name.startswith(item)]
        for changed in (content + b"x", bytes([content[0] ^ 1]) + content[1:], None):
            (checkpoint / name).unlink() if changed is None else (checkpoint / name).write_bytes(changed)
            assert damage(checkpoint, 3, ITEMS) == f"1 files differ from the saved ones, the first is {name}"
            assert damage(checkpoint, 3, [item]), "alone too"
            assert damage(checkpoint, 3, others) == "", "an item that is not read may be damaged"
        (checkpoint / name).write_bytes(content)


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", "[" * 100_000, '{"step": 3, "files": {}}', '{"step": 3}'])
def test_damaged_digests_are_damage(checkpoint, tmp_path, text):
    (tmp_path / "digests").mkdir()
    (tmp_path / "digests" / "metadata").write_text(text)
    assert f"{tmp_path / 'digests'} is damaged" in damage(epath.Path(tmp_path), 3, ["notes"])
    assert damage(checkpoint, 4, ITEMS) == "it is the checkpoint of step 3"
