"""Diversity of captions as an `evaluate` module: Div-n, mBLEU, vocabulary, novelty."""

import evaluate

import hf_captionrl.metrics as metrics
from hf_captionrl.evaluate_modules.prediction_columns import CaptionColumns, column_features

__all__ = ["CaptionDiversity"]

_CITATION = """\
@inproceedings{chen2020sle,
  title     = {Better Captioning With Sequence-Level Exploration},
  author    = {Chen, Jia and Jin, Qin},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year      = {2020}
}
@inproceedings{shetty2017speaking,
  title     = {Speaking the Same Language: Matching Machine to Human Captions by Adversarial Training},
  author    = {Shetty, Rakshith and Rohrbach, Marcus and Hendricks, Lisa Anne and Fritz, Mario and Schiele, Bernt},
  booktitle = {IEEE International Conference on Computer Vision},
  year      = {2017}
}
"""

_DESCRIPTION = """\
How different captions are from one another. Within an image: Div-1 and Div-2 (distinct words and word pairs over all
words) and mBLEU-4 (each caption against the other captions of its image; lower is more diverse), per corpus and per
image. Over the whole set: share of distinct captions, mean length, lexical diversity (distinct words in thousands),
vocabulary, and share of captions that a training set does not hold.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions: For each of B images the list of its captions (`list[list[str]]`, at least two each); or N captions,
        with `image_ids`.
    image_ids (N labels): With N captions: the image of each.
    training_captions (`list[str]`): Captions of a training set, for `novel_captions`.
    min_frequency (`int`): How often a word must occur to count for `vocabulary_size`.
    max_order (`int`): Longest n-gram of mBLEU.
Returns:
    div_1, div_2 (`float` in [0, 1], higher is more diverse); mbleu_1 ... mbleu_4 (corpus) and mbleu_1_per_image ...
    (mean over captions), lower is more diverse; unique_captions; length; lexical_diversity; vocabulary_size;
    novel_captions; per_image, lists of div_1, div_2 and mbleu_4 (of max_order); signature.
Examples:

    >>> import evaluate
    >>> import hf_captionrl
    >>> metric = evaluate.load("caption_diversity")
    >>> found = metric.compute(predictions=[["a man rides a horse", "a man rides a horse"]])
    >>> found["div_1"], found["div_2"], round(found["mbleu_4"], 4), found["unique_captions"]
    (0.4, 0.4, 1.0, 0.5)
    >>> found = metric.compute(
    ...     predictions=["a cat", "two dogs", "one cat sleeps", "a dog"], image_ids=["c", "d", "c", "d"]
    ... )
    >>> found["per_image"]["div_1"]
    [0.8, 1.0]
"""


class CaptionDiversity(CaptionColumns, evaluate.Metric):
    """Diversity within images and over a set, by `hf_captionrl.metrics.caption_diversity`."""

    prediction_kinds = ("texts", "text")

    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=column_features(self.prediction_kinds),
            reference_urls=["https://arxiv.org/abs/2003.03749", "https://arxiv.org/abs/1703.10476"],
        )

    def _compute(self, predictions, *, image_ids=None, training_captions=None, min_frequency=5, max_order=4, **others):
        from hf_captionrl.evaluate_modules import inputs, results

        results.warn_of_misspelling(others, self._compute)
        result = metrics.caption_diversity(
            inputs.captions_by_image(predictions, image_ids),
            training_captions=training_captions,
            min_frequency=min_frequency,
            max_order=max_order,
        )
        return results.plain_result(result)
