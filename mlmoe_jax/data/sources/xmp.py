"""An XMP packet: the lists of keywords in it, and longer lists in their place, without a change of the rest.

Libraries of XMP write the whole packet again: exiv2 (GPL) and Exempi in the order and with the prefixes of Adobe's
toolkit, lxml without the space around the root. Here, expat gives the places of the lists, and all other bytes stay as
a person or a program wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat
from xml.sax.saxutils import escape, quoteattr

from mlmoe_jax.runtime.formats import refuse_doctype

_RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
_ROOT, _DESCRIPTION, _ABOUT, _ITEM = (f"{_RDF} {name}" for name in ("RDF", "Description", "about", "li"))
_ARRAYS = [f"{_RDF} {name}" for name in ("Bag", "Seq", "Alt")]
SUBJECT = "http://purl.org/dc/elements/1.1/ subject"
HIERARCHY = "http://ns.adobe.com/lightroom/1.0/ hierarchicalSubject"
WRITTEN = "urn:mlmoe:1.0/ written"  # all labels that were ever written
_PREFIXES = {SUBJECT: "dc", HIERARCHY: "lr", WRITTEN: "mlmoe"}
_ENCODINGS = {b"\xff\xfe": "utf-16-le", b"<\0": "utf-16-le", b"\xfe\xff": "utf-16-be", b"\0<": "utf-16-be"}
_TAG = re.compile(rb"""<([^\s/>]+)(?:[^"'>]|"[^"]*"|'[^']*')*>""")
EMPTY = f"""<?xml version="1.0" encoding="UTF-8"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/">
 <rdf:RDF xmlns:rdf="{_RDF}">
 </rdf:RDF>
</x:xmpmeta>
""".encode()


class XmpPacket:
    """A parsed packet, in UTF-8 or UTF-16, perhaps with an XML declaration, an xpacket wrapper and padding.

    Attributes:
      lists: name of a list, such as SUBJECT -> its texts, for the lists that the packet has. A list is a bag, a
        sequence, or a single text in an element or an attribute.

    Raises:
      ValueError: the content is no XMP, has a document type, or has a list of another form.
      ExpatError, UnicodeDecodeError: it is malformed.
    """

    def __init__(self, content: bytes):
        self.lists: dict[str, list[str]] = {}
        self._encoding = _ENCODINGS.get(content[:2], "utf-8")
        self._content = content.decode(self._encoding).encode()
        places = _parse(self._content)
        root = next((element for element in places if element.tag == _ROOT), None)
        if root is None:
            raise ValueError("it is no XMP, since it has no rdf:RDF")
        self._root, self._about = places[root], ""
        self._places: list[tuple[str, int, int]] = []  # name of a list, its first byte, the byte after its last
        for description in root:
            if description.tag == _DESCRIPTION:
                self._about = self._about or description.get(_ABOUT, "")
                self._add_lists(description, places)

    def _add_lists(self, description: Element, places: Mapping[Element, tuple[int, int]]) -> None:
        for name in filter(_PREFIXES.__contains__, description.attrib):
            raise _no_list(name)
        for element in description:
            if element.tag in _PREFIXES:
                self.lists.setdefault(element.tag, []).extend(filter(None, map(str.strip, _read_list(element))))
                self._places.append((element.tag, *places[element]))

    # --------------------------------------------------------------------------------------------------------- texts
    def keywords(self) -> list[str] | None:
        """Return the keywords; None if there is no list of keywords, of levels of keywords, or of written labels.

        Of levels, such as animal|dog, the last is a keyword.
        """
        if not self.lists:
            return None
        texts = (last_level(text) for name in (SUBJECT, HIERARCHY) for text in self.lists.get(name, ()))
        return list(filter(None, dict.fromkeys(texts)))

    def add(self, lists: Mapping[str, Sequence[str]]) -> bytes:
        """Return the packet with texts added to its lists, each text once. A list that it does not have is made."""
        made = {}
        for name, texts in lists.items():
            known = self.lists.get(name, ())
            if name not in self.lists or {*texts} - {*known}:
                made[name] = dict.fromkeys([*known, *texts])
        edits = [(start, end, b"") for name, start, end in self._places if name in made]
        content = self._content
        for start, end, new in sorted([*edits, *self._insertion(made)], reverse=True):
            content = content[:start] + new + content[end:]
        return content.decode().encode(self._encoding)

    def _insertion(self, lists: Mapping[str, Iterable[str]]) -> Iterator[tuple[int, int, bytes]]:
        """Yield where the root gets a further description of the image, with lists, and its XML; nothing if none."""
        if not lists:
            return
        lines = [f" <rdf:Description xmlns:rdf={quoteattr(_RDF)} rdf:about={quoteattr(self._about)}>"]
        for name, texts in lists.items():
            uri, local = name.split()
            tag = f"{_PREFIXES[name]}:{local}"
            items = (f"    <rdf:li>{escape(text)}</rdf:li>" for text in texts)
            lines += [f"  <{tag} xmlns:{_PREFIXES[name]}={quoteattr(uri)}>", "   <rdf:Bag>"]
            lines += [*items, "   </rdf:Bag>", f"  </{tag}>"]
        text = "\n ".join([*lines, " </rdf:Description>", ""]).encode()
        start, end = self._root
        tag = _TAG.match(self._content, start)
        if tag.end() == end:  # an empty root
            yield end - 2, end, b">%b</%b>" % (text, tag[1])
        else:
            close = self._content.rindex(b"</", start, end)
            yield close, close, text


def _parse(content: bytes) -> dict[Element, tuple[int, int]]:
    """Return the elements of XML in UTF-8, each with its first byte and the byte after its last."""
    parser, builder, starts, places = expat.ParserCreate("utf-8", " "), TreeBuilder(), [], {}

    def start(name: str, attributes: dict[str, str]) -> None:
        starts.append(parser.CurrentByteIndex)
        builder.start(name, attributes)

    def end(name: str) -> None:
        tag = _TAG.match(content, starts.pop())
        is_empty = tag[0].endswith(b"/>")
        after = tag.end() if is_empty else content.index(b">", parser.CurrentByteIndex) + 1
        places[builder.end(name)] = tag.start(), after

    parser.XmlDeclHandler, parser.StartDoctypeDeclHandler = _require_unicode, refuse_doctype
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = builder.data
    parser.Parse(content.rstrip(b"\0"), True)
    return places


def _read_list(element: Element) -> list[str]:
    """Return the texts of an array in an element, or the text of an element without an array."""
    _, *nodes = element.iter()
    array, *items = [node.tag for node in nodes] or _ARRAYS[:1]
    is_more = any(node.attrib for node in element.iter())  # a link, XML as a text, or a text with a language
    if is_more or array not in _ARRAYS or {*items} - {_ITEM}:
        raise _no_list(element.tag)
    return [node.text or "" for node in (nodes[1:] if nodes else [element])]


def _no_list(name: str) -> ValueError:
    return ValueError(f"its {name.split()[-1]} is no list of texts")


def _require_unicode(version: str, encoding: str | None, standalone: int) -> None:
    if encoding and not encoding.upper().startswith("UTF-"):
        raise ValueError(f"its encoding is {encoding}; save it as UTF-8")


def last_level(keyword: str) -> str:
    """Return the last of the levels of a keyword, such as dog of animal|dog."""
    return keyword.rpartition("|")[2].strip()
