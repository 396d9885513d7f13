"""EMScore as an `evaluate` module: a caption against a video, token by frame."""

import evaluate

import hf_captionrl.metrics as metrics
from hf_captionrl.evaluate_modules.prediction_columns import CaptionColumns, column_features

__all__ = ["Emscore"]

_CITATION = """\
@inproceedings{shi2022emscore,
  title     = {{EMScore}: Evaluating Video Captioning via Coarse-Grained and Fine-Grained Embedding Matching},
  author    = {Shi, Yaya and Yang, Xu and Xu, Haiyang and Yuan, Chunfeng and Li, Bing and Hu, Weiming and
               Zha, Zheng-Jun},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year      = {2022}
}
"""

_DESCRIPTION = """\
EMScore holds a caption against the frames of a video, without references: fine (every token takes its most similar
frame, every frame its most similar token: precision, recall, F), coarse (the whole caption against the mean frame),
and full, the mean of both.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (`list[str]`, N): Captions.
    references (N rows, may be left out): Of each caption the frames of its video: images, paths, or features `(F, D)`.
    scorer: CLIP model (transformers or open_clip) that makes the features: a name on the Hub, a folder, `"scenes:clip-judge"`, or a
        loaded one. Only models with a text projection of every token can be used.
    frames: Instead of references: for each caption a list of F images or paths.
    frame_features: Instead of references: N arrays `(F, D)`.
    token_features: Instead of the scorer's: N arrays `(T, D)`, the end-of-text token last.
    idf: Weights of the tokens, N lists of T numbers; or `True`, to count them on `idf_captions`.
    idf_captions (`list[str]`): Captions to count document frequencies on; the predictions, when left out.
Returns:
    precision, recall, f (full), fine_precision, fine_recall, fine_f, coarse (`float` in [-1, 1], higher is better);
    per_sample, a list of each; signature.
Examples:

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
"""


class Emscore(CaptionColumns, evaluate.Metric):
    """EMScore without references, by `hf_captionrl.metrics.emscore`."""

    reference_kinds = ("images", "texts", "matrix", "text")

    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=column_features(self.prediction_kinds, self.reference_kinds),
            reference_urls=["https://arxiv.org/abs/2111.08919"],
        )

    def _compute(
        self,
        predictions,
        references=None,
        *,
        scorer=None,
        frames=None,
        frame_features=None,
        token_features=None,
        idf=None,
        idf_captions=None,
        **others,
    ):
        from hf_captionrl.evaluate_modules import inputs, results, video

        results.warn_of_misspelling(others, self._compute)
        tokens, weights = video.caption_tokens(predictions, token_features, scorer, idf, idf_captions)
        pictures = video.video_frames(references, frames, frame_features, scorer)
        result = metrics.emscore(tokens, pictures, idf=weights, scorer=inputs.scorer_signature(scorer))
        return results.plain_result(result)
