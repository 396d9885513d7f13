"""CLIPScore and RefCLIPScore as an `evaluate` module, with any scorer."""

import evaluate

import hf_captionrl.metrics as metrics
from hf_captionrl.evaluate_modules.prediction_columns import CaptionColumns, column_features

__all__ = ["ClipScore"]

_CITATION = """\
@inproceedings{hessel2021clipscore,
  title     = {{CLIPScore}: A Reference-free Evaluation Metric for Image Captioning},
  author    = {Hessel, Jack and Holtzman, Ari and Forbes, Maxwell and Le Bras, Ronan and Choi, Yejin},
  booktitle = {Conference on Empirical Methods in Natural Language Processing},
  year      = {2021}
}
"""

_DESCRIPTION = """\
CLIPScore: the scaled cosine of a caption with its own image under a frozen image-text model, negative ones counted as 0.
RefCLIPScore, where reference captions are given: the harmonic mean of CLIPScore and the largest cosine with a
reference. Presets name the conventions of papers: `hessel` (2.5), `smile` (250), both after "A photo depicts", and
`ndlb` (100, no clamp, no prefix). A caption that is too long for the scorer is cut before its end-of-text token.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (`list[str]`, N): Captions; or their features, N vectors of D floats.
    references (N rows, may be left out): Of each caption its own image: an image (PIL, array), a path, or a feature
        vector of D floats; or, with a pool in `images` or `image_features`, its id or row (left out: caption i belongs
        to image i). Lists of texts are reference captions, for RefCLIPScore, and need such a pool.
    scorer: Image-text model that makes the features: a name on the Hub, a folder, `"open_clip:NAME@TAG"`,
        `"scenes:clip-judge"`, or a loaded `hf_captionrl.load_scorer(...)`.
    text_features (`(N, D)`): Features of the captions, the preset's prefix put before them, instead of the scorer's.
    images, image_features, image_ids, targets: The images, as in `self_retrieval`.
    reference_captions (`list[list[str]]`, N): For RefCLIPScore, where references are images.
    reference_features: Features of the reference captions, N arrays `(R, D)`.
    preset (`str`): `"hessel"`, `"smile"` or `"ndlb"`.
    scale (`float`), clamp (`bool`), prefix (`str`): Instead of the preset's.
Returns:
    clip_score (`float`, higher is better), per_sample; ref_clip_score and ref_per_sample where there are reference
    captions; num_truncated and truncated_share, captions longer than the scorer reads; signature.
Examples:

    >>> import evaluate
    >>> import hf_captionrl
    >>> from hf_captionrl.scenes import load_scenes
    >>> scenes = load_scenes(num_train=0, num_validation=0, num_test=4)["test"]
    >>> metric = evaluate.load("clip_score")
    >>> images, captions = list(scenes["image"]), list(scenes["full_caption"])
    >>> options = dict(scorer="scenes:clip-judge", prefix="")
    >>> right = metric.compute(predictions=captions, references=images, **options)["clip_score"]
    >>> wrong = metric.compute(predictions=captions[::-1], references=images, **options)["clip_score"]
    >>> 0 <= wrong < right <= 2.5
    True
    >>> found = metric.compute(predictions=["a kite"], references=[[0.6, 0.8]], text_features=[[1.0, 0.0]], preset="ndlb")
    >>> round(found["clip_score"], 3)
    60.0
"""


class ClipScore(CaptionColumns, evaluate.Metric):
    """CLIPScore and RefCLIPScore, by `hf_captionrl.metrics.clip_score` and `ref_clip_score`."""

    prediction_kinds = ("text", "vector")
    reference_kinds = ("image", "text", "vector", "row", "texts")

    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=column_features(self.prediction_kinds, self.reference_kinds),
            reference_urls=["https://arxiv.org/abs/2104.08718"],
        )

    def _compute(
        self,
        predictions,
        references=None,
        *,
        scorer=None,
        text_features=None,
        images=None,
        image_features=None,
        image_ids=None,
        targets=None,
        reference_captions=None,
        reference_features=None,
        preset="hessel",
        scale=None,
        clamp=None,
        prefix=None,
        **others,
    ):
        from hf_captionrl.evaluate_modules import inputs, pools, results
        from hf_captionrl.metrics.clip import score_prefix
        from hf_captionrl.retrieval.feature_checks import as_features

        results.warn_of_misspelling(others, self._compute)
        before = score_prefix(preset, prefix)
        text = as_features(inputs.caption_features(predictions, text_features, scorer, before), "text_features")
        pool, rows = pools.image_pool(
            references,
            images=images,
            image_features=image_features,
            image_ids=image_ids,
            targets=targets,
            scorer=scorer,
            dtype=text.dtype,
        )
        own = pools.own_images(pool, rows)
        used = inputs.scorer_signature(scorer)
        result = metrics.clip_score(text, own, preset=preset, scale=scale, clamp=clamp, prefix=before, scorer=used)
        texts = inputs.reference_texts(references, reference_captions)
        if reference_features is None and texts is not None:
            reference_features = inputs.grouped_features(texts, scorer, before)
        if reference_features is not None:
            found = metrics.ref_clip_score(text, own, reference_features, prefix=before, scorer=used)
            result |= {"ref_clip_score": found["ref_clip_score"], "ref_per_sample": found["per_sample"]}
            result["signature"] += " + " + found["signature"]
        return results.plain_result(result | inputs.truncation(predictions, scorer, before))
