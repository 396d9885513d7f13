"""EMScore: a caption against the frames of a video, token by frame.

Legend: N captions, T tokens, F frames, D features.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import evaluate
import torch

import hf_captionrl.metrics as metrics
from hf_captionrl.metrics.caption_checks import check_captions
from hf_captionrl.metrics.evaluate_modules.inputs import image_features_of, resolve_scorer, scorer_signature
from hf_captionrl.metrics.evaluate_modules.metric import DeclaredMetric, Metric, is_missing
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


METRIC = Metric(
    title="EMScore",
    emoji="🎞️",
    summary="A caption against the frames of a video",
    description="""\
EMScore compares a caption with the frames of a video, without references: fine (each token is matched with its most
similar frame, each frame with its most similar token: precision, recall, F), coarse (the whole caption and the mean
frame), and full, the mean of both.
""",
    arguments="""\
    predictions (`list[str]`, N): Captions.
    references (N rows, optional): The frames of each caption's video: images, paths, or features `(F, D)`.
    scorer: CLIP model (transformers or open_clip) that makes the features: a name on the Hub, a folder, `"scenes:siglip-held-out"`, or a
        loaded one. Only models with a text projection of every token can be used.
    frames: Instead of references: F images or paths per caption.
    frame_features: Instead of references: N arrays `(F, D)`.
    token_features: N arrays `(T, D)`, the end-of-text token last; the scorer is then not used for them.
    idf: Weights of the tokens, N lists of T numbers; or `True`: inverse document frequencies of `idf_captions`.
    idf_captions (`list[str]`): Captions in which document frequencies are counted; by default the predictions.
""",
    returns="""\
    precision, recall, f (full), fine_precision, fine_recall, fine_f, coarse (`float` in [-1, 1], higher is better);
    per_sample, a list of each; signature.
""",
    examples="""\
    >>> import evaluate
    >>> import hf_captionrl
    >>> metric = evaluate.load("emscore")
    >>> found = metric.compute(
    ...     predictions=["a dog runs"],
    ...     references=[[[1.0, 0.0], [0.0, 1.0]]],
    ...     token_features=[[[1.0, 0.0], [0.6, 0.8]]],
    ... )
    >>> [round(found[name], 3) for name in ("fine_precision", "fine_recall", "coarse", "f")]
    [0.9, 0.9, 0.99, 0.945]
""",
    limitations="""\
The number and choice of frames change the result. CLIP's token features contain the words before the token, so fine
matching is not word by word. Only CLIP models have features of tokens.
""",
    citation="""\
@inproceedings{shi2022emscore,
  title     = {{EMScore}: Evaluating Video Captioning via Coarse-Grained and Fine-Grained Embedding Matching},
  author    = {Shi, Yaya and Yang, Xu and Xu, Haiyang and Yuan, Chunfeng and Li, Bing and Hu, Weiming and
               Zha, Zheng-Jun},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year      = {2022}
}
""",
    urls=("https://arxiv.org/abs/2111.08919",),
    compute=compute,
    references=("images", "texts", "matrix", "text"),
    functions=("emscore",),
    keys="`precision`, `recall`, `f`, `fine_*`, `coarse`",
    data_arguments=("idf", "token_features"),
    cases=(
        {
            "predictions": ["a dog runs"],
            "references": [[[1.0, 0.0], [0.0, 1.0]]],
            "token_features": [[[1.0, 0.0], [0.6, 0.8]]],
            "result": {"precision": 0.9449747459, "recall": 0.9449747459, "f": 0.9449747459}
            | {"fine_precision": 0.8999999964, "coarse": 0.9899494953},
        },
        {
            "predictions": ["a dog runs"],
            "references": [[[1.0, 0.0], [0.0, 1.0]]],
            "token_features": [[[1.0, 0.0], [0.6, 0.8]]],
            "idf": [[3.0, 1.0]],
            "result": {"precision": 0.9699747468, "recall": 0.9449747459, "f": 0.9571369085}
            | {"fine_precision": 0.9499999982, "coarse": 0.9899494953},
        },
    ),
)


class Emscore(DeclaredMetric, evaluate.Metric):
    """EMScore."""

    declaration = "emscore"
