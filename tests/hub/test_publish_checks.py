"""Keys of any service are not published; texts are escaped."""

import contextlib
import json
import re
import secrets
import string
import time

import pytest
from markdown_it import MarkdownIt

from hf_captionrl.hub import public_values
from hf_captionrl.hub.push import check_secret
from hf_captionrl.utils.io import escape_markdown


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
    with pytest.raises(ValueError, match="token") as refused:
        check_secret("results.json", f'{{"note": 1}} {key} and more')
    assert key not in str(refused.value)
    with pytest.raises(ValueError, match="token"):
        check_secret("results.json", json.dumps({"note": f"first line\n{key}"}))
    crossed = public_values(f"before {key} after")
    assert "[removed]" in crossed
    assert crossed.startswith("before ")
    assert crossed.endswith(" after")
    check_secret("text", crossed)


def test_private_key_is_redacted_completely():
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA PRIVATE KEY-----"
    assert public_values(f"before\n{key}\nafter") == "before\n[removed]\nafter"


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
    assert public_values(text) == text


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


@pytest.mark.parametrize(
    "address", ["HTTP://evil.test/x", "ftp://evil.test", "WWW.evil.test", "me@evil.test", "hi @someone"]
)
def test_addresses_and_entities_in_captions_do_not_become_links_or_characters(address):
    text = f"a dog, {address}, and a &lt;cat&gt; &#106; AT&T 12:30"
    shown = escape_markdown(text)
    # GitHub's Markdown makes links of a scheme, `www.` or a mail address in the source.
    assert not re.search(r"https?://|ftp://|www\.|\w@\w|(?<!\\)@", shown, re.IGNORECASE)
    assert MarkdownIt("commonmark").render(shown) == f"<p>{text.replace('&', '&amp;')}</p>\n"
