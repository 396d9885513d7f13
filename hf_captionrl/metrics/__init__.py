"""Metrics as pure functions of arrays and strings; each returns a dict with a `signature` that states how it was computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_captionrl.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from hf_captionrl.metrics.bootstrap import (
        bootstrap_interval,
        exact_interval,
        mean_interval,
        paired_test,
        proportion_interval,
    )
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

__getattr__, __all__ = lazy_names(__name__)
