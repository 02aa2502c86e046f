"""What the registry of data sets needs of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ml_collections import ConfigDict

from mlmoe_jax.data.split import Split


@dataclass(frozen=True)
class Source:
    """One data set, or one form in which your own images may lie on disk.

    open: (`config.data`, split, classes) -> Split; UserError for whatever is wrong. classes: the names, in order, that
    the model knows, or None; a source whose classes come from its labels reads them by these, any other has its own.
    labels: `config.data` -> the number of labels; None if only opening the data set tells.
    original: `config.data` -> the name of the data set of which this is a copy; None if it is none.
    """

    open: Callable[[ConfigDict, str, Sequence[str] | None], Split]
    labels: Callable[[ConfigDict], int] | None = None
    original: Callable[[ConfigDict], str] | None = None


def kept_and_checked(data_config: ConfigDict) -> dict[str, bool]:
    """Return the options of what opens a published data set, from `config.data`.

    keep_empty: keep images without a positive label. check: look at once whether all images are there.
    """
    return {"keep_empty": data_config.keep_empty, "check": data_config.bad_images == "error"}
