"""The server of --mode=serve: labels images over HTTP and on a web page."""

from importlib.util import find_spec

from mlmoe_jax.errors import UserError

LIBRARIES = (
    "fastapi",
    "starlette",
    "pydantic",
    "uvicorn",
    "python_multipart",
    "prometheus_client",
)  # modules of the extra "serve"


def require_libraries() -> None:
    """Raise UserError if a library of the extra "serve" is missing."""
    if missing := [name for name in LIBRARIES if find_spec(name) is None]:
        raise UserError(f"--mode=serve needs the module {missing[0]}; run pip install 'mlmoe-jax[serve]'")
