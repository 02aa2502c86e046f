"""The program: `python -m mlmoe_jax.main --config=… --mode=… --workdir=…`; see `apps.cli.commands`."""

import sys
from collections.abc import Sequence

from mlmoe_jax.apps.cli.large_pages import use_large_pages


def main(arguments: Sequence[str]) -> int:
    """Run one command; return its exit code."""
    from mlmoe_jax.apps.cli import commands  # after the process has started again with large pages

    return commands.main(arguments)


def console() -> None:
    """Entry point of the installed `mlmoe` command."""
    use_large_pages()
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    console()
