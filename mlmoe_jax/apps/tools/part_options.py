"""The options of a folder of parts, without imports, because a mistake in a command is answered at once."""

import os

PART_FORMATS = ("parquet", "csv", "jsonl")
PART_SIZE = 4096  # images


def wants_parts(output: str | None, form: str | None) -> bool:
    """Return whether an output is a folder of parts.

    It is if `form` is one of PART_FORMATS, or without `form` if `output` exists as a folder, ends with / or has no
    suffix.
    """
    if form:
        return form in PART_FORMATS
    return bool(output) and output != "-" and (not os.path.splitext(output)[1] or os.path.isdir(output))
