"""What must not be published: unfinished texts, secrets, HTML, and paths that lead out of a folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

__all__ = ["check_card", "check_secret", "check_text", "redact"]

_PLACEHOLDER = re.compile(
    # TODO only in capitals: "todo" is a Spanish word.
    r"\b(TODO|TBD|FIXME|XXX|ORGANISATION)\b|(?i:more information needed|lorem ipsum|<your|\byour[-_ ](name|org|model|username)\b)"
    r"|\{\{|\{%|^\W*$"
)
_MACHINE_PATH = re.compile(r"^(/|~|[A-Za-z]:[\\/]|\\\\|file:)|(^|/)\.\.(/|$)")
# What services that such runs use give out: Hugging Face, language models behind an endpoint, GitHub, AWS; and private keys.
_TOKEN = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}\b|(?<![A-Za-z0-9])sk-(?=[\w-]*?\w{16})(?=[\w-]*\d)[\w-]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}\b"
    r"|\bgithub_pat_\w{20,}|\bA(?:KIA|SIA)[0-9A-Z]{16}\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(?:.*?-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|.*)",
    re.DOTALL,
)
# A run of backticks is closed by one of the same length.
_CODE = re.compile(r"^(```|~~~).*?^\1[^\n]*$|(?<!`)(`+)(?!`)[^\n]+?(?<!`)\2(?!`)", re.MULTILINE | re.DOTALL)
# Of one line, and without a blank inside of its dollars: "from $5 to $6" is none.
_FORMULA = re.compile(r"\$\$.*?\$\$|\$(?!\s)[^$\n]+(?<!\s)\$(?!\d)", re.DOTALL)
_HTML = re.compile(r"(?<!\\)<(?!https?://)(?:[A-Za-z][^>\n]*|/[^>\n]*|!--)>?")
_TAG = re.compile(r"(?<!\\)<(?!https?://)[A-Za-z/!][^<>$\n]*>")
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|^\s{0,3}\[[^\]\n]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE)


def check_secret(name: str, text: str, token: str | None = None) -> None:
    """Refuse a text that holds an access token or a private key.

    Args:
        name: What the text is called.
        text: The text.
        token: The token that is about to be used, which need not look like one.

    Raises:
        ValueError: If it does. The message does not repeat the token: it may end in a public log.
    """
    if _TOKEN.search(text) or (token and token in text):
        raise ValueError(
            f"{name} holds an access token or a private key. Remove it, and revoke it if it was shown to anybody."
        )


def redact(text: str, token: str | None = None) -> str:
    """A text whose tokens are crossed out.

    Args:
        text: For instance the message of an error.
        token: A token that need not look like one.

    Returns:
        `str`: With `[removed]` in place of each; of a private key without an end, in place of all that follows.
    """
    return _TOKEN.sub("[removed]", text.replace(token, "[removed]") if token else text)


def check_text(name: str, value: str) -> None:
    """Refuse what is unfinished, leads out of the project, or must never be published.

    Args:
        name: What the text is called.
        value: The text.

    Raises:
        ValueError: If it is a placeholder, a path of this machine or a token.
    """
    check_secret(name, value)
    if _PLACEHOLDER.search(value):
        raise ValueError(
            f"{name} is {value!r}, a placeholder. A card is published: state the fact, or choose another field."
        )
    if _MACHINE_PATH.search(value):
        raise ValueError(f"{name} is {value!r}, a path on this machine, which nobody else has. Give a name instead.")


def check_card(text: str) -> Mapping[str, Any]:
    """Refuse a card that must not be published, whoever wrote it.

    Args:
        text: Markdown with metadata in front, as in a `README.md`.

    Returns:
        `Mapping`: Its metadata.

    Raises:
        ValueError: If it lacks metadata or a licence, or holds a placeholder, a token, HTML, or a link to a place
            outside its folder.
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
    for link in _LINK.finditer(body):
        target = link.group(1) or link.group(2)
        if _MACHINE_PATH.search(target) or target.lower().startswith(("javascript:", "data:", "vbscript:")):
            raise ValueError(
                f"The card links to {target!r}, which is outside its folder. Put the file into the folder, or give an address."
            )
    return metadata
