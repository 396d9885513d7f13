"""Metrics as pure functions of arrays and strings; each gives a dict with a `signature` that says how it was made."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_captionrl.metrics.bootstrap import bootstrap_interval, exact_interval, paired_test, proportion_interval
    from hf_captionrl.metrics.caption_faithfulness import chair, faithfulness
    from hf_captionrl.metrics.clip import clip_score, ref_clip_score
    from hf_captionrl.metrics.diversity import caption_diversity, caption_statistics
    from hf_captionrl.metrics.java import meteor, spice
    from hf_captionrl.metrics.nlg import bleu, cider, cider_d, rouge_l
    from hf_captionrl.metrics.perplexity import caption_perplexity
    from hf_captionrl.metrics.self_retrieval_recall import self_retrieval
    from hf_captionrl.metrics.video import emscore
    from hf_captionrl.metrics.words import characteristic_words, length_statistics, local_mutual_information

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

# No module bears the name of a function: importing it would hide the function.
_MODULES = {
    "bleu": "nlg",
    "bootstrap_interval": "bootstrap",
    "caption_diversity": "diversity",
    "caption_perplexity": "perplexity",
    "chair": "caption_faithfulness",
    "characteristic_words": "words",
    "cider": "nlg",
    "cider_d": "nlg",
    "clip_score": "clip",
    "emscore": "video",
    "exact_interval": "bootstrap",
    "faithfulness": "caption_faithfulness",
    "length_statistics": "words",
    "local_mutual_information": "words",
    "meteor": "java",
    "spice": "java",
    "caption_statistics": "diversity",
    "paired_test": "bootstrap",
    "proportion_interval": "bootstrap",
    "ref_clip_score": "clip",
    "rouge_l": "nlg",
    "self_retrieval": "self_retrieval_recall",
}


def path(name: str) -> str:
    """Folder of an `evaluate` module, for `evaluate.load(path)`.

    Args:
        name: For instance `"self_retrieval"`.

    Returns:
        `str`: The folder.

    Raises:
        ValueError: If there is no such module.
    """
    return str(import_module("hf_captionrl.evaluate_modules").path(name))


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; only what is used pays for it.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
