"""The gallery is self-contained, and captions cannot inject HTML."""

import base64
import hashlib
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from hf_captionrl.evaluation.pages import (
    GalleryCaption,
    GalleryItem,
    Mark,
    split_at_marks,
    write_gallery,
)

HOSTILE = [
    "<script>document.title = 'owned'</script>",
    '"><img src=http://example.test/a onerror="document.title=\'owned\'">',
    "' onmouseover='document.title=1' x='",
    "{{7*7}} {% raw %} ${7*7} <%= 7*7 %>",
    "</script></style></title><link rel=stylesheet href=http://example.test/b>",
    "\u202eright to left \u05e9\u05dc\u05d5\u05dd",
    "x" * 3000,
    "&lt;b&gt; \x00 \ud83d \u2028",
    "javascript:alert(1) url(http://example.test/c)",
    " ",
]


PIGS = "two small pigs on a blue background"


def make_item(index=0, captions=None, **changes):
    mle = GalleryCaption("MLE", "a pig", [Mark("pig", "right", 2, 5)], 12, 100)
    marks = [Mark("two", "right", 0, 3), Mark("pigs", "right", 10, 14), Mark("on blue background", "wrong", 15, 35)]
    smile = GalleryCaption("SMILE", PIGS, marks, 1, 100)
    image = Image.new("RGB", (72, 72), (index * 5 % 256, 100, 200))
    item = GalleryItem(image, f"test-{index}", captions or [mle, smile], ["a pig", "some pigs"])
    return replace(item, **changes)


def marked(text="a blue pig"):
    marks = [Mark("a", "right", 0, 1), Mark("blue", "wrong", 2, 6), Mark("large", "wrong")]
    return GalleryCaption("SR", text, marks, 2, 3)


def hostile_items():
    """Hostile texts as names of methods, captions, claims, ids and references."""
    for i, text in enumerate(HOSTILE):
        claims = [Mark(text, "right", 0, len(text)), Mark(HOSTILE[i - 1], "wrong")]
        captions = [GalleryCaption(HOSTILE[0], text, claims, 1), GalleryCaption("B", HOSTILE[i - 1])]
        if len(text) > 6:
            captions.append(marked(text))
        yield make_item(i, captions, image_id=text, references=HOSTILE)


class Page(HTMLParser):
    """Tags with their attributes, list items with their class, and the text outside of scripts and styles."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.items, self.text, self.open = [], [], "", []
        self.feed(Path(path).read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style", "li"):
            self.open.append(tag)
        if tag == "li":
            self.items.append([dict(attrs).get("class"), ""])

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data):
        if self.open[-1:] == ["li"]:
            self.items[-1][1] += data
        if self.open[-1:] in ([], ["li"]):
            self.text += data


SOURCES = ("src", "href", "srcset", "action", "data", "poster", "background")


def resources(path):
    """Everything that a browser would fetch for the page."""
    found = []
    for _, attributes in Page(path).tags:
        found += [v for k, v in attributes.items() if k in SOURCES]
    style = "".join(re.findall(r"<style>(.*?)</style>", Path(path).read_text(encoding="utf-8"), re.DOTALL))
    return found + re.findall(r"url\(([^)]*)\)|@import\s+([^;]+)", style)


def embedded(path):
    """The first image of the page."""
    return Image.open(io.BytesIO(base64.b64decode(resources(path)[0].partition(",")[2])))


def test_page_fetches_nothing(tmp_path):
    path = write_gallery(tmp_path / "gallery.html", [make_item(i) for i in range(3)], "Title", note="Note.")
    found = resources(path)
    assert len(found) == 3
    assert all(source.startswith("data:image/png;base64,") for source in found)
    path.write_text("<style>b {background: url(http://x.test/y)}</style><img src='http://x.test/z'>")
    assert len(resources(path)) == 2  # negative control


def test_every_text_is_shown(tmp_path):
    page = Page(write_gallery(tmp_path / "g.html", [make_item(i) for i in range(2)], "A title", note="A note."))
    text = " ".join(page.text.split())
    for piece in "A title|A note.|test-0|test-1|MLE|12 of 100|1 of 100|2 references|some pigs".split("|"):
        assert piece in text
    assert PIGS in text
    classes = [attributes.get("class") for _, attributes in page.tags]
    assert classes.count("right") == 2 * 3 + 1  # the legend has one more
    assert classes.count("wrong") == 2 + 1


def test_texts_are_escaped(tmp_path):
    path = write_gallery(tmp_path / "g.html", list(hostile_items()), HOSTILE[0], note=HOSTILE[4])
    page = Page(path)
    assert [tag for tag, _ in page.tags].count("script") == 0
    assert [tag for tag, _ in page.tags].count("img") == len(HOSTILE)
    assert not [t for t, a in page.tags for k in a if k.startswith("on") or k == "style"]
    assert all(source.startswith("data:") for source in resources(path))
    for text in HOSTILE[:7]:
        assert " ".join(text.split()) in " ".join(page.text.split())
    assert "49" not in page.text
    assert "(empty caption)" in page.text


def test_policy_allows_only_the_style_of_the_page(tmp_path):
    html = write_gallery(tmp_path / "g.html", list(hostile_items()), "T").read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html).group(1).replace("&#39;", "'")
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "script-src" not in policy
    assert content_hash(re.search(r"<style>(.*?)</style>", html, re.DOTALL).group(1)) in policy


def content_hash(text):
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@pytest.mark.parametrize(("size", "shown"), [((72, 72), (72, 72)), ((3000, 1000), (512, 171))])
def test_small_images_keep_their_pixels_and_photographs_are_downscaled(tmp_path, size, shown):
    image = Image.effect_noise(size, 90).convert("RGB")
    path = write_gallery(tmp_path / "g.html", [make_item(image=image)], "T")
    found = embedded(path)
    assert found.size == shown
    assert (found.tobytes() == image.tobytes()) is (size == shown)
    assert ('class="pixelated"' in path.read_text(encoding="utf-8")) is (size == shown)
    assert path.stat().st_size < 300_000
    assert image.size == size  # the caller's image is unchanged


def test_marks_are_at_their_positions():
    text = "two pigs left of two mushrooms"
    marks = [Mark("two", "right", 0, 3), Mark("two", "wrong", 17, 20), Mark("pigs", "right", 4, 8)]
    # After the wrong one, which is marked.
    marks += [Mark("left of two", "wrong", 9, 20), Mark("alone", "wrong")]
    pieces = split_at_marks(text, marks)
    assert "".join(piece.text for piece in pieces) == text
    verdicts = [tuple(piece) for piece in pieces if piece.verdict]
    assert verdicts == [("two", "right"), ("pigs", "right"), ("two", "wrong")]
    # Wrong claims are placed first, in any order of the list.
    pieces = split_at_marks("pigs", [Mark("pigs", "right", 0, 4), Mark("pigs", "wrong", 0, 4)])
    assert pieces == [("pigs", "wrong")]


def test_errors_are_named_and_distinguished_by_more_than_colour(tmp_path):
    path = write_gallery(tmp_path / "g.html", [make_item(captions=[marked()])], "T")
    html, text = path.read_text(encoding="utf-8"), " ".join(Page(path).text.split())
    assert '<span class="wrong" title="wrong claim">blue</span>' in html
    assert "Wrong: “blue”, “large”" in text
    lines = re.findall(r"\.(right|wrong) \{[^}]*text-decoration: underline (\w+)", html)
    assert sorted(lines) == [("right", "solid"), ("wrong", "wavy")]


# --- Panels ---------------------------------------------------------------------------------------------------------

CAPTIONS = {
    "SLL": ["a man in a room", "a man in a room", " a man in a room ", "a man", ""],
    "SLE <b>": ["a man reads", "someone & a <script>alert(1)</script>", "it's a room", "a chair", "a book"],
}


@pytest.fixture
def panel(tmp_path):
    image = Image.new("RGB", (20, 10), "red")
    captions = [GalleryCaption(name, samples=texts) for name, texts in CAPTIONS.items()]
    items = [GalleryItem(image, "img<1>", captions, references) for references in (["a <i>man</i>"], [])]
    return write_gallery(tmp_path / "panel.html", items, "Five <samples>", note="n&m")


def test_every_caption_is_shown_and_repetitions_are_marked(panel):
    found = Page(panel)
    first = found.items[:10]
    assert [text for _, text in first] == [c.strip() or "(empty caption)" for cs in CAPTIONS.values() for c in cs]
    assert [kind for kind, _ in first] == [None, "again", "again", None, None] + [None] * 5
    assert found.text.count("3 of 5 distinct") == 2
    assert found.text.count("5 of 5 distinct") == 2
    assert "1 reference" in found.text
    assert "a <i>man</i>" in found.text
    assert "someone & a <script>alert(1)</script>" in found.text
    assert not {tag for tag, _ in found.tags} & {"script", "b", "samples"}
