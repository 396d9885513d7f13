"""Answers of language models to the same questions: their judges and scores, the table and the file of answers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoTokenizer

from hf_captionrl.captioners.language_models import BackendError, Failure, HTTPBackend, Prompt, Truncated
from hf_captionrl.metrics.bootstrap import bootstrap_interval, signature
from hf_captionrl.metrics.caption_checks import as_sequence
from hf_captionrl.metrics.columns import Column, table_columns
from hf_captionrl.metrics.words import caption_statistics
from hf_captionrl.utils.io import read_jsonl, write_jsonl
from hf_captionrl.utils.model_files import load_language_model
from hf_captionrl.utils.options import Positive, check_values, documented

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
        numbers = [float(found.split("/")[0].replace("\u2212", "-")) for found in _NUMBER.findall(text)]
        labelled += numbers if labels == len(numbers) == 1 else []
        numbers = labelled if len(labelled) == 2 else numbers
        if len(numbers) == 2 and all(WORST <= number <= BEST for number in numbers):
            return numbers[0], numbers[1]
    return None


def answer_statistics(answers: Sequence[str]) -> dict[str, Any]:
    """Average length and lexical diversity of answers, and how many are empty."""
    answers = list(as_sequence(answers, "answers", "a list with one answer per question"))
    spoken = [answer for answer in answers if not (isinstance(answer, str) and not answer.strip())]
    found = caption_statistics(spoken) if spoken else {"length": 0.0, "lexical_diversity": 0.0}
    return {
        "length": found["length"] * len(spoken) / len(answers),
        "lexical_diversity": found["lexical_diversity"],
        "empty": 1 - len(spoken) / len(answers),
        "signature": signature(metric="answer_statistics", words="whitespace", answers=len(answers)),
    }


def relative_scores(ratings: Sequence[Rating], *, num_resamples: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Scores of the answers divided by those of the reference answers; above 1 they are better.

    Reference: Yue et al. 2023, appendix B, Table 7, which multiplies by 100. Differs from it by: each pair is judged in
    both orders, because judges prefer a position, and both count. Intervals resample questions, each with all its
    ratings.
    """
    if not ratings:
        raise ValueError("There are no ratings. Ask a judge first, or check why all its replies failed.")
    result: dict[str, Any] = {}
    for name in ("overall", *CATEGORIES):
        mine = [r for r in ratings if name in ("overall", r.category)]
        if not mine:
            continue
        above, below = [r.candidate for r in mine], [r.reference for r in mine]
        result[name] = math.fsum(above) / math.fsum(below)
        questions = [r.question_id for r in mine]
        if len(set(questions)) > 1:
            settings: dict[str, Any] = {"groups": questions, "num_resamples": num_resamples, "seed": seed}
            result[f"{name}_ci"] = bootstrap_interval(above, weights=below, **settings)
    of_question: dict[str, dict[bool, list[float]]] = {}
    for rating in ratings:
        orders = of_question.setdefault(rating.question_id, {})
        orders.setdefault(rating.candidate_first, []).append(rating.candidate - rating.reference)
    # Candidate minus reference, shown first and shown second: the position causes half of the difference.
    both = [orders for orders in of_question.values() if len(orders) == 2]
    gaps = [sum(o[True]) / len(o[True]) - sum(o[False]) / len(o[False]) for o in both]
    return result | {
        "first_place": sum(gaps) / len(gaps) / 2 if gaps else None,
        "num_ratings": len(ratings),
        "num_questions": len(of_question),
        "one_order": len(of_question) - len(both),
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
    answers: dict[str, str] = {}
    if reference_answers is not None:
        answers = {str(row["question_id"]): str(row["text"]) for _, row in _rows(reference_answers)}
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


# --- Judges of answers: an OpenAI-compatible endpoint, a local model, or a file of ratings ---------------------------


@dataclass
class Ratings:
    """Ratings and failures of a judge."""

    ratings: list[Rating] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # question id and beginning of each reply that could not be read


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


class Judge:
    """Rates the answers of one model; subclasses reply to one prompt, or have the ratings."""

    name: str

    def ask(self, prompt: str) -> str:
        """The reply to one prompt."""
        raise NotImplementedError

    def rate(self, model: str, questions: Sequence[Question], answers: Sequence[str]) -> Ratings:
        """Rate each answer beside its question's reference answer, in both orders; an empty one is `(no answer)`."""
        result = Ratings()
        for question, answer in zip(questions, answers, strict=True):
            if not question.reference.strip():
                raise ValueError(
                    f"Question {question.question_id!r} has no reference answer to compare with. Pass "
                    "--reference_answers, a JSON Lines file with question_id and text."
                )
            shown = answer if answer.strip() else "(no answer)"
            for first in (True, False):
                pair = (shown, question.reference) if first else (question.reference, shown)
                reply = self.ask(judge_prompt(question.text, *pair))
                scores = parse_scores(reply)
                if scores is None:
                    result.failed.append(f"{question.question_id}: {reply[:80]!r}")
                    continue
                candidate, reference = scores if first else scores[::-1]
                result.ratings.append(Rating(question.question_id, question.category, candidate, reference, first))
        return result


class EndpointJudge(Judge):
    """A model behind an OpenAI-compatible address, asked at temperature 0 by an [`HTTPBackend`] with these options."""

    def __init__(self, base_url: str, model: str, **options: Any) -> None:
        self.name = model
        self._url = base_url
        options = {"max_new_tokens": 512, "timeout_s": 120.0, "tries": 6, "backoff_s": 1.0, **options}
        self._backend = HTTPBackend(base_url, model, seed=None, concurrency=1, **options)

    def ask(self, prompt: str) -> str:
        [(_, answer)] = self._backend.complete([Prompt("judge", "", prompt)])
        if isinstance(answer, Failure):
            raise BackendError(
                f"The judge at {self._url} failed: {answer.detail}. Check --judge_base_url and --judge_model, or try again "
                "later; the answers are in answers.jsonl."
            )
        text = answer.text if isinstance(answer, Truncated) else answer
        if not text:
            raise BackendError(
                f"The judge at {self._url} returned an empty reply. Check that {self.name!r} is a chat model."
            )
        return text


class LocalJudge(Judge):
    """A causal language model of transformers, with greedy decoding and its chat template, if it has one."""

    def __init__(self, model: Any, tokenizer: Any, *, name: str = "local", max_new_tokens: int = 64) -> None:
        self.name = name
        self._model, self._tokenizer, self._max_new_tokens = model.eval(), tokenizer, max_new_tokens

    @classmethod
    def from_pretrained(cls, name: str, **kwargs: Any) -> LocalJudge:
        """Load it."""
        model = load_language_model(name)  # first, because it checks the tokenizer's files
        return cls(model, AutoTokenizer.from_pretrained(name, trust_remote_code=False), name=Path(name).name, **kwargs)

    def ask(self, prompt: str) -> str:
        has_template = bool(self._tokenizer.chat_template)
        if has_template:
            messages = [{"role": "user", "content": prompt}]
            prompt = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        encoded = self._tokenizer(prompt, return_tensors="pt", add_special_tokens=not has_template)
        ids = encoded["input_ids"].to(self._model.device)
        with torch.no_grad():
            settings = {"do_sample": False, "max_new_tokens": self._max_new_tokens}
            written = self._model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
        return self._tokenizer.decode(written[0, ids.size(1) :], skip_special_tokens=True)


class FileJudge(Judge):
    """Ratings from a file of JSON Lines, for example by people.

    A line has `model` (row name), `question_id`, `candidate` and `reference` (scores from 1 to 10), and optionally
    `candidate_first`, which is `true` by default.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = Path(path).name
        self._rows: list[tuple[str, Rating]] = []
        for number, row in read_jsonl(path):
            values: dict[str, Any] = row if isinstance(row, dict) else {}
            scores: list[Any] = [values.get("candidate"), values.get("reference")]
            first = values.get("candidate_first", True)
            fair = all(type(score) in (int, float) and WORST <= score <= BEST for score in scores)
            if not fair or not isinstance(first, bool) or not {"model", "question_id"} <= values.keys():
                raise ValueError(
                    f"Line {number} of {self.name} is not a rating: {row!r:.80}. Write model, question_id, candidate and "
                    "reference, scores from 1 to 10."
                )
            self._rows.append((str(row["model"]), Rating(str(row["question_id"]), "", scores[0], scores[1], first)))

    def rate(self, model: str, questions: Sequence[Question], answers: Sequence[str]) -> Ratings:
        category = {question.question_id: question.category for question in questions}
        found = [rating for name, rating in self._rows if name == model and rating.question_id in category]
        rated = {rating.question_id for rating in found}
        return Ratings(
            [replace(rating, category=category[rating.question_id]) for rating in found],
            [f"{name}: not in {self.name}" for name in category if name not in rated],
        )


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
    judge: Literal["none", "endpoint", "model", "file"] = documented(
        "none",
        "Judge of the answers: 'none', 'endpoint' (OpenAI-compatible), 'model' (of transformers) or 'file' (of ratings).",
    )
    judge_base_url: str | None = documented(None, "Address of the endpoint, such as http://localhost:8000/v1.")
    judge_model: str | None = documented(None, "Name of the judge: at the endpoint, or a folder or a name on the Hub.")
    judge_key_variable: str = documented(
        "JUDGE_API_KEY", "Environment variable with the endpoint's key, if it needs one."
    )
    judge_ratings: str | None = documented(None, "JSON Lines of ratings, for judge='file'.")
    answers: str | None = documented(None, "answers.jsonl of an earlier run, to judge its answers without training.")

    def __post_init__(self) -> None:
        check_values(self)
        needs = {"endpoint": ["judge_base_url", "judge_model"], "model": ["judge_model"], "file": ["judge_ratings"]}
        for name in needs.get(self.judge, []):
            if not getattr(self, name):
                raise ValueError(f"judge={self.judge!r} needs --{name}.")

    def load(self) -> Judge | None:
        """Make the judge."""
        if self.judge == "endpoint":
            variable = self.judge_key_variable if os.environ.get(self.judge_key_variable) else None
            return EndpointJudge(str(self.judge_base_url), str(self.judge_model), api_key_env=variable)
        if self.judge == "model":
            return LocalJudge.from_pretrained(str(self.judge_model))
        return FileJudge(str(self.judge_ratings)) if self.judge == "file" else None


def answer_row(
    name: str, questions: Sequence[Question], answers: Sequence[str], judge: Judge | None, seed: int
) -> dict[str, Any]:
    """One row of the table."""
    row: dict[str, Any] = {"name": name, **answer_statistics(answers)}
    row |= dict.fromkeys((*CATEGORIES, "overall"))
    reason = "no judge was set"
    if judge is not None:
        try:
            found = judge.rate(name, questions, answers)
            row |= {"judge": judge.name, "judge_failed": len(found.failed), "judge_failures": found.failed[:5]}
            reason = f"none of the {len(found.failed)} replies of the judge was understood"
            if found.ratings:
                reason = "no question of this category was rated"
                scores = relative_scores(found.ratings, seed=seed)
                row["judge_signature"] = scores.pop("signature")
                row |= scores
        except BackendError as error:
            reason = str(error)
    for key in (*CATEGORIES, "overall"):
        if row[key] is None:
            row[f"{key}_reason"] = reason
    return row


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
    found: dict[str, dict[str, str]] = {}
    for _, row in read_jsonl(path):
        found.setdefault(row["model"], {})[str(row["question_id"])] = row["answer"]
    for name, texts in found.items():
        missing = [q.question_id for q in questions if q.question_id not in texts]
        if missing:
            raise ValueError(
                f"{Path(path).name} has no answer of {name!r} to question {missing[0]!r}. Use the same --questions as "
                "that run."
            )
    return {name: [texts[q.question_id] for q in questions] for name, texts in found.items()}
