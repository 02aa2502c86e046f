"""The interface of data sources, as the registry of data sets uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ml_collections import ConfigDict

from mlmoe_jax.data.sources.published import Published
from mlmoe_jax.data.split import Split


@dataclass(frozen=True)
class Source:
    """One data set, or one file layout for your own images.

    open: (`config.data`, split, classes) -> Split; it raises UserError for all errors in the data or its settings.
    classes: the ordered class names of the model, or None. A source without fixed classes uses them to read its labels;
    other sources ignore them.
    labels: `config.data` -> the number of labels; None if the data set has to be opened to count them.
    original: `config.data` -> the name of the data set of which this is a copy; None if it is not a copy.
    published: where the files of a published data set are; None for other data.
    """

    open: Callable[[ConfigDict, str, Sequence[str] | None], Split]
    labels: Callable[[ConfigDict], int] | None = None
    original: Callable[[ConfigDict], str] | None = None
    published: Published | None = None


def difficult_of(data_config: ConfigDict, split: str) -> str:
    """Return how difficult labels of a split count: as in training for the training split, else as in metrics."""
    return data_config.difficult_train if split == data_config.train_split else data_config.difficult_eval


def kept_and_checked(data_config: ConfigDict) -> dict[str, bool]:
    """Return the options with which published data sets are opened, from `config.data`.

    keep_empty: keep images without a positive label. check: check on opening whether all images exist.
    """
    return {"keep_empty": data_config.keep_empty, "check": data_config.bad_images == "error"}
