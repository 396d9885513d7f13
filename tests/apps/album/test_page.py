"""The album's HTML: every caption with its rank. Hostile texts: tests/security/test_pages.py."""

import re
from html.parser import HTMLParser

import pytest
from PIL import Image

from hf_captionrl.apps.album.album import Album, AlbumImage
from tests.browser import CHROMIUM, Browser


class Parts(HTMLParser):
    """All text."""

    def __init__(self, html):
        super().__init__()
        self.text = ""
        self.feed(html)

    def handle_data(self, data):
        self.text += data


def made(number=4):
    images = [AlbumImage(f"{n}.png", f"a pig {n}", rank=1, margin=0.1, is_distinct=True) for n in range(number)]
    images[1] = AlbumImage(
        "1.png", "=a pig", old="the pig", rank=2, margin=-0.1, confused_with=(0,), meets_constraints=False
    )
    images[2] = AlbumImage("2.png", "", unreadable="it is truncated")
    return Album(images, number, shared={"g": ("a pig",)})


def pictures(number=4):
    return [Image.new("RGB", (30 + n, 20), (n, 90, 40)) for n in range(number)]


@pytest.fixture
def report(tmp_path):
    """The page of an album, and the texts of its cards."""

    def write(album, pictures, **settings):
        page = album.to_html(tmp_path / "page.html", pictures, **settings).read_text(encoding="utf-8")
        return page, [" ".join(Parts(card).text.split()) for card in page.split("<article>")[1:]]

    return write


def test_page_has_cards_shared_phrases_and_an_escaped_title(report):
    page, cards = report(made(), pictures(), title="My <album>")
    assert cards == [
        "0.png a pig 0 rank 1 of 4",
        "1.png =a pig before: the pig rank 2 of 4; also fits 0.png does not meet the constraints on length and words",
        "2.png it is truncated",
        "3.png a pig 3 rank 1 of 4",
    ]
    assert re.findall(r'<img [^>]*width="(\d+)"', page) == ["30", "31", "33"]
    assert "no pictures of" not in page
    assert "My &lt;album&gt;" in page
    assert "<b>g</b>: shared phrases <b>a pig</b>." in " ".join(page.split())
    assert "default-src 'none'" in page
    assert "<script" not in page
    assert "<textarea" not in page


IN_VIEW = """(() => { const b = document.querySelector('article img').getBoundingClientRect();
    return b.height > 100 && b.top >= 0 && b.bottom <= innerHeight; })()"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_first_photograph_is_in_view_and_all_texts_have_contrast(tmp_path):
    photographs = [Image.new("RGB", (1200, 900), (n, 90, 40)) for n in range(4)]
    path = made().to_html(tmp_path / "page.html", photographs, title="A long name " * 4)
    with Browser(1280, 900) as page:
        page.open(path.as_uri())
        assert page.evaluate(IN_VIEW)
        assert page.pale() == []
        page.phone()
        page.open(path.as_uri())
        assert page.evaluate(IN_VIEW)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.pale() == []
        page.evaluate("document.querySelector('.id').style.color = '#999'")
        assert len(page.pale(["light"])) == 1, "the negative control"
        assert page.problems() == []
