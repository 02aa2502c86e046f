"""Selection of the values for evaluation and prediction, and early stopping."""

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
    """The values selected so far, their origin, and the best mAP per kind (`raw`, `ema`).

    All of it is part of a checkpoint, so a resumed run selects and stops like an uninterrupted one.
    step, kind, split: of the selected values; split "" = selected without a metric. finished: training stops early.
    """

    values: Params
    step: int = 0
    kind: str = "ema"
    split: str = ""
    best: dict[str, float] = field(default_factory=dict)
    rounds_without_gain: int = 0
    finished: bool = False

    def consider(self, step: int, split: str, candidates: dict[str, tuple[float, Params]]) -> None:
        """Select the best of `candidates`, kind -> (mAP, values), if it is better than all earlier ones.

        A round is a gain if any kind exceeds its own best, as in the authors' early stopping.
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
        """Select `values` regardless of their mAP."""
        self.values, self.step, self.kind, self.split = values, step, kind, split

    def notes(self) -> dict[str, Any]:
        """Return all fields except the values, as plain JSON for a checkpoint; `from_notes` is the inverse."""
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
