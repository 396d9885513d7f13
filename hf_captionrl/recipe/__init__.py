"""What the recipes share: their arguments, data, evaluation, training runs and report."""

from hf_captionrl.recipe.arguments import (
    DataArguments,
    EvaluationArguments,
    ModelArguments,
    describe,
)
from hf_captionrl.recipe.comparison import START, Comparison, Run, alone_in, defer_push, finish, resumes, train_runs
from hf_captionrl.recipe.evaluation import Evaluator, draw_references
from hf_captionrl.recipe.loading import describe_data, load_data, optional_scorer
from hf_captionrl.recipe.parsing import parse_arguments
from hf_captionrl.recipe.report import write_report

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
