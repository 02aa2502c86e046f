"""The training steps to trace (`--profile=START:STOP`).

The trace is in `profile/` of the run folder, where TensorBoard's profile plugin and xprof find it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mlmoe_jax.errors import UserError

FOLDER = "profile"
MOST_STEPS = 100  # a step can have a hundred thousand events


@dataclass(frozen=True)
class Window:
    """The steps to trace, `first` to `last`, both included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Window:
        """Return the steps of `START:STOP`; UserError unless these are at most MOST_STEPS steps in order."""
        numbers = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
        first, last = map(int, numbers.groups()) if numbers else (0, 0)
        if not 1 <= first <= last < first + MOST_STEPS:
            raise UserError(
                f"--profile={text} should be the first and the last step to trace, such as --profile=10:12; steps "
                f"count from 1, and at most {MOST_STEPS} are traced"
            )
        return cls(first, last)

    def require(self, step: int, total: int) -> None:
        """Raise UserError unless the window is after step `step` and ends at step `total` at the latest."""
        if not step < self.first <= self.last <= total:
            raise UserError(
                f"--profile={self.first}:{self.last} is not within the remaining steps, {step + 1} to {total}"
            )
