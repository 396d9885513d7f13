"""Visual Caption Boosting: richer references from people's captions, a language model and a vision model."""

from hf_captionrl.boosting.answers import ANSWER_REMEDIES, answer_fault, clean_answer
from hf_captionrl.boosting.caption_statistics import source_statistics, write_source_histogram
from hf_captionrl.boosting.conflicts import Conflict, scene_conflicts, text_conflicts
from hf_captionrl.boosting.merging import MergeReport, UnfinishedError, merge_journals
from hf_captionrl.boosting.pipeline import ShardReport, boost_shard
from hf_captionrl.boosting.prompts import STAGES, blend_prompt, holistic_prompt, visual_prompt
from hf_captionrl.boosting.scene_backends import SceneDescriber, SceneWriter

__all__ = [
    "ANSWER_REMEDIES",
    "STAGES",
    "Conflict",
    "MergeReport",
    "SceneDescriber",
    "SceneWriter",
    "ShardReport",
    "UnfinishedError",
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
