"""Tokens of captions and frames of videos as features, for the module `emscore`.

Legend: N captions, T tokens, F frames, D features.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from hf_captionrl.evaluate_modules.inputs import resolve_scorer
from hf_captionrl.evaluate_modules.pools import image_features_of
from hf_captionrl.evaluate_modules.prediction_columns import is_missing
from hf_captionrl.metrics.caption_checks import check_captions
from hf_captionrl.retrieval.scorer import TokenScorer

__all__ = ["caption_tokens", "token_weights", "video_frames"]


def caption_tokens(
    captions: Sequence[str],
    token_features: Sequence[Any] | None,
    scorer: Any,
    idf: Any,
    idf_captions: Sequence[str] | None,
) -> tuple[Sequence[Any], Sequence[Any] | None]:
    """Projected features of every token, start and end of text included as in the authors' code, and their weights.

    Args:
        token_features: N arrays `(T, D)` made before, or `None`.

    Returns:
        `tuple`: N arrays `(T, D)`, and N lists of weights or `None`.
    """
    texts = check_captions(captions, "predictions")
    if token_features is not None:
        if len(token_features) != len(texts):
            raise ValueError(f"{len(texts)} predictions and {len(token_features)} token_features: pass one each.")
        if idf is True:
            raise ValueError("idf=True needs the tokens themselves, not only token_features. Pass a scorer instead.")
        return token_features, None if idf is None or idf is False else idf
    resolved = resolve_scorer(scorer)
    if not isinstance(resolved, TokenScorer):
        raise ValueError(
            f"{type(resolved).__name__} gives features of captions, not of their tokens. Use a CLIP model, or pass "
            "token_features."
        )
    features = [row.cpu() for row in resolved.token_features(texts)]
    if idf is True:
        corpus = texts if idf_captions is None else check_captions(idf_captions, "idf_captions")
        return features, token_weights(resolved.token_ids(texts), resolved.token_ids(corpus))
    return features, None if idf is None or idf is False else idf


def token_weights(rows: Sequence[Sequence[int]], corpus: Sequence[Sequence[int]]) -> list[list[float]]:
    """Inverse document frequencies of tokens: `log((N + 1) / (count + 1))`, and for the end of text their mean.

    Reference: Shi et al. 2022, Section 3.3, and the authors' code, which counts the padding as one more token of no
    weight in that mean.
    """
    counts = Counter(token for row in corpus for token in set(row))
    weight = {token: math.log((len(corpus) + 1) / (count + 1)) for token, count in counts.items()}
    end = sum(weight.values()) / (len(weight) + 1)
    unseen = math.log(len(corpus) + 1)
    return [[*(weight.get(token, unseen) for token in row[:-1]), end] for row in rows]


def video_frames(
    references: Sequence[Any] | None, frames: Sequence[Any] | None, frame_features: Sequence[Any] | None, scorer: Any
) -> Sequence[Any]:
    """Features of the frames of each video.

    Args:
        frame_features: Instead: arrays `(F, D)`.

    Returns:
        Sequence of arrays `(F, D)`, one a caption.
    """
    if frame_features is not None:
        return frame_features
    name = "references" if frames is None else "frames"
    videos = references if frames is None else frames
    if (frames is None and is_missing(references)) or videos is None:
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
