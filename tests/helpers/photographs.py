"""XMP as programs write it into sidecars and photographs, and an independent reader of it."""

import io
import struct
import zlib
from xml.etree import ElementTree

from PIL import Image

RDF, DC = "http://www.w3.org/1999/02/22-rdf-syntax-ns#", "http://purl.org/dc/elements/1.1/"
OURS = {
    "subject": f"{{{DC}}}subject",
    "levels": "{http://ns.adobe.com/lightroom/1.0/}hierarchicalSubject",
    "written": "{urn:mlmoe:1.0/}written",
}
SPACES = (
    f'xmlns:dc="{DC}" xmlns:xmp="http://ns.adobe.com/xap/1.0/" xmlns:lr="http://ns.adobe.com/lightroom/1.0/" '
    'xmlns:digiKam="http://www.digikam.org/ns/1.0/" xmlns:darktable="http://darktable.sf.net/" '
    'xmlns:crs="http://ns.adobe.com/camera-raw-settings/1.0/" xmlns:xmpMM="http://ns.adobe.com/xap/1.0/mm/"'
)


def packet(*properties, attributes="", about='rdf:about=""', tail="", head='<?xml version="1.0" encoding="UTF-8"?>\n'):
    """XMP with the properties of one description."""
    return (
        f'{head}<x:xmpmeta xmlns:x="adobe:ns:meta/" x:xmptk="XMP Core 4.4.0-Exiv2">\n <rdf:RDF xmlns:rdf="{RDF}">\n'
        f"  <rdf:Description {about} {SPACES} {attributes}>\n   {''.join(properties)}\n  </rdf:Description>\n"
        f" </rdf:RDF>\n</x:xmpmeta>\n{tail}"
    )


def array(name, *texts, kind="Bag"):
    items = "".join(f"\n     <rdf:li>{text}</rdf:li>" for text in texts)
    return f"<{name}>\n    <rdf:{kind}>{items}\n    </rdf:{kind}>\n   </{name}>"


XPACKET = '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>\n'
SEA = array("dc:subject", "sea", "sand &amp; sun")
TITLE = '<dc:title><rdf:Alt><rdf:li xml:lang="x-default">T &lt; &#xD;&#10;U</rdf:li></rdf:Alt></dc:title>'
HISTORY = (
    '<darktable:history><rdf:Seq><rdf:li darktable:num="0" darktable:operation="sharpen" '
    'darktable:params="gz04eJxjYGBgkGAAgRNODESDBnsIHll8ANNSGQM=" /></rdf:Seq></darktable:history>'
)
NESTED = (
    '<xmpMM:Ingredients><rdf:Bag><rdf:li rdf:parseType="Resource"><dc:subject><rdf:Bag><rdf:li>lake</rdf:li></rdf:Bag>'
    "</dc:subject></rdf:li></rdf:Bag></xmpMM:Ingredients>"
)
EXIFTOOL = f"""<?xpacket begin='\ufeff' id='W5M0MpCehiHzreSzNTczkc9d'?>
<x:xmpmeta xmlns:x='adobe:ns:meta/' x:xmptk='Image::ExifTool 12.57'>
<rdf:RDF xmlns:rdf='{RDF}'>

 <rdf:Description rdf:about=''
  xmlns:dc='{DC}'>
  <dc:subject>
   <rdf:Bag>
    <rdf:li>sea</rdf:li>
    <rdf:li>sand &amp; sun</rdf:li>
   </rdf:Bag>
  </dc:subject>
 </rdf:Description>

 <rdf:Description rdf:about=''
  xmlns:xmp='http://ns.adobe.com/xap/1.0/'>
  <xmp:Rating>3</xmp:Rating>
 </rdf:Description>
</rdf:RDF>
</x:xmpmeta>
{(" " * 99 + chr(10)) * 20}<?xpacket end='w'?>"""
LIGHTROOM = packet(SEA, array("lr:hierarchicalSubject", "nature|sea", "sand &amp; sun"), head="", tail="")
FOREIGN = f"""<RDF xmlns="{RDF}" xmlns:d="{DC}"><Description d:format="image/jpeg"><d:subject><Bag><li>sea</li>
<li><![CDATA[sand & sun]]></li></Bag></d:subject><!-- kept --></Description></RDF>"""

# All have the keywords sea and "sand & sun".
LAYOUTS = {
    "darktable": packet(SEA, HISTORY, attributes='xmp:Rating="1" darktable:xmp_version="5"'),
    "darktable with levels": packet(SEA, array("lr:hierarchicalSubject", "nature|sea", "sand &amp; sun"), HISTORY),
    "digiKam": packet(
        array("digiKam:TagsList", "nature/sea", "sand &amp; sun", kind="Seq"), SEA, attributes="xmp:Rating='4'"
    ),
    "digiKam with sequences": packet(array("dc:subject", "sea", "sand &amp; sun", kind="Seq"), TITLE),
    "Lightroom": LIGHTROOM,
    "Lightroom with settings": packet(
        SEA, attributes='crs:Version="15.0" crs:Look="a&#xA;b &quot;c&quot;"', head=XPACKET, tail='<?xpacket end="w"?>'
    ),
    "Lightroom with levels only": packet(array("lr:hierarchicalSubject", "nature|water|sea", "sand &amp; sun")),
    "ExifTool": EXIFTOOL,
    "ExifTool in Windows": EXIFTOOL.replace("\n", "\r\n"),
    "padding": packet(SEA, head=XPACKET, tail=" " * 3000 + '\n<?xpacket end="w"?>\0\0\0'),
    "UTF-16 with a mark": ("\ufeff" + packet(SEA, TITLE, head="")).encode("utf-16-le"),
    "UTF-16 without a mark": packet(SEA, TITLE, head="<?xml version='1.0' encoding='UTF-16'?>").encode("utf-16-be"),
    "UTF-8 with a mark": "\ufeff" + packet(SEA),
    "other prefixes": FOREIGN,
    "texts without a list": packet("<dc:subject>sand &amp; sun</dc:subject><dc:subject> sea</dc:subject>"),
    "two lists": packet(
        array("dc:subject", "sea", "sea"), TITLE, array("dc:subject", " sand &amp; sun ", "", kind="Alt")
    ),
    "another subject": packet(SEA, about='rdf:about="uuid:faf5&amp;1"'),
    "lists elsewhere": packet(NESTED, SEA),
    "comments": packet("<!-- dc:subject -->", SEA.replace("sea", "s<!-- x -->ea"), "<?what ever?>"),
    "levels in the subject": packet(array("dc:subject", "nature|sea", "sea", "sand &amp; sun")),
}
BLANK = {
    "no list": packet(TITLE),
    "an empty list": packet("<dc:subject/>"),
    "an empty array": packet("<dc:subject><rdf:Bag/></dc:subject>", TITLE),
    "an empty root": f"<x:xmpmeta xmlns:x='adobe:ns:meta/'><r:RDF xmlns:r='{RDF}'/></x:xmpmeta>",
}


def encode(text):
    return text if isinstance(text, bytes) else text.encode()


def descriptions(content):
    """The descriptions in XMP, by the parser of Python's library."""
    encoding = {b"\xff": "utf-16", b"\0": "utf-16-be"}.get(content[:1], "utf-8-sig")
    root = ElementTree.fromstring(content.decode(encoding).rstrip("\0"), ElementTree.XMLParser(encoding="utf-8"))
    return [*next(root.iter(f"{{{RDF}}}RDF")).iterfind(f"{{{RDF}}}Description")]


def texts(content, name):
    """The texts in a list of OURS."""
    lists = (one for parent in descriptions(content) for one in parent.iterfind(OURS[name]))
    return [item.text.strip() for one in lists for item in one.iter(f"{{{RDF}}}li")]


def rest(content):
    """All properties but OURS, as canonical XML, and the things that they describe."""
    found = []
    for parent in descriptions(content):
        about = parent.attrib.pop(f"{{{RDF}}}about", "")
        found += [(about, *item) for item in parent.attrib.items() if item[0] not in OURS.values()]
        for child in parent:
            child.tail = None
            if child.tag not in OURS.values():
                found.append((about, ElementTree.canonicalize(ElementTree.tostring(child, encoding="unicode"))))
    return found


def photograph(path, content=None, **options):
    """A small image with XMP in it; in a PNG, after the pixels, as ExifTool writes it."""
    image = Image.new("RGB", (16, 12), (200, 30, 40))
    given = {} if content is None else {"xmp": content, "tiffinfo": {700: content}}
    image.save(path, **given, **options)
    if content is not None and str(path).endswith(".png"):
        data = b"iTXtXML:com.adobe.xmp\0\0\0\0\0" + content
        chunk = struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))
        path.write_bytes(path.read_bytes()[:-12] + chunk + path.read_bytes()[-12:])


def iptc(*keywords):
    """IPTC's records of keywords, as a block of Photoshop in a JPEG."""
    records = b"".join(b"\x1c\x02\x19" + len(word).to_bytes(2) + word for word in keywords)
    block = b"8BIM\x04\x04\0\0" + len(records).to_bytes(4) + records + bytes(len(records) % 2)
    segment = b"Photoshop 3.0\0" + block
    return b"\xff\xed" + (len(segment) + 2).to_bytes(2) + segment


def jpeg_with_iptc(path, *keywords):
    buffer = io.BytesIO()
    photograph(buffer, format="JPEG")
    path.write_bytes(buffer.getvalue()[:2] + iptc(*keywords) + buffer.getvalue()[2:])
