"""Which values of a run are kept for evaluation and prediction, and when training stops early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.models.params import Params


def selection_split(config: ConfigDict) -> str:
    """Return the split that is evaluated during training, on which the weights are selected; "" if there is none."""
    return config.data.test_splits[0] if config.eval.select_on == "test" else config.data.val_split


@dataclass
class Selection:
    """The values chosen so far, how they came to be chosen, and the best mAP of each kind (`raw`, `ema`).

    Everything here is part of a checkpoint, so that a resumed run chooses and stops as an undisturbed one does.
    """

    values: Params
    step: int = 0
    kind: str = "ema"
    split: str = ""
    best: dict[str, float] = field(default_factory=dict)
    rounds_without_gain: int = 0
    finished: bool = False

    def consider(self, step: int, split: str, candidates: dict[str, tuple[float, Params]]) -> None:
        """Take over the best of `candidates`, kind -> (mAP, values), if it beats all before it.

        A round counts as a gain where any kind beats its own best, as the authors' early stopping has it.
        """
        before = max(self.best.values(), default=-math.inf)
        kind = max(candidates, key=lambda name: candidates[name][0])
        mean_ap, values = candidates[kind]
        if mean_ap > before:
            self.keep(step, kind, split, values)
        gained = [name for name, (value, _) in candidates.items() if value > self.best.get(name, -math.inf)]
        self.best |= {name: candidates[name][0] for name in gained}
        self.rounds_without_gain = 0 if gained else self.rounds_without_gain + 1

    def keep(self, step: int, kind: str, split: str, values: Params) -> None:
        """Take over `values` whatever their mAP."""
        self.values, self.step, self.kind, self.split = values, step, kind, split

    def notes(self) -> dict[str, Any]:
        """Return everything but the values, as plain JSON for a checkpoint; `from_notes` is the inverse."""
        return {
            "step": self.step,
            "kind": self.kind,
            "split": self.split,
            "best": dict(self.best),
            "rounds_without_gain": self.rounds_without_gain,
            "finished": self.finished,
        }

    @classmethod
    def from_notes(cls, values: Params, notes: Mapping[str, Any]) -> Selection:
        """Return the selection of a checkpoint from its values and `notes`, which may hold further keys."""
        return cls(
            values,
            step=notes["step"],
            kind=notes["kind"],
            split=notes["split"],
            best=dict(notes["best"]),
            rounds_without_gain=notes["rounds_without_gain"],
            finished=notes["finished"],
        )

    def __str__(self) -> str:
        reason = f"best mAP on {self.split}, {100 * max(self.best.values()):.2f} %" if self.split else "the last"
        return f"{self.kind} weights of step {self.step} ({reason})"
