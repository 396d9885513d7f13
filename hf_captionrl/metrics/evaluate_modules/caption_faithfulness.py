"""Faithfulness of captions: CHAIR, and a checker that knows the facts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import evaluate

import hf_captionrl.metrics as metrics
from hf_captionrl.metrics.evaluate_modules.metric import DeclaredMetric, Metric, is_missing
from hf_captionrl.scenes import check as scene_check

_MAX_WORDS_OF_A_NAME = 4  # a reference caption has more


def compute(
    predictions: Sequence[str],
    references: Sequence[Any] | None = None,
    *,
    objects: Sequence[Any] | None = None,
    facts: Sequence[Any] | None = None,
    synonyms: Mapping[str, Sequence[str]] | Literal["coco"] | None = None,
    check: Callable[[str, Any], Any] | None = None,
) -> dict[str, Any]:
    """Call `chair` on objects and `faithfulness` on facts, whichever are given."""
    if objects is None and facts is None:
        objects, facts = _objects_or_facts(references)
    found: list[dict[str, Any]] = []
    if objects is not None:
        found.append(metrics.chair(predictions, objects, synonyms=synonyms))
    if facts is not None:
        found.append(metrics.faithfulness(predictions, facts, check or scene_check))
    result: dict[str, Any] = {}
    per_sample: dict[str, Any] = {}
    for part in found:
        # Both have a list "wrong": objects in one, numbers of claims in the other.
        prefix = "chair_" if "chair_i" in part else ""
        per_sample |= {prefix + name: values for name, values in part["per_sample"].items()}
        result |= part
    return result | {"per_sample": per_sample, "signature": " + ".join(part["signature"] for part in found)}


def facts_as_json(references: Any) -> Any:
    """Mappings of facts as JSON, which a column of strings can hold."""
    if references is None or isinstance(references, str | Mapping):
        return references
    return [json.dumps(row) if isinstance(row, Mapping) else row for row in references]


def _objects_or_facts(references: Sequence[Any] | None) -> tuple[Sequence[Any] | None, Sequence[Any] | None]:
    if is_missing(references) or references is None:
        raise ValueError("There is nothing to compare captions with. Pass references, objects= or facts=.")
    if isinstance(references[0], list):
        for i, names in enumerate(references):
            for name in names:
                if len(name.split()) > _MAX_WORDS_OF_A_NAME:
                    remedy = "Pass lists of objects, or objects= if references are captions for another module."
                    raise ValueError(f"references[{i}] holds {name!r}, which is not the name of an object. {remedy}")
        return references, None
    parsed = []
    for i, text in enumerate(references):
        try:
            parsed.append(json.loads(text))
        except json.JSONDecodeError:
            raise ValueError(f"references[{i}] is {text!r:.60}, neither a list of objects nor JSON.") from None
    return None, parsed


METRIC = Metric(
    title="Caption Faithfulness",
    emoji="✅",
    summary="Objects and claims that are not in the image",
    description="""\
Whether captions describe what is in the image. CHAIR counts objects that a caption names and its image does not
contain (CHAIR-i over mentions, CHAIR-s over captions), using lists of objects with synonyms. If all facts are known, as
in the embedded scenes of hf_captionrl, a checker counts wrong claims and mentioned facts exactly. Report it beside
every retrieval number.
""",
    arguments="""\
    predictions (`list[str]`, N): Captions.
    references (N rows, optional): For CHAIR, the objects of each caption's image (`list[str]`); for the checker, its
        facts (a mapping, or the mapping as JSON).
    objects (`list[list[str]]`, N), facts (`list[dict]`, N): Instead of references; pass both to
        get the numbers of both.
    synonyms (`dict[str, list[str]]`): Other names of each object; `"coco"`: of COCO's 80 objects.
    check: Function of a caption and its facts (see `hf_captionrl.metrics.caption_faithfulness`); by default the checker
        of the embedded scenes.
""",
    returns="""\
    With objects chair_i, chair_s (`float` in [0, 1], lower is better; None, with chair_i_reason, if no object was recognised)
    and object_recall, with the counts num_mentions, num_wrong, num_objects and num_captions; with facts hallucination,
    wrong_captions (lower is better) and fact_recall (higher is better); per_sample, lists for each caption; signature.
""",
    examples="""\
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
""",
    limitations="""\
CHAIR knows only the objects of its list, and counts objects that annotators left out as wrong. Plurals are reduced by
spelling rules. The exact checker works only for the embedded scenes of hf_captionrl.
""",
    citation="""\
@inproceedings{rohrbach2018object,
  title     = {Object Hallucination in Image Captioning},
  author    = {Rohrbach, Anna and Hendricks, Lisa Anne and Burns, Kaylee and Darrell, Trevor and Saenko, Kate},
  booktitle = {Conference on Empirical Methods in Natural Language Processing},
  year      = {2018}
}
""",
    urls=("https://arxiv.org/abs/1809.02156",),
    compute=compute,
    references=("texts", "text"),
    store_references=facts_as_json,
    functions=("chair", "faithfulness"),
    keys="`chair_i`, `chair_s`, `hallucination`, `fact_recall`",
    data_arguments=("synonyms",),
    cases=(
        {
            "predictions": ["a puppy chases a ball", "two cats"],
            "references": [["dog"], ["cat"]],
            "synonyms": {"dog": ["puppy"], "ball": []},
            "result": {"chair_i": 0.3333333333, "chair_s": 0.5, "object_recall": 1.0},
        },
        {
            "predictions": ["two large pigs on a blue background"],
            "references": [
                {"kind": "pig", "count": 2, "size": "small", "orientation": "sideways", "position": "top"}
                | {"background": "blue", "second": "mushroom", "relation": "left of"}
            ],
            "result": {"hallucination": 0.25, "fact_recall": 0.375, "wrong_captions": 1.0},
        },
    ),
)


class CaptionFaithfulness(DeclaredMetric, evaluate.Metric):
    """Caption Faithfulness."""

    declaration = "caption_faithfulness"
