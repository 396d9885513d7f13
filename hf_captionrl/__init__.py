"""hf_captionrl: teach Hugging Face image captioners to say what makes this image different, and measure whether they do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_captionrl.captioners.clipcap import register_auto_classes
from hf_captionrl.metrics.evaluate_modules import extend_evaluate
from hf_captionrl.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from hf_captionrl.apps.album.album import describe_album
    from hf_captionrl.captioners.captioner import Captioner
    from hf_captionrl.captioners.loading import load_captioner
    from hf_captionrl.captioners.lora import both_lora, language_lora, vision_lora
    from hf_captionrl.captioners.pipeline import pipeline
    from hf_captionrl.data.bag_curriculum import BagCurriculumSampler
    from hf_captionrl.data.loading import load_captions
    from hf_captionrl.losses.smile import fused_smile_loss, smile_loss
    from hf_captionrl.retrieval.scorer import load_scorer
    from hf_captionrl.scenes.dataset import load_scenes
    from hf_captionrl.trainers.caption_config import CaptionConfig
    from hf_captionrl.trainers.caption_rl_trainer import CaptionRLConfig, CaptionRLTrainer
    from hf_captionrl.trainers.caption_trainer import CaptionTrainer
    from hf_captionrl.trainers.self_retrieval_trainer import SelfRetrievalConfig, SelfRetrievalTrainer
    from hf_captionrl.trainers.sle_trainer import SLEConfig, SLETrainer
    from hf_captionrl.trainers.smile_trainer import SmileConfig, SmileTrainer
    from hf_captionrl.trainers.trl_grpo import SelfRetrievalGRPOConfig, SelfRetrievalGRPOTrainer
    from hf_captionrl.trainers.trl_smile_sft import SmileSFTConfig, SmileSFTTrainer

__getattr__, __all__ = lazy_names(__name__)
__version__ = "0.1.0"
__all__ += ["__version__"]

# evaluate.load("self_retrieval") then works.
extend_evaluate()
# AutoModelForImageTextToText and the other Auto classes then know ClipCap.
register_auto_classes()
