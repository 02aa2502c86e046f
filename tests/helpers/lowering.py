"""The MLIR context of JAX's programs."""

import sys
import threading


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
