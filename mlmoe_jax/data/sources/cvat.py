"""CVAT: its XML format "CVAT for images 1.1".

    <image id="0" name="beach/001.jpg" subset="train" width="640" height="480">
      <tag label="sea"><attribute name="difficult">true</attribute></tag>
    </image>

An attribute of a shape whose name is in `data.attributes` has a value, `color: red` for example. A tag `attributes`,
which is no label, has the values of an image.

A label is positive if the image has a tag, a box or another shape with this label. It is difficult instead if all of
these have the attribute `difficult`. CVAT does not mark unlabeled images, so every image of a file counts as labeled. A
note in the account counts the images without a label.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from mlmoe_jax.data.attributes import AttributeValues
from mlmoe_jax.data.decoding import read_size
from mlmoe_jax.data.label_codes import DIFFICULT, POSITIVE
from mlmoe_jax.data.sources.labeling_formats import Format, LabelEntry, LabelFile, group_values
from mlmoe_jax.data.sources.rows import ImageRow, LabelRows, Listing, note_empty
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import open_regular
from mlmoe_jax.runtime.formats import parse_xml
from mlmoe_jax.runtime.storage import OutputTarget, open_output

HOLDER = "attributes"  # the tag with the values of an image
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
SCORE = (
    "<attribute><name>score</name><mutable>False</mutable><input_type>text</input_type><default_value></default_value>"
    "<values></values></attribute>"
)
DIFFICULT_MARK = (
    "<attribute><name>difficult</name><mutable>False</mutable><input_type>checkbox</input_type>"
    "<default_value>false</default_value><values>false</values></attribute>"
)


def _read(given: Listing) -> LabelRows:
    with open_regular(given.path) as file:
        root = parse_xml(file)
    names = [label.findtext("name", "") for label in root.iterfind(".//labels/label")]
    names = [name for name in names if name != HOLDER or not given.attributes.values]
    images = root.iter("image")
    rows = [
        ImageRow(image.attrib["name"], _read_labels(image, given.attributes), split=image.get("subset"))
        for image in images
    ]
    note_empty(rows, given.usage)
    return rows, names or None


def _read_labels(image: ElementTree.Element, attributes: AttributeValues) -> dict[str, int]:
    """Return label -> code of an image: DIFFICULT if all shapes with the label are difficult, else POSITIVE."""
    codes: dict[str, int] = {}
    for shape in image:
        for label, code in _read_shape(shape, attributes):
            codes[label] = POSITIVE if POSITIVE in (code, codes.get(label)) else code
    return codes


def _read_shape(shape: ElementTree.Element, attributes: AttributeValues) -> Iterator[tuple[str, int]]:
    """Yield the labels of a tag, a box or another shape, and their codes."""
    marks = [(mark.get("name"), (mark.text or "").strip()) for mark in shape.iter("attribute")]
    yield from ((f"{name}: {value}", POSITIVE) for name, value in marks if value and name in attributes.values)
    label = shape.get("label")
    if label is not None and (label != HOLDER or not attributes.values):
        yield label, DIFFICULT if ("difficult", "true") in marks else POSITIVE


def _require(file: LabelFile) -> None:
    if bad := next(filter(_NOT_IN_XML.search, file.images), None):
        raise UserError(f"XML cannot name the image {bad!r}; rename it")


def _write(file: LabelFile, entries: Iterable[LabelEntry]) -> str:
    with open_output(OutputTarget(file.path, "xml")) as output:
        output.write('<?xml version="1.0" encoding="utf-8"?>\n<annotations>\n<version>1.1</version>\n')
        output.write("\n".join(["<meta><task><labels>", *_describe_labels(file), "</labels></task></meta>\n"]))
        for number, entry in enumerate(entry for entry in entries if entry.labels is not None):
            image = _make_image(file, entry, number)
            ElementTree.indent(image)
            output.write(ElementTree.tostring(image, encoding="unicode") + "\n")
        output.write("</annotations>\n")
    return ""


def _describe_labels(file: LabelFile) -> Iterator[str]:
    """Yield the description of each label, and of the tag with the values of an image."""
    mark = SCORE if file.version else DIFFICULT_MARK  # of a prediction, or of labels
    tags = {name: mark for name in file.names if name not in file.values}
    if file.values:
        tags[HOLDER] = "".join(_describe_attributes(file.values))
    for name, marks in tags.items():
        yield f"<label><name>{escape(name)}</name><attributes>{marks}</attributes></label>"


def _make_image(file: LabelFile, entry: LabelEntry, number: int) -> ElementTree.Element:
    """Return the element of an image, without a size for a missing or damaged one, of which CVAT has its own file."""
    image = ElementTree.Element("image", {"id": str(number), "name": entry.image})
    if size := read_size(os.path.join(file.folder, entry.image)):
        image.attrib |= {"width": str(size[0]), "height": str(size[1])}
    for name, code in entry.labels.items():
        if name not in file.values:
            marks = [("difficult", "true")] if code == DIFFICULT else []
            _add_tag(image, name, entry, marks if entry.scores is None else [("score", f"{entry.scores[name]:.6f}")])
    if values := [file.values[name] for name in entry.labels if name in file.values]:
        _add_tag(image, HOLDER, entry, values)
    return image


def _add_tag(image: ElementTree.Element, label: str, entry: LabelEntry, marks: Iterable[tuple[str, str]]) -> None:
    """Add a tag with attributes, `marks`, to an image."""
    source = "manual" if entry.scores is None else "auto"
    tag = ElementTree.SubElement(image, "tag", label=label, source=source)
    for name, text in marks:
        ElementTree.SubElement(tag, "attribute", name=name).text = text


def _describe_attributes(values: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """Yield the description of each attribute, a choice of one value."""
    for attribute, some in group_values(values.values()).items():
        listed = escape("\n".join(some))
        yield (
            f"<attribute><name>{escape(attribute)}</name><mutable>False</mutable><input_type>radio</input_type>"
            f"<default_value></default_value><values>{listed}</values></attribute>"
        )


CVAT = Format(".xml", _read, _write, require=_require, holds_difficult=True)
