"""Questions by category with reference answers, and answering them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_captionrl.instruct.ratings import CATEGORIES
from hf_captionrl.io import read_jsonl

__all__ = ["Question", "answer_questions", "load_questions"]


@dataclass(frozen=True)
class Question:
    """One question."""

    question_id: str  # id in every file
    category: str  # one of `CATEGORIES`
    text: str
    reference: str = ""  # reference answer; empty if there is none


def _rows(path: str | os.PathLike[str]) -> Iterable[tuple[int, dict[str, Any]]]:
    for number, row in read_jsonl(path):
        if not isinstance(row, dict) or "question_id" not in row or "text" not in row:
            raise ValueError(f"Line {number} of {Path(path).name} lacks question_id or text. Use Vicuna's format.")
        yield number, row


def load_questions(
    path: str | os.PathLike[str], reference_answers: str | os.PathLike[str] | None = None
) -> list[Question]:
    """Read questions in the format of Vicuna's `question.jsonl`: `question_id`, `text` and `category` per line.

    Questions of categories that Table 7 omits (coding, math) are skipped.
    """
    answers = (
        {}
        if reference_answers is None
        else {str(r["question_id"]): str(r["text"]) for _, r in _rows(reference_answers)}
    )
    found: dict[str, Question] = {}
    for number, row in _rows(path):
        name = str(row["question_id"])
        if name in found:
            raise ValueError(
                f"Line {number} of {Path(path).name} has the question_id {name!r} of an earlier line. Use different "
                "ids."
            )
        category = str(row.get("category", ""))
        if category not in CATEGORIES:
            continue
        found[name] = Question(name, category, str(row["text"]), str(row.get("reference", answers.get(name, ""))))
    if not found:
        raise ValueError(f"{Path(path).name} contains no question of the categories {', '.join(CATEGORIES)}.")
    return list(found.values())


def answer_questions(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, max_new_tokens: int, batch_size: int = 8
) -> list[str]:
    """Answer greedily."""
    import torch

    training, side = model.training, tokenizer.padding_side
    model.eval()
    tokenizer.padding_side = "left"
    answers: list[str] = []
    try:
        for start in range(0, len(prompts), batch_size):
            encoded = tokenizer(list(prompts[start : start + batch_size]), return_tensors="pt", padding=True)
            # Some tokenizers return inputs that the model does not accept.
            inputs = {name: encoded[name].to(model.device) for name in ("input_ids", "attention_mask")}
            with torch.no_grad():
                written = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
            texts = tokenizer.batch_decode(written[:, inputs["input_ids"].size(1) :], skip_special_tokens=True)
            answers += [text.strip() for text in texts]
    finally:
        tokenizer.padding_side = side
        model.train(training)
    return answers
