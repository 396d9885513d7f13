"""CLIPScore and RefCLIPScore from features of any scorer.

Legend: N captions, D features, R references of a caption.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hf_captionrl.metrics.signature import signature
from hf_captionrl.retrieval.feature_checks import as_features, check_features, unit_length

__all__ = ["CLIP_SCORE_PRESETS", "ClipScorePreset", "clip_score", "ref_clip_score", "score_prefix"]

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class ClipScorePreset:
    """How a paper computes CLIPScore from a cosine.

    Args:
        scale: Factor of the cosine.
        clamp: Whether negative cosines count as 0.
        prefix: Text before each caption when its features are computed.
    """

    scale: float
    clamp: bool
    prefix: str


CLIP_SCORE_PRESETS = {
    "hessel": ClipScorePreset(2.5, True, "A photo depicts "),
    "smile": ClipScorePreset(250.0, True, "A photo depicts "),
    "ndlb": ClipScorePreset(100.0, False, ""),
}
"""The conventions of Hessel et al. 2021, SMILE (100 times as large) and No Detail Left Behind."""


def _cosines(a: Any, b: Any, names: tuple[str, str]) -> Tensor:
    a, b = as_features(a, names[0]), as_features(b, names[1])
    if a.dtype != b.dtype:
        raise ValueError(
            f"{names[0]} and {names[1]} have different dtypes. Convert one: both should come from one scorer."
        )
    first, second = check_features(a, names[0]).cpu(), check_features(b, names[1]).cpu()
    if first.shape != second.shape:
        raise ValueError(
            f"{names[0]} {tuple(first.shape)} and {names[1]} {tuple(second.shape)} must have equal shapes. Pass one row per caption in both."
        )
    found = torch.empty(len(first), dtype=torch.float64)
    for start in range(
        0, len(first), _ROWS_AT_ONCE
    ):  # copies in fp64 would take four times the memory of the features
        rows = slice(start, start + _ROWS_AT_ONCE)
        # Not cosine_similarity, which treats rows shorter than 1e-8 as longer.
        found[rows] = (unit_length(first[rows].double()) * unit_length(second[rows].double())).sum(dim=1)
    return found.clamp_(-1, 1)


def _check_scale(scale: float) -> float:
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}; it must be a finite number above 0. Use 2.5, as in the paper.")
    return scale


def _preset(name: str) -> ClipScorePreset:
    if name not in CLIP_SCORE_PRESETS:
        raise ValueError(f"preset must be one of {sorted(CLIP_SCORE_PRESETS)}, got {name!r}.")
    return CLIP_SCORE_PRESETS[name]


def score_prefix(preset: str, prefix: str | None = None) -> str:
    """The prefix of captions: the given one, or the preset's."""
    known = _preset(preset)  # refuses unknown names, whatever the prefix
    before = known.prefix if prefix is None else prefix
    return before if not before or before[-1].isspace() else f"{before} "


def clip_score(
    text_features: Any,
    image_features: Any,
    *,
    preset: Literal["hessel", "smile", "ndlb"] = "hessel",
    scale: float | None = None,
    clamp: bool | None = None,
    prefix: str | None = None,
    scorer: str = "",
) -> dict[str, Any]:
    r"""CLIPScore, `scale * max(cos(text, image), 0)`, of each caption with its image.

    Reference: Hessel et al. 2021, "CLIPScore". Presets: `hessel` 2.5, `smile` 100 * 2.5 (both for features
    computed with the prefix "A photo depicts "), `ndlb` 100 without clamping and without a prefix; see `CLIP_SCORE_PRESETS`.

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
    Raises:
        ValueError: If shapes or dtypes differ, a row is NaN or zero (its index is named), or the preset is unknown.
    """
    chosen = _preset(preset)
    factor = _check_scale(chosen.scale if scale is None else scale)
    clamped = chosen.clamp if clamp is None else clamp
    cosine = _cosines(text_features, image_features, ("text_features", "image_features"))
    scores = factor * (cosine.clamp(min=0) if clamped else cosine)
    return {
        "clip_score": float(scores.mean()),
        "per_sample": scores.numpy(),
        "signature": signature(
            metric="clip_score",
            scorer=scorer,
            preset=preset,
            scale=factor,
            clamp=clamped,
            prefix=score_prefix(preset, prefix).strip() or "none",
        ),
    }


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
        scale: Factor of CLIPScore.
        prefix: The prefix with which the features of captions and references were computed, for the signature.
        scorer: Scorer and revision, for the signature.
    Returns:
        `dict`: `ref_clip_score`, the mean, higher is better; `clip_score`; `per_sample`; `signature`.
    Raises:
        ValueError: If shapes or dtypes differ, or a row is NaN or zero (its index is named).
    """
    image = _check_scale(scale) * _cosines(text_features, image_features, ("text_features", "image_features")).clamp(
        min=0
    )
    text = as_features(text_features, "text_features")
    if len(reference_features) != len(text):
        raise ValueError(
            f"{len(text)} captions and {len(reference_features)} sets of references. Pass one set per caption."
        )
    nearest = torch.empty_like(image)
    for i, features in enumerate(reference_features):
        rows = as_features(features, f"reference_features[{i}]")
        same = text[i : i + 1].expand(len(rows), -1) if rows.ndim == 2 else text[i : i + 1]
        nearest[i] = _cosines(same, rows, (f"text_features[{i}]", f"reference_features[{i}]")).max().clamp(min=0)
    total = image + nearest
    scores = torch.where(total > 0, 2 * image * (nearest / total), torch.zeros_like(total))
    return {
        "ref_clip_score": float(scores.mean()),
        "clip_score": float(image.mean()),
        "per_sample": scores.numpy(),
        "signature": signature(
            metric="ref_clip_score",
            scorer=scorer,
            scale=scale,
            prefix=None if prefix is None else prefix.strip() or "none",
        ),
    }
