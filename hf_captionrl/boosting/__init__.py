"""Visual Caption Boosting: richer references from people's captions, a language model and a vision model."""

from hf_captionrl.boosting.answers import ANSWER_WAYS_OUT, answer_fault, clean_answer
from hf_captionrl.language_models.backend import Answer, Backend, BackendError, Cut, Failure
from hf_captionrl.boosting.conflicts import Conflict, scene_conflicts, text_conflicts
from hf_captionrl.language_models.endpoint import HTTPBackend
from hf_captionrl.boosting.merging import MergeReport, UnfinishedError, merge_journals
from hf_captionrl.boosting.pipeline import ShardReport, boost_shard
from hf_captionrl.boosting.prompts import STAGES, Prompt, blend_prompt, holistic_prompt, visual_prompt
from hf_captionrl.boosting.scene_backends import SceneDescriber, SceneWriter
from hf_captionrl.boosting.caption_statistics import source_statistics, write_source_histogram
from hf_captionrl.language_models.transformers_models import (
    CaptionerBackend,
    TransformersTextBackend,
    TransformersVisionBackend,
)
from hf_captionrl.language_models.vllm_models import VLLMBackend

__all__ = [
    "ANSWER_WAYS_OUT",
    "STAGES",
    "Answer",
    "Backend",
    "BackendError",
    "CaptionerBackend",
    "Conflict",
    "Cut",
    "Failure",
    "HTTPBackend",
    "MergeReport",
    "Prompt",
    "SceneDescriber",
    "SceneWriter",
    "ShardReport",
    "TransformersTextBackend",
    "TransformersVisionBackend",
    "UnfinishedError",
    "VLLMBackend",
    "answer_fault",
    "blend_prompt",
    "boost_shard",
    "clean_answer",
    "holistic_prompt",
    "merge_journals",
    "scene_conflicts",
    "source_statistics",
    "text_conflicts",
    "visual_prompt",
    "write_source_histogram",
]
