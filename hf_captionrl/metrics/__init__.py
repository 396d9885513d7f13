"""Metrics as pure functions of arrays and strings; each returns a dict with a `signature` that states how it was computed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_captionrl.metrics.bootstrap import bootstrap_interval, exact_interval, paired_test, proportion_interval
    from hf_captionrl.metrics.caption_faithfulness import chair, faithfulness
    from hf_captionrl.metrics.clip_scores import clip_score, emscore, ref_clip_score
    from hf_captionrl.metrics.meteor_spice import meteor, spice
    from hf_captionrl.metrics.nlg import bleu, cider, cider_d, rouge_l
    from hf_captionrl.metrics.perplexity import caption_perplexity
    from hf_captionrl.metrics.recall import self_retrieval
    from hf_captionrl.metrics.words import (
        caption_diversity,
        caption_statistics,
        characteristic_words,
        length_statistics,
        local_mutual_information,
    )

__all__ = [
    "bleu",
    "bootstrap_interval",
    "caption_diversity",
    "caption_perplexity",
    "caption_statistics",
    "chair",
    "characteristic_words",
    "cider",
    "cider_d",
    "clip_score",
    "emscore",
    "exact_interval",
    "faithfulness",
    "length_statistics",
    "local_mutual_information",
    "meteor",
    "paired_test",
    "path",
    "proportion_interval",
    "ref_clip_score",
    "rouge_l",
    "self_retrieval",
    "spice",
]

# Importing torch takes seconds, so a name loads its module on first use. No module has the name of a function,
# because importing the module would hide the function.
_MODULES = {
    "bootstrap": ("bootstrap_interval", "exact_interval", "paired_test", "proportion_interval"),
    "caption_faithfulness": ("chair", "faithfulness"),
    "clip_scores": ("clip_score", "ref_clip_score"),
    "diversity": ("caption_diversity", "caption_statistics"),
    "meteor_spice": ("meteor", "spice"),
    "perplexity": ("caption_perplexity",),
    "reference_similarity": ("bleu", "cider", "cider_d", "rouge_l"),
    "self_retrieval_recall": ("self_retrieval",),
    "video_matching": ("emscore",),
    "word_statistics": ("characteristic_words", "length_statistics", "local_mutual_information"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def path(name: str) -> str:
    """Folder of an `evaluate` module, for `evaluate.load(path)`.

    Args:
        name: For instance `"self_retrieval"`.

    Returns:
        `str`: The folder.

    Raises:
        ValueError: If there is no such module.
    """
    return str(import_module("hf_captionrl.metrics.evaluate_modules").path(name))


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
