"""Rewards, their weighted sum, and the baselines that turn them into advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_captionrl.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from hf_captionrl.rewards.advantages import BASELINES, Baseline, RunningMeanBaseline, make_baseline
    from hf_captionrl.rewards.banks import ImageBank
    from hf_captionrl.rewards.base import (
        REWARDS,
        CompletionReward,
        Reward,
        RewardContext,
        RewardData,
        RewardLike,
        WeightedRewards,
        register_reward,
        resolve_rewards,
    )
    from hf_captionrl.rewards.self_retrieval import BankRewardFunction, SelfRetrieval, retrieval_rewards
    from hf_captionrl.rewards.text_rewards import (
        CiderReward,
        LengthPenalty,
        PairwiseDiversity,
        RepetitionPenalty,
        TruncationPenalty,
        bleu34_distance,
        edit_distance,
        repeated_share,
    )

__getattr__, __all__ = lazy_names(__name__)
