"""EMScore: a caption is matched with the frames of a video, and with reference captions.

Legend: N captions, F frames of a video, T tokens of a caption, D features.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_captionrl.metrics.signature import signature
from hf_captionrl.retrieval.feature_checks import check_features, unit_length

__all__ = ["emscore", "emscore_matrix"]

_NAMES = ("precision", "recall", "f", "fine_precision", "fine_recall", "fine_f", "coarse")


def emscore(
    token_features: Sequence[Any],
    frame_features: Sequence[Any],
    *,
    idf: Sequence[Any] | None = None,
    reference_features: Sequence[Sequence[Any]] | None = None,
    reference_idf: Sequence[Sequence[Any]] | None = None,
    scorer: str = "",
) -> dict[str, Any]:
    r"""Precision, recall and F of the embedding matching of captions and videos, fine, coarse and full.

    Reference: Shi et al. 2022, "EMScore", Eq. 1-6. Fine: each token is matched with its most similar frame (P, weighted
    by idf), and each frame with its most similar token (R). Coarse: cosine between the mean frame and the last token (EOS),
    which represents the whole caption. Full: the mean of fine and coarse, separately for P, R and F. With references: the
    tokens of a reference replace the frames, and its last token replaces the mean frame. Of several references the best
    value counts, separately for each number, as in the authors' code; the result is the mean of that and the score with
    the video.

    Args:
        token_features: N arrays of shape `(T, D)`, projected features of the tokens of each caption, EOS last.
        frame_features: N arrays of shape `(F, D)`, features of the frames of each caption's video.
        idf: N sequences of `T` token weights, not negative; `None`: equal weights.
        reference_features: N lists of arrays of shape `(T, D)`, one per reference, EOS last.
        reference_idf: Weights of the references' tokens, used in recall; `None`: equal weights.
        scorer: Scorer and revision, for the signature.
    Returns:
        `dict`: means `precision`, `recall`, `f` (full), `fine_precision`, `fine_recall`, `fine_f`, `coarse`, in [-1, 1],
        higher is better; `per_sample`, arrays with the same names; `signature`. With references also
        `reference_precision` and so on, which combine the video and the references.
    Raises:
        ValueError: If sizes differ, a row is NaN or zero, or weights are invalid (the index is named).
    """
    if len(token_features) != len(frame_features) or len(token_features) == 0:
        raise ValueError(
            f"{len(token_features)} captions and {len(frame_features)} videos. Pass one video per caption, at least one."
        )
    if idf is not None and len(idf) != len(token_features):
        raise ValueError(
            f"{len(token_features)} captions and {len(idf)} lists of idf weights. Pass one list per caption."
        )
    if reference_features is not None and (
        len(reference_features) != len(token_features) or not all(len(texts) for texts in reference_features)
    ):
        raise ValueError(
            f"reference_features lacks references. Pass at least one for each of the {len(token_features)} captions."
        )
    rows, with_references = [], []
    for i, (tokens_i, frames_i) in enumerate(zip(token_features, frame_features, strict=True)):
        tokens = _unit(tokens_i, f"token_features[{i}]")
        frames = _unit(frames_i, f"frame_features[{i}]", tokens)
        weights = _weights(None if idf is None else idf[i], tokens, f"idf[{i}]")
        middle = torch.nn.functional.normalize(frames.mean(dim=0), dim=0)
        video = _matching(tokens, weights, frames, _weights(None, frames, ""), middle)
        rows.append(_full(video))
        if reference_features is None:
            continue
        found = []
        for k, texts in enumerate(reference_features[i]):
            name = f"reference_features[{i}][{k}]"
            texts = _unit(texts, name, tokens)
            own = _weights(None if reference_idf is None else reference_idf[i][k], texts, f"reference_idf[{i}][{k}]")
            found.append(_matching(tokens, weights, texts, own, texts[-1]))
        best = torch.stack(found).amax(dim=0)
        with_references.append(_full((video + best) / 2))
    result: dict[str, Any] = {"per_sample": {}}
    for prefix, part in (("", rows), ("reference_", with_references)):
        for column, name in enumerate(_NAMES if part else ()):
            values = torch.stack(part)[:, column].cpu()
            result[prefix + name] = float(values.mean())
            result["per_sample"][prefix + name] = values.numpy()
    result["signature"] = signature(metric="emscore", scorer=scorer, idf=idf is not None)
    return result


def emscore_matrix(token_features: Sequence[Any], frame_features: Sequence[Any]) -> Tensor:
    r"""EMScore's full F of every caption with every video, for retrieval among videos.

    Source: Yue et al. 2023, section 3.4 and Table 6, rank the test videos by it; definitions as for [`emscore`], with equal weights.

    Args:
        token_features: N arrays of shape `(T, D)`, projected features of the tokens of each caption, EOS last.
        frame_features: M arrays of shape `(F, D)`, features of the frames of each video.

    Returns:
        `torch.Tensor` of shape `(N, M)`: fp64 scores in [-1, 1].
    """
    first = _unit(token_features[0], "token_features[0]")
    videos = [_unit(rows, f"frame_features[{i}]", first) for i, rows in enumerate(frame_features)]
    frames = torch.nn.utils.rnn.pad_sequence(videos, batch_first=True)  # (M, F, D)
    numbers = torch.tensor([len(rows) for rows in videos], device=frames.device)
    is_padding = torch.arange(frames.shape[1], device=frames.device) >= numbers[:, None]  # (M, F)
    middle = torch.nn.functional.normalize(torch.stack([rows.mean(0) for rows in videos]), dim=1)  # (M, D)
    rows = []
    for i, features in enumerate(token_features):
        tokens = _unit(features, f"token_features[{i}]", first)
        similarity = torch.einsum("td,mfd->mtf", tokens, frames).masked_fill(is_padding[:, None], -torch.inf)
        precision = similarity.amax(2).mean(1)  # (M,)
        recall = similarity.amax(1).masked_fill(is_padding, 0).sum(1) / numbers
        total = precision + recall
        fine = torch.where(total != 0, 2 * precision * recall / total, 0)
        coarse = middle @ tokens[-1]
        # The full F is the mean of fine and coarse F, as in `_full`.
        rows.append((fine + coarse) / 2)
    return torch.stack(rows)


def _unit(features: Any, name: str, tokens: Tensor | None = None) -> Tensor:
    """Features of unit length, of the same dimension and on the same device as the tokens."""
    rows = unit_length(check_features(features, name).double())
    if tokens is not None and rows.shape[1] != tokens.shape[1]:
        owner = name[name.index("[") :].split("]")[0] + "]"
        raise ValueError(f"token_features{owner} have {tokens.shape[1]} features, {name} {rows.shape[1]}.")
    return rows if tokens is None else rows.to(tokens.device)


def _weights(weights: Any, rows: Tensor, name: str) -> Tensor:
    """One weight per row, on the device of the rows."""
    number = len(rows)
    found = rows.new_ones(number) if weights is None else torch.as_tensor(weights, dtype=rows.dtype).to(rows.device)
    if found.shape != (number,) or not bool(((found >= 0) & found.isfinite()).all()) or not bool((found > 0).any()):
        raise ValueError(
            f"{name} must hold {number} weights that are finite, not negative and not all 0. Use None for equal weights."
        )
    return found / found.amax() if float(found.amax()) > 2.0**500 else found  # their sum must not overflow


def _matching(tokens: Tensor, weights: Tensor, others: Tensor, other_weights: Tensor, whole: Tensor) -> Tensor:
    """Fine precision, recall and F, and the coarse cosine, `(4,)`."""
    similarity = tokens @ others.T  # (T, F), F frames or tokens of a reference
    precision = (similarity.amax(dim=1) * weights).sum() / weights.sum()
    recall = (similarity.amax(dim=0) * other_weights).sum() / other_weights.sum()
    total = precision + recall
    fine = 2 * precision * recall / total if float(total) else torch.zeros_like(total)
    return torch.stack([precision, recall, fine, whole @ tokens[-1]])


def _full(matching: Tensor) -> Tensor:
    """Full precision, recall and F, then the fine and coarse ones, `(7,)`."""
    return torch.cat([(matching[:3] + matching[3]) / 2, matching])
