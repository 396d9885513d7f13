"""Answers of language models to the same questions: their judges and scores, the table and the file of answers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch

from hf_captionrl.captioners.language_model_clients import HTTPBackend, TransformersTextBackend
from hf_captionrl.metrics.bootstrap import bootstrap_interval, signature
from hf_captionrl.metrics.columns import Column, table_columns
from hf_captionrl.metrics.words import caption_statistics
from hf_captionrl.utils.io import read_jsonl, write_jsonl
from hf_captionrl.utils.options import Positive, check_values, documented
from hf_captionrl.utils.prompts import Backend, BackendError, Failure, Prompt, Truncated

# --- Scores of answers relative to reference answers, by category, with intervals ------------------------------------
# Reference: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable MLE", appendix B and Table 7, after
# the evaluation of Vicuna (Chiang et al. 2023).

# Categories of Table 7, in its order, with the names of Vicuna's question file; without coding and math, as in the paper.
CATEGORIES: dict[str, str] = {
    "generic": "Generic",
    "knowledge": "Knowledge",
    "roleplay": "Roleplay",
    "common-sense": "Common sense",
    "fermi": "Fermi",
    "counterfactual": "Counterfactual",
    "writing": "Writing",
}

WORST, BEST = 1.0, 10.0  # scores of a judge

# With its sign, so that "-1" does not count as a score; a hyphen between two numbers is not a sign.
_NUMBER = re.compile(r"(?<![\w.])[-\u2212]?[0-9]+(?:\.[0-9]+)?(?:\s*/\s*10\b)?(?![\w]|\.\d)")

_LABEL = re.compile(r"\b(?:answer|assistant)\s*[12]\b", re.IGNORECASE)  # its number is no score


@dataclass(frozen=True)
class Rating:
    """The judge's scores, from 1 to 10, of one answer and of the reference answer beside it."""

    question_id: str
    category: str
    candidate: float
    reference: float
    candidate_first: bool = True


def parse_scores(reply: str) -> tuple[float, float] | None:
    """The two scores in a judge's reply: the first line with exactly two numbers from 1 to 10, or two labelled lines; or None."""
    labelled: list[float] = []
    for line in reply.splitlines():
        text, labels = _LABEL.subn(" ", line)
        numbers = [float(score.split("/")[0].replace("\u2212", "-")) for score in _NUMBER.findall(text)]
        labelled += numbers if labels == len(numbers) == 1 else []
        numbers = labelled if len(labelled) == 2 else numbers
        if len(numbers) == 2 and all(WORST <= number <= BEST for number in numbers):
            return numbers[0], numbers[1]
    return None


def answer_statistics(answers: Sequence[str]) -> dict[str, Any]:
    """Average length and lexical diversity of answers, and how many are empty."""
    written = [answer for answer in answers if answer.strip()]
    words = caption_statistics(written) if written else {"length": 0.0, "lexical_diversity": 0.0}
    return {
        "length": words["length"] * len(written) / len(answers),
        "lexical_diversity": words["lexical_diversity"],
        "empty": 1 - len(written) / len(answers),
        "signature": signature(metric="answer_statistics", words="whitespace", answers=len(answers)),
    }


def relative_scores(ratings: Sequence[Rating], *, num_resamples: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Scores of the answers divided by those of the reference answers; above 1 they are better.

    Reference: Yue et al. 2023, appendix B, Table 7, which multiplies by 100. Differs from it by: each pair is judged in
    both orders, because judges prefer a position, and both count. Intervals resample questions, each with all its ratings.
    """
    result: dict[str, Any] = {}
    for name in ("overall", *CATEGORIES):
        rows = [r for r in ratings if name in ("overall", r.category)]
        if not rows:
            continue
        above, below = [r.candidate for r in rows], [r.reference for r in rows]
        result[name] = math.fsum(above) / math.fsum(below)
        questions = [r.question_id for r in rows]
        if len(set(questions)) > 1:
            settings: dict[str, Any] = {"groups": questions, "num_resamples": num_resamples, "seed": seed}
            result[f"{name}_ci"] = bootstrap_interval(above, weights=below, **settings)
    gaps: dict[str, dict[bool, list[float]]] = {}  # candidate minus reference, by question and place
    for rating in ratings:
        orders = gaps.setdefault(rating.question_id, {})
        orders.setdefault(rating.candidate_first, []).append(rating.candidate - rating.reference)
    both = [fmean(orders[True]) - fmean(orders[False]) for orders in gaps.values() if len(orders) == 2]
    return result | {
        "first_place": fmean(both) / 2 if both else None,  # the position causes half of the difference
        "num_ratings": len(ratings),
        "num_questions": len(gaps),
        "one_order": len(gaps) - len(both),
        "signature": signature(
            metric="relative_scores", scale="1-10", pooled="sum/sum", resampled="questions", resamples=num_resamples
        ),
    }


# --- Questions by category with reference answers, and answering them ------------------------------------------------


@dataclass(frozen=True)
class Question:
    """One question."""

    question_id: str  # id in every file
    category: str  # one of `CATEGORIES`
    text: str
    reference: str = ""  # reference answer; empty if there is none


def load_questions(
    path: str | os.PathLike[str], reference_answers: str | os.PathLike[str] | None = None
) -> list[Question]:
    """Read questions in the format of Vicuna's `question.jsonl`: `question_id`, `text` and `category` per line.

    Questions of categories that Table 7 omits (coding, math) are skipped.
    """
    try:
        lines = [] if reference_answers is None else read_jsonl(reference_answers)
        answers = {row["question_id"]: row["text"] for _, row in lines}
        return [
            Question(
                str(row["question_id"]),
                row["category"],
                row["text"],
                row.get("reference") or answers.get(row["question_id"], ""),
            )
            for _, row in read_jsonl(path)
            if row.get("category") in CATEGORIES
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{Path(path).name} or its answers lack question_id or text. Use Vicuna's format.") from error


def answer_questions(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, max_new_tokens: int, batch_size: int = 8
) -> list[str]:
    """Answer greedily."""
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


# --- Judges of answers -----------------------------------------------------------------------------------------------


def judge_prompt(question: str, first: str, second: str) -> str:
    """The question to a judge."""
    return (
        "Two assistants were given the same question. Judge how helpful, relevant, accurate and detailed each answer is, "
        f"and give each of them one score from {WORST:g} (worst) to {BEST:g} (best). The order in which they are shown "
        "means nothing, and a longer answer is not better for its length.\n\n"
        f"<question>\n{question}\n</question>\n\n<answer 1>\n{first}\n</answer 1>\n\n<answer 2>\n{second}\n</answer 2>\n\n"
        "Write the two scores on the first line, answer 1 before answer 2, as two numbers with a space between them and "
        "nothing else. Explain them below."
    )


def rate(judge: Backend, questions: Sequence[Question], answers: Sequence[str]) -> tuple[list[Rating], list[str]]:
    """Rate each answer beside its question's reference answer, in both orders; an empty one is `(no answer)`.

    Also returns the id of the question and the beginning of each reply that could not be read.
    """
    ratings: list[Rating] = []
    failed: list[str] = []
    for question, answer in zip(questions, answers, strict=True):
        text = answer if answer.strip() else "(no answer)"
        for first in (True, False):
            pair = (text, question.reference) if first else (question.reference, text)
            [(_, reply)] = judge.complete([Prompt("judge", "", judge_prompt(question.text, *pair))])
            if isinstance(reply, Failure):
                raise BackendError(f"{judge!r} failed: {reply.detail}. The answers are in answers.jsonl.")
            written = reply.text if isinstance(reply, Truncated) else reply
            scores = parse_scores(written)
            if scores is None:
                failed.append(f"{question.question_id}: {written[:80]!r}")
                continue
            candidate, reference = scores if first else scores[::-1]
            ratings.append(Rating(question.question_id, question.category, candidate, reference, first))
    return ratings, failed


# --- Answers of several language models to the same questions: the judge, the table and the file of answers ----------

# Columns that need no judge, and those of Table 7, whose scores are divided by those of the reference answers.
TEXT_COLUMNS: tuple[Column, ...] = (
    replace(*table_columns("length", short=True), digits=1),
    *table_columns("lexical_diversity", short=True),
    Column("empty", "Empty\n", "lower", is_fraction=True),
)
ANSWER_COLUMNS: tuple[Column, ...] = (
    *TEXT_COLUMNS,
    *(Column(name, f"{title}\n", "higher") for name, title in CATEGORIES.items()),
    Column("overall", "Overall\n", "higher"),
)


@dataclass
class JudgeArguments:
    """The questions, and the judge of the answers."""

    questions: str | None = documented(
        None, "File in the format of Vicuna's question.jsonl. None: the questions of this package."
    )
    reference_answers: str | None = documented(
        None, "JSON Lines with question_id and text, for questions without a reference."
    )
    answer_max_new_tokens: Positive = documented(512, "Maximum length of an answer in tokens.")
    judge: Literal["none", "endpoint", "model"] = documented(
        "none", "Judge of the answers: 'none', 'endpoint' (OpenAI-compatible) or 'model' (of transformers)."
    )
    judge_base_url: str | None = documented(None, "Address of the endpoint, such as http://localhost:8000/v1.")
    judge_model: str | None = documented(None, "Name of the judge: at the endpoint, or a folder or a name on the Hub.")
    judge_key_variable: str = documented(
        "JUDGE_API_KEY", "Environment variable with the endpoint's key, if it needs one."
    )
    answers: str | None = documented(None, "answers.jsonl of an earlier run, to judge its answers without training.")

    def __post_init__(self) -> None:
        check_values(self)
        needs = {"endpoint": ["judge_base_url", "judge_model"], "model": ["judge_model"]}
        for name in needs.get(self.judge, []):
            if not getattr(self, name):
                raise ValueError(f"judge={self.judge!r} needs --{name}.")

    def load(self) -> Backend | None:
        """Make the judge."""
        name = str(self.judge_model)
        if self.judge == "endpoint":
            variable = self.judge_key_variable if os.environ.get(self.judge_key_variable) else None
            settings: dict[str, Any] = {"max_new_tokens": 512, "seed": None, "concurrency": 1}  # some refuse a seed
            return HTTPBackend(str(self.judge_base_url), name, api_key_env=variable, **settings)
        if self.judge == "model":
            return TransformersTextBackend(name, dtype="float32", max_new_tokens=64)
        return None


def answer_row(
    name: str, questions: Sequence[Question], answers: Sequence[str], judge: Backend | None, seed: int
) -> dict[str, Any]:
    """One row of the table."""
    row: dict[str, Any] = {"name": name, **answer_statistics(answers), **dict.fromkeys((*CATEGORIES, "overall"))}
    reason = "no judge was set"
    if judge is not None:
        try:
            ratings, failed = rate(judge, questions, answers)
            row |= {"judge": Path(judge.model).name, "judge_failed": len(failed), "judge_failures": failed[:5]}
            reason = f"the judge rated no question of this category; {len(failed)} of its replies were not understood"
            scores = relative_scores(ratings, seed=seed) if ratings else {"signature": None}
            row |= {"judge_signature": scores.pop("signature"), **scores}
        except BackendError as error:
            reason = str(error)
    return row | {f"{key}_reason": reason for key in (*CATEGORIES, "overall") if row[key] is None}


def write_answers(path: Path, questions: Sequence[Question], answers: Mapping[str, Sequence[str]]) -> None:
    """Store the answers, so that they can be judged again."""
    rows = [
        {"model": name, "question_id": q.question_id, "category": q.category, "question": q.text, "answer": text}
        for name, texts in answers.items()
        for q, text in zip(questions, texts, strict=True)
    ]
    write_jsonl(path, rows)


def read_answers(path: str, questions: Sequence[Question]) -> dict[str, list[str]]:
    """Answers of an earlier run, by model."""
    answers: dict[str, dict[str, str]] = {}
    for _, row in read_jsonl(path):
        answers.setdefault(row["model"], {})[str(row["question_id"])] = row["answer"]
    lacking = {q.question_id for q in questions if any(q.question_id not in texts for texts in answers.values())}
    if lacking:
        raise ValueError(f"{Path(path).name} lacks an answer to {min(lacking)!r}. Use the --questions of that run.")
    return {name: [texts[q.question_id] for q in questions] for name, texts in answers.items()}
