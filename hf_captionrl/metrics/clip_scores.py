"""CLIPScore, RefCLIPScore, EMScore and the matching of pairs, from features of any scorer.

Legend: N captions, R references of a caption, F frames of a video, T tokens of a caption, D features, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hf_captionrl.metrics.bootstrap import signature
from hf_captionrl.retrieval.ranking import as_features, check_features, unit_length


@dataclass(frozen=True)
class ClipScorePreset:
    """How a paper computes CLIPScore from a cosine."""

    scale: float  # factor of the cosine
    clamp: bool  # whether negative cosines count as 0
    prefix: str  # text before each caption when its features are computed


CLIP_SCORE_PRESETS = {
    "hessel": ClipScorePreset(2.5, True, "A photo depicts "),
    "smile": ClipScorePreset(250.0, True, "A photo depicts "),
    "ndlb": ClipScorePreset(100.0, False, ""),
    "pac_s": ClipScorePreset(2.0, True, "A photo depicts "),
}
"""The conventions of Hessel et al. 2021, SMILE (100 times as large), No Detail Left Behind, and PAC-S (Sarto et al. 2023), which
is CLIPScore with other weights, see `captionrl convert`."""


def _cosines(text_features: Any, image_features: Any) -> Tensor:
    text, images = as_features(text_features, "text_features"), as_features(image_features, "image_features")
    if text.dtype != images.dtype or text.shape != images.shape:
        shapes = (
            f"text_features {tuple(text.shape)} {text.dtype} and image_features {tuple(images.shape)} {images.dtype}"
        )
        raise ValueError(f"{shapes} must have equal shapes and dtypes. Pass one row per caption in both.")
    # Not cosine_similarity, which treats rows shorter than 1e-8 as longer.
    return (_unit(text, "text_features").cpu() * _unit(images, "image_features").cpu()).sum(dim=1).clamp_(-1, 1)


def score_prefix(preset: str, prefix: str | None = None) -> str:
    """The prefix of captions: the given one, or the preset's."""
    if preset not in CLIP_SCORE_PRESETS:
        raise ValueError(f"preset must be one of {sorted(CLIP_SCORE_PRESETS)}, got {preset!r}.")
    before = CLIP_SCORE_PRESETS[preset].prefix if prefix is None else prefix
    return before if not before or before[-1].isspace() else f"{before} "


def clip_score(
    text_features: Any,
    image_features: Any,
    *,
    preset: Literal["hessel", "smile", "ndlb", "pac_s"] = "hessel",
    scale: float | None = None,
    clamp: bool | None = None,
    prefix: str | None = None,
    scorer: str = "",
) -> dict[str, Any]:
    r"""CLIPScore, `scale * max(cos(text, image), 0)`, of each caption with its image.

    Reference: Hessel et al. 2021, "CLIPScore". Presets: `hessel` 2.5, `smile` 100 * 2.5 (both for features
    computed with the prefix "A photo depicts "), `ndlb` 100 without clamping and without a prefix, `pac_s` 2 with this prefix and
    features of the weights of PAC-S (Sarto et al. 2023); see `CLIP_SCORE_PRESETS`.

    Args:
        text_features (array or tensor of shape `(N, D)`): Features of the captions with the preset's prefix; they need not
            have unit length.
        image_features (array or tensor of shape `(N, D)`): Features of the image of each caption.
        preset: The paper whose convention is used.
        scale: Factor; None: the preset's.
        clamp: Whether negative cosines count as 0; None: the preset's.
        prefix: The prefix with which the features were computed, for the signature; None: the preset's.
        scorer: Scorer and revision, for the signature.
    Returns:
        `dict`: `clip_score`, the mean, higher is better; `per_sample`; `signature`.
    """
    prefix = score_prefix(preset, prefix)
    scale = CLIP_SCORE_PRESETS[preset].scale if scale is None else scale
    clamp = CLIP_SCORE_PRESETS[preset].clamp if clamp is None else clamp
    cosine = _cosines(text_features, image_features)
    scores = scale * (cosine.clamp(min=0) if clamp else cosine)
    used = {"scale": scale, "clamp": clamp, "prefix": prefix.strip() or "none"}
    named = signature(metric="clip_score", scorer=scorer, preset=preset, **used)
    return {"clip_score": float(scores.mean()), "per_sample": scores.numpy(), "signature": named}


def ref_clip_score(
    text_features: Any,
    image_features: Any,
    reference_features: Sequence[Any],
    *,
    scale: float = 2.5,
    prefix: str | None = None,
    scorer: str = "",
) -> dict[str, Any]:
    r"""RefCLIPScore: harmonic mean of CLIPScore and the largest cosine with a reference.

    Reference: Hessel et al. 2021, Section 3: `H-mean(CLIP-S(c, v), max(max_r cos(c, r), 0))`.

    Args:
        text_features (array or tensor of shape `(N, D)`): Features of the captions.
        image_features (array or tensor of shape `(N, D)`): Features of the image of each caption.
        reference_features: N arrays of shape `(R, D)`, features of the references of each caption.
        scale: Factor of CLIPScore; 2 with the weights of PAC-S is RefPAC-S.
        prefix: The prefix with which the features of captions and references were computed, for the signature.
        scorer: Scorer and revision, for the signature.
    Returns:
        `dict`: `ref_clip_score`, the mean, higher is better; `clip_score`; `per_sample`; `signature`.
    """
    image = scale * _cosines(text_features, image_features).clamp(min=0)
    text = _unit(text_features, "text_features").cpu()
    if len(reference_features) != len(text):
        sets = f"{len(reference_features)} sets of references"
        raise ValueError(f"{len(text)} captions and {sets}. Pass one set per caption.")
    groups = [_unit(features, f"reference_features[{i}]").cpu() for i, features in enumerate(reference_features)]
    # Products as in `_cosines`, so that a reference that equals the image gets the same cosine.
    nearest = torch.stack([(rows * caption).sum(dim=1).max() for caption, rows in zip(text, groups, strict=True)])
    nearest = nearest.clamp(0, 1)
    total = image + nearest
    scores = torch.where(total > 0, 2 * image * (nearest / total), torch.zeros_like(total))
    used = None if prefix is None else prefix.strip() or "none"
    named = signature(metric="ref_clip_score", scorer=scorer, scale=scale, prefix=used)
    means = {"ref_clip_score": float(scores.mean()), "clip_score": float(image.mean())}
    return means | {"per_sample": scores.numpy(), "signature": named}


# --- EMScore ---------------------------------------------------------------------------------------------------------

_NAMES = ("precision", "recall", "f", "fine_precision", "fine_recall", "fine_f", "coarse")


def emscore(
    token_features: Sequence[Any],
    frame_features: Sequence[Any],
    *,
    idf: Sequence[Any] | None = None,
    reference_features: Sequence[Sequence[Any]] | None = None,
    scorer: str = "",
) -> dict[str, Any]:
    r"""Precision, recall and F of the embedding matching of captions and videos, fine, coarse and full.

    Reference: Shi et al. 2022, "EMScore", Eq. 1-6. Fine: each token is matched with its most similar frame (P, weighted
    by idf), and each frame with its most similar token (R). Coarse: cosine between the mean frame and the last token (EOS),
    which represents the whole caption. Full: the mean of fine and coarse, separately for P, R and F. With references: the
    tokens of a reference replace the frames, and its last token replaces the mean frame. Of several references the best value
    counts, separately for each number, as in the authors' code; the result is the mean of that and the score with the video.

    Args:
        token_features: N arrays of shape `(T, D)`, projected features of the tokens of each caption, EOS last.
        frame_features: N arrays of shape `(F, D)`, features of the frames of each caption's video.
        idf: N sequences of `T` token weights, not negative; `None`: equal weights.
        reference_features: N lists of arrays of shape `(T, D)`, one per reference, EOS last.
        scorer: Scorer and revision, for the signature.
    Returns:
        `dict`: means `precision`, `recall`, `f` (full), `fine_precision`, `fine_recall`, `fine_f`, `coarse`, in [-1, 1],
        higher is better; `per_sample`, arrays with the same names; `signature`. With references also
        `reference_precision` and so on, which combine the video and the references.
    """
    if len(token_features) != len(frame_features) or len(token_features) == 0:
        numbers = f"{len(token_features)} captions and {len(frame_features)} videos"
        raise ValueError(f"{numbers}. Pass one video per caption, at least one.")
    for name, given in (("idf", idf), ("reference_features", reference_features)):
        if given is not None and not (len(given) == len(token_features) and all(map(len, given))):
            raise ValueError(f"{name} is incomplete. Pass one or more for each of {len(token_features)} captions.")
    rows, with_references = [], []
    for i, (tokens_i, frames_i) in enumerate(zip(token_features, frame_features, strict=True)):
        tokens = _unit(tokens_i, f"token_features[{i}]")
        frames = _unit(frames_i, f"frame_features[{i}]", tokens)
        weights = _weights(None if idf is None else idf[i], tokens, f"idf[{i}]")
        middle = torch.nn.functional.normalize(frames.mean(dim=0), dim=0)
        video = _matching(tokens, weights, frames, middle)
        rows.append(_full(video))
        if reference_features is None:
            continue
        found = []
        for k, texts in enumerate(reference_features[i]):
            name = f"reference_features[{i}][{k}]"
            texts = _unit(texts, name, tokens)
            found.append(_matching(tokens, weights, texts, texts[-1]))
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
    r"""EMScore's full F of N captions with M videos, `(N, M)` fp64 in [-1, 1], for retrieval among videos.

    Source: Yue et al. 2023, section 3.4 and Table 6; definitions and features as for [`emscore`], with equal weights.
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
        raise ValueError(f"{name} have {rows.shape[1]} features, the caption's token_features {tokens.shape[1]}.")
    return rows if tokens is None else rows.to(tokens.device)


def _weights(weights: Any, rows: Tensor, name: str) -> Tensor:
    """One weight per row, on the device of the rows."""
    values = (
        rows.new_ones(len(rows)) if weights is None else torch.as_tensor(weights, dtype=rows.dtype).to(rows.device)
    )
    if (
        values.shape != (len(rows),)
        or not bool(((values >= 0) & values.isfinite()).all())
        or not bool((values > 0).any())
    ):
        raise ValueError(f"{name} must be {len(rows)} weights: finite, not negative, not all 0. None: equal weights.")
    return values


def _matching(tokens: Tensor, weights: Tensor, others: Tensor, whole: Tensor) -> Tensor:
    """Fine precision, recall and F, and the coarse cosine, `(4,)`."""
    similarity = tokens @ others.T  # (T, F), F frames or tokens of a reference
    precision = (similarity.amax(dim=1) * weights).sum() / weights.sum()
    recall = similarity.amax(dim=0).mean()
    total = precision + recall
    fine = 2 * precision * recall / total if float(total) else torch.zeros_like(total)
    return torch.stack([precision, recall, fine, whole @ tokens[-1]])


def _full(matching: Tensor) -> Tensor:
    """Full precision, recall and F, then the fine and coarse ones, `(7,)`."""
    return torch.cat([(matching[:3] + matching[3]) / 2, matching])
