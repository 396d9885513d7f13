"""The page of an album in a real browser: filters, editing with keys, export; and what it contains without one."""

import json
import re

import pytest
from PIL import Image

from hf_captionrl.album.album_result import Album, AlbumImage
from hf_captionrl.album.report_page import render_report, write_report
from hf_captionrl.album.shared_phrases import GroupFacts
from tests.browser import CHROMIUM, Browser


def made(number=4):
    images = [AlbumImage(f"{n}.png", f"a pig {n}", rank=1, margin=0.1, is_distinct=True) for n in range(number)]
    images[1] = AlbumImage(
        "1.png", "=a pig", old="the pig", rank=2, margin=-0.1, confused_with=(0,), problems=("ambiguous",)
    )
    images[2] = AlbumImage("2.png", "", unreadable="it is truncated")
    return Album(images, number, 0.97, shared=[GroupFacts("g", 3, ("a pig",), (("red", 2),))])


def pictures(number=4):
    return [Image.new("RGB", (30 + n, 20), (n, 90, 40)) for n in range(number)]


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_report_page_has_cards_shared_phrases_and_an_escaped_title():
    page = render_report(made(), pictures(), title="My <album>")
    data = data_of(page)
    assert [card["image_id"] for card in data["cards"]] == ["0.png", "1.png", "2.png", "3.png"]
    assert data["cards"][1]["confused_with"] == ["0.png"]
    assert data["cards"][2]["picture"] is None
    assert data["cards"][0]["picture"]["width"] == 30
    assert "My &lt;album&gt;" in page
    assert "share <b>a pig</b>; what varies: red (2)" in " ".join(page.split())
    assert "default-src 'none'" in page


def test_large_albums_show_problems_first():
    page = render_report(made(), pictures(), max_images=2)
    assert [card["image_id"] for card in data_of(page)["cards"]] == ["0.png", "1.png"]
    assert "leaves out 2 images" in page
    page = render_report(made(), pictures(), max_images=1)
    assert [card["image_id"] for card in data_of(page)["cards"]] == ["1.png"]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_editing_with_keys(tmp_path):
    path = write_report(tmp_path / "page.html", made(), pictures())
    with Browser() as page:
        page.open(path.as_uri())
        count = "document.querySelector('#count').value"
        assert page.evaluate(count) == "4 of 4 shown"
        page.evaluate(
            "(() => { const s = document.querySelector('#problem'); s.value = 'ambiguous';"
            " s.dispatchEvent(new Event('input')); })()"
        )
        assert page.evaluate(count) == "1 of 4 shown"
        assert page.evaluate("document.querySelector('.old').innerText") == "the pig"
        press = "document.dispatchEvent(new KeyboardEvent('keydown', {key: '%s', bubbles: true}))"
        page.evaluate("document.querySelector('article').focus()")
        page.evaluate("document.activeElement." + (press % "e").removeprefix("document."))
        assert page.evaluate("document.querySelector('textarea').value") == "=a pig"
        page.evaluate(
            "(() => { const box = document.querySelector('textarea'); box.value = 'a pig 0';"
            " box.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'})); })()"
        )
        # The edited text is that of another image; the scorer has not read it.
        page.evaluate(
            "(() => { const s = document.querySelector('#problem'); s.value = 'edited';"
            " s.dispatchEvent(new Event('input')); })()"
        )
        assert page.evaluate(count) == "1 of 4 shown, 1 edited"
        assert "duplicate" in page.evaluate("document.querySelector('article').innerText")
        # What an export contains.
        page.evaluate(
            "window.saved = []; URL.createObjectURL = (blob) => { window.saved.push(blob); return '#'; };"
            " URL.revokeObjectURL = () => {};"
        )
        page.evaluate("document.querySelector('#jsonl').click()")
        page.evaluate("window.saved[0].text().then((text) => { window.text = text; })")
        page.wait("window.text !== undefined")
        rows = [json.loads(line) for line in page.evaluate("window.text").splitlines()]
        assert rows[1] == {"image_id": "1.png", "caption": "a pig 0"}
        assert page.problems() == []
        # Edits are there after a reload.
        page.open(path.as_uri())
        assert page.evaluate(count) == "4 of 4 shown, 1 edited"
