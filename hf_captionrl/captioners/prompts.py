"""Prompts per image for chat models, and words that captions must not contain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.data.columns import read_csv
from hf_captionrl.text.tokenize import word_pattern
from hf_captionrl.utils.io import read_jsonl, say

# --- The prompt of an image: the user's turn, what not to mention ----------------------------------------------------

_NAMES = ("image", "image_id", "file_name")  # of the column that names images


@dataclass(frozen=True)
class ImagePrompts:
    """The prompt of each image, its own or that of the model, and words not to mention."""

    do_not_mention: Sequence[str] = ()
    rows: dict[str, str] = field(default_factory=dict)  # prompt by image id

    def __bool__(self) -> bool:
        return bool(self.do_not_mention or self.rows)

    def of(self, image_id: str, prompt: str) -> str:
        """The prompt of an image; `prompt` is that of the model."""
        # JSON strings without characters that begin special tokens of chat models, such as <image> and [INST].
        words = json.dumps(list(self.do_not_mention), ensure_ascii=False)[1:-1]
        words = words.replace("<", "\\u003c").replace("[", "\\u005b")
        lines = [self.rows.get(image_id, prompt), f"Do not mention: {words}." if words else ""]
        return "\n".join(filter(None, lines))

    def check(self, captioner: Captioner) -> None:
        """Refuse prompts per image for a model that reads no instructions."""
        if self.rows and captioner.family != "chat":
            raise ValueError(f"--prompts needs a chat model, not a {captioner.family}. Use one, or --endpoint.")

    @classmethod
    def read(cls, path: Path | None, image_ids: Sequence[str], **settings: Any) -> ImagePrompts:
        """Read the file of `--prompts`, JSON Lines or CSV."""
        if path is None:
            return cls(**settings)
        if path.suffix.lower() not in (".jsonl", ".csv") or not path.is_file():
            raise ValueError(f"--prompts {str(path)!r} is not a file that ends in .jsonl or .csv. Use one.")
        is_csv = path.suffix.lower() == ".csv"
        lines: list[tuple[int, Any]] = list(enumerate(read_csv(path), start=2)) if is_csv else list(read_jsonl(path))
        rows: dict[str, str] = {}
        for number, row in lines:
            cells = row if isinstance(row, dict) else {}
            name, prompt = next((cells[key] for key in _NAMES if cells.get(key)), None), cells.get("prompt")
            if not isinstance(name, str) or not isinstance(prompt, str) or not prompt or name in rows:
                columns = "needs the columns image (each image once) and prompt"
                raise ValueError(f"--prompts {str(path)!r}, row {number}, {columns}. Correct it.")
            rows[name] = prompt
        unknown = sorted(rows.keys() - set(image_ids))
        if len(unknown) == len(rows):
            raise ValueError(f"--prompts {str(path)!r} names no image of the data, such as {image_ids[0]!r}.")
        if unknown:
            say(f"captionrl: {len(unknown):,} rows of --prompts {path} name no image, such as {unknown[0]!r}.")
        return cls(rows=rows, **settings)


# --- Words that captions must not contain ----------------------------------------------------------------------------


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


def encode_with_prompts(captioner: Any, images: Sequence[Image.Image], prompts: Sequence[str]) -> dict[str, Tensor]:
    """`encode_images` of a chat captioner with a prompt per image; the captioner keeps its own."""
    if captioner.family != "chat":
        raise ValueError(f"Prompts per image need a chat model, not a {captioner.family}. Use one, or --endpoint.")
    own, rows = captioner.prompt, []
    try:
        for image, captioner.prompt in zip(images, prompts, strict=True):
            rows.append(captioner._prefix_of(image))
    finally:
        captioner.prompt = own
    return captioner._stacked(rows)  # type: ignore[no-any-return]
