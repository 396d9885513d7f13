"""The album's HTML: every caption with its rank and find, and hostile texts stay text."""

from html.parser import HTMLParser

import pytest
from PIL import Image

from hf_captionrl.apps.album.demo import album_style, render_album, render_comparison, spoken_list
from hf_captionrl.apps.album.distinct import Finding
from hf_captionrl.apps.album.result import Album, AlbumImage
from tests.evaluation.test_pages import HOSTILE

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


def test_album_names_copies_and_confusions():
    album = Album(
        [
            AlbumImage("a", "a pig", rank=2, margin=-0.25, is_distinct=True, confused_with=(1,)),
            AlbumImage("b", "two pigs", rank=1, margin=0.125),
            AlbumImage("c", "Two pigs.", rank=1, margin=0.5),
            AlbumImage("d", "a pig", rank=2, margin=-0.25, is_distinct=True, copy_of=0),
        ],
        num_compared=3,
        copy_threshold=0.97,
    )
    text = " ".join(Parts(render_album(images(4), album)).text.split())
    assert "1 of 3 images have a caption that no other image has, and 0 of these captions rank the image first" in text
    assert "Images 1 and 4 are copies and share a caption." in text
    assert "rank 2 of 3 margin -0.250 also fits image 2" in text
    assert "rank 1 of 3 margin +0.500 same caption as another image" in text
    assert text.endswith("copy of image 1")
    alone = render_album(images(1), Album([AlbumImage("a", "a pig", rank=1, is_distinct=True)], 1, 1.0))
    assert "margin" not in alone
    assert "copies" not in alone
    with pytest.raises(ValueError, match="4 captions for 2 images"):
        render_album(images(2), album)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_captions_and_names_are_escaped(text):
    pictures = images(2)
    compared = render_comparison(pictures, {text: [Finding(text, 2, 1)] * 2})
    chosen = render_album(pictures, Album([AlbumImage(text, text, rank=1, margin=0.1, is_distinct=True)] * 2, 2, 1.0))
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
