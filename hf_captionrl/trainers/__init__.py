"""Trainers and their configs."""

from hf_captionrl.trainers.caption_config import CaptionConfig
from hf_captionrl.trainers.caption_trainer import CaptionTrainer, EpochCallback
from hf_captionrl.trainers.smile_config import SmileConfig
from hf_captionrl.trainers.smile_trainer import SmileObjective, SmileTrainer

__all__ = ["CaptionConfig", "CaptionTrainer", "EpochCallback", "SmileConfig", "SmileObjective", "SmileTrainer"]
