"""Run folders by their location: a path, an address in an object store, a model on the Hugging Face hub (hf:user/name),
or the model that comes with the package (demo:photographs)."""

from __future__ import annotations

import os
from pathlib import Path

from mlmoe_jax.errors import UserError
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
from mlmoe_jax.runtime.files import DEMO, HUB, MIB, MOST_DATA
from mlmoe_jax.runtime.text import printable

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
_DEMOS = Path(__file__).parent / "demos"


def run_folder(location: str | os.PathLike) -> RunFolder:
    """Return the run folder at a location; a model on the hub is downloaded into the cache first.

    Raises UserError as `hub.parse` and `hub.fetch_model` do, and for an unknown name after demo:.
    """
    text = os.fspath(location)
    if text.startswith(DEMO):
        return RunFolder(_demo(text.removeprefix(DEMO)))
    if text.startswith(HUB):
        return RunFolder(hub.fetch_model(hub.parse(text), FILES, _REQUIRED))
    return RunFolder(location)


def _demo(name: str) -> Path:
    known = sorted(path.name for path in _DEMOS.iterdir() if path.is_dir())
    if name not in known:
        there = ", ".join(DEMO + one for one in known)
        raise UserError(f"no model {DEMO}{printable(name, 100)} comes with the package; there is {there}")
    return _DEMOS / name
