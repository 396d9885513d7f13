"""Any Hugging Face vision-to-text model as a captioner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_captionrl.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from hf_captionrl.captioners.captioner import Captioner, Completions, ProcessorPair
    from hf_captionrl.captioners.chat import ChatCaptioner, PaliGemmaCaptioner
    from hf_captionrl.captioners.families import (
        Blip2Captioner,
        Blip2EncoderDecoderCaptioner,
        BlipCaptioner,
        ClipCapCaptioner,
        EncoderDecoderCaptioner,
        GitCaptioner,
    )
    from hf_captionrl.captioners.head_tap import (
        HeadInputs,
        HeadObjective,
        HeadOutput,
        LogProbsObjective,
        mean_cross_entropy,
    )
    from hf_captionrl.captioners.loading import load_captioner, register
    from hf_captionrl.captioners.lora import both_lora, language_lora, vision_lora

__getattr__, __all__ = lazy_names(__name__)
