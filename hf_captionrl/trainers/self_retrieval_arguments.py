"""Arguments of the rewards, shared by the self-retrieval trainers of captioners and of chat models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_captionrl.rewards import REWARDS
from hf_captionrl.rewards.arguments import reward_arguments

__all__ = ["SelfRetrievalArguments"]

_RewardFields: Any = reward_arguments(REWARDS.values())


@dataclass
class SelfRetrievalArguments(_RewardFields):
    """Weight and arguments of every registered reward; by default self-retrieval alone, as in DiscriTune."""
