"""The training steps to record with the JAX profiler (`--profile=START:STOP`).

The profile is written to `profile/` in the run folder. TensorBoard's profile plugin and xprof can open the folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mlmoe_jax.errors import UserError

FOLDER = "profile"
MOST_STEPS = 100  # a step can have a hundred thousand events


@dataclass(frozen=True)
class Window:
    """The training steps to record with the JAX profiler: `first` to `last`, inclusive, counted from 1."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Window:
        """Parse `START:STOP`; UserError for another form, START 0 or above STOP, or more than MOST_STEPS steps."""
        numbers = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
        first, last = map(int, numbers.groups()) if numbers else (0, 0)
        if not 1 <= first <= last < first + MOST_STEPS:
            raise UserError(
                f"--profile={text} should be the first and the last step to trace, such as --profile=10:12; steps "
                f"count from 1, and at most {MOST_STEPS} are traced"
            )
        return cls(first, last)

    def require(self, step: int, total: int) -> None:
        """Raise UserError if the range is not within the steps of a training of `total` that remain after `step`."""
        if not step < self.first <= self.last <= total:
            raise UserError(
                f"--profile={self.first}:{self.last} is not within the remaining steps, {step + 1} to {total}"
            )
