"""Any metric of captions as one function: metrics of this package by name, Python functions.

Such a function gets `candidates` (N strings), `references` (N lists of strings) and `images` (N paths or images), and returns N
numbers; higher is better. `captionrl agreement` takes any of them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MetricFunction = Callable[[Sequence[str], Sequence[Sequence[str]], Sequence[Any]], Sequence[float]]
"""From N captions, the references of each, and the image of each (a path or an image) to N numbers."""

TEXT_METRICS = ("bleu_1", "bleu_2", "bleu_3", "bleu_4", "rouge_l", "meteor", "cider_d", "cider", "spice")
SCORER_METRICS = ("clip_score", "ref_clip_score", "pac_s")
JUDGE_METRICS = ("vqa_score", "clair")  # of `experimental/judges.py`


def metric_function(metric: Any, *, scorer: Any = None, prefix: str | None = None) -> MetricFunction:
    """The function of a metric.

    `metric` is a name of `TEXT_METRICS`, or of `SCORER_METRICS`, with a `scorer` and the text before each caption (None: that of
    CLIPScore); `"package.module:function"`, also in the working folder; or a function.
    """
    if not isinstance(metric, str):
        try:
            signature = inspect.signature(metric)
            arguments = [each for each in signature.parameters.values() if each.kind < each.VAR_POSITIONAL]
            # A third argument that is needed, or called images; an option of the function is neither.
            takes_images = any(each.default is each.empty or each.name == "images" for each in arguments[2:3])
            signature.bind(*[None] * (3 if takes_images else 2))
        except TypeError as error:
            how = "Use a function of captions and references, or of captions, references and images."
            raise ValueError(f"{metric!r} cannot be a metric: {error}. {how}") from error
        return metric if takes_images else lambda candidates, references, _: metric(candidates, references)
    if metric in TEXT_METRICS:
        return functools.partial(_text_scores, metric)
    if metric in SCORER_METRICS:
        if scorer is None:
            raise ValueError(f"{metric} needs a scorer. Use --scorer openai/clip-vit-base-patch32.")
        return functools.partial(_scorer_scores, metric, scorer, prefix)
    module, colon, function = metric.partition(":")
    if not colon:
        names = ", ".join((*TEXT_METRICS, *SCORER_METRICS))
        raise ValueError(f"There is no metric {metric!r}. Use one of {names}, or package.module:function.")
    sys.path.insert(0, os.getcwd())  # a console script does not look into the working folder
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"The metric {metric!r} cannot be imported: {error}. Use package.module:function.") from error
    finally:
        sys.path.remove(os.getcwd())
    return metric_function(found)


def call_metric(
    function: MetricFunction,
    name: str,
    candidates: Sequence[str],
    references: Sequence[Sequence[str]],
    images: Sequence[Any],
) -> list[float]:
    """The numbers of a metric, checked: one finite number per caption."""
    found = [float(value) for value in function(candidates, references, images)]
    if len(found) != len(candidates):
        raise ValueError(f"{name} returned {len(found)} numbers for {len(candidates)} captions.")
    bad = next((row for row, value in enumerate(found) if not math.isfinite(value)), None)
    if bad is not None:
        raise ValueError(f"{name} returned {found[bad]} for caption {bad}, {candidates[bad]!r}.")
    return found


def _text_scores(name: str, candidates: Sequence[str], references: Sequence[Sequence[str]], images: Any) -> Any:
    from hf_captionrl import metrics

    function: Any = metrics.bleu if name.startswith("bleu") else getattr(metrics, name)
    found = function(list(candidates), [list(each) for each in references])["per_sample"]
    return found[name] if isinstance(found, dict) else found


def _scorer_scores(
    name: str,
    scorer: Any,
    prefix: str | None,
    candidates: Sequence[str],
    references: Sequence[Sequence[str]],
    images: Sequence[Any],
) -> Any:
    """CLIPScore, PAC-S and RefCLIPScore; captions and files of images that occur several times are encoded once."""
    import torch

    from hf_captionrl.data.images import open_image
    from hf_captionrl.metrics import clip_score, ref_clip_score
    from hf_captionrl.metrics.clip_scores import score_prefix

    prefix = score_prefix("hessel", prefix)
    keys = [os.fspath(image) if isinstance(image, (str, Path)) else id(image) for image in images]
    distinct = dict(zip(keys, images, strict=True))
    parts = [list(distinct.values())[i : i + scorer.batch_size] for i in range(0, len(distinct), scorer.batch_size)]
    pictures = torch.cat([scorer.image_features([open_image(image) for image in part]) for part in parts])
    own = pictures[[*map({key: row for row, key in enumerate(distinct)}.__getitem__, keys)]]

    def encoded(texts: Sequence[str]) -> tuple[Any, dict[str, int]]:
        each = list(dict.fromkeys(texts))
        return scorer.text_features([prefix + text for text in each]), {text: row for row, text in enumerate(each)}

    texts, row_of = encoded(candidates)
    features = texts[[row_of[text] for text in candidates]]
    if name != "ref_clip_score":
        return clip_score(features, own, preset="pac_s" if name == "pac_s" else "hessel")["per_sample"]
    texts, row_of = encoded([text for each in references for text in each])
    of_references = [texts[[row_of[text] for text in each]] for each in references]
    return ref_clip_score(features, own, of_references)["per_sample"]
