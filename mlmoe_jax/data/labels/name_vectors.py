"""The vectors of label names in the space of an image-text model, and the file that holds them.

A list of names is a text file with one name per line. A name may be followed by descriptions of the label, each after
a tab. The vectors are a .safetensors file, whose header describes them.

Axes: k labels, d numbers per vector, w numbers per pooled feature of the backbone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Float32
from safetensors.numpy import load, save

from mlmoe_jax.data.names import require_list
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import PathLike, damage_explained, open_text, read_bytes
from mlmoe_jax.runtime.formats import read_metadata
from mlmoe_jax.runtime.storage import Folder, named_file
from mlmoe_jax.runtime.text import abbreviate, compose

SUFFIX = ".safetensors"
_ABOUT = "mlmoe_jax"  # the entry of the header
_ARRAYS = ("vectors", "background", "projection")  # attributes of `NameVectors`
_LARGEST = 1e6  # absolute number of a file; scores of larger numbers can overflow in float32


@dataclass(frozen=True)
class LabelName:
    """A label of a list of names. `descriptions` are texts that describe an image with the label; () without any."""

    name: str
    descriptions: tuple[str, ...] = ()


def read_label_names(path: PathLike) -> tuple[LabelName, ...]:
    """Return the labels of a text file with one name per line. Descriptions follow after tabs. Empty lines are skipped.

    Raises UserError if the file is missing, has no names, or is refused by `require_list`.
    """
    with damage_explained(path), open_text(path) as file:
        rows = {
            line: [compose(cell.strip()) for cell in text.split("\t")]
            for line, text in enumerate(file, 1)
            if text.strip()
        }
    labels = tuple(LabelName(name, tuple(filter(None, descriptions))) for name, *descriptions in rows.values())
    if not labels:
        raise UserError(f"{path} contains no class names; write one class name per line")
    lines = list(rows)
    require_list([(label.name, *label.descriptions) for label in labels], lambda row: f"{path} line {lines[row]}")
    return labels


def _are_small(numbers: npt.ArrayLike) -> bool:
    return bool((np.abs(numbers) <= _LARGEST).all())  # not nan either


def is_vectors_file(path: PathLike) -> bool:
    """Return whether a path is the path of a file of vectors. Otherwise, it is the path of a list of names."""
    return os.fspath(path).endswith(SUFFIX)


def require_vectors_file(path: PathLike) -> None:
    """Raise UserError unless a file of vectors can be written at a path."""
    if not is_vectors_file(path) or not ("://" in os.fspath(path) or Path(path).parent.is_dir()):
        raise UserError(f"--output={path} should be a {SUFFIX} file in a folder that exists")


def unit(vectors: Float[np.ndarray, "*n d"]) -> Float[np.ndarray, "*n d"]:
    """Return vectors of length 1."""
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def mean_direction(vectors: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " d"]:
    """Return the mean of the normalized vectors, normalized again."""
    return unit(unit(vectors).mean(axis=0))


@dataclass(frozen=True, eq=False)
class NameVectors:
    """The vectors of K label names, and how scores follow from them.

    An image has the vector u = v/‖v‖, where v is the pooled feature of the backbone, or its product with `projection`.
    The logit of label k is scale·⟨u, t_k − t_0⟩ + bias.

    Attributes:
      vectors: t f32[K,D], normalized means of normalized vectors.
      background: t_0 f32[D], the vector of the templates without a name, if the model was trained with a softmax over
        texts; otherwise 0.
      projection: f32[W,D], from the pooled feature of the backbone to the space of the vectors; None if there is
        none.
      templates: texts in which {} stands for the name of a label.
      fingerprint: the `params.fingerprint` of the float32 parameters of the backbone. The vectors belong to the
        features of this backbone only. "" if the backbone is not known.
      sha256: the sha256 of the file from which the vectors were read; "" if they were not read.
    """

    names: tuple[str, ...]
    vectors: np.ndarray
    scale: float
    bias: float
    background: np.ndarray
    projection: np.ndarray | None = None
    backbone: str = ""
    templates: tuple[str, ...] = ()
    descriptions: tuple[tuple[str, ...], ...] = ()
    fingerprint: str = ""
    sha256: str = ""

    def kernel(self) -> Float32[np.ndarray, "d k"]:
        """Return the weights f32[D,K] of the linear classifier of normalized image vectors."""
        return np.ascontiguousarray((self.scale * (self.vectors - self.background)).T, np.float32)

    def offsets(self) -> Float32[np.ndarray, " k"]:
        """Return the bias f32[K] of the linear classifier of normalized image vectors."""
        return np.full(len(self.names), self.bias, np.float32)

    def for_labels(self, names: Sequence[str]) -> NameVectors:
        """Return the vectors in the order of `names`, the labels of the data.

        Raises UserError if a label has no vector, or a vector belongs to no label.
        """
        if lacking := [name for name in names if name not in self.names]:
            raise UserError(f"the vectors have no name {abbreviate(lacking, 4)}, which the data has as a label; add it")
        if further := [name for name in self.names if name not in names]:
            raise UserError(
                f"the vectors have the name {abbreviate(further, 4)}, which is no label of the data; remove it, or set "
                "data.classes to the file of the names"
            )
        rows = [self.names.index(name) for name in names]
        descriptions = tuple(self.descriptions[row] for row in rows) if self.descriptions else ()
        return replace(self, names=tuple(names), vectors=self.vectors[rows], descriptions=descriptions)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of the vectors, by the names of their attributes."""
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        return {name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None}

    def about(self) -> str:
        """Return the attributes that are no arrays, as JSON."""
        return json.dumps({name: value for name, value in vars(self).items() if name not in _ARRAYS})

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], about: str) -> NameVectors:
        """Return the vectors from the results of `arrays` and `about`.

        Raises ValueError, KeyError or TypeError if the two do not match.
        """
        stored: dict[str, Any] = json.loads(about)
        stored |= {name: tuple(stored[name]) for name in ("names", "templates")}
        stored["descriptions"] = tuple(map(tuple, stored["descriptions"]))
        loaded = cls(**stored, **{name: arrays[name] for name in _ARRAYS if name in arrays})
        loaded._require_fitting()
        return loaded

    @property
    def inputs(self) -> int:
        """W, the number of values of a pooled feature of the backbone."""
        return self.background.size if self.projection is None else len(self.projection)

    def _require_fitting(self) -> None:
        """Raise ValueError unless the attributes have their types, and all arrays are f32, of shapes that fit."""
        texts = (*self.names, *self.templates, *itertools.chain(*self.descriptions), self.backbone, self.fingerprint)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a name, a template, a description or the backbone is not text")
        count, width = len(self.names), self.background.size
        shapes = {"vectors": (count, width), "background": (width,), "projection": (self.inputs, width)}
        for name, array in self.arrays().items():
            if array.shape != shapes[name] or array.dtype != np.float32 or not array.size or not _are_small(array):
                raise ValueError(f"its {name} do not fit its {count} names, or have numbers beyond {_LARGEST:,.0f}")
        if len(set(self.names)) < count or not _are_small(self.bias) or not 0 < self.scale <= _LARGEST:
            raise ValueError(f"its names are not different, or its scale or bias is not from 0 to ±{_LARGEST:,.0f}")
        if len(self.descriptions) not in (0, count):
            raise ValueError(f"its descriptions do not fit its {count} names")

    def write(self, path: PathLike) -> None:
        """Write the vectors to a .safetensors file, which is replaced whole."""
        place = named_file(path)
        content = save(self.arrays(), {_ABOUT: replace(self, sha256="").about()})
        Folder(place.parent).write_bytes(place.name, content)


def read_name_vectors(path: PathLike) -> NameVectors:
    """Return the vectors in a file of `NameVectors.write`; UserError if it is missing, damaged or another file."""
    with damage_explained(path):
        content = read_bytes(path)
        arrays, header = load(content), read_metadata(content)
        if _ABOUT not in header:
            raise UserError(f"{path} has no vectors of names; write one with mlmoe encode")
        loaded = NameVectors.from_arrays(arrays, header[_ABOUT])
        descriptions = loaded.descriptions or [()] * len(loaded.names)
        rows = [(name, *texts) for name, texts in zip(loaded.names, descriptions, strict=True)]
        require_list(rows, lambda row: f"{path} name {row + 1}")
    return replace(loaded, sha256=hashlib.sha256(content).hexdigest())


def read_classes(path: PathLike) -> tuple[str, ...]:
    """Return the names in a list of names, or in a file of vectors; UserError if it is missing or damaged."""
    if is_vectors_file(path):
        return read_name_vectors(path).names
    return tuple(label.name for label in read_label_names(path))
