"""Prompts of chat models: per image, with context, with similar captions; words that captions must not contain; entropy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.head_tap import evaluating
from hf_captionrl.data.columns import read_csv
from hf_captionrl.text.tokenize import word_pattern
from hf_captionrl.utils.io import read_jsonl, say


def caption_entropy(
    captioner: Captioner, images: Sequence[Any], captions: Sequence[str], *, batch_size: int = 16
) -> dict[str, Any]:
    """Entropy of a captioner's distributions along one given caption per image, in nats: the mean over captions of token means.

    Source: the code of No Detail Left Behind (`evaluation/entropy.py`). The end token counts here; there it does not.
    """
    if len(images) != len(captions) or not captions:
        raise ValueError(f"There are {len(images)} images and {len(captions)} captions. Pass one caption per image.")
    found: list[float] = []
    with evaluating(captioner.model), torch.no_grad():
        for start in range(0, len(captions), batch_size):
            chosen = slice(start, start + batch_size)
            batch = captioner.collate(list(images[chosen]), list(captions[chosen]))
            _, entropy = captioner.log_probs(batch, return_entropy=True)
            supervised = captioner.align_labels(batch["labels"]) != -100  # (B, T - 1)
            found += (entropy.double().cpu().sum(1) / supervised.cpu().sum(1)).tolist()
    return {"entropy": sum(found) / len(found), "per_sample": found}


# --- The prompt of an image: the user's turn, what not to mention, the text around the image -------------------------

_NAMES = ("image", "image_id", "file_name")  # of the column that names images


def _quoted(text: str) -> str:
    """A text as a JSON string without characters that begin special tokens of chat models, such as <image> and [INST]."""
    return json.dumps(text, ensure_ascii=False).replace("<", "\\u003c").replace("[", "\\u005b")


@dataclass(frozen=True)
class ImagePrompts:
    """The prompt of each image: its own or that of the model, words not to mention, and the text around the image."""

    do_not_mention: Sequence[str] = ()
    max_context: int = 1000
    rows: dict[str, tuple[str, str]] = field(default_factory=dict)  # prompt and context by image id; one may be empty

    def __bool__(self) -> bool:
        return bool(self.do_not_mention or self.rows)

    def of(self, image_id: str, prompt: str) -> str:
        """The prompt of an image; `prompt` is that of the model."""
        own, context = self.rows.get(image_id, ("", ""))
        context = " ".join(context.split())
        if len(context) > self.max_context:
            context = context[: self.max_context + 1].rpartition(" ")[0] or context[: self.max_context]
        words = ", ".join(map(_quoted, self.do_not_mention))
        lines = [own or prompt, f"Do not mention: {words}." if words else ""]
        # Text of others is data, not an instruction; what it says need not be in the picture.
        lines += [f"The image stands in this text, quoted for background only: {_quoted(context)}"] if context else []
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
        if path.suffix.lower() == ".csv":
            lines: list[Any] = list(enumerate(read_csv(path), start=2))
        else:
            lines = list(read_jsonl(path))
        rows: dict[str, tuple[str, str]] = {}
        for number, row in lines:
            name = next((row[key] for key in _NAMES if row.get(key)), None) if isinstance(row, dict) else None
            texts = [] if name is None else [row.get(key) or "" for key in ("prompt", "context")]
            is_text = any(texts) and all(isinstance(one, str) for one in texts)
            if not isinstance(name, str) or not is_text or name in rows:
                columns = "needs the columns image (each image once), and prompt or context"
                raise ValueError(f"--prompts {str(path)!r}, row {number}, {columns}. Correct it.")
            rows[name] = (texts[0], texts[1])
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


_CONTRASTIVE = "Similar images are described like this:\n{captions}\nSay what is different here, in one sentence."


def contrastive_prompt(prompt: str, captions: Sequence[str]) -> str:
    """The user's turn with the captions of similar images, one per line; without any, the prompt does not change."""
    lines = [f"- {' '.join(caption.split())}" for caption in dict.fromkeys(captions) if caption.strip()]
    told = _CONTRASTIVE.format(captions="\n".join(lines)) if lines else ""
    return "\n".join(filter(None, (prompt, told)))


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
