"""loop: the training with its input pipeline, relative to the bare step on a batch that is on the device."""

from __future__ import annotations

import contextlib
from typing import Any

from benchmarks import harness
from benchmarks.suites.cases import Settings
from benchmarks.suites.photos import LABELS, labeled_folder, small_training

DIGITS = ("mlvpt_digits", {"train.epochs": "2", "eval.every_epochs": "1", "train.log_every": "10"}, 10)
# Images instead of features, for which nothing is read and the step differs.
EPOCHS = {"train.epochs": "2", "train.patience": "0", "train.log_every": "5", "data.cache_features": "no"}


def run(settings: Settings, workers: harness.Workers, results: harness.Results) -> list[str]:
    """Return a table with one row per data set and checkout of this package."""
    workers.close()  # a TPU belongs to one process
    rows = []
    with contextlib.ExitStack() as stack:
        trainings = {} if settings.quick else {"digits": DIGITS}
        if settings.quick:
            folder = stack.enter_context(labeled_folder(settings, 16))
            trainings["drawn"] = (*small_training(folder), LABELS)
        elif settings.photos:
            folder = stack.enter_context(labeled_folder(settings, 2000))
            trainings["photographs"] = (f"own_csv:root={folder},fit=steps", EPOCHS, LABELS)
        for name, training in trainings.items():
            for side in workers.ours:
                given = (side, _measured, settings, *training)
                if outcome := results.measure("loop", f"{name} {side.name}", workers.alone, *given):
                    rows.append([name, side.name, *harness.cells_of(outcome, _cells)])
    columns = ("", "side", "loop, images/s", "bare step, images/s", "loop over bare step", "data wait", "evaluation, s")
    return [harness.table("The training loop", (*columns, "checkpoint, s"), rows)]


def _measured(
    worker: harness.Worker, settings: Settings, reference: str, keys: dict[str, str], labels: int
) -> dict[str, Any]:
    """Return the speed of the loop and of the bare step, which is measured before and after the loop."""
    bare: dict[str, Any] = {"config": reference, "rounds": []}
    rounds = max(1, settings.rounds // 2)
    for turn in range(1 if settings.quick else 2):
        outcome = worker.call("bare_step", reference=reference, overrides=keys, labels=labels, rounds=rounds)
        bare |= {"batch": outcome["batch"], "rounds": bare["rounds"] + outcome["rounds"]}
        if turn == 0:
            loop = worker.call("training_loop", reference=reference, overrides=keys)
    return {"bare": bare, "loop": loop}


def _cells(outcome: dict[str, Any]) -> list[str]:
    loop, bare = outcome["loop"], outcome["bare"]
    rates = harness.Spread.of(bare["batch"] / one["seconds"] for one in bare["rounds"])
    stalls = [loop[f"{name}_seconds"] for name in ("evaluation", "checkpoint")]
    return [
        harness.number(loop["images_per_second"]),
        rates.text() + harness.mark(bare),
        harness.number(loop["images_per_second"] / rates.median),
        f"{loop['data_wait']:.1%}",
        *(harness.Spread.of(values).text() if values else "" for values in stalls),
    ]
