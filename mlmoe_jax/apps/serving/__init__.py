"""The server of `mlmoe serve`: labels images over HTTP and on a web page."""

from importlib.util import find_spec

from mlmoe_jax.errors import UserError

# Modules of the extra "serve".
LIBRARIES = ("fastapi", "starlette", "pydantic", "uvicorn", "httptools", "python_multipart", "prometheus_client")


def require_libraries() -> None:
    """Raise UserError if a library of the extra "serve" is missing."""
    if missing := [name for name in LIBRARIES if find_spec(name) is None]:
        raise UserError(
            f"mlmoe serve needs the module {missing[0]}; in the folder with pyproject.toml, run "
            'pip install -e ".[serve]"'
        )
