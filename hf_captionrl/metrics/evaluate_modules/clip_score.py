"""CLIPScore and RefCLIPScore with any scorer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

import hf_captionrl.metrics as metrics
from hf_captionrl.metrics.clip_scores import CLIP_SCORE_PRESETS, score_prefix
from hf_captionrl.metrics.evaluate_modules.inputs import (
    captions_and_pool,
    reference_features_of,
    scorer_signature,
    truncation,
)
from hf_captionrl.metrics.evaluate_modules.metric import DeclaredMetric, Metric
from hf_captionrl.retrieval.ranking import check_targets


def compute(
    predictions: Sequence[Any],
    references: Sequence[Any] | None = None,
    *,
    scorer: Any = None,
    text_features: Any = None,
    images: Any = None,
    image_features: Any = None,
    image_ids: Sequence[str] | None = None,
    targets: Sequence[int] | None = None,
    reference_captions: Sequence[Sequence[str]] | None = None,
    reference_features: Any = None,
    preset: Any = "hessel",
    scale: float | None = None,
    clamp: bool | None = None,
    prefix: str | None = None,
) -> dict[str, Any]:
    """Call `clip_score`, and `ref_clip_score` if there are reference captions."""
    prefix = score_prefix(preset, prefix)
    pool_options = {"images": images, "image_features": image_features, "image_ids": image_ids, "targets": targets}
    text, pool, rows = captions_and_pool(predictions, references, text_features, scorer, prefix, **pool_options)
    own = pool if rows is None else pool[check_targets(rows, len(text), len(pool))]
    name = scorer_signature(scorer)
    result = metrics.clip_score(text, own, preset=preset, scale=scale, clamp=clamp, prefix=prefix, scorer=name)
    result["per_sample"] = {"clip_score": result["per_sample"]}
    if reference_features is None:
        reference_features = reference_features_of(references, reference_captions, scorer, prefix)
    if reference_features is not None:
        # RefPAC-S has the scale of PAC-S; the other presets only scale CLIPScore.
        factor = {"scale": CLIP_SCORE_PRESETS[preset].scale} if preset == "pac_s" else {}
        found = metrics.ref_clip_score(text, own, reference_features, prefix=prefix, scorer=name, **factor)
        result["ref_clip_score"] = found["ref_clip_score"]
        result["per_sample"]["ref_clip_score"] = found["per_sample"]
        result["signature"] += " + " + found["signature"]
    return result | truncation(predictions, scorer, prefix)


METRIC = Metric(
    title="CLIPScore and RefCLIPScore",
    emoji="📎",
    summary="CLIPScore and RefCLIPScore with any scorer",
    description="""\
CLIPScore: the scaled cosine between a caption and its image under a frozen image-text model; negative cosines count as
0. RefCLIPScore, if reference captions are given: the harmonic mean of CLIPScore and the largest cosine with a
reference. Presets name the conventions of papers: `hessel` (2.5), `smile` (250), both after "A photo depicts",
`ndlb` (100, no clamp, no prefix), and `pac_s` (2, after "A photo depicts"), which is PAC-S with its weights. A caption that is too long for the scorer is truncated before its end-of-text token.
""",
    arguments="""\
    predictions (`list[str]`, N): Captions; or their features, N vectors of D floats.
    references (N rows, optional): The image of each caption: an image (PIL, array), a path, or a feature vector of D
        floats; with a pool in `images` or `image_features`, the image's id or row (if left out, caption i belongs to
        image i). Lists of texts are reference captions, for RefCLIPScore, and need such a pool.
    scorer: Image-text model that makes the features: a name on the Hub, a folder, `"open_clip:NAME@TAG"`,
        `"scenes:siglip-held-out"`, or a loaded `hf_captionrl.load_scorer(...)`.
    text_features (`(N, D)`): Features of the captions with the preset's prefix; the scorer is then not used for them.
    images, image_features, image_ids, targets: The images, as in `self_retrieval`.
    reference_captions (`list[list[str]]`, N): For RefCLIPScore, if references are images.
    reference_features: Features of the reference captions, N arrays `(R, D)`.
    preset (`str`): `"hessel"`, `"smile"`, `"ndlb"` or `"pac_s"` (with a scorer of `captionrl convert clip_ViT-B-32.pth`).
    scale (`float`), clamp (`bool`), prefix (`str`): Override the preset's.
""",
    returns="""\
    clip_score (`float`, higher is better); ref_clip_score where there are reference captions; per_sample, a list of each;
    num_truncated and truncated_share, captions that the scorer truncates; signature.
""",
    examples="""\
    >>> import evaluate
    >>> import hf_captionrl
    >>> from hf_captionrl.scenes import load_scenes
    >>> scenes = load_scenes(num_train=0, num_validation=0, num_test=4)["test"]
    >>> metric = evaluate.load("clip_score")
    >>> images, captions = list(scenes["image"]), list(scenes["full_caption"])
    >>> options = dict(scorer="scenes:siglip-held-out", prefix="")
    >>> right = metric.compute(predictions=captions, references=images, **options)["clip_score"]
    >>> wrong = metric.compute(predictions=captions[::-1], references=images, **options)["clip_score"]
    >>> 0 <= wrong < right <= 2.5
    True
    >>> found = metric.compute(predictions=["a kite"], references=[[0.6, 0.8]], text_features=[[1.0, 0.0]], preset="ndlb")
    >>> round(found["clip_score"], 3)
    60.0
""",
    limitations="""\
CLIPScore does not see many errors (counts, relations) and overrates captioners that were trained with the same scorer.
Numbers with different scorers, prefixes or scales cannot be compared; the signature states them.
""",
    citation="""\
@inproceedings{hessel2021clipscore,
  title     = {{CLIPScore}: A Reference-free Evaluation Metric for Image Captioning},
  author    = {Hessel, Jack and Holtzman, Ari and Forbes, Maxwell and Le Bras, Ronan and Choi, Yejin},
  booktitle = {Conference on Empirical Methods in Natural Language Processing},
  year      = {2021}
}
""",
    urls=("https://arxiv.org/abs/2104.08718",),
    compute=compute,
    predictions=("text", "vector"),
    references=("image", "text", "vector", "row", "texts"),
    functions=("clip_score", "ref_clip_score"),
    keys="`clip_score`, `ref_clip_score`",
    data_arguments=("image_features", "image_ids", "reference_features", "text_features"),
    cases=(
        {
            "predictions": ["a kite", "a dog"],
            "references": [[0.6, 0.8], [0.0, 1.0]],
            "text_features": [[1.0, 0.0], [0.0, 1.0]],
            "preset": "hessel",
            "result": {"clip_score": 2.0000000119},
        },
        {
            "predictions": ["a kite"],
            "references": [[0.6, 0.8]],
            "text_features": [[1.0, 0.0]],
            "reference_features": [[[0.8, 0.6], [0.0, 1.0]]],
            "preset": "hessel",
            "result": {"clip_score": 1.5000000238, "ref_clip_score": 1.0434782606},
        },
    ),
)


class ClipScore(DeclaredMetric, evaluate.Metric):
    """CLIPScore and RefCLIPScore."""

    declaration = "clip_score"
