"""Refuses content that must not be published: unfinished texts, secrets, HTML, and paths that lead out of a folder."""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import yaml

__all__ = ["check_card", "check_secret", "check_text", "redact"]

_PLACEHOLDER = re.compile(
    # TODO only in capitals: "todo" is a Spanish word.
    r"\b(TODO|TBD|FIXME|XXX|ORGANISATION)\b|(?i:more information needed|lorem ipsum|<your|\byour[-_ ](name|org|model|username)\b)"
    r"|\{\{|\{%|^\W*$"
)
_MACHINE_PATH = re.compile(r"^(/|~|[A-Za-z]:[\\/]|\\\\|file:)|(^|/)\.\.(/|$)")
# A path of this machine within a sentence: two parts or more after a space, a quote or a bracket, or a drive.
_DRIVE = r"(?<![\w/])[A-Za-z]:(?:\\{1,2}|/(?!/))\w|(?<![\w\\])\\{2,4}[\w.-]+\\{1,2}\w|\bfile:/"
_PATH_IN_PROSE = re.compile(rf"(?<![\w/:.~)\]}}$-])/(?:[\w@+~.-]|\\_)+/[\w@+~.-]|(?<![\w~])~\w*/[\w.]|{_DRIVE}")
_HOME = re.compile(rf"(?<![\w/:.])/(?:home|Users|root)/[\w.]|{_DRIVE}")
# Prefixes that services give their keys: Hugging Face, OpenAI-like endpoints, GitHub, GitLab, AWS, Google, Slack, Stripe, ...
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
# Keys of services that no list names: a value given to something called a key, and a word with a prefix and random letters.
_NAMED_SECRET = re.compile(
    r"(?i)(?:api[_-]?key|access[_-]?key|secret(?:[_-]?key)?|auth[_-]?token|access[_-]?token|hub[_-]?token|password|passwd|bearer)"
    r"[\"']?(?:\s*[:=]\s*|\s+)[\"']?([A-Za-z0-9+/_=.~-]{16,})"
)
_PREFIXED_WORD = re.compile(
    r"(?<![\w/+=.-])(?!sha\d)[A-Za-z][A-Za-z0-9]{1,11}[_-](?:[a-z0-9]{1,8}[_-])?([A-Za-z0-9]{24,})(?![\w/+=])"
)
_MIN_BITS = 3.7
"""Bits per character above which a text of 24 letters and digits is taken for random; words of a language have about 3."""
# A run of backticks is closed by one of the same length.
_CODE = re.compile(r"^(```|~~~).*?^\1[^\n]*$|(?<!`)(`+)(?!`)[^\n]+?(?<!`)\2(?!`)", re.MULTILINE | re.DOTALL)
# Of one line, and without a blank inside of its dollars: "from $5 to $6" is none.
_FORMULA = re.compile(r"\$\$.*?\$\$|\$(?!\s)[^$\n]+(?<!\s)\$(?!\d)", re.DOTALL)
_HTML = re.compile(r"(?<!\\)<(?!https?://)(?:[A-Za-z][^>\n]*|/[^>\n]*|!--)>?")
_TAG = re.compile(r"(?<!\\)<(?!https?://)[A-Za-z/!][^<>$\n]*>")
_SCHEMES = ("", "http", "https", "mailto")
"""What a link of a card may begin with; without a scheme it leads into the folder."""


def check_secret(name: str, text: str, token: str | None = None) -> None:
    """Refuse a text that holds an access token or a private key."""
    if _TOKEN.search(text) or (token and token in text) or next(_random_values(text), None) is not None:
        raise ValueError(
            f"{name} holds an access token or a private key. Remove it, and revoke it if it was shown to anybody."
        )


def redact(text: str, token: str | None = None) -> str:
    """The text with its tokens removed."""
    text = _TOKEN.sub("[removed]", text.replace(token, "[removed]") if token else text)
    for value in sorted(set(_random_values(text)), key=len, reverse=True):
        text = text.replace(value, "[removed]")
    return text


def _random_values(text: str) -> Iterator[str]:
    """Random-looking values in the place of a key, of any service."""
    for pattern in (_NAMED_SECRET, _PREFIXED_WORD):
        for found in pattern.finditer(text):
            if _looks_random(found.group(1), strict=pattern is _PREFIXED_WORD):
                yield found.group(1)


def _looks_random(value: str, *, strict: bool) -> bool:
    kinds = [sum(map(test, value)) for test in (str.islower, str.isupper, str.isdigit)]
    # Without a name that says so, a key has all three kinds; hexadecimal checksums and ids have two.
    enough = all(count >= 3 for count in kinds) if strict else sum(count >= 2 for count in kinds) >= 2
    counts = Counter(value).values()
    bits = -sum(count / len(value) * math.log2(count / len(value)) for count in counts)
    return enough and bits >= (_MIN_BITS if strict else 3.0)


def check_text(name: str, value: str) -> None:
    """Refuse placeholders, local paths and secrets."""
    check_secret(name, value)
    if _PLACEHOLDER.search(value):
        raise ValueError(
            f"{name} is {value!r}, a placeholder. A card is published: state the fact, or choose another field."
        )
    if _MACHINE_PATH.search(value) or _PATH_IN_PROSE.search(value):
        raise ValueError(f"{name} is {value!r}, which holds a path of this machine. Use a name instead.")


def check_card(text: str) -> Mapping[str, Any]:
    """Refuse a card that must not be published, whether generated or edited.

    Args:
        text: Markdown with metadata in front, as in a `README.md`.

    Returns:
        `Mapping`: Its metadata.

    Raises:
        ValueError: If it lacks metadata or a licence, or holds a placeholder, a token, HTML, a path of this machine, or a link
            to a place outside its folder.
    """
    check_secret("The card", text)
    parts = re.split(r"^---\s*$", text, maxsplit=2, flags=re.MULTILINE)
    if len(parts) != 3 or parts[0].strip():
        raise ValueError(
            "The card has no metadata between two lines of '---' at its top. Write it with `captionrl card`."
        )
    try:
        metadata = yaml.safe_load(parts[1])
    except yaml.YAMLError as error:
        raise ValueError(f"The card's metadata are no YAML ({str(error).splitlines()[0]}). Correct them.") from None
    if not isinstance(metadata, dict) or not metadata.get("license"):
        raise ValueError("The card names no licence. Add `license:` to its metadata.")
    # What a browser would run or follow; code is shown as it is, and formulas are full of braces.
    prose = _CODE.sub("", parts[2])
    body = _FORMULA.sub("", prose)
    if not body.strip():
        raise ValueError("The card says nothing. Write it with `captionrl card`.")
    if found := _PLACEHOLDER.search(body):
        raise ValueError(
            f"The card holds {found.group(0)!r}, a placeholder. State the fact, or leave the sentence out."
        )
    # Whole tags also between dollars: where formulas are not known, they are text.
    if found := _HTML.search(body) or _TAG.search(prose):
        raise ValueError(
            f"The card holds HTML, {found.group(0)[:60]!r}, which is shown on a public page. Use Markdown, or escape the '<'."
        )
    for target in _link_targets(parts[2]):
        if _MACHINE_PATH.search(target) or _scheme(target) not in _SCHEMES:
            raise ValueError(
                f"The card links to {target[:60]!r}, which is outside its folder. Put the file into the folder, or give an "
                "address that begins with https://."
            )
    if found := _PATH_IN_PROSE.search(body) or _HOME.search(text):
        raise ValueError(
            f"The card holds {_around(found)!r}, a path of this machine. Use the name of the file, or a relative path."
        )
    return metadata


def _around(found: re.Match[str]) -> str:
    return found.string[found.start() : found.start() + 60].split()[0]


def _link_targets(markdown: str) -> Iterator[str]:
    """Where links and images lead, as a browser would read it: entities, escapes and blanks are resolved."""
    from markdown_it import MarkdownIt

    parser: Any = MarkdownIt("commonmark").enable("table")
    parser.validateLink = lambda url: True  # it would show the worst ones as text, which other renderers do not
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
    # Browsers drop blanks and control characters within a scheme.
    return re.sub(r"[\x00-\x20\x7f-\xa0\u200b-\u200f\u2028-\u202e\ufeff]", "", html.unescape(unquote(target)))


def _scheme(target: str) -> str:
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", target)
    return found.group(1).lower() if found else ""
