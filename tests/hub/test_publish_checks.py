"""Forbidden content of cards: links that execute code in any notation, local paths, and keys of any service."""

import contextlib
import json
import re
import secrets
import string
import time
from dataclasses import replace

import pytest

from hf_captionrl.hub import check_card, render_model_card
from hf_captionrl.hub.push import check_secret, check_text, redact
from hf_captionrl.metrics.table import escape_markdown
from tests.hub.folders import FACTS, make_results

CARD = "---\nlicense: mit\n---\n\nA card.\n\n{}\n"


@pytest.mark.parametrize(
    "text",
    [
        "[x](java&#115;cript:alert(1))",
        "[x](javascript&colon;alert(1))",
        "[x](java&Tab;script:alert(1))",
        "[x](javascript\\:alert(1))",
        "[x](%6aavascript:alert(1))",
        "[x](JAVASCRIPT:alert(1))",
        "[x](\n javascript:alert)",
        "![x](data:text/html;base64,AAAA)",
        "[x](intent:a)",
        '[x][a]\n\n[a]: javascript:alert "a title"',
        "> [a]: javascript:alert",
        "| a |\n|--|\n| [x](javascript:a) |",
        "$[x](javascript:a)$",
        "[x](&#47;etc/passwd)",
        "![picture](/etc/passwd)",
        "[x](%2e%2e/secret)",
    ],
)
def test_links_out_of_the_folder_raise_in_any_notation(text):
    with pytest.raises(ValueError, match=r"outside its folder.*https://"):
        check_card(CARD.format(text))


@pytest.mark.parametrize(
    "text",
    ["[a](results.json#part:2)", "[a](https://example.org/a/b)", "<https://example.org>", "[m](mailto:me@example.org)", "[t](#top)",
     "`[x](javascript:a)`", "```\n[x](javascript:a)\n```"],
)  # fmt: skip
def test_links_within_the_folder_are_accepted(text):
    assert check_card(CARD.format(text))["license"] == "mit"


@pytest.mark.parametrize(
    "text",
    ["TODO: describe", " ", "[More Information Needed]", "{{ scorer }}", "your-name/model", "ORGANISATION/model"],
)
def test_placeholders_raise(text):
    with pytest.raises(ValueError, match=r"^fact is .*a placeholder"):
        check_text("fact", text)
    with pytest.raises(ValueError, match=r"placeholder|is empty"):
        check_card(CARD.replace("A card.", "").format(text))


# Concatenated, because no file of the project may contain a local path.
HOME = "/" + "home"


@pytest.mark.parametrize(
    "text",
    [
        f"Trained on {HOME}/ann/photos.",
        f'```python\nopen("{HOME}/ann/x")\n```',
        "The images lie in /data/photos.",
        "on D:\\photos\\a",
        "from \\\\server\\share",
        "file:///photos",
    ],
)
def test_local_paths_within_a_sentence_raise(text):
    with pytest.raises(ValueError, match=r"local path\. Use the name"):
        check_card(CARD.format(text))
    if "```" not in text and "`" not in text:
        with pytest.raises(ValueError, match="local path"):
            replace(FACTS, dataset_description=text)
        assert check_card(CARD.format("fine"))


@pytest.mark.parametrize(
    "text",
    [
        "and/or/not",
        "https://example.org/a/b",
        "`a/b/c`, ./a/b and a/b",
        "12:30",
        "10 km/h, 5 $/image",
    ],
)
def test_fractions_urls_and_relative_paths_are_not_local_paths(text):
    assert check_card(CARD.format(text))
    check_text("text", f"x {text}")


def random_text(length, alphabet=string.ascii_letters + string.digits):
    # Three characters of each kind, so that the test does not depend on chance.
    return "aB3cD4eF5" + "".join(secrets.choice(alphabet) for _ in range(length - 9))


KEYS = {
    "OpenAI": lambda: f"sk-proj-{random_text(30)}",
    "OpenAI after an underscore": lambda: f"_sk-{random_text(30)}",
    "GitHub": lambda: f"ghp_{random_text(36)}",
    "GitHub, fine-grained": lambda: f"github_pat_{random_text(30)}",
    "AWS": lambda: "AKIA" + "ABCD1234" * 2,
    "AWS, temporary": lambda: "ASIA" + "ABCD1234" * 2,
    "a private key": lambda: "-----BEGIN OPENSSH PRIVATE KEY-----\\nAAAA\\n-----END OPENSSH PRIVATE KEY-----",
    "GitLab": lambda: f"glpat-{random_text(20)}",
    "Google": lambda: f"AIza{random_text(35)}",
    "Slack": lambda: f"xoxb-{random_text(24)}",
    "Stripe": lambda: f"sk_live_{random_text(24)}",
    "npm": lambda: f"npm_{random_text(36)}",
    "an organisation's": lambda: f"api_org_{random_text(34)}",
    "Groq": lambda: f"gsk_{random_text(40)}",
    "Replicate": lambda: f"r8_{random_text(37)}",
    "NVIDIA": lambda: f"nvapi-{random_text(40)}",
    "Azure": lambda: f"AccountKey={random_text(86)}==",
    "JWT": lambda: f"eyJ{random_text(20)}.eyJ{random_text(20)}.{random_text(20)}",
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


@pytest.mark.parametrize(
    "text",
    [
        "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=",
        "open_clip:ViT-B-32@laion2b_s34b_b79k",
        "hf-captionrl-scenes-blip-mle AutoModelForImageTextToText",
        f"fingerprint: {'0123456789abcdef' * 4}, model_{'0123456789abcdef' * 3}",
        "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhf",
        "password reset instructions; the secret: a caption that says more",
        '"additional_special_tokens": ["<|endoftext|>"], "pad_token_id": 151645',
        "hub_token: null, push_to_hub_token=None",
        "sk-learn-contrib-0-24-intelex, AKIA, ghp_x",
    ],
)
def test_texts_without_a_key_are_accepted(text):
    check_secret("text", text)
    assert redact(text) == text


@pytest.mark.parametrize(
    "unit", ["sk-", "sk-a_", "eyJ-", "eyJaaaaaaaaaaa.", "-----BEGIN A", "-----END ", "hf_", "ya29."]
)
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


@pytest.mark.parametrize(
    "text",
    [
        "``` a`b\n<script>alert(1)</script>\n```",
        "```\na\n``` x\n```\n<script>alert(1)</script>",
        "```\na\n ```\n<script>alert(1)</script>\n```",
        "    ```\n<script>alert(1)</script>\n    ```",
        "> ```\n<script>alert(1)</script>",
        "`a\n\n<script>alert(1)</script>`",
        "<?php echo 1 ?>",
        "<!DOCTYPE html>",
        "<![CDATA[x]]>",
        "<!-- hidden -->",
        "It costs $5 <script>alert(1)</script> or $6.",
        "$x<img src=y onerror=alert(1)>z$",
        "`a` <b onclick=x> `c`",
        "![a <b>](x.png)",
        ">" * 50 + " <script>alert(1)</script>",
    ],
)
def test_html_is_found_as_a_browser_reads_it(text):
    with pytest.raises(ValueError, match="HTML"):
        check_card(CARD.format(text))


@pytest.mark.parametrize(
    "text",
    [
        "```\na\n``` x\n<b>\n```",
        "> ```\n> <b>\n> ```",
        "    <b>",
        "`` a ` <b> ``",
        "$a<b$ and $$c<d$$",
        "\\<b> and &lt;b&gt;",
        "1 <2, <- 3",
    ],
)
def test_code_and_escaped_characters_are_not_html(text):
    assert check_card(CARD.format(text))["license"] == "mit"


@pytest.mark.parametrize("text", [">" * 5000 + " a", "[" * 20000, "![" * 5000])
def test_deeply_nested_cards_raise_in_one_line(text):
    with pytest.raises(ValueError, match="nested too deeply"):
        check_card(CARD.format(text))


def test_model_cards_are_checked_when_they_are_rendered(tmp_path):
    facts = replace(FACTS, reward="")
    assert render_model_card(make_results(), facts)
    hostile = make_results()
    hostile["versions"] = {"torch": f"built in {HOME}/ann/torch"}
    with pytest.raises(ValueError, match="local path"):
        render_model_card(hostile, facts)


@pytest.mark.parametrize(
    "address",
    [
        "https://evil.test/x",
        "HTTP://evil.test",
        "ftp://evil.test",
        "www.evil.test",
        "WWW.evil.test",
        "me@evil.test",
        "hi @someone",
    ],
)
def test_urls_in_captions_do_not_become_links(address):
    from markdown_it import MarkdownIt

    shown = escape_markdown(f"a dog, {address}, and a cat")
    # GitHub's Markdown makes links of a scheme, `www.` or a mail address in the source.
    assert not re.search(r"https?://|ftp://|www\.|\w@\w|(?<!\\)@", shown, re.IGNORECASE)
    assert MarkdownIt("commonmark").render(shown) == f"<p>a dog, {address}, and a cat</p>\n"


def test_entities_in_captions_are_not_changed():
    from markdown_it import MarkdownIt

    text = "&lt;b&gt; &#106; AT&T 12:30"
    assert MarkdownIt("commonmark").render(escape_markdown(text)) == f"<p>{text.replace('&', '&amp;')}</p>\n"
