"""The program: `python -m mlmoe_jax.main --config=… --mode=… --workdir=…`; see `apps.cli.commands`."""

import os
import signal
import sys
from collections.abc import Sequence

from mlmoe_jax.apps.cli.large_pages import use_large_pages
from mlmoe_jax.errors import INTERRUPTED


def main(arguments: Sequence[str]) -> int:
    """Run one command; return its exit code."""
    from mlmoe_jax.apps.cli import commands  # after the process has started again with large pages

    return commands.main(arguments)


def console() -> None:
    """Entry point of the installed `mlmoe` command."""
    for number in (signal.SIGINT, signal.SIGTERM):  # while no command is in progress, and nothing needs to be saved
        signal.signal(number, lambda number, frame: os._exit(INTERRUPTED))
    use_large_pages()
    from mlmoe_jax.apps.cli.process import quiet_libraries

    quiet_libraries()
    code = main(sys.argv[1:])
    # With `python -m`, a KeyboardInterrupt in exec("…"), as in the definition of a dataclass, lets CPython end by
    # SIGINT, even if it was caught. The next exec("…") resets its flag.
    exec("")
    sys.exit(code)


if __name__ == "__main__":
    console()
