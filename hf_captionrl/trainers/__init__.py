"""Trainers and their configs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_captionrl.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from hf_captionrl.trainers.caption_config import CaptionConfig
    from hf_captionrl.trainers.caption_rl_trainer import CaptionRLConfig, CaptionRLTrainer
    from hf_captionrl.trainers.caption_trainer import CaptionTrainer, EpochCallback
    from hf_captionrl.trainers.guard import GuardThresholds
    from hf_captionrl.trainers.self_retrieval_trainer import SelfRetrievalConfig, SelfRetrievalTrainer
    from hf_captionrl.trainers.sle_trainer import SLEConfig, SLETrainer
    from hf_captionrl.trainers.smile_trainer import SmileConfig, SmileObjective, SmileTrainer
    from hf_captionrl.trainers.trl_grpo import SelfRetrievalGRPOConfig, SelfRetrievalGRPOTrainer
    from hf_captionrl.trainers.trl_smile_sft import SmileSFTConfig, SmileSFTTrainer

__getattr__, __all__ = lazy_names(__name__)
