"""Any metric of captions as one function: metrics of this package by name, Python functions, `evaluate` modules, programs.

Such a function gets `candidates` (N strings), `references` (N lists of strings) and `images` (N paths or images), and returns N
numbers; higher is better. `captionrl agreement` and `captionrl audit-metric` take any of them.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MetricFunction = Callable[[Sequence[str], Sequence[Sequence[str]], Sequence[Any]], Sequence[float]]
"""From N captions, the references of each, and the image of each (a path or an image) to N numbers."""

TEXT_METRICS = ("bleu_1", "bleu_2", "bleu_3", "bleu_4", "rouge_l", "meteor", "cider_d", "cider", "spice")
SCORER_METRICS = ("clip_score", "ref_clip_score")


def metric_function(name: str, *, scorer: Any = None, prefix: str | None = None) -> MetricFunction:
    """The function of a metric.

    Args:
        name: A name of `TEXT_METRICS` or `SCORER_METRICS`; `"package.module:function"` for a function of your own with
            these three arguments.
        scorer ([`Scorer`], *optional*): Dual encoder of the metrics of `SCORER_METRICS`.
        prefix (`str`, *optional*): Text before each caption for these; None for that of CLIPScore.
    Raises:
        ValueError: If there is no such metric, or its scorer is missing.
    """
    if name in TEXT_METRICS:
        return lambda candidates, references, images: _text_scores(name, candidates, references)
    if name in SCORER_METRICS:
        if scorer is None:
            raise ValueError(f"{name} needs a scorer. Use --scorer openai/clip-vit-base-patch32.")
        return lambda candidates, references, images: _scorer_scores(
            name, scorer, prefix, candidates, references, images
        )
    module, colon, function = name.partition(":")
    if not colon:
        known = ", ".join((*TEXT_METRICS, *SCORER_METRICS))
        raise ValueError(f"There is no metric {name!r}. Use one of {known}, or package.module:function.")
    found: MetricFunction = getattr(importlib.import_module(module), function)
    return found


def program_metric(command: str) -> MetricFunction:
    """A program as a metric: it reads JSON lines with `candidate`, `references` and `image`, and writes a number per line."""

    def scores(candidates: Sequence[str], references: Sequence[Sequence[str]], images: Sequence[Any]) -> list[float]:
        rows = zip(candidates, references, images, strict=True)
        lines = "".join(
            json.dumps(
                {"candidate": c, "references": list(r), "image": str(i) if isinstance(i, (str, Path)) else None}
            )
            + "\n"
            for c, r, i in rows
        )
        done = subprocess.run(shlex.split(command), input=lines, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise ValueError(f"--command {command!r} ended with exit code {done.returncode}.")
        try:
            return [float(word) for word in done.stdout.split()]
        except ValueError as error:
            raise ValueError(f"--command {command!r} must write a number per line: {error}.") from error

    return scores


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


def _text_scores(name: str, candidates: Sequence[str], references: Sequence[Sequence[str]]) -> Sequence[float]:
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
) -> Sequence[float]:
    """CLIPScore and RefCLIPScore; captions and files of images that occur several times are encoded once."""
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
    if name == "clip_score":
        scores: Sequence[float] = clip_score(features, own)["per_sample"]
        return scores
    texts, row_of = encoded([text for each in references for text in each])
    of_references = [texts[[row_of[text] for text in each]] for each in references]
    scores = ref_clip_score(features, own, of_references)["per_sample"]
    return scores
