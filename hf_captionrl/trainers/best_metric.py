"""The metric that selects the best model, checked before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_captionrl.data.caption_columns import caption_lists

__all__ = ["check_best_metric", "metrics_of_evaluation", "references_of"]


def references_of(dataset: Any) -> list[list[str]] | None:
    """The captions of each row of a data set; None if it has no captions."""
    if not _has_references(dataset):
        return None
    found = caption_lists(dataset)
    return found if any(found) else None


def _has_references(dataset: Any) -> bool:
    return "captions" in (getattr(dataset, "column_names", None) or ())


def metrics_of_evaluation(trainer: Any, args: Any, datasets: Any) -> list[str]:
    """Names of the metrics of a [`CaptionTrainer`]'s evaluation, without the prefix."""
    scorers = {"": trainer.scorer, "reward_": trainer.selecting_scorer}
    sets: Mapping[str, Any] = datasets if isinstance(datasets, Mapping) else {"": datasets}
    found = []
    for name, rows in sets.items():
        own = ["loss"] if _has_references(rows) else []
        if not args.prediction_loss_only:
            own += ["length", "lexical_diversity"]
            large = rows is not None and len(rows) >= 100
            for prefix in (prefix for prefix, scorer in scorers.items() if scorer is not None):
                own += [f"{prefix}recall_at_1", f"{prefix}recall_at_5"]
                own += [f"{prefix}rd100_recall_at_1"] if large else []
            own += ["degenerate", "clipped_ratio"] if getattr(args, "guard", "off") != "off" else []
        own += ["runtime", "samples_per_second", "steps_per_second"]
        found += [f"{name}_{metric}" if name else metric for metric in own]
    return found


def check_best_metric(trainer: Any, args: Any, datasets: Any, *, is_complete: bool) -> None:
    """Refuse a metric for the best model that evaluation does not compute."""
    wanted = str(args.metric_for_best_model or "").removeprefix("eval_")
    used = args.load_best_model_at_end or args.save_strategy == "best"
    if not wanted or not (used or args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")):
        return
    if "recall_at" in wanted and trainer.scorer is None and is_complete:
        raise ValueError(
            f"The best model is chosen by {args.metric_for_best_model!r}, which needs a scorer. "
            "Pass scorer=load_scorer(...), or choose another metric_for_best_model."
        )
    known = metrics_of_evaluation(trainer, args, datasets)
    if is_complete and wanted not in known:
        raise ValueError(
            f"The best model is chosen by {args.metric_for_best_model!r}, which evaluation does not compute. Use one of "
            f"{', '.join(known)}, or compute it in compute_metrics."
        )
