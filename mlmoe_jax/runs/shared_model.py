"""Shared models: their locations, and the file with all their values except a published backbone.

A location is a path, an address in an object store, a model on the Hugging Face hub (hf:user/name), or the model that
comes with the package (demo:photographs). A folder with `adapter.safetensors` and the metadata of a run is opened like
a run folder with checkpoints. The file holds float32 tensors by parameter path, and in its header the layout, the
version that wrote it, and the origin of the values.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict
from safetensors.numpy import load, save

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.params import Params
from mlmoe_jax.pretrained.hub_models import fetch_model
from mlmoe_jax.runs.checkpoint import Restored
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
from mlmoe_jax.runtime.files import DEMO, HUB, MIB, MOST_DATA, open_regular
from mlmoe_jax.runtime.formats import read_header
from mlmoe_jax.runtime.hub import parse_address
from mlmoe_jax.runtime.sharding import shard_tree
from mlmoe_jax.runtime.text import printable
from mlmoe_jax.runtime.version import __version__

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
LAYOUT = 1  # readers refuse any other layout
_MOST_TENSORS, _MOST_HEADER = 10_000, 4 * MIB
_MOST_PATCHES = 48  # per side of an image; attention weights take memory by the fourth power
_ABOUT = "mlmoe_jax"  # the entry of the header
_ORIGIN = {"step": int, "kind": str, "split": str}  # the origin of the values, among the notes of a checkpoint


def run_folder(location: str | os.PathLike) -> RunFolder:
    """Return the run folder at a location: a path, a URL, `hf:USER/NAME` or `demo:NAME`.

    A model on the Hugging Face hub is downloaded into the cache first. Raises UserError if no `demo:` model has this
    name, the address is invalid, or the download fails.
    """
    text = os.fspath(location)
    if text.startswith(DEMO):
        name, demos = text.removeprefix(DEMO), sorted(path.name for path in _DEMOS.iterdir() if path.is_dir())
        if name not in demos:
            known = ", ".join(DEMO + demo for demo in demos)
            raise UserError(f"no model {DEMO}{printable(name, 100)} comes with the package; there is {known}")
        return RunFolder(_DEMOS / name)
    if text.startswith(HUB):
        return RunFolder(fetch_model(parse_address(text), FILES, _REQUIRED))
    return RunFolder(location)


def write_adapter(folder: RunFolder, values: Params, notes: Mapping[str, Any]) -> None:
    """Write values, path -> array, to adapter.safetensors, with `step`, `kind` and `split` of a checkpoint's notes."""
    tensors = {path: np.ascontiguousarray(jax.device_get(values[path]), np.float32) for path in sorted(values)}
    about = {"layout": LAYOUT, "version": __version__, "origin": selection_origin(notes)}
    folder.write_bytes(ADAPTER, save(tensors, {_ABOUT: json.dumps(about)}))  # several entries have no fixed order


def selection_origin(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `step`, `kind` and `split` of a checkpoint's notes; ValueError if one is missing or has a wrong type."""
    for name, kind in _ORIGIN.items():
        if not isinstance(notes.get(name), kind):
            raise ValueError(f"its notes give {name} as {notes.get(name)!r}")
    return {name: notes[name] for name in _ORIGIN}


def require_usual_size(config: ConfigDict) -> None:
    """Raise UserError if the config of a shared model has such large images that one image may need all memory."""
    name, size = config.model.backbone.name, config.data.image_size
    most = _MOST_PATCHES * catalog.entry(name).shape.patch
    if isinstance(size, int) and size > most:
        raise UserError(
            f"the model takes images of {size:,} × {size:,} pixels, and {name} of a shared model at most {most:,} × "
            f"{most:,}; to use it nevertheless, set --config.data.image_size={size}"
        )


def learned_rules(folder: RunFolder) -> tuple[tuple[str, bool], ...]:
    """Return rules for `config.trainable`: the values in adapter.safetensors were trained, and all others were not."""
    with folder.reading(ADAPTER):
        names = "|".join(map(re.escape, _read_header(folder)))
    return (f"^({names})$", True), ("", False)


def restore_adapter(folder: RunFolder, like: Params, mesh: Mesh) -> Restored:
    """Read the values that `write_adapter` wrote, and place them on a mesh.

    `like`, path -> array or ShapeDtypeStruct, has the expected shapes and the types to cast to. Raises UserError if the
    file is damaged, has another layout, or its tensors do not fit the model.
    """
    with folder.reading(ADAPTER):
        content = folder.read_bytes(ADAPTER)
        tensors = load(content)
        notes = _stored_origin(folder, read_header(io.BytesIO(content)))
        shapes = {path: value.shape for path, value in tensors.items()}
        expected = {path: value.shape for path, value in like.items()}
        if unfit := sorted(path for path in shapes | expected if shapes.get(path) != expected.get(path)):
            raise ValueError(f"{len(unfit)} tensors do not fit its config, such as {printable(unfit[0], 100)}")
    values = {path: tensors[path].astype(value.dtype) for path, value in like.items()}
    return Restored(notes["step"], notes["step"], notes, shard_tree(values, mesh))


def read_origin(folder: RunFolder) -> dict[str, Any]:
    """Return the origin of the values in adapter.safetensors, see `selection_origin`; {} if there is no such file."""
    if not folder.is_shared:
        return {}
    with folder.reading(ADAPTER):
        return _stored_origin(folder, _read_header(folder))


def is_untrained(config: ConfigDict, origin: Mapping[str, Any]) -> bool:
    """Return whether a model is not trained: its head has only the vectors of its label names.

    `origin` is the result of `read_origin`, or the notes of a checkpoint.
    """
    return config.model.head.kind == "cosine" and origin.get("kind") == "imported"


def _read_header(folder: RunFolder) -> dict[str, Any]:
    """Return the header of adapter.safetensors, without reading its values."""
    path = folder.inside(ADAPTER)
    with open_regular(path) if folder.is_local else path.open("rb") as file:
        header = read_header(file, most=_MOST_HEADER)
    if len(header) > _MOST_TENSORS:
        raise ValueError(f"it has {len(header):,} tensors, more than {_MOST_TENSORS:,}")
    _stored_origin(folder, header)  # another layout may have other names
    return header


def _stored_origin(folder: RunFolder, header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the origin of the values from the header of adapter.safetensors."""
    about = json.loads(header.get("__metadata__", {})[_ABOUT])
    if about["layout"] != LAYOUT:
        raise UserError(
            f"{folder} was shared by mlmoe_jax {printable(str(about['version']), 40)}, whose layout this version, "
            f"{__version__}, does not read; update mlmoe_jax"
        )
    return selection_origin(about["origin"])
