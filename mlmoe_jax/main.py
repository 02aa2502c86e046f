"""The program: `python -m mlmoe_jax.main --config=… --mode=… --workdir=…`; see `apps.cli.commands`."""

from mlmoe_jax.apps.cli.commands import console, main

__all__ = ["console", "main"]

if __name__ == "__main__":
    console()
