"""The options of a folder of parts, without imports, because a mistake in a command is answered at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

PART_FORMATS = ("parquet", "csv", "jsonl")
PART_SIZE = 4096  # images


@dataclass(frozen=True)
class PartOptions:
    """The options of a command that writes parts.

    Attributes:
      items: the values of `--images`, see image_list.py.
      output: the folder of the parts, which may be in an object store.
      kind: the format of the parts, in PART_FORMATS.
      size: the number of images of a part.
      worker: the index of this process among all processes of the command, and their number.
      column: the column of images in Parquet files; "" finds it.
      every: the seconds between frames of videos, see `open_video`.
    """

    items: Sequence[str]
    output: str
    kind: str = PART_FORMATS[0]
    size: int = PART_SIZE
    worker: tuple[int, int] = (0, 1)
    column: str = ""
    every: Fraction | None = None


def wants_parts(output: str | None, form: str | None) -> bool:
    """Return whether an output is a folder of parts.

    It is if `form` is one of PART_FORMATS, or without `form` if `output` exists as a folder, ends with / or has no
    suffix.
    """
    if form:
        return form in PART_FORMATS
    return bool(output) and output != "-" and (not os.path.splitext(output)[1] or os.path.isdir(output))
