"""Captions of somebody who wants the reader's browser to do something: set `window.owned`, or fetch from `a.example`."""

from dataclasses import replace

import markdown
import pytest
from PIL import Image

from hf_captionrl.apps.album.album import Album, AlbumImage
from hf_captionrl.apps.truematch.review import TEMPLATES as REVIEW
from hf_captionrl.evaluation.pages import GalleryCaption, GalleryItem, Mark, render_html, write_gallery
from hf_captionrl.hub.cards import render_model_card
from tests.browser import CHROMIUM, Browser
from tests.hub.folders import FACTS, make_results

_DO = "window.owned=1"
_AWAY = "http://a.example"

CAPTIONS = {
    "script": f"<script>{_DO}</script>",
    "end of script": f"</script><script>{_DO}</script>",
    "comment in script": f"<!--<script>{_DO}</script>-->",
    "end of JSON": f'"}}];{_DO};//',
    "line separator in JSON": f"\u2028{_DO}\u2029//",
    "template literal": f"`${{{_DO}}}`",
    "end of style": f"</style><script>{_DO}</script>",
    "style": f"<style>@import '{_AWAY}/a.css'; *{{background:url({_AWAY}/b)}}</style>",
    "end of title": f"</title><script>{_DO}</script>",
    "image that fails": f'<img src=x onerror="{_DO}">',
    "double quote": f'"><img src=x onerror={_DO}>',
    "event in an attribute": f'" autofocus onfocus="{_DO}" tabindex="0" x="',
    "svg": f"<svg onload={_DO}>",
    "details": f"<details open ontoggle={_DO}>x</details>",
    "iframe": f'<iframe srcdoc="<script>parent.{_DO}</script>"></iframe>',
    "link": f'<a href="javascript:{_DO}">click</a>',
    "link of Markdown": f"[click](javascript:{_DO}) ![p]({_AWAY}/d.png) <javascript:{_DO}>",
    "image of Markdown": f'![x]({_AWAY}/e.png "t" onerror={_DO})',
    "code of Markdown": f"`` ` ``` \n<script>{_DO}</script>\n",
    "stylesheet": f"<link rel=stylesheet href={_AWAY}/g.css>",
    "refresh": f'<meta http-equiv=refresh content="0;url={_AWAY}/h">',
    "base": f"<base href={_AWAY}/>",
    "template of Jinja": f"{{{{ ''.__class__ }}}}{{% set x = 1 %}}<script>{_DO}</script>",
    "entities": f"&lt;script&gt;{_DO}&lt;/script&gt; &#60;img src=x onerror={_DO}&#62;",
    "right to left": f"\u202e<script>{_DO}</script>\u202c",
    "null": f"<scr\x00ipt>{_DO}</scr\x00ipt><img src=x one\x00rror={_DO}>",
    "half a surrogate pair": f"\ud83d<script>{_DO}</script>",
}


pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

TEXTS = list(CAPTIONS.values())
ALL = " ".join(TEXTS)
PICTURE = Image.new("RGB", (8, 8), (10, 90, 200))
DATA = "data:image/gif;base64,R0lGODlhAQABAAAAACw="


@pytest.fixture(scope="module")
def browser():
    with Browser() as running:
        running.call("Network.enable")
        yield running


def gallery(folder):
    items = [
        GalleryItem(PICTURE, text, [GalleryCaption(text, text, [Mark(text, "wrong", 0, 2)], 1, 2)], [text])
        for text in TEXTS
    ]
    return write_gallery(folder / "page.html", items, ALL, note=ALL)


def review(folder):
    images = {str(n): {"image_id": text, "source": DATA, "captions": [text]} for n, text in enumerate(TEXTS)}
    bags = [{"id": text, "similarity": 0.5, "images": list(images)} for text in TEXTS]
    decisions = {text: {"decision": "drop", "reason": "other"} for text in TEXTS}
    reasons = {"other": ALL}
    data = {"bags": bags, "images": images, "reasons": reasons, "decisions": decisions, "fingerprint": ALL}
    values = {"title": ALL, "reasons": reasons, "data": data}
    page = render_html(REVIEW, "review", sort_keys=False, **values)
    (folder / "page.html").write_text(page, encoding="utf-8", errors="replace")
    return folder / "page.html"


def album_report(folder):
    images = [AlbumImage(text, text, old=text[::-1], rank=2, confused_with=(0,)) for text in TEXTS]
    found = Album(images, len(TEXTS), shared={text: (text,) for text in TEXTS})
    return found.to_html(folder / "page.html", [PICTURE] * len(TEXTS), title=TEXTS[0])


def model_card(folder):
    """A Hub that would clean nothing: python-markdown hands all HTML on."""
    accepted = " ".join(text for text in TEXTS if "{{" not in text)  # which a card refuses as a placeholder
    results = make_results()
    results["rows"][1]["name"] = accepted
    facts = replace(FACTS, dataset_description=accepted, prompt=accepted, row=accepted)
    text = render_model_card(results, facts).split("\n---\n", 1)[1]
    html = markdown.markdown(text, extensions=["tables", "fenced_code"])
    (folder / "page.html").write_text(f"<!doctype html><meta charset=utf-8>{html}", "utf-8", "replace")
    return folder / "page.html"


def requested(browser):
    """Where the page tried to get something from; what stands in the page itself does not count."""
    addresses = [
        event["params"]["request"]["url"] for event in browser.events if event["method"] == "Network.requestWillBeSent"
    ]
    return [address for address in addresses if not address.startswith(("file:", "data:", "blob:", "about:"))]


def outcome(browser, page):
    """What the attacks reached."""
    browser.events.clear()
    browser.open(page.as_uri())
    # Everything that can have the focus, or wants to be clicked, gets it.
    browser.evaluate(
        "document.querySelectorAll('a[href^=\"javascript:\" i], [onclick], [onfocus], [onmouseover]')"
        ".forEach((e) => { e.focus(); e.click(); e.dispatchEvent(new MouseEvent('mouseover')); })"
    )
    state = browser.evaluate(
        "new Promise((done) => setTimeout(() => done([typeof window.owned, location.protocol]), 50))"
    )
    return state, requested(browser), browser.problems()


PAGES = [gallery, review, album_report, model_card]


@pytest.mark.parametrize("write", PAGES, ids=[page.__name__ for page in PAGES])
def test_captions_do_nothing(write, browser, tmp_path):
    state, addresses, problems = outcome(browser, write(tmp_path))
    assert state == ["undefined", "file:"]
    assert addresses == []
    assert problems == []  # nor did the page's policy have to stop anything


@pytest.mark.parametrize("name", ["script", "image that fails", "details", "iframe", "link"])
def test_unescaped_they_would(name, browser, tmp_path):
    html = f"<!doctype html>{CAPTIONS['stylesheet']}<p>{CAPTIONS[name]}</p>"
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    state, addresses, problems = outcome(browser, tmp_path / "page.html")
    assert state[0] == "number"
    assert f"{_AWAY}/g.css" in addresses
    assert problems  # by the browser's rules, names of other machines are unknown


def test_behind_the_policy_an_attack_is_stopped_and_said(browser, tmp_path):
    page = gallery(tmp_path)
    html = page.read_text(encoding="utf-8").replace("<body", f"<body><p>{CAPTIONS['script']}</p><div", 1)
    (tmp_path / "broken.html").write_text(html, encoding="utf-8")
    state, _, problems = outcome(browser, tmp_path / "broken.html")
    assert state[0] == "undefined"
    assert any("Content Security Policy" in problem for problem in problems)
