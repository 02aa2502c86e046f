"""Which values of a run are kept for evaluation and prediction, and when training stops early."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mlmoe_jax.models.params import Params


@dataclass
class Selection:
    """The values chosen so far, how they came to be chosen, and the best mAP of each kind (`raw`, `ema`).

    Everything here is part of a checkpoint, so that a resumed run chooses and stops as an undisturbed one.
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

    def notes(self) -> dict:
        """Return everything but the values, as plain JSON."""
        return {name: value for name, value in vars(self).items() if name != "values"} | {"best": dict(self.best)}

    def __str__(self) -> str:
        reason = f"best mAP on {self.split}, {100 * max(self.best.values()):.2f} %" if self.split else "the last"
        return f"{self.kind} weights of step {self.step} ({reason})"
