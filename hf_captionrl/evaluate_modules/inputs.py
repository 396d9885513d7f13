"""Converts the user's arguments to those of `hf_captionrl.metrics`: models by name, features and groups of captions.

Legend: N captions, B images, R references of a caption, D features.
"""

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hf_captionrl.checkpoints.loading import load_language_model as read_language_model
from hf_captionrl.checkpoints.shipped_models import model_path
from hf_captionrl.metrics.caption_checks import check_captions, check_groups
from hf_captionrl.retrieval.feature_checks import as_features
from hf_captionrl.retrieval.scorer import load_scorer

__all__ = [
    "caption_features",
    "grouped_features",
    "load_language_model",
    "reference_texts",
    "resolve_scorer",
    "scorer_signature",
    "truncation",
]


@functools.lru_cache(maxsize=2)
def _named_scorer(name: str) -> Any:
    return load_scorer(name)


def resolve_scorer(scorer: Any) -> Any:
    """A scorer from its name; each name is loaded once."""
    if scorer is None:
        raise ValueError(
            "scorer is missing: it computes the features of captions and images. Pass for instance "
            "scorer='openai/clip-vit-base-patch32', or text_features and image_features that you have."
        )
    return _named_scorer(scorer) if isinstance(scorer, str) else load_scorer(scorer)


@functools.lru_cache(maxsize=2)
def _named_language_model(name: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoTokenizer

    model = read_language_model(name, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(model_path(name), trust_remote_code=False)


def load_language_model(model: Any, tokenizer: Any = None) -> tuple[Any, Any]:
    """A causal language model, in fp32, and its tokenizer; each name is loaded once."""
    if isinstance(model, str):
        loaded, own = _named_language_model(model)
        return loaded, own if tokenizer is None else tokenizer
    if model is None or tokenizer is None:
        raise ValueError(
            f"{'model' if model is None else 'tokenizer'} is missing. Pass model='openai-community/gpt2', or a model "
            "together with its tokenizer."
        )
    return model, tokenizer


def caption_features(captions: Sequence[str], text_features: Any, scorer: Any, prefix: str = "") -> Tensor:
    """Features of captions `(N, D)`, on the CPU: `text_features`, or the scorer's."""
    if captions and isinstance(captions[0], list):
        if text_features is not None:
            raise ValueError("predictions are features, and text_features are given too. Pass one of them.")
        return as_features(list(captions), "predictions")
    texts = check_captions(captions, "predictions")
    if text_features is None:
        # On the CPU, like features that are passed.
        return resolve_scorer(scorer).text_features([prefix + text for text in texts]).cpu()
    if len(text_features) != len(texts):
        raise ValueError(f"{len(texts)} predictions and {len(text_features)} rows of text_features: pass one each.")
    return as_features(text_features, "text_features").cpu()


def reference_texts(references: Sequence[Any] | None, given: Sequence[Any] | None) -> list[list[str]] | None:
    """Reference captions: those passed, or the references column if it holds texts."""
    if given is not None:
        return check_groups(given, "reference_captions")
    if references and isinstance(references[0], list) and references[0] and isinstance(references[0][0], str):
        return check_groups(references, "references")
    return None


def grouped_features(texts: Sequence[Sequence[str]], scorer: Any, prefix: str = "") -> list[Tensor]:
    """Features of several texts for each caption, on the CPU: N tensors `(R, D)`."""
    flat = resolve_scorer(scorer).text_features([prefix + text for group in texts for text in group])
    return list(flat.cpu().split([len(group) for group in texts]))


def scorer_signature(scorer: Any) -> str:
    """The signature of a scorer; None without one."""
    return "" if scorer is None else str(resolve_scorer(scorer).signature)


def truncation(captions: Sequence[Any], scorer: Any, prefix: str = "") -> dict[str, Any]:
    """Number of captions that the scorer truncates."""
    if scorer is None or not isinstance(captions[0], str):
        return {}
    count = int(resolve_scorer(scorer).count_truncated([prefix + caption for caption in captions]))
    return {"num_truncated": count, "truncated_share": count / len(captions)}
