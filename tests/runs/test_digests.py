import hashlib
import json

import jax.numpy as jnp
import numpy as np
import pytest

from mlmoe_jax.runs import digests

VALUES = np.arange(12, dtype=np.float32).reshape(4, 3)
HALVES = {"0:2,0:3": VALUES[:2], "2:4,0:3": VALUES[2:]}


def sha256(values: np.ndarray) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()


def stored(**changes) -> dict:
    """Return the digests of an array that two processes saved in halves."""
    return {"state": {"x": {name: sha256(part) for name, part in HALVES.items()} | changes}}


def test_a_whole_array_has_one_digest_in_any_type():
    tree = {"x": jnp.asarray(VALUES), "y": jnp.asarray(VALUES[::-1, 1], jnp.bfloat16), "z": jnp.float32(3)}
    expected = {name: sha256(np.ascontiguousarray(value)) for name, value in tree.items()}
    assert digests.shard_digests(digests.host_shards(tree)) == expected
    assert digests.damage({"state": tree}, {"state": expected}) == ""


@pytest.mark.parametrize("change", [{"2:4,0:3": sha256(VALUES[:2])}, {"0:2,0:3": sha256(-VALUES[:2])}, "part", "array"])
def test_an_array_is_verified_against_the_digests_of_shards_on_other_devices(change):
    tree, known = {"state": {"x": jnp.asarray(VALUES)}}, stored()
    assert digests.damage(tree, known) == ""
    if change == "part":
        del known["state"]["x"]["2:4,0:3"]
    elif change == "array":
        del known["state"]["x"]
    else:
        known = stored(**change)
    assert digests.damage(tree, known) == "1 arrays differ from the saved ones, the first is state: x"


def test_the_files_of_all_processes_are_read_together(tmp_path):
    first, second = stored(), stored()
    del first["state"]["x"]["2:4,0:3"], second["state"]["x"]["0:2,0:3"]
    (tmp_path / "metadata").write_text(json.dumps(first | {"notes": "abc"}))
    (tmp_path / "metadata-1").write_text(json.dumps(second))
    assert digests.read(tmp_path) == stored() | {"notes": "abc"}
