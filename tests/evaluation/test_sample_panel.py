"""The panel page: its content, its content security policy, and invalid input."""

import base64
import hashlib
import io
import re
from html.parser import HTMLParser

import pytest
from PIL import Image

from hf_captionrl.evaluation.pages import PanelItem, write_panel

CAPTIONS = {
    "SLL": ["a man in a room", "a man in a room", " a man in a room ", "a man", ""],
    "SLE <b>": ["a man reads", "someone & a <script>alert(1)</script>", "it's a room", "a chair", "a book"],
}


class Page(HTMLParser):
    """Tags, list items with their class, and all text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.items, self.text, self.inside = [], [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "li":
            self.items.append([dict(attrs).get("class"), ""])
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "li"

    def handle_data(self, data):
        self.text += data
        if self.inside:
            self.items[-1][1] += data


def item(captions=CAPTIONS, **kwargs):
    return PanelItem(Image.new("RGB", (20, 10), "red"), "img<1>", captions, **kwargs)


@pytest.fixture
def page(tmp_path):
    path = write_panel(
        tmp_path / "panel.html", [item(references=["a <i>man</i>"]), item()], "Five <samples>", note="n&m"
    )
    return path.read_text(encoding="utf-8")


def test_every_caption_is_shown_and_repetitions_are_marked(page):
    found = Page(page)
    first = found.items[:10]
    assert [text for _, text in first] == [c.strip() or "(empty caption)" for cs in CAPTIONS.values() for c in cs]
    assert [kind for kind, _ in first] == [None, "again", "again", None, None] + [None] * 5
    assert found.text.count("3 of 5 distinct") == 2
    assert found.text.count("5 of 5 distinct") == 2
    assert "1 reference" in found.text
    assert "a <i>man</i>" in found.text


def test_captions_are_escaped(page):
    found = Page(page)
    names = {tag for tag, _ in found.tags}
    assert not names & {"script", "b", "samples"}
    assert "someone & a <script>alert(1)</script>" in found.text
    assert "<script" not in page
    assert not any(key.startswith("on") for _, attributes in found.tags for key in attributes)


def test_policy_allows_only_the_style_of_the_page_and_embedded_images(page):
    policy = next(a["content"] for tag, a in Page(page).tags if a.get("http-equiv") == "Content-Security-Policy")
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "script-src" not in policy
    sources = [a["src"] for tag, a in Page(page).tags if tag == "img"]
    with Image.open(io.BytesIO(base64.b64decode(sources[0].split(",")[1]))) as image:
        assert image.getpixel((0, 0)) == (255, 0, 0)
    assert "http:" not in page
    assert "https:" not in page


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "no items"),
        ([item({})], "captions by {}"),
        ([item({"SLL": []})], "'SLL': 0"),
        ([item(), item({"SLL": ["a man"]})], "has captions by {'SLL': 1}"),
    ],
)
def test_invalid_items_are_refused(tmp_path, items, message):
    with pytest.raises(ValueError, match=message):
        write_panel(tmp_path / "p.html", items, "t")
    assert not list(tmp_path.iterdir())
