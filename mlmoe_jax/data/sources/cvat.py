"""CVAT: its XML format "CVAT for images 1.1".

    <image id="0" name="beach/001.jpg" subset="train" width="640" height="480">
      <tag label="sea"><attribute name="difficult">true</attribute></tag>
    </image>

A label is positive if the image has a tag, or a box or another shape, of this label, and difficult if all of them have
the attribute `difficult`. Every image of a file counts as labeled, because CVAT does not distinguish.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from ml_collections import ConfigDict

from mlmoe_jax.data.images import read_size
from mlmoe_jax.data.label_codes import DIFFICULT, POSITIVE
from mlmoe_jax.data.sources.labeling_formats import Format, LabelEntry, LabelFile
from mlmoe_jax.data.sources.rows import ImageRow
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import open_regular
from mlmoe_jax.runtime.formats import XmlBuilder, parse_xml
from mlmoe_jax.runtime.storage import OutputTarget, open_output

_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class _Annotations(XmlBuilder):
    """Collects the images and the label names of a file, and keeps no more of the tree than is open."""

    def __init__(self):
        super().__init__()
        self.rows: list[ImageRow] = []
        self.names: list[str] = []

    def end(self, tag: str) -> ElementTree.Element:
        """Close an element."""
        element = super().end(tag)
        if tag == "labels":
            self.names += [label.findtext("name", "") for label in element.iter("label")]
        elif tag == "image":
            self.rows.append(ImageRow(element.attrib["name"], _read_labels(element), split=element.get("subset")))
            element.clear()
        return element


def _read(
    path: Path, data_config: ConfigDict, folder: Path, known_classes: Sequence[str] | None
) -> tuple[list[ImageRow], list[str] | None]:
    annotations = _Annotations()
    with open_regular(path) as file:
        parse_xml(file, annotations)
    return annotations.rows, annotations.names or None


def _read_labels(image: ElementTree.Element) -> dict[str, int]:
    """Return the code of each label of an image. A label is difficult if all its shapes are."""
    codes: dict[str, int] = {}
    for shape in image:
        label = shape.get("label")
        if label is not None:
            difficult = any(
                attribute.get("name") == "difficult" and (attribute.text or "").strip() == "true"
                for attribute in shape.iter("attribute")
            )
            codes[label] = DIFFICULT if difficult and codes.get(label) != POSITIVE else POSITIVE
    return codes


def _require(file: LabelFile) -> None:
    if bad := next(filter(_NOT_IN_XML.search, file.images), None):
        raise UserError(f"XML cannot name the image {bad!r}; rename it")


def _write(file: LabelFile, entries: Iterable[LabelEntry]) -> str:
    with open_output(OutputTarget(file.path, "xml")) as output:
        output.write('<?xml version="1.0" encoding="utf-8"?>\n<annotations>\n<version>1.1</version>\n')
        output.write(_to_text(_make_meta(file)))
        for number, entry in enumerate(entry for entry in entries if entry.labels is not None):
            # without a size for a missing or damaged image, of which CVAT has its own file
            size = read_size(os.path.join(file.folder, entry.image))
            sides = {"width": str(size[0]), "height": str(size[1])} if size else {}
            image = ElementTree.Element("image", {"id": str(number), "name": entry.image, **sides})
            for name, code in entry.labels.items():
                _add_tag(image, name, code, entry.scores)
            output.write(_to_text(image))
        output.write("</annotations>\n")
    return ""


def _make_meta(file: LabelFile) -> ElementTree.Element:
    """Return the definition of the labels, with the attribute `score` of a prediction, or otherwise `difficult`."""
    meta = ElementTree.Element("meta")
    labels = ElementTree.SubElement(ElementTree.SubElement(meta, "task"), "labels")
    attribute = {"name": "difficult", "mutable": "False", "input_type": "checkbox", "default_value": "false"}
    if file.version:
        attribute = {"name": "score", "mutable": "False", "input_type": "text", "default_value": ""}
    for name in file.names:
        label = ElementTree.SubElement(labels, "label")
        ElementTree.SubElement(label, "name").text = name
        definition = ElementTree.SubElement(ElementTree.SubElement(label, "attributes"), "attribute")
        for key, value in (attribute | {"values": attribute["default_value"]}).items():
            ElementTree.SubElement(definition, key).text = value
    return meta


def _add_tag(image: ElementTree.Element, name: str, code: int, scores: Mapping[str, float] | None) -> None:
    tag = ElementTree.SubElement(image, "tag", label=name, source="manual" if scores is None else "auto")
    if scores is not None:
        ElementTree.SubElement(tag, "attribute", name="score").text = f"{scores[name]:.6f}"
    elif code == DIFFICULT:
        ElementTree.SubElement(tag, "attribute", name="difficult").text = "true"


def _to_text(element: ElementTree.Element) -> str:
    ElementTree.indent(element)
    return ElementTree.tostring(element, encoding="unicode") + "\n"


CVAT = Format(".xml", _read, _write, require=_require, holds_difficult=True)
