"""The process of a command: the job that it joins, and how it ends.

A process of a job that fails exits at once, since none can continue alone; JAX then ends the others.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from mlmoe_jax.apps.cli.quiet import discard_output, results_only_from
from mlmoe_jax.errors import DONE, INTERRUPTED, UserError
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.files import no_room
from mlmoe_jax.runtime.text import printable


def run_job(work: Callable[[], int], *, together: bool) -> int:
    """Join the other processes of the job, if there are any, and return the exit code of `work`.

    If one of several processes fails, this does not return but prints the reason and ends the process.

    Args:
      work: the command.
      together: whether the processes share the work; otherwise the first one does it, and the others do nothing.
    """
    job = distributed.find_job(os.environ)
    if job is None:
        return work()
    if not together:
        # The accelerators of several hosts can only be initialized by all of them together.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        return work() if job.index == 0 else DONE
    try:
        results_only_from(job.index == 0)
        distributed.join(job)
        code = work()
        sys.stdout.flush()
        distributed.leave()
        return code
    except BaseException as error:
        code = _explain_for_job(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal exit would wait for the other processes


# ----------------------------------------------------------------------------------------------------------------- end
def explain(error: BaseException) -> int | None:
    """Print the sentence of an error and return its exit code; None, without output, for an error that has none."""
    if isinstance(error, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):  # `… | head`
        discard_output()
        return DONE
    reason = error if isinstance(error, UserError) else no_room(error)
    if reason is None:
        return None
    print(f"error: {printable(str(reason))}", file=sys.stderr)
    return reason.exit_code


def _explain_for_job(error: BaseException) -> int:
    if (code := explain(error)) is None:
        traceback.print_exception(error)
        print(
            "error: this process or another one failed; the same command resumes from the last checkpoint",
            file=sys.stderr,
        )
        code = 1
    return code
