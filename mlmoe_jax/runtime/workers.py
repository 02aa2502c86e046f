"""Worker processes: whether this program can start them, and how they end.

A worker process imports the file of the program first. If this file starts workers when it is imported, every worker
would repeat the whole program.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import spawn

from mlmoe_jax.errors import UserError

START = "spawn"  # a forked process could deadlock on a lock of one of JAX's threads
GUARD = 'put the code that trains, evaluates or predicts below `if __name__ == "__main__":`'
_IMPORTED = 97  # the exit code of a process that has imported the program


def require_program() -> None:
    """End this process if it is a worker that is still importing the program. Call it before a long computation.

    Raises SystemExit, whose sentence Python prints without a traceback.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(f"error: a worker process would run {sys.argv[0]} again; {GUARD}")


@functools.cache
def can_start() -> bool:
    """Return whether workers can be started: False if the program has no file that they can import, as with `python -`.

    A first process shows whether the program can be imported, because Grain would wait for a worker that ends before it
    has read its arguments.

    Raises:
      UserError: a worker fails to import the program.
    """
    require_program()
    program = spawn.get_preparation_data("").get("init_main_from_path")
    if program is not None and not os.path.isfile(program):
        logging.getLogger(__name__).warning(
            "images are read by threads, because worker processes cannot import the program %s", program
        )
        return False
    process = multiprocessing.get_context(START).Process(target=os._exit, args=(_IMPORTED,), daemon=True)
    process.start()
    process.join()
    if process.exitcode >= 0 and process.exitcode != _IMPORTED:  # it was not killed by a signal
        raise UserError(
            f"a worker process ended while it imported {program or sys.argv[0]} (exit code {process.exitcode}); "
            f"{GUARD}, or set data.workers=0"
        )
    return True


def follow_parent(*_: int) -> None:
    """Make this worker ignore Ctrl-C, which its parent handles, and exit when its parent exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
