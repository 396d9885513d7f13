"""Language models that answer prompts: transformers, vLLM, or an OpenAI-compatible endpoint."""

from hf_captionrl.language_models.backend import Answer, Backend, BackendError, Failure, Truncated
from hf_captionrl.language_models.endpoint import HTTPBackend
from hf_captionrl.language_models.prompt import Prompt
from hf_captionrl.language_models.transformers_models import (
    CaptionerBackend,
    TransformersTextBackend,
    TransformersVisionBackend,
)
from hf_captionrl.language_models.vllm_models import VLLMBackend

__all__ = [
    "Answer",
    "Backend",
    "BackendError",
    "CaptionerBackend",
    "Failure",
    "HTTPBackend",
    "Prompt",
    "TransformersTextBackend",
    "TransformersVisionBackend",
    "Truncated",
    "VLLMBackend",
]
