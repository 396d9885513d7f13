"""Captions in XMP: IPTC's alternative text and Dublin Core's description, in XMP files beside images and inside images.

Both are language alternatives: a list of texts with languages, of which "x-default" is for everyone. Pillow finds the packet of an
image. It is written as bytes, because saving an image with Pillow would encode its pixels again. Of the libraries that write XMP, pyexiv2
is under the GPL, and python-xmp-toolkit needs a library of the system.
"""

from __future__ import annotations

import contextlib
import io
import re
import struct
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree  # document types, and with them entities, are refused below # nosec B405

from PIL import Image

PROPERTIES = {
    "alt_text": ("Iptc4xmpCore", "http://iptc.org/std/Iptc4xmpCore/1.0/xmlns/", "AltTextAccessibility"),
    "description": ("dc", "http://purl.org/dc/elements/1.1/", "description"),
}
"""Prefix, namespace and name of each property, in the order in which they are read."""
_RDF = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}"
_LANG = "{http://www.w3.org/XML/1998/namespace}lang"
_EMPTY = f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="{_RDF[1:-1]}"/></x:xmpmeta>'.encode()
_JPEG = b"http://ns.adobe.com/xap/1.0/\0"

Texts = list[tuple[str, str]]
"""Language and text of each alternative."""


def _tag(name: str) -> str:
    return f"{{{PROPERTIES[name][1]}}}{PROPERTIES[name][2]}"


def xmp_file(image: str) -> Path:
    """The XMP file beside an image: NAME.jpg.xmp, or NAME.xmp if only that exists."""
    whole, short = Path(f"{image}.xmp"), Path(image).with_suffix(".xmp")
    return short if short.is_file() and not whole.is_file() else whole


# --- The properties of a packet --------------------------------------------------------------------------------------


class _Tree(ElementTree.TreeBuilder):
    """Builds a tree with its comments, and notes the prefixes of each element; an entity needs a document type, which is refused."""

    def __init__(self) -> None:
        super().__init__(insert_comments=True, insert_pis=True)
        self.prefixes: dict[Any, list[tuple[str, str]]] = {}
        self._next: list[tuple[str, str]] = []

    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        raise ValueError("it declares a document type, which XMP does not have")

    def start_ns(self, prefix: str, uri: str) -> None:
        self._next.append((prefix, uri))

    def start(self, tag: Any, attrs: Any) -> Any:
        element = super().start(tag, attrs)
        self.prefixes[element], self._next = self._next, []
        return element

    def write(self, element: Any, out: ElementTree.C14NWriterTarget) -> None:
        """Write an element as canonical XML."""
        if element.tag is ElementTree.Comment:
            out.comment(element.text)
        elif element.tag is ElementTree.ProcessingInstruction:
            target, _, data = element.text.partition(" ")
            out.pi(target, data)
        else:
            for prefix in self.prefixes.get(element, ()):
                out.start_ns(*prefix)
            out.start(element.tag, element.attrib)
            out.data(element.text or "")
            for child in element:
                self.write(child, out)
            out.end(element.tag)
        out.data(element.tail or "")


def _parsed(packet: bytes, name: str) -> tuple[_Tree, Any, Any]:
    """Builder, root and first rdf:RDF of a packet."""
    try:
        parser = ElementTree.XMLParser(target=(tree := _Tree()))  # nosec B314
        parser.feed(packet.strip(b"\0 \r\n\t"))
        root = parser.close()
        rdf = next(root.iter(f"{_RDF}RDF"), None)
        if rdf is None:
            raise ValueError("it has no rdf:RDF")
    except (ElementTree.ParseError, ValueError, LookupError) as error:  # LookupError: an unknown encoding
        raise ValueError(f"The XMP of {name} cannot be read: {error}. Correct or remove it.") from None
    return tree, root, rdf


def read_texts(packet: bytes, name: str) -> dict[str, Texts]:
    """The alternatives of each property that a packet has; `name` is the file in errors."""
    return _texts_of(_parsed(packet, name)[2])


def _texts_of(rdf: Any) -> dict[str, Texts]:
    found: dict[str, Texts] = {}
    for one in PROPERTIES:
        tag = _tag(one)
        for description in rdf.findall(f"{_RDF}Description"):
            element = description.find(tag)
            texts = [("x-default", description.get(tag) or "")]
            if element is not None:
                items = list(element.iter(f"{_RDF}li"))
                texts = [(item.get(_LANG, "x-default"), "".join(item.itertext())) for item in items]
                texts = texts or [("x-default", "".join(element.itertext()))]
            if texts := [(language, text.strip()) for language, text in texts if text.strip()]:
                found.setdefault(one, texts)
    return found


def chosen_text(texts: Texts, language: str | None = None) -> str:
    """The text in a language such as "de", else that for everyone, else the first one; empty without texts."""
    by_language = {tag.lower(): text for tag, text in reversed(texts)}
    near = [text for tag, text in texts if language and tag.lower().partition("-")[0] == language.lower()]
    return (near or [by_language.get("x-default") or (texts[0][1] if texts else "")])[0]


def with_text(
    packet: bytes | None, caption: str, properties: list[str], name: str, language: str | None = None
) -> bytes:
    """A packet with the caption as text for everyone and, if it is known, in its language; all else is kept.

    Texts of other languages are kept, except copies of the text for everyone, which change with it. `None` makes a new packet.
    """
    caption = re.sub(r"[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "", caption)  # no characters of XML
    tree, root, rdf = _parsed((packet or b"").strip(b"\0 \r\n\t") or _EMPTY, name)
    before, descriptions = _texts_of(rdf), rdf.findall(f"{_RDF}Description")
    if not descriptions:
        descriptions = [ElementTree.SubElement(rdf, f"{_RDF}Description", {f"{_RDF}about": ""})]
    for place, one in enumerate(properties):
        texts, tag = before.get(one, []), _tag(one)
        old = dict(reversed(texts)).get("x-default")
        kept = [
            (lang, caption if text == old else text) for lang, text in texts if lang not in ("x-default", language)
        ]
        for description in descriptions:
            description.attrib.pop(tag, None)  # a property of one text may be an attribute
            for element in description.findall(tag):
                description.remove(element)
        descriptions[0].insert(place, new := ElementTree.Element(tag))
        tree.prefixes[new] = [PROPERTIES[one][:2]]
        alternatives = ElementTree.SubElement(new, f"{_RDF}Alt")
        for lang, text in [("x-default", caption), *([(language, caption)] if language else []), *kept]:
            ElementTree.SubElement(alternatives, f"{_RDF}li", {_LANG: lang}).text = text
    parts: list[str] = []
    try:
        tree.write(root, ElementTree.C14NWriterTarget(parts.append, with_comments=True))
    except RecursionError:
        raise ValueError(f"The XMP of {name} is nested too deep. Correct or remove it.") from None
    begin = '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>'
    return f'{begin}\n{"".join(parts)}\n<?xpacket end="w"?>\n'.encode()


# --- The packet of an image ------------------------------------------------------------------------------------------


def read_packet(file: str | io.BytesIO) -> bytes | None:
    """The packet inside a JPEG, PNG or WebP file; None for other files and without one."""
    try:
        with Image.open(file, formats=("JPEG", "PNG", "WEBP")) as image:
            if image.format == "PNG":
                image.load()  # its packet may follow the pixels
            found: Any = image.info.get("xmp") or image.info.get("XML:com.adobe.xmp")
    except (OSError, SyntaxError, ValueError):  # unreadable files are reported elsewhere
        return None
    return found.encode() if isinstance(found, str) else found


def with_packet(data: bytes, packet: bytes, name: str) -> bytes:
    """The bytes of a JPEG, PNG or WebP file with another packet; everything else, also the pixels, is the same."""
    kinds = {b"\xff\xd8": _in_jpeg, b"\x89PNG\r\n\x1a\n": _in_png, b"RIFF": _in_webp}
    write = next((function for start, function in kinds.items() if data.startswith(start)), None)
    with contextlib.suppress(struct.error, IndexError):  # a damaged file, or a packet too long for the format
        if write is not None and read_packet(io.BytesIO(found := write(data, packet))) == packet:
            return found
    raise ValueError(
        f"XMP of {len(packet):,} bytes cannot be written into {name}, but only into whole JPEG (up to 65,502 bytes), PNG and WebP files. "
        "Use --xmp_sidecars."
    )


def _in_jpeg(data: bytes, packet: bytes) -> bytes:
    segment = b"\xff\xe1" + struct.pack(">H", 2 + len(_JPEG) + len(packet)) + _JPEG + packet
    head, at = data[:2], 2
    kept: list[bytes] = []
    while data[at : at + 1] == b"\xff" and data[at + 1] != 0xDA:  # up to the pixels
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if not data[at + 4 : end].startswith(_JPEG):
            kept.append(data[at:end])
        at = end
    # Readers expect JFIF and Exif first.
    first = next((i for i, one in enumerate(kept) if one[1] != 0xE0 and one[4:10] != b"Exif\0\0"), len(kept))
    return head + b"".join([*kept[:first], segment, *kept[first:]]) + data[at:]


def _in_png(data: bytes, packet: bytes) -> bytes:
    keyword, parts, at = b"XML:com.adobe.xmp\0", [data[:8]], 8
    body = b"iTXt" + keyword + b"\0\0\0\0" + packet
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        if not data[at + 4 : end].startswith(b"iTXt" + keyword):
            parts.append(data[at:end])
        if data[at + 4 : at + 8] == b"IHDR":
            parts.append(chunk)
        at = end
    return b"".join(parts)


def _in_webp(data: bytes, packet: bytes) -> bytes:
    chunks, at = [], 12
    while at < len(data):
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        chunks.append((data[at : at + 4], data[at + 8 : at + 8 + size]))
        at += 8 + size + size % 2
    if chunks[0][0] != b"VP8X":  # the simple format, which holds nothing but pixels
        kind, pixels = chunks[0]
        if kind == b"VP8L":  # 14 bits of width, 14 of height, 1 of transparency
            bits = int.from_bytes(pixels[1:5], "little")
            width, height, flags = bits & 0x3FFF, (bits >> 14) & 0x3FFF, 0x10 * (bits >> 28 & 1)
        else:
            width, height = ((value & 0x3FFF) - 1 for value in struct.unpack("<HH", pixels[6:10]))
            flags = 0
        header = bytes([flags, 0, 0, 0]) + width.to_bytes(3, "little") + height.to_bytes(3, "little")
        chunks.insert(0, (b"VP8X", header))
    first = chunks[0][1]
    chunks = [(b"VP8X", bytes([first[0] | 0x04]) + first[1:]), *(one for one in chunks[1:] if one[0] != b"XMP ")]
    chunks.append((b"XMP ", packet))
    body = b"WEBP" + b"".join(k + struct.pack("<I", len(v)) + v + b"\0" * (len(v) % 2) for k, v in chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body
