"""EMScore: a caption against a video, token by frame.

Legend: N captions, F frames of a video, T tokens of a caption, D features.
"""

from collections.abc import Sequence
from typing import Any

import torch

from hf_captionrl.metrics.signature import signature
from hf_captionrl.retrieval.checks import check_features

__all__ = ["emscore"]


def emscore(
    token_features: Sequence[Any],
    frame_features: Sequence[Any],
    *,
    idf: Sequence[Any] | None = None,
    scorer: str = "",
) -> dict[str, Any]:
    r"""Precision, recall and F of the embedding matching of captions and videos, fine, coarse and full.

    Reference: Shi et al. 2022, "EMScore", Eq. 1-6. Fine: every token takes its most similar frame (P, weighted by
    idf) and every frame its most similar token (R). Coarse: cosine of the mean frame with the last token (EOS), which
    holds the whole caption. Full: the mean of fine and coarse, of P, R and F each.
    Differs from it by: nothing.

    Args:
        token_features: For each caption an array of shape `(T, D)`, projected features of its tokens, EOS last.
        frame_features: For each caption an array of shape `(F, D)`, features of the frames of its video.
        idf: For each caption `T` weights of its tokens, not negative; `None` means equal ones.
        scorer: Scorer and revision, for the signature.
    Returns:
        `dict`: means `precision`, `recall`, `f` (full), `fine_precision`, `fine_recall`, `fine_f`, `coarse`, in [-1,
            1],
        higher is better; `per_sample`, arrays of the same names; `signature`.
    Raises:
        ValueError: If the sizes disagree, a row is NaN or zero, or weights are bad (the index is named).
    """
    if len(token_features) != len(frame_features) or len(token_features) == 0:
        raise ValueError(
            f"{len(token_features)} captions and {len(frame_features)} videos: pass one each, at least one."
        )
    if idf is not None and len(idf) != len(token_features):
        raise ValueError(f"{len(token_features)} captions and {len(idf)} lists of idf weights: pass one each.")
    rows = []
    for i, (tokens_i, frames_i) in enumerate(zip(token_features, frame_features, strict=True)):
        tokens = torch.nn.functional.normalize(check_features(tokens_i, f"token_features[{i}]").double(), dim=1)
        frames = torch.nn.functional.normalize(check_features(frames_i, f"frame_features[{i}]").double(), dim=1)
        if tokens.shape[1] != frames.shape[1]:
            raise ValueError(
                f"token_features[{i}] have {tokens.shape[1]} features, frame_features[{i}] {frames.shape[1]}."
            )
        weights = torch.ones(len(tokens), dtype=torch.float64) if idf is None else torch.as_tensor(idf[i]).double()
        if weights.shape != tokens.shape[:1] or not bool((weights >= 0).all()) or not float(weights.sum()) > 0:
            raise ValueError(f"idf[{i}] must hold {len(tokens)} weights that are not negative and not all 0.")
        similarity = tokens @ frames.T  # (T, F)
        precision = float((similarity.amax(dim=1) * weights).sum() / weights.sum())
        recall = float(similarity.amax(dim=0).mean())
        fine = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
        coarse = float(torch.nn.functional.normalize(frames.mean(dim=0), dim=0) @ tokens[-1])
        full = [(value + coarse) / 2 for value in (precision, recall, fine)]
        rows.append([*full, precision, recall, fine, coarse])
    names = ("precision", "recall", "f", "fine_precision", "fine_recall", "fine_f", "coarse")
    table = torch.tensor(rows, dtype=torch.float64)
    result: dict[str, Any] = {name: float(table[:, i].mean()) for i, name in enumerate(names)}
    result["per_sample"] = {name: table[:, i].numpy() for i, name in enumerate(names)}
    result["signature"] = signature(metric="emscore", scorer=scorer, idf=idf is not None)
    return result
