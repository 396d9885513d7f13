"""XMP packets: language alternatives, properties of others, files of three formats, bad input."""

import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from hf_captionrl.data.xmp import PROPERTIES, chosen_text, read_packet, read_texts, with_packet, with_text, xmp_file

DC, IPTC = PROPERTIES["description"][1], PROPERTIES["alt_text"][1]
PACKET = f"""<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/" x:xmptk="Some Editor"><!-- kept --><?kept too?>
 <rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
  <rdf:Description rdf:about="" xmlns:dc="{DC}" xmlns:crs="http://example.org/crs" crs:Curve="0, 0&#10;9, 9"
    xmlns:Regions="http://example.org/regions" crs:Empty="">
   <dc:description><rdf:Alt>
    <rdf:li xml:lang="x-default">a dog</rdf:li><rdf:li xml:lang="en-GB">a dog</rdf:li><rdf:li xml:lang="de">ein Hund &lt;3</rdf:li>
   </rdf:Alt></dc:description>
   <dc:subject><rdf:Bag><rdf:li>pets &amp; co</rdf:li></rdf:Bag></dc:subject>
   <Regions:List><rdf:Description><dc:description>a face</dc:description></rdf:Description></Regions:List>
  </rdf:Description>
  <rdf:Description rdf:about="" xmlns:xmp="http://ns.adobe.com/xap/1.0/" xmp:Rating="5"/>
 </rdf:RDF>
</x:xmpmeta>
<?xpacket end="w"?>""".encode()


def foreign(packet):
    """Everything but the properties of the album, in canonical form without indentation."""
    root = ElementTree.fromstring(packet.decode().strip("\ufeff \n\0"))
    rdf = root.find("{http://www.w3.org/1999/02/22-rdf-syntax-ns#}RDF")
    for description in rdf:
        for name in (f"{{{DC}}}description", f"{{{IPTC}}}AltTextAccessibility"):
            description.attrib.pop(name, None)
            for element in description.findall(name):
                description.remove(element)
    return ElementTree.canonicalize(ElementTree.tostring(root), strip_text=True)


def test_text_for_everyone_and_its_copies_change_and_everything_else_stays():
    new = with_text(PACKET, "a <cat> & 'x'\x00\ud800", ["description"], "n")
    assert read_texts(new, "n") == {
        "description": [("x-default", "a <cat> & 'x'"), ("en-GB", "a <cat> & 'x'"), ("de", "ein Hund <3")]
    }
    assert foreign(new) == foreign(PACKET)
    assert "a face" in foreign(PACKET)  # a property of a structure is not the image's
    for kept in ("<!-- kept -->", "<?kept too?>", "crs:Curve", "xmp:Rating", "Regions:List"):
        assert kept in new.decode()
    # Again, with a language and the other property.
    more = with_text(new, "un chat", ["alt_text", "description"], "n", "de")
    both = [("x-default", "un chat"), ("de", "un chat")]
    assert read_texts(more, "n") == {"alt_text": both, "description": [*both, ("en-GB", "un chat")]}
    assert foreign(more) == foreign(PACKET)
    assert with_text(more, "un chat", ["alt_text", "description"], "n", "de") == more


def test_new_packets_simple_properties_and_packets_without_a_description():
    new = with_text(None, "a cat", ["alt_text"], "n")
    assert read_texts(new, "n") == {"alt_text": [("x-default", "a cat")]}
    attribute = re.sub(rb"<dc:description>.*?</dc:description>\s*<dc:subject", b"<dc:subject", PACKET, flags=re.DOTALL)
    attribute = attribute.replace(b'crs:Empty=""', b'dc:description="a dog"')
    assert read_texts(attribute, "n") == {"description": [("x-default", "a dog")]}
    assert read_texts(with_text(attribute, "b", ["description"], "n"), "n") == {"description": [("x-default", "b")]}


def test_language_is_chosen():
    texts = [("de-AT", "Hund"), ("x-default", "dog"), ("fr", "chien")]
    assert [chosen_text(texts, language) for language in (None, "de", "FR", "it")] == ["dog", "Hund", "chien", "dog"]
    assert chosen_text(texts[2:]) == "chien"
    assert chosen_text([]) == ""


WHOLE = PACKET.partition(b"?>")[2].strip()  # valid, if entities were allowed
BOMB = b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]>' + WHOLE.replace(b"a dog", b"&b;")
SECRET = b'<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/hostname">]>' + WHOLE.replace(b"a dog", b"&a;")
NO_ENTITY = b"<!DOCTYPE x>" + WHOLE


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"text",
        b"<x",
        b"<x/>",
        BOMB,
        SECRET,
        NO_ENTITY,
        PACKET[:-200],
        b'<?xml version="1.0" encoding="none"?><x/>',
        b"<x>\xff</x>",
    ],
)
def test_invalid_packets_are_refused_with_the_name_of_the_file(packet):
    with pytest.raises(ValueError, match=r"photos/a\.xmp") as error:
        read_texts(packet, "photos/a.xmp")
    assert "aaaa" not in str(error.value)
    if packet:
        with pytest.raises(ValueError, match=r"photos/a\.xmp"):
            with_text(packet, "a", ["alt_text"], "photos/a.xmp")


def test_deep_packets_are_refused_and_prefixes_keep_their_place():
    deep = WHOLE.replace(b"<dc:subject>", b"<a>" * 5000 + b"</a>" * 5000 + b"<dc:subject>")
    with pytest.raises(ValueError, match=r"photos/a\.xmp"):
        with_text(deep, "a", ["alt_text"], "photos/a.xmp")
    # The same prefix stands for two namespaces, one inside the other.
    twice = (
        b'<p:A xmlns:p="http://x.org/1"><p:B xmlns:p="http://x.org/2" p:c="&#13;"><p:D/></p:B><p:E>1&#13;2</p:E></p:A>'
    )
    packet = WHOLE.replace(b"<dc:subject>", twice + b"<dc:subject>")
    assert foreign(with_text(packet, "a", ["alt_text", "description"], "n")) == foreign(packet)


def encoded(kind, mode="RGB", **settings):
    pixels = np.random.default_rng(0).integers(0, 255, (33, 21, len(mode)), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **settings)
    return buffer.getvalue()


EXIF = Image.Exif()
EXIF[0x0112] = 6


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("JPEG", {}),
        ("JPEG", {"exif": EXIF, "icc_profile": b"profile", "comment": b"hello"}),
        ("PNG", {"mode": "RGBA", "exif": EXIF}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True, "mode": "RGBA"}),
        ("WEBP", {"exif": EXIF}),
    ],
)
def test_images_get_a_packet_and_keep_their_pixels_and_metadata(kind, settings):
    plain = encoded(kind, **settings)
    first = with_packet(plain, with_text(PACKET, "one", ["alt_text"], "n"), "n")
    packet = with_text(None, "two", ["alt_text"], "n")
    second = with_packet(first, packet, "n")
    before, after = (Image.open(io.BytesIO(data)) for data in (plain, second))
    assert read_packet(io.BytesIO(plain)) is None
    assert read_packet(io.BytesIO(second)) == packet
    assert (np.asarray(before) == np.asarray(after)).all()
    assert (after.mode, after.size, after.getexif().get(0x0112)) == (
        before.mode,
        before.size,
        before.getexif().get(0x0112),
    )
    assert after.info.get("icc_profile") == before.info.get("icc_profile")
    assert with_packet(first, packet, "n") == with_packet(second, packet, "n")  # nothing of the first one is left
    if kind == "JPEG":  # readers expect JFIF and Exif first
        assert second[:20] == plain[:20]
        assert second.find(b"Exif\0\0") < second.index(b"ns.adobe.com/xap")
    if kind != "WEBP":  # whose simple form gets a header, too
        whole = second.replace(packet, b"")
        assert len(whole) - len(plain) == (33 if kind == "JPEG" else 34)


def test_packet_behind_the_pixels_of_a_png_is_read_and_replaced():
    data = encoded("PNG")
    packet = with_text(None, "one", ["alt_text"], "n")
    early = with_packet(data, packet, "n")
    at = early.index(b"iTXt") - 4
    chunk = early[at : at + 12 + int.from_bytes(early[at : at + 4], "big")]
    late = data[:-12] + chunk + data[-12:]
    assert read_packet(io.BytesIO(late)) == packet
    assert with_packet(late, packet, "n") == early


@pytest.mark.parametrize(
    ("data", "size"),
    [(encoded("GIF"), 9), (encoded("JPEG"), 65_600), (encoded("JPEG")[:40], 9), (encoded("WEBP")[:20], 9), (b"", 9)],
)
def test_files_that_hold_no_packet_are_refused(data, size):
    packet = with_text(None, "x" * size, ["alt_text"], "n")
    with pytest.raises(ValueError, match=r"a\.gif.*--xmp_sidecars"):
        with_packet(data, packet, "a.gif")


def test_file_beside_an_image(tmp_path):
    image = str(tmp_path / "a.jpg")
    assert xmp_file(image).name == "a.jpg.xmp"
    (tmp_path / "a.xmp").touch()
    assert xmp_file(image).name == "a.xmp"
    (tmp_path / "a.jpg.xmp").touch()
    assert xmp_file(image).name == "a.jpg.xmp"
