"""Facts about a training, stored beside the model: base model, data, objective and settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hf_captionrl.io import write_json

__all__ = ["TRAINING_FILE", "training_facts", "write_training_facts"]

TRAINING_FILE = "training.json"
"""Base model, objective, rewards, data and seeds, without local paths."""


def _public(name: Any) -> str | None:
    """A name on the Hub unchanged; of a folder only the last part."""
    text = str(name or "")
    if not text:
        return None
    return Path(text).name if os.path.isabs(text) or os.path.exists(text) else text


def _objective(trainer: Any) -> dict[str, Any]:
    args, rewards = trainer.args, getattr(trainer, "rewards", None)
    if rewards is None:
        weight = getattr(args, "mle_weight", None)
        if weight is None:
            return {}
        return {
            "objective": "mle" if weight == 1.0 else "smile",
            "mle_weight": weight,
            "first_token": args.first_token,
        }
    known = {"SelfRetrieval": "self_retrieval", "PairwiseDiversity": "sle"}
    kinds = [known[type(r).__name__] for r in rewards.rewards if type(r).__name__ in known]
    scorers = [scorer.signature for scorer in trainer.scorers if hasattr(scorer, "signature")]
    return {
        **({"objective": kinds[0]} if kinds else {}),
        "reward": rewards.describe(),
        "baseline": args.baseline,
        "num_generations": args.num_generations,
        "reward_scorers": [_public(signature) for signature in scorers],
    }


def _number_of_images(data: Any) -> int | None:
    """Number of training images; None for a stream."""
    return getattr(data, "num_images", len(data) if hasattr(data, "__len__") else None)


def training_facts(trainer: Any) -> dict[str, Any]:
    """Facts about a trainer's model."""
    captioner, args, data = trainer.captioner, trainer.args, trainer.train_dataset
    model = captioner.base_model
    facts: dict[str, Any] = {
        "trainer": type(trainer).__name__,
        "base_model": _public(getattr(model, "name_or_path", None)),
        "family": captioner.family,
        "prompt": captioner.prompt,
        "is_adapter": hasattr(captioner.model, "peft_config"),
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "learning_rate": args.learning_rate,
        "seeds": {"seed": args.seed, "data_seed": args.data_seed},
        "train_images": _number_of_images(data),
        "generation": {"num_beams": args.generation_num_beams, "max_new_tokens": args.generation_max_new_tokens},
    }
    return {**facts, **_objective(trainer)}


def write_training_facts(trainer: Any, folder: str | os.PathLike[str]) -> Path:
    """Write [`TRAINING_FILE`]."""
    return write_json(Path(folder) / TRAINING_FILE, training_facts(trainer))
