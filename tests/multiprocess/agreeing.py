"""One process of several: it runs each collective operation and writes the results to a file named by its index."""

import json
import os
import sys
import time

import numpy as np

from mlmoe_jax.apps.cli.process import run_job
from mlmoe_jax.runtime import distributed


def work(folder: str) -> int:
    import jax
    import safetensors.numpy
    from jax.sharding import NamedSharding, PartitionSpec

    from mlmoe_jax.config import default_config
    from mlmoe_jax.runs import checkpoint
    from mlmoe_jax.runs.folder import RunFolder
    from mlmoe_jax.runtime.sharding import make_mesh, shard_tree
    from mlmoe_jax.training.label_transfer import Counterparts, transfer_parameters
    from mlmoe_jax.training.loop import _backbone_file

    index, count = distributed.process()
    vote = distributed.Vote(seconds=0)
    found = {
        "process": (index, count),
        "gathered": distributed.gather({"who": "é" * index, "of": index}),
        "first": distributed.broadcast_from_first(index + 10),
        # process 1 votes yes in the second of four rounds; all processes see it in the third
        "votes": [vote.any(index == 1 and turn == 1) for turn in range(4)],
    }
    # process 1 votes yes from its fourth round on; all see it in the same round, although one counts slower
    seldom, answers = distributed.Vote(seconds=0.2), []
    while not any(answers):
        time.sleep(0.02 * (index + 1))
        answers.append(seldom.any(index == 1 and len(answers) >= 3))
    found["rounds"] = len(answers)
    mesh = make_mesh(default_config().mesh)
    whole = np.arange(6 * count, dtype=np.float32).reshape(2 * count, 3)
    parts = jax.make_array_from_callback(
        whole.shape, NamedSharding(mesh, PartitionSpec("data")), lambda piece: whole[piece]
    )
    tree = {"parts": parts, "everywhere": shard_tree({"x": whole}, mesh)["x"]}
    found["addressable"] = parts.is_fully_addressable
    found["whole"] = {name: np.array_equal(value, whole) for name, value in distributed.to_host(tree).items()}

    wide = make_mesh({"data": 1, "fsdp": count, "expert": 1})
    kernel = np.arange(64 * 192, dtype=np.float32).reshape(64, 192) / 64
    sharded = shard_tree({"backbone/kernel": kernel}, wide)
    found["sharded"] = sharded["backbone/kernel"].is_fully_addressable
    found["exported"] = np.array_equal(safetensors.numpy.load(_backbone_file(sharded))["kernel"], kernel.astype("f2"))
    match = Counterparts(("a",), ("a",))
    taken, left = transfer_parameters({"backbone/kernel": np.zeros_like(kernel)}, sharded, match)
    found["transferred"] = np.array_equal(taken["backbone/kernel"], kernel) and not left

    run = RunFolder(folder)
    with checkpoint.open_manager(run) as manager:
        for step in (1, 2):
            checkpoint.save(manager, step, tree, tree, {"step": step})
            manager.wait_until_finished()
    if index == 1:  # a checkpoint that one process cannot read is rejected by all
        restore, failures = checkpoint.ocp.CheckpointManager.restore, iter(["a broken disk"])

        def restore_or_fail(manager, *args, **options):
            restored = restore(manager, *args, **options)
            for failure in failures:
                raise OSError(failure)
            return restored

        checkpoint.ocp.CheckpointManager.restore = restore_or_fail
    with checkpoint.open_manager(run) as manager:
        restored = checkpoint.restore(manager, selected=tree)
    found["restored"] = restored.step
    found["values"] = {name: np.array_equal(v, whole) for name, v in distributed.to_host(restored.selected).items()}
    distributed.barrier("end")
    with open(os.path.join(folder, f"{index}.json"), "w") as file:
        json.dump(found, file)
    print(index)
    return 0


if __name__ == "__main__":
    sys.exit(run_job(lambda: work(sys.argv[1]), together=True))
