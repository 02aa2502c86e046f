"""The process of a command: its job, exit code and output, and the messages of libraries.

In a multi-process job, a process that fails exits at once, since no process can continue alone. JAX then ends all
processes. Some libraries raise an error and also print it as a traceback or warning. Such messages are suppressed, and
the error is reported in one sentence.
"""

import contextlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mlmoe_jax.apps.cli.commands import COMMANDS
from mlmoe_jax.apps.cli.flags import parse_flags
from mlmoe_jax.errors import DONE, INTERRUPTED, DiskError, Stopped, UserError
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.files import disk_error, disk_errors_explained
from mlmoe_jax.runtime.preemption import interruptible
from mlmoe_jax.runtime.progress import AboveBars
from mlmoe_jax.runtime.text import printable

_TOPIC = "--help="  # followed by a section or a key of the config; --help alone is about the commands


def run_command(arguments: Sequence[str]) -> int:
    """Run the command that `arguments` name, print its output, and return its exit code."""
    try:
        with interruptible(INTERRUPTED), warnings_printed():
            code = _run(arguments)
            flush_output()
            return code
    except (Exception, KeyboardInterrupt) as error:
        if (code := explain(error)) is None:
            raise
        return code


def _run(arguments: Sequence[str]) -> int:
    if topics := [word.removeprefix(_TOPIC) for word in arguments if word.startswith(_TOPIC)]:
        from mlmoe_jax.config.reference import describe_config

        print("\n\n".join(map(describe_config, topics)))
        return DONE
    try:
        flags, overrides = parse_flags(arguments)
    except SystemExit:  # --help and --version are printed
        return DONE
    command = COMMANDS[flags.mode]

    def work() -> int:
        try:
            outcome = command.run(flags, overrides)
        except Stopped as stopped:
            print(stopped, file=sys.stderr)
            return INTERRUPTED
        if outcome.parts:
            print(outcome.json() if flags.json else outcome.text())
        return outcome.exit_code

    return work() if command.independent(flags) else run_job(work, together=command.together)


def run_job(work: Callable[[], int], *, together: bool) -> int:
    """Call `work` and return its exit code.

    In a multi-process job, all processes connect and call `work` if `together`. A process in which `work` fails prints
    the reason and exits here. If not `together`, only the first process calls `work`, without connecting.
    """
    job = distributed.find_job(os.environ)
    if job is None:
        return work()
    if not together:
        # The accelerators of several hosts can only be initialized by all hosts together.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        return work() if job.index == 0 else DONE
    try:
        results_only_from(job.index == 0)
        distributed.connect(job)
        code = work()
        sys.stdout.flush()
        distributed.disconnect()
        return code
    except BaseException as error:
        if (code := explain(error)) is None:
            code = 1
            traceback.print_exception(error)
            print(
                "error: this or another process failed; the same command resumes from the last checkpoint",
                file=sys.stderr,
            )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal exit would wait for all processes


# ----------------------------------------------------------------------------------------------------------------- end
def explain(error: BaseException) -> int | None:
    """Print one sentence about an expected error, and return the exit code of the process.

    Return None for an unexpected error, and print nothing.
    """
    if isinstance(error, KeyboardInterrupt):
        print(str(error) or "stopped", file=sys.stderr)
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):  # `… | head`
        discard_output()
        return DONE
    reason = error if isinstance(error, UserError) else disk_error(error)
    if reason is None:
        return None
    print(f"error: {printable(str(reason))}", file=sys.stderr)
    return reason.exit_code


# ------------------------------------------------------------------------------------------------------------ warnings
@contextlib.contextmanager
def warnings_printed() -> Iterator[None]:
    """While the context is active, print the warnings that this package logs to stderr, as `warning: …`.

    In a multi-process job, only the first process prints.
    """
    logger, printer = logging.getLogger("mlmoe_jax"), AboveBars(logging.WARNING)
    printer.setFormatter(logging.Formatter("warning: %(message)s"))
    propagate, logger.propagate = logger.propagate, False  # to handlers of the root, which would print them again
    logger.addHandler(printer)
    try:
        yield
    finally:
        logger.removeHandler(printer)
        logger.propagate = propagate


# ----------------------------------------------------------------------------------------------------- standard output
def results_only_from(first: bool) -> None:
    """Reserve standard output for the results of the first process.

    Everything that C++ libraries write to standard output goes to stderr instead. `first` is whether this is the first
    process. All other processes discard their results.
    """
    sys.stdout.flush()
    results = os.dup(1) if first else os.open(os.devnull, os.O_WRONLY)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(results, "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def flush_output() -> None:
    """Flush standard output, so that a full disk raises DiskError here instead of printing a traceback at exit."""
    try:
        with disk_errors_explained("standard output"):
            sys.stdout.flush()
    except (OSError, DiskError):
        discard_output()
        raise


def discard_output() -> None:
    """Discard buffered and later standard output, so that writing it at exit cannot fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


# ----------------------------------------------------------------------------------------------- messages of libraries
def quiet_libraries() -> None:
    """Suppress messages of libraries about errors that they also raise, and about errors without consequences.

    The setting lasts until the process ends. For example, an unreadable or unwritable compilation cache has no
    consequences, because JAX compiles the program again.
    """
    sys.unraisablehook = ignore_leftovers(sys.unraisablehook)
    # The tracker removes what a killed worker has left, and says so.
    sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
    warnings.filterwarnings("ignore", "(?i).*orbax.* was never awaited")
    logging.getLogger("asyncio").addFilter(_is_not_unretrieved)
    logging.getLogger("absl").addFilter(_is_not_full_disk)


def ignore_leftovers(show: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a `sys.unraisablehook` that ignores errors which only follow from an error that is reported anyway.

    If Orbax cannot read an array, it closes its event loop and raises an exception. TensorStore continues to read other
    arrays and later notifies the closed event loop, and the coroutines that wait for these arrays never finish. A
    KeyboardInterrupt in a callback is also ignored, because `interruptible` raises it again. All other errors go to
    `show`.
    """

    def show_unless_known(what: Any) -> None:
        unfinished = "orbax" in getattr(getattr(what.object, "cr_code", None), "co_filename", "")
        interrupted = isinstance(what.exc_value, KeyboardInterrupt)
        if not (unfinished or interrupted or str(what.exc_value) == "Event loop is closed"):
            show(what)

    return show_unless_known


def _is_not_unretrieved(record: logging.LogRecord) -> bool:
    return not record.getMessage().partition("\n")[0].endswith("exception was never retrieved")


def _is_not_full_disk(record: logging.LogRecord) -> bool:
    """Return False for a log record about a full disk, and True for all other records.

    A thread of Orbax logs the traceback of this error, and Orbax also raises the error.
    """
    error = record.exc_info[1] if record.exc_info else None
    return error is None or disk_error(error) is None
