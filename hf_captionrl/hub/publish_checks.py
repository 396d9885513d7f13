"""Rejects content that must not be published: placeholders, secrets, HTML, local paths, and links out of the folder."""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import yaml

__all__ = ["HUB_NAME", "check_card", "check_name", "check_secret", "check_text", "redact"]

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""`owner/name`."""

_PLACEHOLDER = re.compile(
    # TODO only in capitals: "todo" is a Spanish word.
    r"\b(TODO|TBD|FIXME|XXX|ORGANISATION)\b|(?i:more information needed|lorem ipsum|<your|\byour[-_ ](name|org|model|username)\b)"
    r"|\{\{|\{%|^\W*$"
)
_MACHINE_PATH = re.compile(r"^(/|~|[A-Za-z]:[\\/]|\\\\|file:)|(^|/)\.\.(/|$)")
# A local path within a sentence: two parts or more after a space, a quote or a bracket, or a drive.
_DRIVE = r"(?<![\w/])[A-Za-z]:(?:\\{1,2}|/(?!/))\w|(?<![\w\\])\\{2,4}[\w.-]+\\{1,2}\w|\bfile:/"
_PATH_IN_PROSE = re.compile(rf"(?<![\w/:.~)\]}}$-])/(?:[\w@+~.-]|\\_)+/[\w@+~.-]|(?<![\w~])~\w*/[\w.]|{_DRIVE}")
_HOME = re.compile(rf"(?<![\w/:.])/(?:home|Users|root)/[\w.]|{_DRIVE}")
# Prefixes of the keys of services: Hugging Face, OpenAI-like endpoints, GitHub, GitLab, AWS, Google, Slack, Stripe, ...
_TOKEN = re.compile(
    r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}\b|(?<![A-Za-z0-9])sk-(?=[\w-]*?\w{16})(?=[\w-]*\d)[\w-]{20,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}\b|\bgithub_pat_\w{20,}|\bgl[a-z]{2,6}-[\w-]{20,}|\bA(?:KIA|SIA|ROA|IDA)[0-9A-Z]{16}\b"
    r"|\bAIza[\w-]{35}\b|\bya29\.[\w-]{20,}|\bxox[abeoprs]-[\w-]{10,}|\b[rsp]k_(?:live|test)_[A-Za-z0-9]{16,}\b"
    r"|\bnpm_[A-Za-z0-9]{36}\b|\bpypi-[\w-]{40,}|\bdckr_pat_[\w-]{20,}|\bSG\.[\w-]{16,}\.[\w-]{16,}|\bATATT3[\w=-]{20,}"
    r"|\b(?:gsk|r8|xai|nvapi|pplx|tgp_v1|dop_v1|wandb_v1|lin_api|ntn|sntrys|tvly|pat)[_-][\w-]{24,}"
    r"|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(?:.*?-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|.*)",
    re.DOTALL,
)
# Keys of other services: a value assigned to a name such as `api_key`, and a word with a prefix and random characters.
_NAMED_SECRET = re.compile(
    r"(?i)(?:api[_-]?key|access[_-]?key|secret(?:[_-]?key)?|auth[_-]?token|access[_-]?token|hub[_-]?token|password|passwd|bearer)"
    r"[\"']?(?:\s*[:=]\s*|\s+)[\"']?([A-Za-z0-9+/_=.~-]{16,})"
)
_PREFIXED_WORD = re.compile(
    r"(?<![\w/+=.-])(?!sha\d)[A-Za-z][A-Za-z0-9]{1,11}[_-](?:[a-z0-9]{1,8}[_-])?([A-Za-z0-9]{24,})(?![\w/+=])"
)
_MIN_BITS = 3.7
"""Bits per character above which a text of 24 letters and digits counts as random; natural language has about 3."""
# A run of backticks is closed by one of the same length.
_CODE = re.compile(r"^(```|~~~).*?^\1[^\n]*$|(?<!`)(`+)(?!`)[^\n]+?(?<!`)\2(?!`)", re.MULTILINE | re.DOTALL)
# On one line, without spaces next to the dollars: "from $5 to $6" is not a formula.
_FORMULA = re.compile(r"\$\$.*?\$\$|\$(?!\s)[^$\n]+(?<!\s)\$(?!\d)", re.DOTALL)
_HTML = re.compile(r"(?<!\\)<(?!https?://)(?:[A-Za-z][^>\n]*|/[^>\n]*|!--)>?")
_TAG = re.compile(r"(?<!\\)<(?!https?://)[A-Za-z/!][^<>$\n]*>")
_SCHEMES = ("", "http", "https", "mailto")
"""Schemes of the links of a card; a link without a scheme is relative to the folder."""


def check_name(value: str, name: str = "repo_id") -> None:
    """Raise if the Hub does not accept a name of a repository."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(value)
    except HFValidationError as error:
        raise ValueError(
            f"{name} is {value!r}, not a name that the Hub accepts ({error}). Use owner/name, with letters, digits, '-', "
            "'_' and '.'."
        ) from None


def check_secret(name: str, text: str, token: str | None = None) -> None:
    """Raise if a text contains an access token or a private key."""
    if _TOKEN.search(text) or (token and token in text) or next(_random_values(text), None) is not None:
        raise ValueError(
            f"{name} contains an access token or a private key. Remove it, and revoke it if anyone has seen it."
        )


def redact(text: str, token: str | None = None) -> str:
    """The text without tokens."""
    text = _TOKEN.sub("[removed]", text.replace(token, "[removed]") if token else text)
    for value in sorted(set(_random_values(text)), key=len, reverse=True):
        text = text.replace(value, "[removed]")
    return text


def _random_values(text: str) -> Iterator[str]:
    """Values that look like a key of any service."""
    for pattern in (_NAMED_SECRET, _PREFIXED_WORD):
        for found in pattern.finditer(text):
            if _looks_random(found.group(1), strict=pattern is _PREFIXED_WORD):
                yield found.group(1)


def _looks_random(value: str, *, strict: bool) -> bool:
    kinds = [sum(map(test, value)) for test in (str.islower, str.isupper, str.isdigit)]
    # Without a name such as `api_key`, require all three kinds; hexadecimal checksums and ids have two.
    enough = all(count >= 3 for count in kinds) if strict else sum(count >= 2 for count in kinds) >= 2
    counts = Counter(value).values()
    bits = -sum(count / len(value) * math.log2(count / len(value)) for count in counts)
    return enough and bits >= (_MIN_BITS if strict else 3.0)


def check_text(name: str, value: str) -> None:
    """Raise if a text contains a placeholder, a local path or a secret."""
    check_secret(name, value)
    if _PLACEHOLDER.search(value):
        raise ValueError(f"{name} is {value!r}, a placeholder. Replace it, because cards are published.")
    if _MACHINE_PATH.search(value) or _PATH_IN_PROSE.search(value):
        raise ValueError(f"{name} is {value!r}, which contains a local path. Use a name instead.")


def check_card(text: str) -> Mapping[str, Any]:
    """Check that a generated or edited card may be published.

    Args:
        text: Content of a `README.md`: Markdown that begins with metadata.

    Returns:
        `Mapping`: The metadata.

    Raises:
        ValueError: If it lacks metadata or a licence, or contains a placeholder, a token, HTML, a local path, or a link
            to a place outside its folder.
    """
    check_secret("The card", text)
    parts = re.split(r"^---\s*$", text, maxsplit=2, flags=re.MULTILINE)
    if len(parts) != 3 or parts[0].strip():
        raise ValueError(
            "The card does not begin with metadata between two lines of '---'. Write it with `captionrl card`."
        )
    try:
        metadata = yaml.safe_load(parts[1])
    except yaml.YAMLError as error:
        raise ValueError(
            f"The card's metadata are not valid YAML ({str(error).splitlines()[0]}). Correct them."
        ) from None
    if not isinstance(metadata, dict) or not metadata.get("license"):
        raise ValueError("The card has no licence. Add `license:` to its metadata.")
    # Check what a browser would execute or follow: not code, which is shown verbatim, and not formulas.
    prose = _CODE.sub("", parts[2])
    body = _FORMULA.sub("", prose)
    if not body.strip():
        raise ValueError("The card is empty. Write it with `captionrl card`.")
    if found := _PLACEHOLDER.search(body):
        raise ValueError(f"The card contains {found.group(0)!r}, a placeholder. Replace it, or remove the sentence.")
    # Complete tags are rejected in formulas too, because not all renderers support formulas.
    if found := _HTML.search(body) or _TAG.search(prose):
        raise ValueError(f"The card contains HTML, {found.group(0)[:60]!r}. Use Markdown, or escape the '<'.")
    for target in _link_targets(parts[2]):
        if _MACHINE_PATH.search(target) or _scheme(target) not in _SCHEMES:
            raise ValueError(
                f"The card links to {target[:60]!r}, which is outside its folder. Put the file into the folder, or use a "
                "URL that begins with https://."
            )
    if found := _PATH_IN_PROSE.search(body) or _HOME.search(text):
        raise ValueError(
            f"The card contains {_around(found)!r}, a local path. Use the name of the file, or a relative path."
        )
    return metadata


def _around(found: re.Match[str]) -> str:
    return found.string[found.start() : found.start() + 60].split()[0]


def _link_targets(markdown: str) -> Iterator[str]:
    """Targets of links and images, as a browser reads them: entities, escapes and spaces are resolved."""
    from markdown_it import MarkdownIt

    parser: Any = MarkdownIt("commonmark").enable("table")
    parser.validateLink = lambda url: (
        True
    )  # by default, dangerous links are rendered as text, but other renderers do not do this
    parser.normalizeLink = lambda url: url
    references: dict[str, Any] = {}
    for token in parser.parse(markdown, references):
        for child in token.children or []:
            target = child.attrs.get("href") or child.attrs.get("src")
            if target:
                yield _resolved(str(target))
    for reference in references.get("references", {}).values():
        yield _resolved(str(reference["href"]))


def _resolved(target: str) -> str:
    # Browsers ignore spaces and control characters within a scheme.
    return re.sub(r"[\x00-\x20\x7f-\xa0\u200b-\u200f\u2028-\u202e\ufeff]", "", html.unescape(unquote(target)))


def _scheme(target: str) -> str:
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", target)
    return found.group(1).lower() if found else ""
