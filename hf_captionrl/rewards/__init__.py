"""Rewards, their weighted sum, and the baselines that turn them into advantages."""

from hf_captionrl.rewards.advantages import BASELINES, Baseline, RunningMeanBaseline, make_baseline
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
from hf_captionrl.rewards.claim_rewards import ClaimReward
from hf_captionrl.rewards.listener import ListenerReward
from hf_captionrl.rewards.question_rewards import QuestionReward
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
    "ClaimReward",
    "CompletionReward",
    "ImageBank",
    "LengthPenalty",
    "ListenerReward",
    "PairwiseDiversity",
    "QuestionReward",
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
