"""hf_captionrl: teach Hugging Face image captioners to say what makes this image different, and measure whether they do."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_captionrl.captioners.clipcap.registration import register_auto_classes
from hf_captionrl.metrics.evaluate_modules.load import extend_evaluate

__version__ = "0.1.0"

__all__ = [
    "CaptionConfig",
    "CaptionRLConfig",
    "CaptionRLTrainer",
    "CaptionTrainer",
    "Captioner",
    "SLEConfig",
    "SLETrainer",
    "SelfRetrievalConfig",
    "SelfRetrievalGRPOConfig",
    "SelfRetrievalGRPOTrainer",
    "SelfRetrievalTrainer",
    "SmileConfig",
    "SmileSFTConfig",
    "SmileSFTTrainer",
    "SmileTrainer",
    "__version__",
    "both_lora",
    "describe_album",
    "fused_smile_loss",
    "language_lora",
    "load_captioner",
    "load_captions",
    "load_scenes",
    "load_scorer",
    "pipeline",
    "smile_loss",
    "vision_lora",
]

# Where each public name lives. Resolved on first use: importing the package must not import torch.
_HOME = {
    "CaptionConfig": "trainers",
    "CaptionRLConfig": "trainers",
    "CaptionRLTrainer": "trainers",
    "CaptionTrainer": "trainers",
    "Captioner": "captioners",
    "SLEConfig": "trainers",
    "SLETrainer": "trainers",
    "SelfRetrievalConfig": "trainers",
    "SelfRetrievalGRPOConfig": "trainers",
    "SelfRetrievalGRPOTrainer": "trainers",
    "SelfRetrievalTrainer": "trainers",
    "SmileConfig": "trainers",
    "SmileSFTConfig": "trainers",
    "SmileSFTTrainer": "trainers",
    "SmileTrainer": "trainers",
    "both_lora": "captioners",
    "describe_album": "album.album",
    "fused_smile_loss": "losses",
    "language_lora": "captioners",
    "load_captioner": "captioners",
    "load_captions": "data",
    "load_scenes": "scenes",
    "load_scorer": "retrieval.scorer",
    "pipeline": "pipelines",
    "smile_loss": "losses",
    "vision_lora": "captioners",
}

if TYPE_CHECKING:
    from hf_captionrl.apps.album.album import describe_album
    from hf_captionrl.captioners import Captioner, both_lora, language_lora, load_captioner, vision_lora
    from hf_captionrl.captioners.pipeline import pipeline
    from hf_captionrl.data import load_captions
    from hf_captionrl.losses import fused_smile_loss, smile_loss
    from hf_captionrl.retrieval.scorer import load_scorer
    from hf_captionrl.scenes import load_scenes
    from hf_captionrl.trainers import (
        CaptionConfig,
        CaptionRLConfig,
        CaptionRLTrainer,
        CaptionTrainer,
        SelfRetrievalConfig,
        SelfRetrievalGRPOConfig,
        SelfRetrievalGRPOTrainer,
        SelfRetrievalTrainer,
        SLEConfig,
        SLETrainer,
        SmileConfig,
        SmileSFTConfig,
        SmileSFTTrainer,
        SmileTrainer,
    )


# evaluate.load("self_retrieval") then works; CAPTIONRL_NO_INSTALL=1 turns it off.
extend_evaluate()
# AutoModelForImageTextToText and the other Auto classes then know ClipCap.
register_auto_classes()


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"hf_captionrl.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. Its public names are {__all__}.")
