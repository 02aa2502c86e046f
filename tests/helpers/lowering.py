"""What JAX does for each program and each error, made faster for tests."""

import sys
import threading


def pytest_collection_finish():
    """All that the tests import is imported now."""
    share_contexts()
    shorten_errors()


def share_contexts() -> None:
    """Let all programs that a thread lowers share one MLIR context, if JAX is imported.

    JAX makes one per program. That takes a third of the time of a small program whose compiled form is cached.
    """
    mlir = sys.modules.get("jax._src.interpreters.mlir")
    if make := getattr(mlir, "make_ir_context", None):
        made = threading.local()

        def context():
            if not hasattr(made, "context"):
                made.context = make()
            return made.context

        mlir.make_ir_context = context


def shorten_errors() -> None:
    """Leave out of errors about traced values where each comes from, if JAX is imported.

    Flax asks every new variable for its sharding. JAX answers with an error that contains the equations of the value,
    which takes half of the time of a model without values.
    """
    if tracing := sys.modules.get("jax._src.interpreters.partial_eval"):
        tracing.DynamicJaxprTracer._origin_msg = lambda self: ""
