"""EMScore: a caption against the frames of a video, token by frame.

Legend: N captions, T tokens, F frames, D features.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

import hf_captionrl.metrics as metrics
from hf_captionrl.metrics.caption_checks import check_captions
from hf_captionrl.metrics.evaluate_modules import metric
from hf_captionrl.metrics.evaluate_modules.descriptions import DESCRIPTIONS
from hf_captionrl.metrics.evaluate_modules.inputs import image_features_of, resolve_scorer, scorer_signature
from hf_captionrl.retrieval.scorer import TokenScorer


def compute(
    predictions: Sequence[str],
    references: Sequence[Any] | None = None,
    *,
    scorer: Any = None,
    frames: Sequence[Any] | None = None,
    frame_features: Sequence[Any] | None = None,
    token_features: Sequence[Any] | None = None,
    idf: Any = None,
    idf_captions: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Call `emscore` on features of tokens and frames."""
    tokens, weights = caption_tokens(predictions, token_features, scorer, idf, idf_captions)
    videos = _video_frames(references, frames, frame_features, scorer)
    return metrics.emscore(tokens, videos, idf=weights, scorer=scorer_signature(scorer))


def caption_tokens(
    captions: Sequence[str], token_features: Any, scorer: Any, idf: Any, idf_captions: Sequence[str] | None
) -> tuple[Sequence[Any], Sequence[Any] | None]:
    """Projected features `(T, D)` of every token, with start and end of text as in the authors' code, and their weights."""
    texts = check_captions(captions, "predictions")
    if token_features is not None:
        if len(token_features) != len(texts):
            raise ValueError(f"{len(texts)} predictions and {len(token_features)} token_features: pass one each.")
        if idf is True:
            raise ValueError("idf=True needs the tokens themselves, not only token_features. Pass a scorer instead.")
        return token_features, None if idf is None or idf is False else idf
    resolved = resolve_scorer(scorer)
    if not isinstance(resolved, TokenScorer):
        kind = type(resolved).__name__
        raise ValueError(f"{kind} has features of captions, not of their tokens. Use a CLIP model, or token_features.")
    features = [row.cpu() for row in resolved.token_features(texts)]
    if idf is True:
        corpus = texts if idf_captions is None else check_captions(idf_captions, "idf_captions")
        return features, token_weights(resolved.token_ids(texts), resolved.token_ids(corpus))
    return features, None if idf is None or idf is False else idf


def token_weights(rows: Sequence[Sequence[int]], corpus: Sequence[Sequence[int]]) -> list[list[float]]:
    """Inverse document frequencies of tokens: `log((N + 1) / (count + 1))`, and for the end of text their mean.

    Reference: Shi et al. 2022, Section 3.3, and the authors' code, whose mean includes the padding as one more token of
    weight 0.
    """
    counts = Counter(token for row in corpus for token in set(row))
    weight = {token: math.log((len(corpus) + 1) / (count + 1)) for token, count in counts.items()}
    end = sum(weight.values()) / (len(weight) + 1)
    unseen = math.log(len(corpus) + 1)
    return [[*(weight.get(token, unseen) for token in row[:-1]), end] for row in rows]


def _video_frames(
    references: Sequence[Any] | None, frames: Sequence[Any] | None, frame_features: Sequence[Any] | None, scorer: Any
) -> Sequence[Any]:
    """Features `(F, D)` of the frames of each caption's video."""
    if frame_features is not None:
        return frame_features
    name = "references" if frames is None else "frames"
    videos = references if frames is None else frames
    if (frames is None and metric.is_missing(references)) or videos is None:
        raise ValueError("there are no frames. Pass references, frames= or frame_features=.")
    found = []
    for i, video in enumerate(videos):
        if isinstance(video, str) or len(video) == 0:
            raise ValueError(f"{name}[{i}] must be a list of frames, got {video!r:.60}.")
        if isinstance(video[0], list):
            found.append(torch.tensor(video))
        else:
            found.append(image_features_of(video, scorer, f"{name}[{i}]"))
    return found


class Emscore(metric.CaptionMetric):
    """EMScore."""

    about, function = DESCRIPTIONS["emscore"], staticmethod(compute)
