"""Rewards, their weighted sum, and the baselines that turn them into advantages."""

from importlib import import_module
from pkgutil import iter_modules

from hf_captionrl.rewards.advantages import BASELINES, Baseline, RunningMeanBaseline, make_baseline
from hf_captionrl.rewards.bank_reward_function import BankRewardFunction
from hf_captionrl.rewards.base import Reward, RewardContext, RewardData, WeightedRewards
from hf_captionrl.rewards.cider_reward import CiderReward
from hf_captionrl.rewards.diversity import PairwiseDiversity, bleu34_distance, edit_distance
from hf_captionrl.rewards.image_bank import ImageBank
from hf_captionrl.rewards.penalties import LengthPenalty, RepetitionPenalty, TruncationPenalty, repeated_share
from hf_captionrl.rewards.registry import REWARDS, RewardLike, register_reward, resolve_rewards
from hf_captionrl.rewards.self_retrieval import SelfRetrieval, retrieval_rewards
from hf_captionrl.rewards.trl_reward_functions import CompletionReward, FunctionReward

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
