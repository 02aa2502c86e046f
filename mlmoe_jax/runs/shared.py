"""Run folders by their location: a path, an address in an object store, or a model on the Hugging Face hub."""

from __future__ import annotations

import os

from mlmoe_jax.pretrained import hub
from mlmoe_jax.runs.folder import (
    ADAPTER,
    BACKBONE,
    CONFIG,
    FROZEN,
    LABEL_SPACE,
    LABELS,
    PREPROCESS,
    RESULTS,
    THRESHOLDS,
    RunFolder,
)
from mlmoe_jax.runtime.files import MIB, MOST_DATA

CARD = "README.md"
# The files of a shared model, with the largest size of each that is downloaded.
FILES = {
    CONFIG: MIB,
    LABELS: 16 * MIB,
    LABEL_SPACE: 256 * MIB,
    PREPROCESS: MIB,
    THRESHOLDS: 16 * MIB,
    BACKBONE: MIB,
    RESULTS: 16 * MIB,
    ADAPTER: MOST_DATA,
    FROZEN: MOST_DATA,
    CARD: 16 * MIB,
}
_REQUIRED = (ADAPTER, CONFIG, LABELS, LABEL_SPACE, PREPROCESS, THRESHOLDS, BACKBONE)


def is_shared(location: str | os.PathLike) -> bool:
    """Return whether a location is that of a model on the hub, such as hf:user/name."""
    return os.fspath(location).startswith(hub.PREFIX)


def run_folder(location: str | os.PathLike) -> RunFolder:
    """Return the run folder at a location; a model on the hub is downloaded into the cache first.

    Raises UserError as `hub.parse` and `hub.fetch_model` do.
    """
    if not is_shared(location):
        return RunFolder(location)
    address = hub.parse(os.fspath(location))
    return RunFolder(hub.fetch_model(address, FILES, _REQUIRED))
