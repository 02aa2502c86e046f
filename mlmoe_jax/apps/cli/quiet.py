"""State of the whole process that only the command line changes: standard output, and messages of libraries.

Libraries print tracebacks and warnings about errors that are also raised, and so are reported in one sentence.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from mlmoe_jax.errors import NoRoom
from mlmoe_jax.runtime.files import full_disk_explained, no_room

_CACHE_TROUBLE = "persistent compilation cache entry for '"  # in JAX's warnings, followed by the name of the program


# ----------------------------------------------------------------------------------------------------- standard output
def results_only_from(first: bool) -> None:
    """Reserve stdout for the results of the first process; messages that C++ libraries print there go to stderr."""
    sys.stdout.flush()
    results = os.dup(1) if first else os.open(os.devnull, os.O_WRONLY)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(results, "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def flush_output() -> None:
    """Write what is printed so far; NoRoom if that fails, which at exit would have no sentence."""
    try:
        with full_disk_explained("standard output"):
            sys.stdout.flush()
    except (OSError, NoRoom):
        discard_output()
        raise


def discard_output() -> None:
    """Discard what standard output's buffers hold and will hold, so that writing them at exit cannot fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


# ----------------------------------------------------------------------------------------------- messages of libraries
@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppress what libraries print about errors that are also raised; all other messages pass.

    After NoRoom the filters stay until the process ends, because what Orbax leaves behind reports when it is destroyed.
    """
    asyncio_log, absl_log = logging.getLogger("asyncio"), logging.getLogger("absl")
    hook, show = sys.unraisablehook, warnings.showwarning
    sys.unraisablehook, warnings.showwarning = _without_closed_loops(hook), _without_cache_trouble(show)
    asyncio_log.addFilter(_is_not_unretrieved)
    absl_log.addFilter(_is_not_full_disk)
    full = False
    try:
        yield
    except NoRoom:
        full = True
        raise
    finally:
        if not full:
            sys.unraisablehook, warnings.showwarning = hook, show
            asyncio_log.removeFilter(_is_not_unretrieved)
            absl_log.removeFilter(_is_not_full_disk)


def _without_closed_loops(show: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a `sys.unraisablehook` that passes over what Orbax leaves behind at an array that it cannot read.

    It closes its event loop and raises. TensorStore still reads the other arrays and notifies the closed loop later,
    and the coroutines that wait for them never finish.
    """

    def shown(what: Any) -> None:
        unfinished = "orbax" in getattr(getattr(what.object, "cr_code", None), "co_filename", "")
        if not (unfinished or str(what.exc_value) == "Event loop is closed"):
            show(what)

    return shown


def _is_not_unretrieved(record: logging.LogRecord) -> bool:
    return not record.getMessage().partition("\n")[0].endswith("exception was never retrieved")


def _is_not_full_disk(record: logging.LogRecord) -> bool:
    """Return False for the traceback of each thread of Orbax that cannot write because the disk is full."""
    error = record.exc_info[1] if record.exc_info else None
    return error is None or no_room(error) is None


def _without_cache_trouble(show: Callable[..., None]) -> Callable[..., None]:
    """Return a `warnings.showwarning` that turns JAX's warnings about compiled programs into one line of each kind.

    JAX compiles a program that it cannot read, and would leave a file in place that a full disk has truncated.
    """
    reported: set[str] = set()

    def shown(message: Warning | str, *where, **options) -> None:
        failure, about_cache, rest = str(message).partition(_CACHE_TROUBLE)
        if str(message).endswith("was never awaited") and "orbax" in str(message).lower():
            return
        if not about_cache:
            show(message, *where, **options)
            return
        from mlmoe_jax.runtime.progress import status
        from mlmoe_jax.runtime.setup import programs_folder

        folder = programs_folder()
        name, _, reason = rest.partition("': ")
        if failure.startswith("Error reading"):
            text = f"compiled programs in {folder} that cannot be read are compiled again"
            for damaged in folder.glob(f"{name}-*"):
                damaged.unlink(missing_ok=True)
        else:
            text = f"compiled programs are not kept for later runs: {folder} cannot be written"
        if text not in reported:
            reported.add(text)
            status(f"{text} ({reason.splitlines()[0]})")

    return shown
