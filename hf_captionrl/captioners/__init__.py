"""Any Hugging Face vision-to-text model as a captioner."""

from importlib import import_module
from pkgutil import iter_modules

from hf_captionrl.captioners.blip import BlipCaptioner
from hf_captionrl.captioners.blip2 import Blip2Captioner, Blip2EncoderDecoderCaptioner
from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.captioner_loading import load_captioner, register
from hf_captionrl.captioners.chat import ChatCaptioner
from hf_captionrl.captioners.clipcap import ClipCapCaptioner
from hf_captionrl.captioners.encoder_decoder import EncoderDecoderCaptioner
from hf_captionrl.captioners.florence2 import Florence2Captioner
from hf_captionrl.captioners.generation import Completions
from hf_captionrl.captioners.git import GitCaptioner
from hf_captionrl.captioners.head_tap import (
    HeadInputs,
    HeadObjective,
    HeadOutput,
    LogProbsObjective,
    mean_cross_entropy,
)
from hf_captionrl.captioners.kosmos2 import Kosmos2Captioner
from hf_captionrl.captioners.lora_presets import both_lora, language_lora, vision_lora
from hf_captionrl.captioners.paligemma import PaliGemmaCaptioner
from hf_captionrl.captioners.pix2struct import Pix2StructCaptioner
from hf_captionrl.captioners.saving import ProcessorPair

__all__ = [
    "Blip2Captioner",
    "Blip2EncoderDecoderCaptioner",
    "BlipCaptioner",
    "Captioner",
    "ChatCaptioner",
    "ClipCapCaptioner",
    "Completions",
    "EncoderDecoderCaptioner",
    "Florence2Captioner",
    "GitCaptioner",
    "HeadInputs",
    "HeadObjective",
    "HeadOutput",
    "Kosmos2Captioner",
    "LogProbsObjective",
    "PaliGemmaCaptioner",
    "Pix2StructCaptioner",
    "ProcessorPair",
    "both_lora",
    "language_lora",
    "load_captioner",
    "mean_cross_entropy",
    "register",
    "vision_lora",
]

# Every file in this folder registers its families; a new file needs no other line.
for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
