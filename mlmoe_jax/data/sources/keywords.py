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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.data.decoding import IptcRecords, read_embedded
from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.sources.labeling_formats import Format, LabelEntry, LabelFile
from mlmoe_jax.data.sources.own_images import open_own_images
from mlmoe_jax.data.sources.rows import ImageRow, LabelInput, LabelRows
from mlmoe_jax.data.sources.sidecar import common_parent, find_images
from mlmoe_jax.data.sources.source import DataSource
from mlmoe_jax.data.sources.xmp import EMPTY, HIERARCHY, SUBJECT, WRITTEN, XmpPacket, last_level
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import MIB, PathLike, damage_explained, find_file, read_bytes
from mlmoe_jax.runtime.storage import Folder
from mlmoe_jax.runtime.text import compose, quantity

MOST_XMP = 8 * MIB  # bytes of a sidecar
_IPTC_KEYWORDS = (2, 25)


# ------------------------------------------------------------------------------------------------------------ reading
def _read(given: LabelInput) -> LabelRows:
    return _rows(given, find_images(given, _sidecar_names)), None


def _rows(given: LabelInput, images: Sequence[str]) -> Iterator[ImageRow]:
    for image in images:
        try:
            keywords = _read_keywords(_find_sidecars(given.path / image, given.folder / image), given.folder / image)
        except UserError as error:
            given.usage.leave_out("with XMP that is not read", f"{image}: {error}")
            continue
        yield ImageRow(image, None if keywords is None else dict.fromkeys(keywords, POSITIVE))


def _sidecar_names(image: str) -> list[str]:
    """Return the possible paths of the sidecars of an image. In the last two, its suffix is replaced."""
    return [f"{name}{suffix}" for name in (image, os.path.splitext(image)[0]) for suffix in (".xmp", ".XMP")]


def _find_sidecars(*images: PathLike) -> list[str]:
    """Return the existing sidecars of an image, which may be beside any of the paths `images`."""
    names = (find_file(name) for image in images for name in _sidecar_names(os.path.normpath(image)))
    return list(filter(os.path.exists, dict.fromkeys(names)))


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
class _Sidecars:
    """The sidecars of the images of `file`. A new one is named 001.xmp with `short` instead of 001.jpg.xmp.

    A sidecar 001.xmp is that of 001.jpg only if no other image, such as 001.png, could have it too.
    """

    def __init__(self, file: LabelFile, short: bool):
        self.short, self.output = short, os.path.abspath(file.path)
        self.images = {image: os.path.abspath(os.path.join(file.folder, image)) for image in file.images}
        is_inside = all(Path(image).is_relative_to(self.output) for image in self.images.values())
        self.parent = self.output if is_inside else common_parent(file.images)
        self.stems = Counter(os.path.splitext(image)[0] for image in self.images.values())

    def find(self, image: str) -> tuple[str, list[str]]:
        """Return the path of the sidecar to write, relative to the output, and the existing sidecars of an image.

        The first of them is the one to change, or to copy if it is not in the output.
        """
        whole = self.images[image]
        name = os.path.relpath(whole, self.parent) if self.parent else os.path.normpath(image)
        is_shared = self.stems[os.path.splitext(whole)[0]] > 1
        long = f"{os.path.basename(whole)}."
        found = _find_sidecars(os.path.join(self.output, name), whole)
        found = [path for path in found if not is_shared or os.path.basename(path).startswith(long)]
        new = _sidecar_names(name)[2 if self.short and not is_shared else 0]
        return os.path.join(os.path.dirname(name), os.path.basename(found[0] if found else new)), found


def _require(file: LabelFile, *, short: bool) -> None:
    if "://" in os.fspath(file.path):
        raise UserError(f"--output={file.path} is no local folder, which --format=xmp needs")
    Folder(file.path).require_creatable()
    if bad := next((name for name in file.names if "|" in name), None):
        raise UserError(f"XMP cannot hold the label {bad!r}, because | separates levels of keywords; rename it")
    sidecars = _Sidecars(file, short)
    for path in itertools.chain.from_iterable(sidecars.find(image)[1] for image in file.images):
        _read_packet(path)


def _write(file: LabelFile, entries: Iterable[LabelEntry], *, short: bool) -> str:
    sidecars, folder, paths, unchanged = _Sidecars(file, short), Folder(file.path), _tree_paths(file), 0
    for entry in entries:
        if entry.labels is None:
            continue
        name, found = sidecars.find(entry.image)
        content = partial(_label_sidecar, found, sidecars.images[entry.image], entry.labels, paths)
        path = folder.inside(name)
        if path.exists() and content() == read_bytes(path):
            unchanged += 1
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        folder.update(name, content)
    return f"{quantity(unchanged, 'sidecar')} had all labels already" if unchanged else ""


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


def _label_sidecar(
    found: Sequence[str], image: str, labels: Iterable[str], paths: Mapping[str, Sequence[str]]
) -> bytes:
    """Return the first of the sidecars `found`, or a new one, with the labels that were never written to it."""
    packet = _read_packet(found[0]) if found else XmpPacket(EMPTY)
    earlier, lists = packet.keywords(), {}
    new = _absent(packet, WRITTEN, labels)
    if earlier is None:  # readers take the sidecar for the photograph from now on
        with contextlib.suppress(UserError):  # they do not read damaged XMP in the photograph either
            earlier = _read_keywords(found[1:], image)
    elif not new:
        earlier = []
    for name, forms in ((SUBJECT, {}), (HIERARCHY, paths)):
        given = new if name in packet.lists else [*(earlier or ()), *new]
        # Some programs, such as darktable, read the levels alone if there are any.
        if name == SUBJECT or paths or name in packet.lists:
            lists[name] = [form for label in _absent(packet, name, given) for form in forms.get(label, [label])]
    return packet.add({name: texts for name, texts in lists.items() if texts} | {WRITTEN: list(labels)})


def _absent(packet: XmpPacket, name: str, labels: Iterable[str]) -> list[str]:
    known = {compose(last_level(text)) for text in packet.lists.get(name, ())}
    return [label for label in labels if compose(label) not in known]


def _open_photographs(data_config: ConfigDict, *which: Any) -> Split:
    """Open a split of the photographs in the folder `data.images`, which are listed nowhere."""
    data_config = data_config.copy_and_resolve_references()
    data_config.table = data_config.images or "."
    return open_own_images(_read, data_config, *which)


KEYWORDS = DataSource(_open_photographs, reads_classes=True)
XMP, XMP_LIGHTROOM = (
    Format("", _read, partial(_write, short=short), require=partial(_require, short=short)) for short in (False, True)
)
