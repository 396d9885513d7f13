"""Trainers and their configs."""

from hf_captionrl.trainers.caption_config import CaptionConfig
from hf_captionrl.trainers.caption_rl_config import CaptionRLConfig
from hf_captionrl.trainers.caption_rl_trainer import CaptionRLTrainer
from hf_captionrl.trainers.caption_trainer import CaptionTrainer, EpochCallback
from hf_captionrl.trainers.self_retrieval_config import SelfRetrievalConfig
from hf_captionrl.trainers.self_retrieval_trainer import SelfRetrievalTrainer
from hf_captionrl.trainers.sle_config import SLEConfig
from hf_captionrl.trainers.sle_trainer import SLETrainer
from hf_captionrl.trainers.smile_config import SmileConfig
from hf_captionrl.trainers.smile_trainer import SmileObjective, SmileTrainer

__all__ = [
    "CaptionConfig",
    "CaptionRLConfig",
    "CaptionRLTrainer",
    "CaptionTrainer",
    "EpochCallback",
    "SLEConfig",
    "SLETrainer",
    "SelfRetrievalConfig",
    "SelfRetrievalTrainer",
    "SmileConfig",
    "SmileObjective",
    "SmileTrainer",
]
