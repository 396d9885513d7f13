"""A table of `captionrl evaluate` that needs further models: BLEURT, entailment, and the entropy of a captioner on the captions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.caption_entropy import caption_entropy
from hf_captionrl.evaluate_modules.metric import table_columns
from hf_captionrl.evaluation.evaluator import Evaluator
from hf_captionrl.evaluation.paper_tables import ScoredCaptions, Table
from hf_captionrl.metrics.learned_similarity import bleurt, entailment, load_pair_model
from hf_captionrl.metrics.signature import signature
from hf_captionrl.metrics.suites.suite_row import SuiteRow, spoken
from hf_captionrl.scenes.models import model_path
from hf_captionrl.trainers.caption_generation import LazyImages

__all__ = ["learned_table"]


def learned_table(bleurt_name: str | None, nli_name: str | None, captioner_name: str | None) -> Table | None:
    """The table of the named models, which are loaded immediately; None if no model is named.

    Raises FileNotFoundError without weights, and ValueError for a model of another kind.
    """
    numbers: dict[str, Callable[[ScoredCaptions, Evaluator], dict[str, Any]]] = {}
    if bleurt_name is not None:
        numbers["bleurt"] = _by_references(bleurt, _loaded(bleurt_name, "--bleurt"))
    if nli_name is not None:
        numbers["entailment"] = _by_references(entailment, _loaded(nli_name, "--nli"))
    if captioner_name is not None:
        captioner = load_captioner(model_path(captioner_name))

        def entropy(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
            images = LazyImages(evaluator.dataset, range(len(scored.captions)))
            found = caption_entropy(captioner, images, spoken(scored.first))
            return found | {"signature": signature(metric="caption_entropy", family=captioner.family)}

        numbers["caption_entropy"] = entropy

    columns = table_columns(*numbers)

    def compute(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
        row = SuiteRow(scored.first, evaluator.seed)
        for column, number in zip(columns, numbers.values(), strict=True):
            if column.key != "caption_entropy" and scored.given_references is None:
                row.missing("an image has no reference", column.key)
                continue
            found = number(scored, evaluator)
            row.mean(column.key, found["per_sample"], signature=found["signature"], is_share=column.is_fraction)
        return row.result(details=True)

    return Table("Learned metrics", columns, compute) if numbers else None


def _loaded(name: str, option: str) -> Any:
    try:
        return load_pair_model(name)
    except RuntimeError as error:
        raise FileNotFoundError(f"{option}: {str(error).removeprefix('not run: ')}") from error


def _by_references(metric: Any, model: Any) -> Callable[[ScoredCaptions, Evaluator], dict[str, Any]]:
    return lambda scored, _: metric(spoken(scored.first), scored.references, model=model)
