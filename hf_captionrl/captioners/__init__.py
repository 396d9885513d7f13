"""Any Hugging Face vision-to-text model as a captioner."""

from hf_captionrl.captioners.auto import load_captioner, register
from hf_captionrl.captioners.base import Captioner
from hf_captionrl.captioners.blip import BlipCaptioner
from hf_captionrl.captioners.chat import ChatCaptioner, PaliGemmaCaptioner
from hf_captionrl.captioners.clipcap import ClipCapCaptioner
from hf_captionrl.captioners.encoder_decoder import EncoderDecoderCaptioner
from hf_captionrl.captioners.git import GitCaptioner
from hf_captionrl.captioners.head import HeadInputs, HeadObjective, HeadOutput, LogProbsObjective, mean_cross_entropy
from hf_captionrl.captioners.saving import ProcessorPair
from hf_captionrl.captioners.writing import GenerationOutput

__all__ = [
    "BlipCaptioner",
    "Captioner",
    "ChatCaptioner",
    "ClipCapCaptioner",
    "EncoderDecoderCaptioner",
    "GenerationOutput",
    "GitCaptioner",
    "HeadInputs",
    "HeadObjective",
    "HeadOutput",
    "LogProbsObjective",
    "PaliGemmaCaptioner",
    "ProcessorPair",
    "load_captioner",
    "mean_cross_entropy",
    "register",
]
