"""Page and picture of one caption: every number is shown, and captions cannot inject HTML."""

import base64
import hashlib
import io
import json
import re

import pytest
from PIL import Image

from hf_captionrl.apps.explain.explain import (
    CaptionReward,
    explain_caption,
    explanation_json,
    token_pushes,
    visible_token,
    write_explanation,
    write_explanation_picture,
)
from hf_captionrl.utils.io import to_plain
from tests.evaluation.test_pages import HOSTILE, Page, browse, needs_chromium
from tests.tiny import tiny_captioner, tiny_images
from tests.tolerances import within

REWARD = CaptionReward(-0.25, -1.5, "the mean reward of 8 sampled captions", 2, 7, "scenes:clip-reward")


@pytest.fixture(scope="module")
def seen():
    """A view and its image."""
    image = tiny_images(1)[0]
    return explain_caption(tiny_captioner("blip"), image, "a red house with a red fish"), image


def test_every_number_is_on_the_page(seen, tmp_path):
    view, image = seen
    path = write_explanation(
        tmp_path / "e.html", view, image, "Title", image_name="one.png", note="By X.", reward=REWARD
    )
    page = Page(path)
    text = " ".join(page.text.split())
    _, pushes = token_pushes(view, 1.25)
    for token, push in zip(view.tokens, pushes, strict=True):
        row = f"{token.text} {token.mle_loss:.2f} {100 * token.mle_probability:.1f} % {token.smile_loss:.2f}"
        assert row in text
        assert f"{100 * token.outside:.1f} % {push:+.3f}" in text
    for said in ("Title", "By X.", "one.png", "rank 2 of 7", "A = +1.250", "-0.250 nats", view.caption, "8 sampled"):
        assert said in text
    assert f"{view.mle_loss:.2f} nats per token" in text
    assert f"{view.smile_loss:.2f} nats per token" in text
    assert text.count('(first_token="mle")') == 1
    without = Page(write_explanation(tmp_path / "f.html", view, image, "Title"))
    assert "Advantage" not in without.text
    assert f"{pushes[0]:+.3f}" not in without.text


def test_links_have_targets_and_bars_have_the_width_of_their_numbers(seen, tmp_path):
    view, image = seen
    page = Page(write_explanation(tmp_path / "e.html", view, image, "T"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    targets = {attributes["href"] for tag, attributes in page.tags if tag == "a"}
    assert targets == {f"#token-{number}" for number in range(1, len(view.tokens) + 1)}
    assert {target[1:] for target in targets} <= set(ids)
    widths = [float(attributes["width"]) for tag, attributes in page.tags if tag == "rect"]
    longest = max(token.mle_loss for token in view.tokens)
    first = [view.tokens[0].mle_loss / longest, view.tokens[0].smile_loss / longest, view.tokens[0].outside]
    assert widths[:3] == within([100 * share for share in first], 0.01)
    assert all(0 <= width <= 100 for width in widths)


def test_page_has_labels_for_screen_readers(seen, tmp_path):
    view, image = seen
    page = Page(write_explanation(tmp_path / "e.html", view, image, "T", image_name="one.png"))
    assert [a["alt"] for tag, a in page.tags if tag == "img"] == ["one.png"]
    assert all(a.get("aria-hidden") == "true" for tag, a in page.tags if tag == "svg")
    assert len([1 for tag, a in page.tags if tag == "a" and "loss" in a.get("aria-label", "")]) == len(view.tokens)
    (region,) = [a for _, a in page.tags if a.get("role") == "region"]
    assert region["tabindex"] == "0"
    assert region["aria-labelledby"] in [a.get("id") for _, a in page.tags]
    # In words, not only by colour.
    assert page.text.count("not in the caption") > len(view.tokens)
    assert all(a["scope"] in ("row", "col") for tag, a in page.tags if tag == "th")


def hostile_view(text):
    from dataclasses import replace

    view = explain_caption(tiny_captioner("blip"), tiny_images(1)[0], "a red fish")
    other = replace(view.tokens[0].mle_top[0], text=text)
    tokens = [replace(token, text=text, mle_top=(other,), smile_top=(other,)) for token in view.tokens]
    return replace(view, caption=text, subset=(text,), tokens=tuple(tokens))


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_captions_and_tokens_are_escaped(text, tmp_path):
    reward = CaptionReward(-1.0, 0.0, text, 1, 2, text)
    path = write_explanation(
        tmp_path / "e.html", hostile_view(text), tiny_images(1)[0], text, image_name=text, note=text, reward=reward
    )
    page = Page(path)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 0
    assert tags.count("img") == 1
    assert tags.count("style") == 1
    assert tags.count("link") == 0
    assert not [key for _, attributes in page.tags for key in attributes if key.startswith("on") or key == "style"]
    fetched = [v for _, a in page.tags for k, v in a.items() if k in ("src", "href", "srcset", "action", "data")]
    assert all(value.startswith(("data:image/png;base64,", "#token-")) for value in fetched)
    assert "49" not in re.sub(r"[\d.]+ ?%?", "", page.text)
    assert write_explanation_picture(tmp_path / "e.png", hostile_view(text), reward=reward).stat().st_size > 0


def test_policy_allows_only_the_style_of_the_page(seen, tmp_path):
    view, image = seen
    html = write_explanation(tmp_path / "e.html", view, image, "T").read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html).group(1)
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert f"style-src 'sha256-{digest}'" in policy
    assert "script-src" not in policy
    assert "unsafe" not in policy


def test_picture_must_be_a_png(seen, tmp_path):
    view, _ = seen
    path = write_explanation_picture(tmp_path / "e.png", view, reward=REWARD)
    shown = Image.open(io.BytesIO(path.read_bytes()))
    assert shown.format == "PNG"
    assert shown.width > 1500
    assert path.read_bytes() == write_explanation_picture(tmp_path / "again.png", view, reward=REWARD).read_bytes()
    with pytest.raises(ValueError, match=r"ends in \.png"):
        write_explanation_picture(tmp_path / "e.svg", view)


def test_json_contains_every_number_in_full_precision(seen):
    view, _ = seen
    found = json.loads(json.dumps(to_plain(explanation_json(view, REWARD))))
    assert found["mle_loss"] == view.mle_loss
    assert found["tokens"][1]["mle_top"][0]["probability"] == view.tokens[1].mle_top[0].probability
    assert found["reward"]["advantage"] == 1.25
    assert (found["reward"]["weights"], found["reward"]["pushes"]) == token_pushes(view, 1.25)
    assert explanation_json(view)["reward"] is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" pig", "pig"), (" ", "␣"), ("\n", "\\n"), ("\x07", "\\x07"), ("é", "é"), ("\ud83d", "\\ud83d")],
)
def test_invisible_tokens_are_shown(text, shown):
    assert visible_token(text) == shown


@needs_chromium
def test_browser_applies_the_style(seen, tmp_path):
    view, image = seen
    path = write_explanation(tmp_path / "e.html", view, image, "Seen")
    assert "<title>Seen</title>" in browse(path, tmp_path / "profile")
