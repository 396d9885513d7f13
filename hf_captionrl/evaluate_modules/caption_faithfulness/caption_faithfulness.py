"""Faithfulness of captions as an `evaluate` module: CHAIR, and a checker that knows the facts."""

import evaluate

import hf_captionrl.metrics as metrics
from hf_captionrl.evaluate_modules.prediction_columns import CaptionColumns, column_features

__all__ = ["CaptionFaithfulness"]

_CITATION = """\
@inproceedings{rohrbach2018object,
  title     = {Object Hallucination in Image Captioning},
  author    = {Rohrbach, Anna and Hendricks, Lisa Anne and Burns, Kaylee and Darrell, Trevor and Saenko, Kate},
  booktitle = {Conference on Empirical Methods in Natural Language Processing},
  year      = {2018}
}
"""

_DESCRIPTION = """\
Whether captions say what is in the image. CHAIR counts objects that captions name and images do not hold (CHAIR-i over
mentions, CHAIR-s over captions), by lists of objects with synonyms. Where all facts are known, as in the embedded
scenes of hf_captionrl, a checker counts wrong claims and facts told exactly. To be read beside every retrieval number.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (`list[str]`, N): Captions.
    references (N rows, may be left out): Of each caption the objects of its image (`list[str]`), for CHAIR; or its facts
        (a mapping, or the same as JSON), for the checker.
    objects (`list[list[str]]`, N), facts (`list[dict]`, N): Instead of references; both give both.
    synonyms (`dict[str, list[str]]`): For each object its other names.
    check: Checker of a caption and its facts (see `hf_captionrl.metrics.caption_faithfulness`); that of the embedded scenes,
        when left out.
Returns:
    With objects chair_i, chair_s (`float` in [0, 1], lower is better) and object_recall; with facts hallucination,
    wrong_captions (lower is better) and fact_recall (higher is better); per_sample, lists for each caption; signature.
Examples:

    >>> import evaluate
    >>> import hf_captionrl
    >>> metric = evaluate.load("caption_faithfulness")
    >>> found = metric.compute(
    ...     predictions=["a puppy chases a ball", "two cats"],
    ...     references=[["dog"], ["cat"]],
    ...     synonyms={"dog": ["puppy"], "ball": []},
    ... )
    >>> round(found["chair_i"], 3), found["chair_s"], found["object_recall"]
    (0.333, 0.5, 1.0)
    >>> facts = {"kind": "pig", "count": 2, "size": "small", "orientation": "sideways", "position": "top",
    ...          "background": "blue", "second": "mushroom", "relation": "left of"}
    >>> found = metric.compute(predictions=["two large pigs on a blue background"], references=[facts])
    >>> found["hallucination"], found["wrong_captions"]
    (0.25, 1.0)
"""


class CaptionFaithfulness(CaptionColumns, evaluate.Metric):
    """CHAIR and exact faithfulness, by `hf_captionrl.metrics.chair` and `faithfulness`."""

    reference_kinds = ("texts", "text")

    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=column_features(self.prediction_kinds, self.reference_kinds),
            reference_urls=["https://arxiv.org/abs/1809.02156"],
        )

    def add_batch(self, *, predictions=None, references=None, **kwargs):
        """Add a batch of captions, with objects or facts."""
        from hf_captionrl.evaluate_modules import truth

        super().add_batch(predictions=predictions, references=truth.as_text(references), **kwargs)

    def _compute(self, predictions, references=None, *, objects=None, facts=None, synonyms=None, check=None, **others):
        from hf_captionrl.evaluate_modules import results, truth

        results.warn_of_misspelling(others, self._compute)
        objects, facts = truth.objects_and_facts(references, objects, facts)
        result: dict = {}
        per_sample: dict = {}
        signatures = []
        found = []
        if objects is not None:
            found.append(metrics.chair(predictions, objects, synonyms=synonyms))
        if facts is not None:
            found.append(metrics.faithfulness(predictions, facts, check or truth.scene_check))
        for part in found:
            signatures.append(part.pop("signature"))
            # Both name a list "wrong": objects in one, numbers of claims in the other.
            prefix = "chair_" if "chair_i" in part else ""
            per_sample |= {prefix + name: values for name, values in part.pop("per_sample").items()}
            result |= part
        return results.plain_result(result | {"per_sample": per_sample, "signature": " + ".join(signatures)})
