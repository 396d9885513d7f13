"""The album's HTML: every caption with its rank and find. Hostile texts: tests/security/test_pages.py."""

import csv
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from PIL import Image

from hf_captionrl.apps.album.album import Album, AlbumImage
from hf_captionrl.apps.album.assignment import Finding
from hf_captionrl.apps.album.page import (
    render_album,
    render_comparison,
    write_report,
)
from hf_captionrl.apps.album.phrases import GroupFacts
from hf_captionrl.apps.album.sources import AlbumSource, read_captions_for
from hf_captionrl.scenes import load_scenes
from hf_captionrl.scenes.truth_checker import check
from tests.browser import CHROMIUM, Browser


class Parts(HTMLParser):
    """Attributes of the cells, sources of the pictures, and all text."""

    def __init__(self, html):
        super().__init__()
        self.cells, self.text, self.sources = [], "", []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.sources.append(dict(attributes)["src"])
        if tag == "td":
            self.cells.append(dict(attributes))

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


def test_false_captions_are_not_green_where_facts_are_known():
    rows = load_scenes(num_train=0, num_validation=0, num_test=15)["test"]
    true = rows[0]["captions"][0]
    assert not check(true, rows[0]["facts"]).wrong
    other = next(text for text in rows["captions"][1:] if check(text[0], rows[0]["facts"]).wrong)[0]
    facts = [rows[0]["facts"], rows[0]["facts"], None]
    found = [Finding(text, 1, row) for row, text in enumerate((true, other, other))]
    shown = render_comparison(images(3), {"MLE": found}, facts=facts, notes=["<b>.png cannot be used."])
    album = Album([AlbumImage(str(n), one.caption, rank=1, margin=0.1) for n, one in enumerate(found)], 3, 1.0)
    cards = render_album(images(3), album, facts=facts)
    for html in (shown, cards):
        assert re.findall(r'class="rank (\w+)"', html) == ["first", "far", "first"]
        assert html.count("no false claim") == 1
        for claim in check(other, rows[0]["facts"]).wrong:
            assert html.count(claim.text) >= 1
    assert "finds 3 of 3; 1 of 2 false" in Parts(shown).text
    assert "&lt;b&gt;.png cannot be used. The other images are used." in shown
    assert "false" not in render_comparison(images(3), {"MLE": found})


def made(number=4):
    images = [AlbumImage(f"{n}.png", f"a pig {n}", rank=1, margin=0.1, is_distinct=True) for n in range(number)]
    images[1] = AlbumImage(
        "1.png", "=a pig", old="the pig", rank=2, margin=-0.1, confused_with=(0,), problems=("ambiguous",)
    )
    images[2] = AlbumImage("2.png", "", unreadable="it is truncated")
    return Album(images, number, 0.97, shared=[GroupFacts("g", 3, ("a pig",), (("red", 2),))])


def pictures(number=4):
    return [Image.new("RGB", (30 + n, 20), (n, 90, 40)) for n in range(number)]


@pytest.fixture
def report(tmp_path):
    """The page of an album, and its data."""

    def write(album, pictures, **settings):
        page = write_report(tmp_path / "page.html", album, pictures, **settings).read_text(encoding="utf-8")
        return page, json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])

    return write


def test_report_page_has_cards_shared_phrases_and_an_escaped_title(report):
    page, data = report(made(), pictures(), title="My <album>")
    assert data["cards"][1]["confused_with"] == ["0.png"]
    assert {row: picture["width"] for row, picture in data["pictures"].items()} == {"0": 30, "1": 31, "3": 33}
    assert "no pictures of" not in page
    assert "My &lt;album&gt;" in page
    assert "share <b>a pig</b>; what varies: red (2)" in " ".join(page.split())
    assert "default-src 'none'" in page


def test_pages_of_large_albums_have_all_captions_and_pictures_of_problems_first(report):
    for number, shown in ((1, ["1"]), (2, ["0", "1"])):
        page, data = report(made(), pictures(), max_images=number)
        assert list(data["pictures"]) == shown
        assert [card["image_id"] for card in data["cards"]] == ["0.png", "1.png", "2.png", "3.png"]
        assert f"no pictures of {4 - number} images" in page


SAVE = "window.saved = []; URL.createObjectURL = (blob) => { window.saved.push(blob); return '#'; }; URL.revokeObjectURL = () => {};"


def choose(page, control, value):
    """Set a filter of the page."""
    page.evaluate(
        f"(() => {{ const s = document.querySelector('{control}'); s.value = '{value}'; s.dispatchEvent(new Event('input')); }})()"
    )


def start_editing(page):
    page.evaluate("document.querySelector('article').focus()")
    page.evaluate("document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'e', bubbles: true}))")


def accept(page, text):
    page.evaluate(
        f"(() => {{ const box = document.querySelector('textarea'); box.value = '{text}';"
        " box.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'})); })()"
    )


def exported(page, kind):
    """What a button of the page would download."""
    page.evaluate(SAVE)
    page.evaluate(f"document.querySelector('#{kind}').click()")
    page.evaluate("window.text = undefined; window.saved[0].text().then((text) => { window.text = text; }); 0")
    page.wait("window.text !== undefined")
    return page.evaluate("window.text")


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@needs_chromium
def test_export_has_all_captions_and_quotes_formulas(tmp_path):
    formulas = ["\n=1", "\uff1d1", "\uff0b1", "\uff0d1", "\uff20x", "=1"]
    texts = [*formulas, *(f"a pig {n}" for n in range(6, 130))]
    ids = [f"{n}.png" for n in range(130)]
    images = [AlbumImage(name, text, rank=1, is_distinct=True) for name, text in zip(ids, texts, strict=True)]
    images[100] = replace(images[100], further=(AlbumImage("100.png", "a cow"), AlbumImage("100.png", "=2")))
    path = write_report(tmp_path / "page.html", Album(images, 130, 1.0), pictures(1) * 130, max_images=3)
    with Browser() as page:
        page.open(path.as_uri())
        assert page.evaluate("document.querySelector('#count').value") == "132 of 132 shown"
        for shown, text in ((60, "Show 60 more of 72"), (120, "Show 12 more of 12")):
            assert page.evaluate("document.querySelectorAll('article').length") == shown
            assert page.evaluate("document.querySelector('#more').innerText") == text
            page.click("#more")
        assert page.evaluate("document.querySelectorAll('article').length") == 132
        assert page.evaluate("document.querySelector('#more').checkVisibility()") is False
        # Edit the second caption of an image that has no picture.
        choose(page, "#search", "a cow")
        start_editing(page)
        accept(page, "a calf")
        (tmp_path / "o.jsonl").write_text(exported(page, "jsonl"), encoding="utf-8")
        (tmp_path / "o.csv").write_bytes(exported(page, "csv").encode("utf-8"))
        assert page.problems() == []
    # The command reads both files; those of the table that a spreadsheet would evaluate are quoted, as it writes them.
    expected = [[text] for text in texts]
    expected[100] += ["a calf", "=2"]
    for name in ("o.csv", "o.jsonl"):
        assert read_captions_for(AlbumSource(ids, ids), tmp_path / name) == expected
    Album(images, 130, 1.0).to_csv(tmp_path / "a.csv")
    for name in ("o.csv", "a.csv"):
        with open(tmp_path / name, encoding="utf-8-sig", newline="") as file:
            assert [row["caption"] for row in csv.DictReader(file)][:7] == [*("'" + f for f in formulas), "a pig 6"]


IN_VIEW = """(() => { const b = document.querySelector('article img').getBoundingClientRect();
    return b.height > 100 && b.top >= 0 && b.bottom <= innerHeight; })()"""


@needs_chromium
def test_first_photograph_is_in_view_and_all_texts_have_contrast(tmp_path):
    photographs = [Image.new("RGB", (1200, 900), (n, 90, 40)) for n in range(4)]
    shared = [GroupFacts(f"folder {n}", 3, ("a pig",), (("red", 2),)) for n in range(51)]
    path = write_report(tmp_path / "page.html", replace(made(), shared=shared), photographs, title="A long name " * 4)
    with Browser(1280, 900) as page:
        page.open(path.as_uri())
        assert page.evaluate(IN_VIEW)
        for box in ("details", "details + details"):
            page.click(f"{box} > summary")
        assert not page.evaluate(IN_VIEW), "51 groups are opened: the negative control"
        start_editing(page)
        assert page.pale() == []
        page.phone()
        page.open(path.as_uri())
        assert page.evaluate(IN_VIEW)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.pale() == []
        page.evaluate("document.querySelector('.id').style.color = '#999'")
        assert len(page.pale(["light"])) == 1, "the negative control"


@needs_chromium
@pytest.mark.parametrize("pointer", ["mouse", "finger"])
def test_editing_and_enlarging_without_keys(tmp_path, pointer):
    photographs = [Image.new("RGB", (1200, 900), (n, 90, 40)) for n in range(4)]
    path = write_report(tmp_path / "page.html", made(), photographs)
    with Browser() as page:
        if pointer == "finger":
            page.phone()
        press = page.tap if pointer == "finger" else page.click
        page.open(path.as_uri())
        card = "article[data-key='{}'] ".format
        press(card(0) + ".caption")
        page.evaluate("document.querySelector('textarea').value = 'two cows'")
        press(card(0) + ".editor button")
        assert page.evaluate(f'document.querySelector("{card(0)} .caption").innerText') == "two cows"
        # The second button discards.
        press(card(0) + ".caption")
        page.evaluate("document.querySelector('textarea').value = 'gone'")
        press(card(0) + ".editor button + button")
        # Another caption is pressed while one is edited: the first is saved, the second is edited.
        press(card(0) + ".caption")
        page.evaluate("document.querySelector('textarea').style.height = '400px'")  # what follows moves when it closes
        press(card(3) + ".caption")
        page.wait(
            f'document.querySelectorAll("textarea").length === 1 && document.querySelector("{card(3)} textarea")'
        )
        page.evaluate("document.querySelector('textarea').value = 'Two cows.'")
        press(card(1) + ".caption")
        page.wait(
            f'document.querySelectorAll("textarea").length === 1 && document.querySelector("{card(1)} textarea")'
        )
        rows = [json.loads(line) for line in exported(page, "jsonl").splitlines()]
        assert [row["caption"] for row in rows] == ["two cows", "=a pig", "", "Two cows."]
        # The page names the images with the same text, and shows them enlarged.
        facts = page.evaluate(f'document.querySelector("{card(0)} .rank").innerText')
        assert facts == "edited; the rank is not known duplicate of 3.png"
        press(card(0) + ".rank .link")
        assert page.evaluate("document.querySelector('dialog[open] .id').innerText") == "3.png"
        assert page.evaluate("document.querySelector('dialog .words').innerText") == "Two cows."
        press("#close")
        press(card(0) + ".picture")
        sizes = page.evaluate(
            "[...document.querySelectorAll('dialog img, article img')].map((e) => [e.clientWidth, e.naturalWidth])"
        )
        (small, _), *_, (large, natural) = sizes
        assert large > 1.2 * small if pointer == "mouse" else large >= small
        assert natural == 512
        press("#next")
        assert page.evaluate("document.querySelector('dialog .id').innerText") == "1.png"
        press("#close")
        assert page.evaluate("document.querySelector('dialog').open") is False
        assert page.problems() == []


@needs_chromium
def test_editing_with_keys(tmp_path):
    path = write_report(tmp_path / "page.html", made(), pictures())
    with Browser() as page:
        page.open(path.as_uri())
        count = "document.querySelector('#count').value"
        assert page.evaluate(count) == "4 of 4 shown"
        choose(page, "#problem", "ambiguous")
        assert page.evaluate(count) == "1 of 4 shown"
        assert page.evaluate("document.querySelector('.old').innerText") == "the pig"
        start_editing(page)
        assert page.evaluate("document.querySelector('textarea').value") == "=a pig"
        accept(page, "a pig 0")
        # The edited text is that of another image; the scorer has not read it.
        choose(page, "#problem", "edited")
        assert page.evaluate(count) == "1 of 4 shown, 1 edited"
        assert "duplicate" in page.evaluate("document.querySelector('article').innerText")
        # What an export contains.
        rows = [json.loads(line) for line in exported(page, "jsonl").splitlines()]
        assert rows[1] == {"image_id": "1.png", "caption": "a pig 0"}
        assert page.problems() == []
        # Edits are there after a reload. On a busy machine Chromium gives about one load in 400 an empty storage, and
        # the next load the right one; edits that are lost stay away.
        for _ in range(3):
            page.open(path.as_uri())
            if page.evaluate("localStorage.length"):
                break
        assert page.evaluate(count) == "4 of 4 shown, 1 edited"
        # An edit of another tab is shown, and an edit here adds to it.
        page.evaluate(
            "(() => { const key = Object.keys(localStorage)[0]; localStorage[key] = '[[3, \"a cow\"]]';"
            " window.dispatchEvent(new StorageEvent('storage', {key})); })()"
        )
        assert "a cow" in page.evaluate("document.querySelectorAll('article')[3].innerText")
        assert page.evaluate(count) == "4 of 4 shown, 1 edited"
        start_editing(page)
        page.evaluate("localStorage[Object.keys(localStorage)[0]] = '[[3, \"a hen\"]]'")
        accept(page, "a dog")
        assert page.evaluate(count) == "4 of 4 shown, 2 edited"
        assert page.evaluate("Object.values(localStorage)[0]") == '[[3,"a hen"],[0,"a dog"]]'
