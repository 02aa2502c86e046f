"""Measure what one table of the documentation reports.

    python -m benchmarks.measure                       # the names, with a line each
    python -m benchmarks.measure NAME --help           # the options of one
    python -m benchmarks.measure NAME [OPTIONS]

--root is a VOCdevkit folder, with a data set in the layout of VOC 2012, and --out is the folder of the results. What
takes long stores what is finished: the same command continues after an interruption.

Each name is a module of this folder, with its `Options` and a function `measure`, which yields the text to print.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure.options import parse
from mlmoe_jax.apps.cli.environment import use_large_pages
from mlmoe_jax.errors import INTERRUPTED, Stopped, UserError
from tools.docs.source import parse_source

NAMES = (
    *("digits_methods", "photographs", "variants", "calibration", "label_selection", "few_labels", "planted_flips"),
    *("own_images", "peers", "exported", "serving", "pack", "full_size_parity"),
    *("scaling_table", "label_scaling", "corpus", "many_labels"),
)


def overview() -> str:
    """Return the names, each with the first line of its module, of which none is imported."""
    texts = [Path(__file__).with_name(f"{name}.py").read_text() for name in NAMES]
    lines = [ast.get_docstring(parse_source(text)).partition("\n")[0] for text in texts]
    width = max(map(len, NAMES))
    return "\n".join(f"{name:{width}}  {line}" for name, line in zip(NAMES, lines, strict=True))


def main(words: Sequence[str]) -> int:
    """Measure what the first word names, with the options that follow; return the exit code."""
    name, *rest = words or ["--help"]
    if name in ("--help", "-h"):
        print(f"{__doc__}\n{overview()}")
        return 0
    if name not in NAMES:
        print(f"error: there is no {name}; the names are\n{overview()}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"benchmarks.measure.{name}")
    options = parse(module.Options, rest, f"benchmarks.measure {name}", module.__doc__)
    use_large_pages()
    try:
        for text in module.measure(options):
            print(text, flush=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
