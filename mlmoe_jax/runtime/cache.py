"""The folder of what was fetched or made once and can be fetched or made again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $MLMOE_CACHE, or else mlmoe_jax in the user's cache folder; it need not be there yet."""
    if chosen := os.environ.get("MLMOE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlmoe_jax"
