"""The album's HTML: every caption with its rank and find, and hostile texts stay text."""

from html.parser import HTMLParser

import pytest
from PIL import Image

from hf_captionrl.album.distinct_captions import AlbumCaption, AlbumCaptions, Finding
from hf_captionrl.album.html import album_style, render_album, render_comparison, spoken_list
from tests.reports.test_gallery import HOSTILE

ALLOWED = set("section div table thead tbody tr th td p b i span bdi figure figcaption img ol li".split())


class Parts(HTMLParser):
    """Tags, attributes that are not ours, and all text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.cells, self.text, self.sources = set(), [], "", []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        values = dict(attributes)
        assert not [name for name in values if name.startswith("on") or name in ("href", "srcset", "style")]
        if tag == "img":
            self.sources.append(values["src"])
        if tag in ("td", "li"):
            self.cells.append(values)

    def handle_data(self, data):
        self.text += data


def images(number):
    return [Image.new("RGB", (72 + 300 * (i % 2), 40), (i * 20, 90, 200)) for i in range(number)]


def test_comparison_shows_ranks_and_found_images():
    findings = {
        "MLE": [Finding("a pig", 2, 1), Finding("a pig", 1, 1)],
        "SR": [Finding("one pig", 1, 0), Finding("two pigs", 1, 1)],
    }
    parts = Parts(render_comparison(images(2), findings))
    assert [(c["data-method"], c["data-row"], c["data-rank"], c["data-found"]) for c in parts.cells] == [
        ("MLE", "0", "2", "1"),
        ("SR", "0", "1", "0"),
        ("MLE", "1", "1", "1"),
        ("SR", "1", "1", "1"),
    ]
    text = " ".join(parts.text.split())
    assert "MLEfinds 1 of 2" in text
    assert "SRfinds 2 of 2" in text
    assert "a pig rank 2 of 2 finds image 2" in text
    # Two images, and the one that was found instead of another.
    assert len(parts.sources) == 3
    with pytest.raises(ValueError, match="'MLE' has 2 findings for 3 images"):
        render_comparison(images(3), findings)


def test_album_names_images_that_are_not_distinguished():
    captions = AlbumCaptions(
        [
            AlbumCaption("a pig", 0, 2, -0.25, True, (1,)),
            AlbumCaption("two pigs", 1, 1, 0.125, True, ()),
            AlbumCaption("Two pigs.", 0, 1, 0.5, False, ()),
        ]
    )
    text = " ".join(Parts(render_album(images(3), captions)).text.split())
    assert (
        "2 of 3 images have a caption that no other image has, and 1 of these captions ranks the image first" in text
    )
    assert "Images 1, 2 and 3 could not be distinguished." in text
    assert "margin -0.250" in text
    assert "rank 1 of 3 margin +0.500 same caption as another image" in text
    alone = render_album(images(1), AlbumCaptions([AlbumCaption("a pig", 0, 1, None, True, ())]))
    assert "margin" not in alone
    assert "distinguished" not in alone
    with pytest.raises(ValueError, match="3 captions for 2 images"):
        render_album(images(2), captions)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_captions_and_names_are_escaped(text):
    pictures = images(2)
    compared = render_comparison(pictures, {text: [Finding(text, 2, 1)] * 2})
    chosen = render_album(pictures, AlbumCaptions([AlbumCaption(text, 0, 1, 0.1, True, ())] * 2))
    for html in (compared, chosen):
        parts = Parts(html)
        assert parts.tags <= ALLOWED
        assert all(source.startswith("data:image/") for source in parts.sources)
        shown = text.replace("\x00", "\ufffd")
        assert text.strip() == "" or shown in parts.text.replace("\x00", "\ufffd")
    # The negative control: this parser sees a tag that is one.
    assert "script" in Parts(compared.replace("<figure>", "<script></script><figure>")).tags


def test_style_makes_no_requests():
    assert "url(" not in album_style()
    assert "@import" not in album_style()
    assert spoken_list([1]) == "1"
    assert spoken_list([1, 2, 4]) == "1, 2 and 4"
