"""When garbage is collected, and what is said about it."""

import gc
import sys

import pytest

gc.set_threshold(50_000, 20, 50)  # the objects of thousands of programs are visited less often


@pytest.hookimpl(trylast=True)
def pytest_sessionstart():
    """Ignore what a checkpoint that cannot be read leaves behind, as commands do.

    pytest would format it first, in the middle of whatever runs then, and ignore it only afterwards.
    """
    from mlmoe_jax.apps.cli.process import ignore_leftovers

    sys.unraisablehook = ignore_leftovers(sys.unraisablehook)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for garbage only after the collection, and not among what it has made."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result
