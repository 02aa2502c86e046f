"""The files of labeling tools, read and written. A new format is one file and one line here; no reader is imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.registry import Registry

if TYPE_CHECKING:
    from etils import epath
    from ml_collections import ConfigDict

    from mlmoe_jax.data.label_tree import LabelTree


class LabelEntry(NamedTuple):
    """The labels of one image, to be written to a file of a labeling tool.

    Attributes:
      image: path of the image, as in `LabelFile.images`.
      labels: label -> POSITIVE or DIFFICULT; all other labels are negative. None if the labels are unknown.
      scores: label -> probability, for all labels of a prediction. None if the labels are labels of a data set.
    """

    image: str
    labels: Mapping[str, int] | None
    scores: Mapping[str, float] | None = None


@dataclass(frozen=True)
class LabelFile:
    """A file or folder to write in the format of a labeling tool.

    Attributes:
      images: paths of all images, absolute or relative to `folder`.
      folder: folder of the images; "" is the working directory.
      version: name of the model that made the predictions. "" if the labels are labels of a data set.
      tree: the tree of the labels; None if they have none.
    """

    path: epath.Path
    names: Sequence[str]
    images: Sequence[str]
    folder: str = ""
    version: str = ""
    tree: LabelTree | None = None

    @cached_property
    def values(self) -> dict[str, tuple[str, str]]:
        """The result of `LabelTree.values`."""
        return {} if self.tree is None else self.tree.values(self.names)

    def require_stems(self) -> None:
        """Raise UserError if two images differ only in the suffix of their paths, which the format leaves out."""
        images: dict[str, str] = {}
        for image in self.images:
            if images.setdefault(stem := os.path.normpath(os.path.splitext(image)[0]), image) != image:
                raise UserError(
                    f"{self.path} would name {images[stem]} and {image} alike, without suffixes; rename one of them"
                )


@dataclass(frozen=True)
class Format:
    """The file format of a labeling tool.

    Attributes:
      suffix: suffix of the file; "" if the format is a folder.
      read: a function of the type `rows.ReadRows`.
      write: (file, entries) -> sentence. It writes the entries. The sentence tells the user about further files; "" if
        there are none.
      require: raises UserError if the format cannot represent the names of the labels or images of a file.
      read_classes: (file `data.classes`, `config.data`) -> class names. None means that the file has one name per line.
      holds_difficult: whether the format can mark a label as difficult. No format can mark a single label as unknown.
    """

    suffix: str
    read: Callable[..., tuple[Iterable[Any], Sequence[str] | None]]
    write: Callable[[LabelFile, Iterable[LabelEntry]], str]
    require: Callable[[LabelFile], None] = lambda file: None
    read_classes: Callable[[Path, ConfigDict], Sequence[str]] | None = None
    holds_difficult: bool = False


def group_values(values: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return attribute -> its values, from pairs (attribute, value)."""
    groups: dict[str, list[str]] = {}
    for attribute, value in values:
        groups.setdefault(attribute, []).append(value)
    return groups


def output_path(output: str | None, name: str) -> epath.Path:
    """Return where to write the format `name` by --output; UserError if no file or folder can be written there."""
    from etils import epath  # here, because --help does without it

    suffix = FORMATS[name].suffix
    if not output:
        raise UserError(f"--format={name} needs --output={f'FILE{suffix}' if suffix else 'FOLDER'}")
    path = epath.Path(output).expanduser()
    if suffix and path.suffix != suffix:
        raise UserError(f"--output={output} should end in {suffix} for --format={name}")
    return path


# name -> format; the names are values of --format and of the config key data.name.
FORMATS: Registry[Format] = Registry(
    "format of a labeling tool",
    {
        "label_studio": "mlmoe_jax.data.sources.label_studio_export:LABEL_STUDIO",
        "fiftyone": "mlmoe_jax.data.sources.fiftyone:FIFTYONE",
        "cvat": "mlmoe_jax.data.sources.cvat:CVAT",
        "sidecar": "mlmoe_jax.data.sources.sidecar:SIDECAR",
        "wd_tagger": "mlmoe_jax.data.sources.sidecar:WD_TAGGER",
        "xmp": "mlmoe_jax.data.sources.keywords:XMP",
        "xmp_lightroom": "mlmoe_jax.data.sources.keywords:XMP_LIGHTROOM",
    },
)
