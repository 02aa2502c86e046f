"""Keywords of photographs, read from XMP and IPTC, and written to XMP sidecars.

    photos/001.jpg
    photos/001.jpg.xmp         # as darktable and digiKam name a sidecar
    photos/002.jpg
    photos/002.xmp             # as Lightroom and ExifTool name it

The keywords of a photograph are dc:subject and the last levels of lr:hierarchicalSubject: of its sidecars, or if no
sidecar has keywords, of the XMP in the photograph, or if that has none, of its IPTC. A photograph without any of them
is not labeled. An image file is never changed, and in a sidecar only labels are added. A list in the sidecar notes the
labels that were written, so that a label that a person removes does not come back.
"""

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.data.decoding import IptcRecords, read_embedded
from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.sources.files_of_images import TagFile, TagFiles, existing_files, list_own_images
from mlmoe_jax.data.sources.labeling_formats import Format, LabelEntry, LabelFile
from mlmoe_jax.data.sources.own_images import open_own_images
from mlmoe_jax.data.sources.rows import ImageRow, LabelRows, Listing
from mlmoe_jax.data.sources.source import DataSource
from mlmoe_jax.data.sources.xmp import EMPTY, HIERARCHY, SUBJECT, WRITTEN, XmpPacket, last_level
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import MIB, PathLike, damage_explained, read_bytes
from mlmoe_jax.runtime.text import compose

MOST_XMP = 8 * MIB  # bytes of a sidecar
_IPTC_KEYWORDS = (2, 25)


# ------------------------------------------------------------------------------------------------------------ reading
def _read(given: Listing) -> LabelRows:
    return _rows(given, list_own_images(given, _sidecar_names)), None


def _rows(given: Listing, images: Sequence[str]) -> Iterator[ImageRow]:
    for image in images:
        try:
            names = (name for folder in (given.path, given.folder) for name in _sidecar_names(f"{folder / image}"))
            keywords = _read_keywords(existing_files(names), given.folder / image)
        except UserError as error:
            given.usage.leave_out("with XMP that is not read", f"{image}: {error}")
            continue
        yield ImageRow(image, None if keywords is None else dict.fromkeys(keywords, POSITIVE))


def _sidecar_names(image: str, is_shared: bool = False, *, short: bool = False) -> list[str]:
    """Return the possible paths of the sidecars of an image. With `short`, 001.xmp is before 001.jpg.xmp.

    001.xmp is no sidecar of 001.jpg if it `is_shared`, so that another image, such as 001.png, could have it too.
    """
    long, stem = ([f"{name}{suffix}" for suffix in (".xmp", ".XMP")] for name in (image, os.path.splitext(image)[0]))
    if is_shared:
        return long
    return [*stem, *long] if short else [*long, *stem]


def _read_keywords(sidecars: Iterable[PathLike], image: PathLike) -> list[str] | None:
    """Return the keywords of an image; None if it has none. UserError if the XMP of a sidecar or the image is damaged.

    The XMP of the image is not read if a sidecar has keywords.
    """
    found = [keywords for path in sidecars if (keywords := _read_packet(path).keywords()) is not None]
    return list(dict.fromkeys(itertools.chain(*found))) if found else _read_embedded_keywords(image)


def _read_packet(path: PathLike) -> XmpPacket:
    with damage_explained(path):
        return XmpPacket(read_bytes(path, MOST_XMP))


def _read_embedded_keywords(image: PathLike) -> list[str] | None:
    content, records = read_embedded(image)
    with damage_explained(f"the XMP in {image}"):
        keywords = XmpPacket(content).keywords() if content else None
    return _decode_iptc(records) if keywords is None else keywords


def _decode_iptc(records: IptcRecords) -> list[str] | None:
    """Return the keywords of IPTC; None if there are none. Old programs write no UTF-8."""
    values = records.get(_IPTC_KEYWORDS)
    if values is None:
        return None
    names = []
    for value in values if isinstance(values, list) else [values]:
        try:
            names.append(value.decode())
        except UnicodeDecodeError:
            names.append(value.decode("cp1252", errors="replace"))
    return list(filter(None, map(last_level, names)))


# ------------------------------------------------------------------------------------------------------------ writing
def _sidecars(file: LabelFile, short: bool) -> TagFiles:
    return TagFiles(file, partial(_sidecar_names, short=short), partial(_label_sidecar, _tree_paths(file)))


def _require(file: LabelFile, *, short: bool) -> None:
    _sidecars(file, short).require("|")  # between levels of keywords


def _write(file: LabelFile, entries: Iterable[LabelEntry], *, short: bool) -> str:
    return _sidecars(file, short).write(entries)


def _tree_paths(file: LabelFile) -> dict[str, list[str]]:
    """Return label -> its paths in the tree, such as animal|dog, one for each parent; empty without a tree."""
    if not file.tree:
        return {}
    first: dict[int, str] = {}
    paths = {}
    for label, parents in file.tree.parents.items():
        name = file.names[label]
        paths[name] = [f"{first[parent]}|{name}" for parent in parents] or [name]
        first[label] = paths[name][0]
    return paths


def _label_sidecar(paths: Mapping[str, Sequence[str]], file: TagFile, labels: Sequence[str]) -> bytes:
    """Return the sidecar of an image, or a new one, with the labels that were never written to it."""
    packet = _read_packet(file.found[0]) if file.found else XmpPacket(EMPTY)
    earlier, new = packet.keywords(), _absent(packet.lists.get(WRITTEN, ()), labels)
    if earlier is None:  # readers take the sidecar for the photograph from now on
        with contextlib.suppress(UserError):  # they do not read damaged XMP in the photograph either
            earlier = _read_keywords(file.found[1:], file.image)
    elif not new:
        return packet.add({})
    earlier, lists = earlier or [], {}
    for name, forms in ((SUBJECT, {}), (HIERARCHY, paths)):
        known = packet.lists.get(name)
        added = [*earlier, *_absent(earlier, new)] if known is None else _absent(known, new)
        # Some programs, such as darktable, read the levels alone if there are any.
        if added and (name == SUBJECT or paths or known is not None):
            lists[name] = [form for label in added for form in forms.get(label, [label])]
    return packet.add({**lists, WRITTEN: labels})


def _absent(known: Iterable[str], labels: Iterable[str]) -> list[str]:
    """Return the labels that are not the last level of a keyword in `known`."""
    composed = {compose(last_level(keyword)) for keyword in known}
    return [label for label in labels if compose(label) not in composed]


def _open_photographs(data_config: ConfigDict, *which: Any) -> Split:
    """Open a split of the photographs in the folder `data.images`, which are listed nowhere."""
    data_config = data_config.copy_and_resolve_references()
    data_config.table = data_config.images or "."
    return open_own_images(_read, data_config, *which)


KEYWORDS = DataSource(_open_photographs, reads_classes=True)
XMP, XMP_LIGHTROOM = (
    Format("", _read, partial(_write, short=short), require=partial(_require, short=short)) for short in (False, True)
)
