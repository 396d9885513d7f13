"""Visual Caption Boosting: richer references from human captions, a language model and a vision model."""

from importlib import import_module
from typing import Any

__all__ = [
    "ANSWER_REMEDIES",
    "STAGES",
    "BoostedFile",
    "Conflict",
    "SceneDescriber",
    "SceneWriter",
    "ShardReport",
    "UnfinishedError",
    "answer_fault",
    "blend_prompt",
    "boost_shard",
    "boosted_rows",
    "clean_answer",
    "holistic_prompt",
    "scene_conflicts",
    "source_statistics",
    "text_conflicts",
    "visual_prompt",
    "write_boosted_captions",
    "write_source_histogram",
]

# datasets and matplotlib take seconds to import; a name loads its module when it is first used.
_MODULES = {
    "answers": ("ANSWER_REMEDIES", "answer_fault", "clean_answer"),
    "boosted_file": ("BoostedFile", "UnfinishedError", "boosted_rows", "write_boosted_captions"),
    "caption_statistics": ("source_statistics", "write_source_histogram"),
    "conflicts": ("Conflict", "scene_conflicts", "text_conflicts"),
    "prompts": ("STAGES", "blend_prompt", "holistic_prompt", "visual_prompt"),
    "scene_backends": ("SceneDescriber", "SceneWriter"),
    "shards": ("ShardReport", "boost_shard"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
