"""Any Hugging Face vision-to-text model as a captioner."""

from importlib import import_module
from pkgutil import iter_modules

from hf_captionrl.captioners.captioner import Captioner, Completions, ProcessorPair
from hf_captionrl.captioners.chat import ChatCaptioner, PaliGemmaCaptioner
from hf_captionrl.captioners.families import (
    Blip2Captioner,
    Blip2EncoderDecoderCaptioner,
    BlipCaptioner,
    ClipCapCaptioner,
    EncoderDecoderCaptioner,
    Florence2Captioner,
    GitCaptioner,
    Kosmos2Captioner,
    Pix2StructCaptioner,
)
from hf_captionrl.captioners.head_tap import (
    HeadInputs,
    HeadObjective,
    HeadOutput,
    LogProbsObjective,
    mean_cross_entropy,
)
from hf_captionrl.captioners.loading import both_lora, language_lora, load_captioner, register, vision_lora

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
