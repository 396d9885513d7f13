"""Words that captions must not contain."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hf_captionrl.text.tokenize import word_pattern


def without_words(prompt: str, words: Sequence[str]) -> str:
    """The prompt of a chat model with words that its captions must not contain."""
    if not words:
        return prompt
    # JSON strings without characters that begin special tokens of chat models, such as <image> and [INST].
    quoted = json.dumps(list(words), ensure_ascii=False)[1:-1].replace("<", "\\u003c").replace("[", "\\u005b")
    return "\n".join(filter(None, (prompt, f"Do not mention: {quoted}.")))


@contextmanager
def prompt_without(captioner: Any, words: Sequence[str]) -> Iterator[None]:
    """Context in which the prompt of a captioner names the words, if it is a chat model."""
    prompt = captioner.prompt
    if captioner.family == "chat":
        captioner.prompt = without_words(prompt, words)
    try:
        yield
    finally:
        captioner.prompt = prompt


def mentions(caption: str, words: Sequence[str]) -> bool:
    """Whether a caption contains one of some words or phrases, in any case."""
    return any(word_pattern(word).search(caption) for word in words)


def forbidden_tokens(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """Token ids for `bad_words_ids` of `generate`: each word in every casing, at the start of a text, after a space, a quotation mark.

    Longer words that begin with all tokens of a word are excluded with it. A model can still spell a word with other tokens.
    """

    def encoded(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for cased in {word, word.lower(), word.upper(), word.capitalize(), word.title()}:
            for lead in ("", " ", '"'):
                before, ids = encoded(lead) if lead.strip() else [], encoded(lead + cased)
                # Some tokenizers merge the mark with the word.
                if ids[: len(before)] == before and tokenizer.unk_token_id not in ids[len(before) :]:
                    found[tuple(ids[len(before) :])] = None
    return [list(ids) for ids in sorted(found) if ids]
