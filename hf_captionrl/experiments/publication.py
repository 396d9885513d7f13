"""Writes card, manifest and results of a finished model, and pushes it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import datasets

from hf_captionrl.captioners import Captioner
from hf_captionrl.evaluation.arguments import EMBEDDED, EvaluationArguments
from hf_captionrl.evaluation.evaluator import Evaluator
from hf_captionrl.experiments.arguments import DataArguments, ModelArguments, describe
from hf_captionrl.experiments.data import describe_data
from hf_captionrl.hub import (
    ModelCardFacts,
    local_base_model,
    public_values,
    push_folder,
    write_manifest,
    write_model_card,
)
from hf_captionrl.io import write_json
from hf_captionrl.trainers import CaptionConfig

__all__ = ["check_hub_strategy", "defer_push", "push_model", "write_publication"]


def check_hub_strategy(config: Any) -> None:
    """Refuse settings of the push that would upload checkpoints, before anything is written."""
    strategy = getattr(config.hub_strategy, "value", config.hub_strategy)
    if config.push_to_hub and strategy in ("checkpoint", "all_checkpoints"):
        raise ValueError(
            f"hub_strategy is {strategy!r}, but checkpoints contain the optimizer as a pickle, which is never "
            "uploaded. Use 'end' or 'every_save': the finished model is pushed once, with its card."
        )


def defer_push(config: CaptionConfig, held_out_name: str | None) -> bool:
    """Disable the Trainer's own push: the card needs the table, so a recipe pushes at its end.

    Args:
        config ([`CaptionConfig`]): Its `push_to_hub` is set to False.
        held_out_name (`str`, *optional*): Name of the held-out scorer.

    Returns:
        `bool`: Whether to push at the end.

    Raises:
        ValueError: If a push is requested without a held-out scorer, or with a `hub_strategy` that uploads checkpoints.
    """
    check_hub_strategy(config)
    push, config.push_to_hub = config.push_to_hub, False
    if push and held_out_name in (None, "none"):
        raise ValueError(
            "push_to_hub needs a held-out scorer, because the card must contain retrieval numbers. Use "
            "--held_out_scorer_name_or_path."
        )
    return push


def write_publication(
    results_path: Path,
    captioner: Captioner,
    captions: list[str],
    row: str,
    evaluator: Evaluator,
    arguments: tuple[Any, ...],
    splits: datasets.DatasetDict,
    objective: dict[str, Any],
) -> None:
    """Write card, manifest and results into the folder of the finished model."""
    if evaluator.held_out_scorer is None:
        raise ValueError(
            "There is no held-out scorer, but the card must contain retrieval numbers. Set "
            "held_out_scorer_name_or_path."
        )
    model_args: ModelArguments = next(a for a in arguments if isinstance(a, ModelArguments))
    data_args: DataArguments = next(a for a in arguments if isinstance(a, DataArguments))
    config: CaptionConfig = next(a for a in arguments if isinstance(a, CaptionConfig))
    output_dir, name = results_path.parent, data_args.dataset_name
    folder = output_dir / "model"
    results = json.loads(results_path.read_text(encoding="utf-8"))
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not os.path.exists(name)
    card = ModelCardFacts(
        model_id=config.hub_model_id or output_dir.name,
        base_model=model_args.public_name,
        family=captioner.family,
        dataset=f"hf_captionrl {name}" if name in EMBEDDED else Path(name).name,
        dataset_description=describe_data(data_args, splits),
        dataset_id=name if on_hub else None,
        dataset_revision=data_args.dataset_revision if on_hub else None,
        scorer=evaluator.held_out_scorer.signature,
        scorer_max_text_tokens=evaluator.held_out_scorer.max_text_tokens,
        truncated_fraction=evaluator.held_out_scorer.count_truncated(captions) / len(captions),
        generation={"num_beams": config.generation_num_beams, "max_new_tokens": config.generation_max_new_tokens},
        prompt=captioner.prompt,
        row=row,
        license=model_args.license,
        # An adapter of a local base model is merged into it for the push.
        is_adapter=(folder / "adapter_config.json").is_file() and local_base_model(folder) is None,
        base_revision=model_args.model_revision or "main",
        **objective,
    )
    write_model_card(folder, results, card)
    eval_args = next((a for a in arguments if isinstance(a, EvaluationArguments)), None)
    # Local photographs are uploaded only on request.
    shows_images = name in EMBEDDED or on_hub or (eval_args is not None and eval_args.push_gallery)
    write_manifest(
        folder,
        command=sys.argv,
        seeds={"seed": config.seed, "data_seed": config.data_seed},
        data={
            "name": name,
            "config": data_args.dataset_config,
            "revision": data_args.dataset_revision,
            "public_images": shows_images,
            "rows": {split: len(rows) for split, rows in splits.items()},
            "fingerprints": {split: rows._fingerprint for split, rows in splits.items()},
        },
        config=describe(arguments),
    )
    write_json(folder / "results.json", public_values(results))
    for file in ("results.md", *(["gallery.html"] if shows_images else []), "curves.png"):
        if (output_dir / file).exists():
            shutil.copy(output_dir / file, folder / file)


def push_model(folder: Path, config: CaptionConfig) -> str:
    """Push the finished model to the configured repository."""
    return push_folder(
        folder,
        config.hub_model_id or folder.parent.name,
        private=True if config.hub_private_repo is None else config.hub_private_repo,
        token=config.hub_token,
        revision=config.hub_revision,
    )
