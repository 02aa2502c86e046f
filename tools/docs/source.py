"""Python source as a tree, for the tests and tools that read our code."""

import ast
import gc


def parse_source(text: str) -> ast.Module:
    """Return the tree of a program, as `ast.parse` does, but without garbage collection meanwhile.

    Up to Python 3.11.7, a parse that begins during another one breaks it with "recursion depth mismatch"
    (python/cpython#106905). A finalizer that fails begins one: pytest formats its traceback, which parses lines.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if enabled:
            gc.enable()
