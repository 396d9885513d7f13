"""Comparisons of runs: what the recipes share."""

from hf_captionrl.evaluation.arguments import EvaluationArguments, optional_scorer
from hf_captionrl.evaluation.evaluator import Evaluator, draw_references
from hf_captionrl.experiments.arguments import DataArguments, ModelArguments, describe
from hf_captionrl.experiments.comparison import (
    START,
    Comparison,
    Run,
    alone_in,
    defer_push,
    finish,
    resumes,
    train_runs,
)
from hf_captionrl.experiments.data import describe_data, load_data
from hf_captionrl.experiments.parsing import parse_arguments
from hf_captionrl.experiments.report import write_report

__all__ = [
    "START",
    "Comparison",
    "DataArguments",
    "EvaluationArguments",
    "Evaluator",
    "ModelArguments",
    "Run",
    "alone_in",
    "defer_push",
    "describe",
    "describe_data",
    "draw_references",
    "finish",
    "load_data",
    "optional_scorer",
    "parse_arguments",
    "resumes",
    "train_runs",
    "write_report",
]
