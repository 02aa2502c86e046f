"""The cache folder, for files that can be downloaded or made again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $MLMOE_CACHE, or mlmoe_jax in the user's cache folder if that is not set; it may not exist yet."""
    if chosen := os.environ.get("MLMOE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlmoe_jax"
