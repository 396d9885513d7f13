"""Trainers and their configs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_captionrl.trainers.caption_config import CaptionConfig
from hf_captionrl.trainers.caption_rl_trainer import CaptionRLConfig, CaptionRLTrainer
from hf_captionrl.trainers.caption_trainer import CaptionTrainer, EpochCallback
from hf_captionrl.trainers.guard import GuardThresholds
from hf_captionrl.trainers.self_retrieval_trainer import SelfRetrievalConfig, SelfRetrievalTrainer
from hf_captionrl.trainers.sle_trainer import SLEConfig, SLETrainer
from hf_captionrl.trainers.smile_trainer import SmileConfig, SmileObjective, SmileTrainer

if TYPE_CHECKING:
    from hf_captionrl.trainers.trl_grpo import SelfRetrievalGRPOConfig, SelfRetrievalGRPOTrainer
    from hf_captionrl.trainers.trl_smile_sft import SmileSFTConfig, SmileSFTTrainer

__all__ = [
    "CaptionConfig",
    "CaptionRLConfig",
    "CaptionRLTrainer",
    "CaptionTrainer",
    "EpochCallback",
    "GuardThresholds",
    "SLEConfig",
    "SLETrainer",
    "SelfRetrievalConfig",
    "SelfRetrievalGRPOConfig",
    "SelfRetrievalGRPOTrainer",
    "SelfRetrievalTrainer",
    "SmileConfig",
    "SmileObjective",
    "SmileSFTConfig",
    "SmileSFTTrainer",
    "SmileTrainer",
]

# Importing trl takes seconds, so these are imported on first use.
_ON_TRL = {
    "SelfRetrievalGRPOConfig": "self_retrieval_grpo_config",
    "SelfRetrievalGRPOTrainer": "self_retrieval_grpo_trainer",
    "SmileSFTConfig": "smile_sft_config",
    "SmileSFTTrainer": "smile_sft_trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_TRL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ON_TRL[name]}"), name)
