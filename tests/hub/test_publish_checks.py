"""Forbidden content of cards: links that execute code in any notation, local paths, and keys of any service."""

import contextlib
import json
import re
import secrets
import string
import time
from dataclasses import replace

import pytest
from markdown_it import MarkdownIt

from hf_captionrl.hub import check_card, render_model_card
from hf_captionrl.hub.push import check_secret, check_text, redact
from hf_captionrl.utils.io import escape_markdown
from tests.hub.folders import FACTS, make_results

CARD = "---\nlicense: mit\n---\n\nA card.\n\n{}\n"
HOME = "/" + "home"  # concatenated, because no file of the project may contain a local path
LINK, PATH, HTML = r"outside its folder.*https://", r"local path\. Use the name", "HTML"
REFUSED = [
    ("[x](java&#115;cript:alert(1))", LINK),
    ("[x](javascript&colon;alert(1))", LINK),
    ("[x](java&Tab;script:alert(1))", LINK),
    ("[x](javascript\\:alert(1))", LINK),
    ("[x](%6aavascript:alert(1))", LINK),
    ("[x](JAVASCRIPT:alert(1))", LINK),
    ("[x](\n javascript:alert)", LINK),
    ("![x](data:text/html;base64,AAAA)", LINK),
    ('[x][a]\n\n[a]: javascript:alert "a title"', LINK),
    ("| a |\n|--|\n| [x](javascript:a) |", LINK),
    ("$[x](javascript:a)$", LINK),
    ("![picture](&#47;etc/passwd)", LINK),
    ("[x](%2e%2e/secret)", LINK),
    (f"Trained on {HOME}/ann/photos.", PATH),
    (f'```python\nopen("{HOME}/ann/x")\n```', PATH),
    ("The images lie in /data/photos.", PATH),
    ("on D:\\photos\\a", PATH),
    ("from \\\\server\\share", PATH),
    ("file:///photos", PATH),
    ("``` a`b\n<script>alert(1)</script>\n```", HTML),
    ("```\na\n``` x\n```\n<script>alert(1)</script>", HTML),
    ("```\na\n ```\n<script>alert(1)</script>\n```", HTML),
    ("    ```\n<script>alert(1)</script>\n    ```", HTML),
    ("> ```\n<script>alert(1)</script>", HTML),
    ("`a\n\n<script>alert(1)</script>`", HTML),
    ("<?php echo 1 ?>", HTML),
    ("<!-- hidden -->", HTML),
    ("It costs $5 <script>alert(1)</script> or $6.", HTML),
    ("$x<img src=y onerror=alert(1)>z$", HTML),
    ("`a` <b onclick=x> `c`", HTML),
    ("![a <b>](x.png)", HTML),
    (">" * 50 + " <script>alert(1)</script>", HTML),
    (">" * 5000 + " a", "nested too deeply"),
    ("[" * 20000, "nested too deeply"),
]
ACCEPTED = [
    *("[a](results.json#part:2)", "<https://example.org/a/b>", "[m](mailto:me@example.org)", "[t](#top)"),
    *(
        "`[x](javascript:a)`",
        "```\n[x](javascript:a)\n```",
        "```\na\n``` x\n<b>\n```",
        "> ```\n> <b>\n> ```",
        "    <b>",
    ),
    *("`` a ` <b> ``", "$a<b$ and $$c<d$$", "\\<b> and &lt;b&gt;", "1 <2, <- 3", "from $5 to $6"),
    *("and/or/not", "https://example.org/a/b", "`a/b/c`, ./a/b and a/b", "12:30", "10 km/h, 5 $/image"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[text[:40] for text, _ in REFUSED])
def test_cards_that_lead_elsewhere_or_hold_html_are_refused(text, message):
    with pytest.raises(ValueError, match=message) as error:
        check_card(CARD.format(text))
    assert "\n" not in str(error.value)
    if message == PATH and "```" not in text:
        with pytest.raises(ValueError, match=r"^dataset_description .*local path"):
            replace(FACTS, dataset_description=text)


@pytest.mark.parametrize("text", ACCEPTED)
def test_links_within_the_folder_code_and_formulas_are_accepted(text):
    assert check_card(CARD.format(text))["license"] == "mit"


@pytest.mark.parametrize(
    "text",
    ["TODO: describe", " ", "[More Information Needed]", "{{ scorer }}", "your-name/model", "ORGANISATION/model"],
)
def test_placeholders_are_refused(text):
    with pytest.raises(ValueError, match=r"^fact is .*a placeholder"):
        check_text("fact", text)
    with pytest.raises(ValueError, match=r"placeholder|is empty"):
        check_card(CARD.replace("A card.", "").format(text))


def random_text(length, alphabet=string.ascii_letters + string.digits):
    # Three characters of each kind, so that the test does not depend on chance.
    return "aB3cD4eF5" + "".join(secrets.choice(alphabet) for _ in range(length - 9))


KEYS = {
    "OpenAI": lambda: f"sk-proj-{random_text(30)}",
    "OpenAI after an underscore": lambda: f"_sk-{random_text(30)}",
    "GitHub": lambda: f"ghp_{random_text(36)}",
    "AWS": lambda: "AKIA" + "ABCD1234" * 2,
    "a private key": lambda: "-----BEGIN OPENSSH PRIVATE KEY-----\\nAAAA\\n-----END OPENSSH PRIVATE KEY-----",
    "an organisation's": lambda: f"api_org_{random_text(34)}",
}


@pytest.mark.parametrize("service", KEYS)
def test_keys_of_any_service_are_found_and_redacted(service):
    key = KEYS[service]()
    with pytest.raises(ValueError, match="contains an access token or a private key") as refused:
        check_secret("results.json", f'{{"note": 1}} {key} and more')
    assert key not in str(refused.value)
    with pytest.raises(ValueError, match="contains an access token"):
        check_secret("results.json", json.dumps({"note": f"first line\n{key}"}))
    crossed = redact(f"before {key} after")
    assert "[removed]" in crossed
    assert crossed.startswith("before ")
    assert crossed.endswith(" after")
    check_secret("text", crossed)


def test_private_key_is_redacted_completely():
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA PRIVATE KEY-----"
    assert redact(f"before\n{key}\nafter") == "before\n[removed]\nafter"
    assert redact(f"before\n{key[:50]}") == "before\n[removed]"


@pytest.mark.parametrize(
    "text",
    [
        "open_clip:ViT-B-32@laion2b_s34b_b79k",
        "hf-captionrl-scenes-blip-mle AutoModelForImageTextToText",
        f"fingerprint: {'0123456789abcdef' * 4}, model_{'0123456789abcdef' * 3}",
        "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhf",
        '"additional_special_tokens": ["<|endoftext|>"], "pad_token_id": 151645',
        "sk-learn-contrib-0-24-intelex, AKIA, ghp_x",
    ],
)
def test_texts_without_a_key_are_accepted(text):
    check_secret("text", text)
    assert redact(text) == text


@pytest.mark.parametrize("unit", ["sk-", "sk-a_", "eyJaaaaaaaaaaa.", "-----BEGIN A", "-----END ", "ya29."])
def test_time_of_the_search_for_keys_is_linear(unit):
    """A megabyte took hours when each start of a pattern read the rest of the text."""
    texts = [unit * (length // len(unit)) for length in (10**4, 10**5)]
    times = []
    for text in texts:
        start = time.process_time()
        with contextlib.suppress(ValueError):
            check_secret("text", text)
        times.append(time.process_time() - start)
    assert times[1] < 30 * times[0] + 0.1


def test_model_cards_are_checked_when_they_are_rendered():
    assert render_model_card(make_results(), FACTS)
    hostile = make_results()
    hostile["versions"] = {"torch": f"built in {HOME}/ann/torch"}
    with pytest.raises(ValueError, match="local path"):
        render_model_card(hostile, FACTS)


@pytest.mark.parametrize(
    "address", ["HTTP://evil.test/x", "ftp://evil.test", "WWW.evil.test", "me@evil.test", "hi @someone"]
)
def test_addresses_and_entities_in_captions_do_not_become_links_or_characters(address):
    text = f"a dog, {address}, and a &lt;cat&gt; &#106; AT&T 12:30"
    shown = escape_markdown(text)
    # GitHub's Markdown makes links of a scheme, `www.` or a mail address in the source.
    assert not re.search(r"https?://|ftp://|www\.|\w@\w|(?<!\\)@", shown, re.IGNORECASE)
    assert MarkdownIt("commonmark").render(shown) == f"<p>{text.replace('&', '&amp;')}</p>\n"
