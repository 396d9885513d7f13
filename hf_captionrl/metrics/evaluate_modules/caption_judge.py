"""Ratings of captions by a language or vision-language model: VQAScore, FLEUR, CLAIR, and a listener."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import evaluate
import numpy as np

import hf_captionrl.metrics as metrics
from hf_captionrl.metrics import judges
from hf_captionrl.metrics.bootstrap import signature
from hf_captionrl.metrics.evaluate_modules.metric import DeclaredMetric, Metric, is_missing

_NAMES = ("vqa_score", "fleur", "clair", "listener")


def compute(
    predictions: Sequence[str],
    references: Sequence[Any] | None = None,
    *,
    metric: Literal["vqa_score", "fleur", "clair", "listener"] = "vqa_score",
    backend: Any = None,
    images: Sequence[Any] | None = None,
    reference_captions: Sequence[Sequence[str]] | None = None,
    bags: Sequence[Sequence[int]] | None = None,
    normalise: bool = True,
    together: bool = True,
    num_orders: int = 1,
    log_probs: Sequence[Sequence[float]] | None = None,
) -> dict[str, Any]:
    """Call the metric with the rows that it needs."""
    if metric not in _NAMES:
        raise ValueError(f"metric is {metric!r}. Use one of {', '.join(_NAMES)}.")
    known = None if is_missing(references) else list(references or ())
    if known and isinstance(known[0], list):
        reference_captions = known if reference_captions is None else reference_captions
        known = None
    if log_probs is not None:
        found = _of_log_probs(metric, predictions, log_probs, normalise)
    elif backend is None or isinstance(backend, str):
        raise ValueError(
            f"backend is {backend!r}. Pass a loaded one, such as hf_captionrl.captioners.language_models."
            "TransformersVisionBackend(NAME), or log_probs."
        )
    elif metric == "clair":
        found = metrics.clair(predictions, _needed(reference_captions, "reference_captions", metric), backend)
    else:
        shown = _needed(known if images is None else images, "images", metric)
        if metric == "vqa_score":
            found = metrics.vqa_score(predictions, shown, backend, normalise=normalise)
        elif metric == "fleur":
            found = metrics.fleur(predictions, shown, backend, reference_captions)
        else:
            if bags is None:
                raise ValueError("listener needs bags. Pass bags=, rows of the images that are compared.")
            found = metrics.listener(predictions, shown, backend, bags=bags, together=together, num_orders=num_orders)
    return found | {"per_sample": {metric: found["per_sample"]}}


def _needed(value: Any, name: str, metric: str) -> Any:
    if value is None:
        raise ValueError(f"{metric} needs {name}. Pass references, or {name}=.")
    return value


def _of_log_probs(metric: str, captions: Sequence[str], log_probs: Any, normalise: bool) -> dict[str, Any]:
    answers = {"vqa_score": judges.YES_NO, "fleur": judges.RATINGS}
    try:
        rows = np.asarray(log_probs, dtype=np.float64)
    except (ValueError, TypeError):  # rows of different lengths, or texts
        rows = np.empty(0)
    if metric not in answers or rows.shape != (len(captions), len(answers[metric])) or not np.isfinite(rows).all():
        raise ValueError(
            f"log_probs has shape {rows.shape} for {metric}. Pass finite numbers, one row per caption with the log-probabilities "
            f"of {answers.get(metric, 'vqa_score or fleur')}."
        )
    of = (lambda row: judges.yes_probability(row, normalise)) if metric == "vqa_score" else judges.expected_rating
    scores = np.array([of(row) for row in rows])
    named = signature(metric=metric, judge="given", normalise=normalise if metric == "vqa_score" else None)
    return {metric: float(scores.mean()), "per_sample": scores, "num_failed": 0, "failures": [], "signature": named}


METRIC = Metric(
    title="Caption Judge",
    emoji="⚖️",
    summary="VQAScore, FLEUR, CLAIR and a chat model as listener",
    description="""\
Ratings by a language or vision-language model. `vqa_score`: the probability of "Yes" to whether the image shows what the caption
says. `fleur`: the expected rating between 0.0 and 1.0. `clair`: how likely caption and references describe one image, as
written by the model. `listener`: the share of captions from which it finds their image in a bag. Captions that the judge did
not rate are counted, never 0.
""",
    arguments="""\
    predictions (`list[str]`, N): Captions.
    references (N rows, optional): The image of each caption (an image or a path), or its reference captions (`list[str]`).
    metric (`str`): `"vqa_score"`, `"fleur"`, `"clair"` or `"listener"`.
    backend: A loaded judge of `hf_captionrl.captioners.language_models`; a `KeptAnswers` around it asks nothing twice.
    images (N): The images, if references are reference captions.
    reference_captions (`list[list[str]]`, N): For clair, and for fleur with references, if references are images.
    bags (`list[list[int]]`): For the listener, rows of the images that are compared.
    normalise (`bool`): For vqa_score, divide by the probability of "Yes" and "No".
    together (`bool`), num_orders (`int`): For the listener, all images in one prompt, in this many orders.
    log_probs (N rows): Instead of a backend, log-probabilities of "Yes" and "No" (vqa_score) or of 0.0, 0.1, ..., 1.0 (fleur).
""",
    returns="""\
    The number under the name of the metric (`float` in [0, 1], higher is better); per_sample, a list of it (None where the
    judge failed); num_failed; failures, the first reasons; signature. clair also has reasons; the listener chance, log_probs,
    captions and groups.
""",
    examples="""\
    >>> import evaluate
    >>> import hf_captionrl
    >>> metric = evaluate.load("caption_judge")
    >>> found = metric.compute(predictions=["a kite", "a dog"], log_probs=[[-0.1, -2.5], [-3.0, -0.2]])
    >>> [round(value, 3) for value in found["per_sample"]["vqa_score"]]
    [0.917, 0.057]
    >>> found["num_failed"]
    0
""",
    limitations="""\
A judge prefers long and fluent captions, and those of its own family. Numbers of different judges, revisions or prompts cannot be
compared; the signature states them. Do not evaluate with the judge that gave the reward.
""",
    citation="""\
@inproceedings{lin2024evaluating,
  title     = {Evaluating Text-to-Visual Generation with Image-to-Text Generation},
  author    = {Lin, Zhiqiu and Pathak, Deepak and Li, Baiqi and Li, Jiayao and Xia, Xide and Neubig, Graham and Zhang, Pengchuan
               and Ramanan, Deva},
  booktitle = {European Conference on Computer Vision},
  year      = {2024}
}
@inproceedings{lee2024fleur,
  title     = {{FLEUR}: An Explainable Reference-Free Evaluation Metric for Image Captioning Using a Large Multimodal Model},
  author    = {Lee, Yebin and Park, Imseong and Kang, Myungjoo},
  booktitle = {Annual Meeting of the Association for Computational Linguistics},
  year      = {2024}
}
@inproceedings{chan2023clair,
  title     = {{CLAIR}: Evaluating Image Captions with Large Language Models},
  author    = {Chan, David and Petryk, Suzanne and Gonzalez, Joseph and Darrell, Trevor and Canny, John},
  booktitle = {Conference on Empirical Methods in Natural Language Processing},
  year      = {2023}
}
""",
    urls=("https://arxiv.org/abs/2404.01291", "https://arxiv.org/abs/2406.06004", "https://arxiv.org/abs/2310.12971"),
    compute=compute,
    references=("image", "text", "texts"),
    functions=_NAMES,
    keys="`vqa_score`, `fleur`, `clair`, `listener`",
    data_arguments=("metric", "log_probs", "normalise"),
    cases=(
        {
            "predictions": ["a kite", "a dog"],
            "log_probs": [[-0.1, -2.5], [-3.0, -0.2]],
            "metric": "vqa_score",
            "result": {"vqa_score": 0.4870759, "num_failed": 0},
        },
        {
            "predictions": ["a kite"],
            "log_probs": [[-9, -9, -9, -9, -9, -9, -9, -9, -1, -1, -9]],
            "metric": "fleur",
            "result": {"fleur": 0.8493552},
        },
    ),
)


class CaptionJudge(DeclaredMetric, evaluate.Metric):
    """Caption Judge."""

    declaration = "caption_judge"
