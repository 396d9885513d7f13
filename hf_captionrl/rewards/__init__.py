"""Rewards, their weighted sum, and the baselines that turn them into advantages."""

from importlib import import_module
from pkgutil import iter_modules

from hf_captionrl.rewards.advantages import BASELINES, Baseline, RunningMeanBaseline, make_baseline
from hf_captionrl.rewards.base import (
    REWARDS,
    CompletionReward,
    FunctionReward,
    Reward,
    RewardContext,
    RewardData,
    RewardLike,
    WeightedRewards,
    register_reward,
    resolve_rewards,
)
from hf_captionrl.rewards.self_retrieval import BankRewardFunction, ImageBank, SelfRetrieval, retrieval_rewards
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

__all__ = [
    "BASELINES",
    "REWARDS",
    "BankRewardFunction",
    "Baseline",
    "CiderReward",
    "CompletionReward",
    "FunctionReward",
    "ImageBank",
    "LengthPenalty",
    "PairwiseDiversity",
    "RepetitionPenalty",
    "Reward",
    "RewardContext",
    "RewardData",
    "RewardLike",
    "RunningMeanBaseline",
    "SelfRetrieval",
    "TruncationPenalty",
    "WeightedRewards",
    "bleu34_distance",
    "edit_distance",
    "make_baseline",
    "register_reward",
    "repeated_share",
    "resolve_rewards",
    "retrieval_rewards",
]

# Every file in this folder registers its rewards; a new file needs no other line.
for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
