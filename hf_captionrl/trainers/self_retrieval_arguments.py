"""Arguments of the rewards, shared by the self-retrieval trainers of captioners and of chat models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_captionrl.retrieval import Scorer
from hf_captionrl.rewards import REWARDS
from hf_captionrl.rewards.arguments import reward_arguments

__all__ = ["SelfRetrievalArguments", "scorer_list"]


def scorer_list(scorer: Scorer | Sequence[Scorer] | None) -> list[Scorer]:
    """The reward scorers of a trainer, at least one."""
    scorers = list(scorer) if isinstance(scorer, (list, tuple)) else [scorer]
    if not scorers or scorers[0] is None:
        raise ValueError("Self-retrieval needs a scorer. Pass scorer=load_scorer(name).")
    return scorers


_RewardFields: Any = reward_arguments(REWARDS.values())


@dataclass
class SelfRetrievalArguments(_RewardFields):
    """Weight and arguments of every registered reward; by default self-retrieval alone, as in DiscriTune."""
