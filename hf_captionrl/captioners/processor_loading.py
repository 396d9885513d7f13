"""Loads the processor of a checkpoint, as a `ProcessorPair` if transformers has no joint processor for it."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

from hf_captionrl.captioners.saving import ProcessorPair
from hf_captionrl.checkpoints.files import TOKENIZER_FILES, check_json_files, find_file, read_object
from hf_captionrl.checkpoints.loading import brings_code

__all__ = ["load_processor"]

_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "video_preprocessor_config.json",
)


def load_processor(name: str, revision: str | None) -> Any:
    """The processor in a folder or repository; None if tokenizer or image processor are missing."""
    check_json_files(name, revision, _FILES)
    has_tokenizer = any(find_file(name, file, revision) for file in TOKENIZER_FILES)
    has_image_processor = any(find_file(name, file, revision) for file in _FILES[:2])
    if not (has_tokenizer and has_image_processor):
        return None
    try:
        return _joined(name, revision)
    except ImportError:
        raise
    except Exception as error:  # from a validator, a missing file, or an attribute of the wrong type
        if brings_code(name, _FILES, revision):
            raise ValueError(
                f"The image processor or tokenizer of {name!r} needs custom code (auto_map), which is never executed here. "
                "Pass processor=... with classes of transformers, or load a checkpoint converted to them (for Florence-2: "
                "florence-community/...)."
            ) from error
        said = " ".join(str(error).split())
        present = [file for file in _FILES if find_file(name, file, revision)]
        raise ValueError(
            f"The processor of {name!r} cannot be loaded from {', '.join(present)} ({type(error).__name__}: {said[:200]}). Use an "
            "intact copy of the checkpoint, or pass processor=..."
        ) from error


def _joined(name: str, revision: str | None) -> Any:
    try:
        processor = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError):
        processor = None
    if getattr(processor, "tokenizer", None) is not None and getattr(processor, "image_processor", None) is not None:
        return processor
    return ProcessorPair(
        _load_image_processor(name, revision),
        AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False),
    )


def _load_image_processor(name: str, revision: str | None) -> Any:
    """The image processor; former names such as `ViTFeatureExtractor` are mapped to `ViTImageProcessor`."""
    for file in _FILES[:2]:
        path = find_file(name, file, revision)
        content = {} if path is None else read_object(path)
        kind = content.get("image_processor_type")
        if isinstance(kind, str) and kind.endswith("FeatureExtractor") and "auto_map" not in content:
            loader = getattr(transformers, kind.replace("FeatureExtractor", "ImageProcessor"), None)
            if loader is not None:
                settings = {
                    k: v for k, v in content.items() if k not in ("image_processor_type", "feature_extractor_type")
                }
                return loader(**settings)
    return AutoImageProcessor.from_pretrained(name, revision=revision, trust_remote_code=False)
