"""Answers of several language models to the same questions: the judge, the table and the file of answers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_captionrl.evaluate_modules.metric import table_columns
from hf_captionrl.instruct.judges import EndpointJudge, FileJudge, Judge, JudgeError, LocalJudge
from hf_captionrl.instruct.questions import Question
from hf_captionrl.instruct.ratings import CATEGORIES, answer_statistics, relative_scores
from hf_captionrl.io import read_jsonl, write_jsonl
from hf_captionrl.reports.table import Column

__all__ = ["ANSWER_COLUMNS", "TEXT_COLUMNS", "JudgeArguments", "answer_row", "read_answers", "write_answers"]

TEXT_COLUMNS: tuple[Column, ...] = (
    replace(*table_columns("length", short=True), digits=1),
    *table_columns("lexical_diversity", short=True),
    Column("empty", "Empty\n", "lower", is_fraction=True),
)
"""Columns that need no judge."""

ANSWER_COLUMNS: tuple[Column, ...] = (
    *TEXT_COLUMNS,
    *(Column(name, f"{title}\n", "higher") for name, title in CATEGORIES.items()),
    Column("overall", "Overall\n", "higher"),
)
"""Columns of Table 7; scores are divided by those of the reference answers."""


@dataclass
class JudgeArguments:
    """The questions, and the judge of the answers."""

    questions: str | None = field(
        default=None,
        metadata={"help": "File in the format of Vicuna's question.jsonl. None: the questions of this package."},
    )
    reference_answers: str | None = field(
        default=None, metadata={"help": "JSON Lines with question_id and text, for questions without a reference."}
    )
    answer_max_new_tokens: int = field(default=512, metadata={"help": "Maximum length of an answer in tokens."})
    judge: str = field(
        default="none",
        metadata={
            "help": "Judge of the answers: 'none', 'endpoint' (OpenAI-compatible), 'model' (of transformers) or 'file' (of ratings)."
        },
    )
    judge_base_url: str | None = field(
        default=None, metadata={"help": "Address of the endpoint, such as http://localhost:8000/v1."}
    )
    judge_model: str | None = field(
        default=None, metadata={"help": "Name of the judge: at the endpoint, or a folder or a name on the Hub."}
    )
    judge_key_variable: str = field(
        default="JUDGE_API_KEY",
        metadata={"help": "Environment variable with the endpoint's key, if it needs one."},
    )
    judge_ratings: str | None = field(default=None, metadata={"help": "JSON Lines of ratings, for judge='file'."})
    answers: str | None = field(
        default=None, metadata={"help": "answers.jsonl of an earlier run, to judge its answers without training."}
    )

    def __post_init__(self) -> None:
        needs: dict[str, list[str]] = {
            "none": [],
            "endpoint": ["judge_base_url", "judge_model"],
            "model": ["judge_model"],
            "file": ["judge_ratings"],
        }
        if self.judge not in needs:
            raise ValueError(f"judge is {self.judge!r}. Use one of {', '.join(map(repr, needs))}.")
        for name in needs[self.judge]:
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
        except JudgeError as error:
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
