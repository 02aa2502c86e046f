"""An XMP packet: the lists of keywords in it, and longer lists in their place, without a change of the rest.

Libraries of XMP write the whole packet again: exiv2 (GPL) and Exempi in the order and with the prefixes of Adobe's
toolkit, lxml without the space around the root. Here, expat gives the places of the lists, and all other bytes stay as
a person or a program wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from xml.parsers import expat
from xml.sax.saxutils import escape, quoteattr

from mlmoe_jax.runtime.formats import refuse_doctype

_RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
_ROOT, _DESCRIPTION, _ABOUT, _ITEM = (f"{_RDF} {name}" for name in ("RDF", "Description", "about", "li"))
SUBJECT = "http://purl.org/dc/elements/1.1/ subject"
HIERARCHY = "http://ns.adobe.com/lightroom/1.0/ hierarchicalSubject"
WRITTEN = "urn:mlmoe:1.0/ written"  # all labels that were ever written
_PREFIXES = {SUBJECT: "dc", HIERARCHY: "lr", WRITTEN: "mlmoe"}
_LIST = 3  # the depth of the element of a list; the depth of the root is 1
_FORM = {_LIST + 1: [f"{_RDF} {name}" for name in ("Bag", "Seq", "Alt")], _LIST + 2: [_ITEM]}
_ENCODINGS = {b"\xff\xfe": "utf-16-le", b"<\0": "utf-16-le", b"\xfe\xff": "utf-16-be", b"\0<": "utf-16-be"}
_ATTRIBUTE = rb"""\s+([^\s=]+)\s*=\s*(?:"[^"]*"|'[^']*')"""
_TAG = re.compile(rb"<([^\s/>]+)(?:" + _ATTRIBUTE.replace(b"([^", b"(?:[^") + rb")*\s*/?>")
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
        self._places: list[tuple[str, int, int]] = []  # name of a list, its first byte, the byte after its last
        self._about, self._uris = "", {}
        self._root = self._end = None  # the start tag of the root, and where its end tag starts
        self._open: list[tuple[str, int]] = []  # names of the elements from the root on, and where they start
        self._name, self._text = "", ""  # of the list that is read, and of its item
        self._parser = expat.ParserCreate("utf-8", " ")
        self._parser.StartDoctypeDeclHandler = refuse_doctype
        self._parser.XmlDeclHandler = _require_unicode
        self._parser.StartNamespaceDeclHandler = self._uris.__setitem__
        self._parser.StartElementHandler = self._start
        self._parser.CharacterDataHandler = self._add_text
        self._parser.EndElementHandler = self._finish
        self._parser.Parse(self._content.rstrip(b"\0"), True)
        if self._end is None:
            raise ValueError("it is no XMP, since it has no rdf:RDF")

    # ------------------------------------------------------------------------------------------------------- parsing
    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if not self._open and (name != _ROOT or self._root):
            return
        start = self._parser.CurrentByteIndex
        self._open.append((name, start))
        depth = len(self._open)
        if self._name and name not in _FORM.get(depth, ()):
            raise _no_list(self._name)
        if depth == 1:
            self._root = _TAG.match(self._content, start)
        elif depth == _LIST - 1 and name == _DESCRIPTION:
            self._about = self._about or attributes.get(_ABOUT, "")
            self._read_attributes(start, attributes)
        elif depth == _LIST and self._open[1][0] == _DESCRIPTION:
            self._begin_list(name, attributes)

    def _begin_list(self, name: str, attributes: Mapping[str, str]) -> None:
        """Note the list whose element starts, if it is one."""
        if name not in _PREFIXES:
            return
        if any(key.startswith(_RDF) for key in attributes):  # a link, or XML as a text
            raise _no_list(name)
        self._name = name
        self.lists.setdefault(name, [])

    def _read_attributes(self, start: int, attributes: Mapping[str, str]) -> None:
        """Add the lists that are attributes of the element that starts at `start`."""
        for found in re.finditer(_ATTRIBUTE, _TAG.match(self._content, start)[0]):
            prefix, _, local = found[1].decode().rpartition(":")
            name = f"{self._uris.get(prefix)} {local}"
            if name in _PREFIXES:
                self._places.append((name, start + found.start(), start + found.end()))
                self._text = attributes[name]
                self._add_item(name)

    def _add_text(self, text: str) -> None:
        if self._name:
            self._text += text

    def _add_item(self, name: str) -> None:
        self.lists.setdefault(name, []).extend(filter(None, [self._text.strip()]))
        self._text = ""

    def _finish(self, name: str) -> None:
        if not self._open:
            return
        depth, (_, start) = len(self._open), self._open.pop()
        at = self._parser.CurrentByteIndex
        if depth == 1:
            self._end = at
        elif self._name and depth in (_LIST, _LIST + 2):
            self._add_item(self._name)
        if self._name and depth == _LIST:
            tag = _TAG.match(self._content, start)
            end = tag.end() if tag[0].endswith(b"/>") else self._content.index(b">", at) + 1
            self._places.append((self._name, start, end))
            self._name = ""

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
        longer = {name: list(dict.fromkeys((*self.lists.get(name, ()), *texts))) for name, texts in lists.items()}
        made = {name: texts for name, texts in longer.items() if set(texts) != set(self.lists.get(name, (None,)))}
        content, edits = self._content, [(*place, b"") for name, *place in self._places if name in made]
        if made:
            edits.append(self._insert(made))
        for start, end, new in sorted(edits, reverse=True):
            content = content[:start] + new + content[end:]
        return content.decode().encode(self._encoding)

    def _insert(self, lists: Mapping[str, Sequence[str]]) -> tuple[int, int, bytes]:
        """Return where the root gets a further description of the image, and its XML, with lists."""
        lines = [f" <rdf:Description xmlns:rdf={quoteattr(_RDF)} rdf:about={quoteattr(self._about)}>"]
        for name, texts in lists.items():
            uri, local = name.split()
            tag = f"{_PREFIXES[name]}:{local}"
            items = (f"    <rdf:li>{escape(text)}</rdf:li>" for text in texts)
            lines += [f"  <{tag} xmlns:{_PREFIXES[name]}={quoteattr(uri)}>", "   <rdf:Bag>"]
            lines += [*items, "   </rdf:Bag>", f"  </{tag}>"]
        text = "\n ".join([*lines, " </rdf:Description>", ""]).encode()
        if self._root[0].endswith(b"/>"):
            return self._root.end() - 2, self._root.end(), b">%b</%b>" % (text, self._root[1])
        return self._end, self._end, text


def _no_list(name: str) -> ValueError:
    return ValueError(f"its {name.split()[-1]} is no list of texts")


def _require_unicode(version: str, encoding: str | None, standalone: int) -> None:
    if encoding and not encoding.upper().startswith("UTF-"):
        raise ValueError(f"its encoding is {encoding}; save it as UTF-8")


def last_level(keyword: str) -> str:
    """Return the last of the levels of a keyword, such as dog of animal|dog."""
    return keyword.rpartition("|")[2].strip()
