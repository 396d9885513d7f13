"""Diversity of captions: Div-n, mBLEU, vocabulary, novelty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

import hf_captionrl.metrics as metrics
from hf_captionrl.metrics.evaluate_modules.metric import DeclaredMetric, Metric, forwards
from hf_captionrl.text.tokenize import check_tokenize, split_characters


@forwards(metrics.caption_diversity)
def compute(
    predictions: Sequence[Any], *, image_ids: Sequence[Any] | None = None, tokenize: str = "ptb", **options: Any
) -> dict[str, Any]:
    """Call `caption_diversity` on the captions of each image."""
    nested = not isinstance(predictions[0], str)
    if nested == (image_ids is not None):
        state = "lists already, and image_ids are given too" if nested else "single captions without image_ids"
        raise ValueError(f"predictions are {state}. Pass one list per image, or image_ids of captions.")
    groups: dict[Any, list[str]] = dict(enumerate(predictions))
    if image_ids is not None:
        if len(image_ids) != len(predictions):
            raise ValueError(
                f"{len(predictions)} predictions and {len(image_ids)} image_ids. Pass one id per caption."
            )
        groups = {}
        for image, caption in zip(image_ids, predictions, strict=True):
            groups.setdefault(image, []).append(caption)
    captions = list(groups.values())
    if check_tokenize(tokenize, captions):
        captions = split_characters(captions)
        if options.get("training_captions") is not None:
            options["training_captions"] = split_characters(options["training_captions"])
    from hf_captionrl.text.degenerate_captions import degenerate, is_empty

    found = metrics.caption_diversity(captions, **options)
    texts = [text for group in captions for text in group]
    found |= {"empty": sum(map(is_empty, texts)) / len(texts), "degenerate": sum(degenerate(texts)) / len(texts)}
    return found | {"signature": found["signature"].replace("tok:ptb", f"tok:{tokenize}")}


METRIC = Metric(
    title="Caption Diversity",
    emoji="🎨",
    summary="Div-n, mBLEU, vocabulary and novelty of captions",
    description="""\
How much captions differ. Per image: Div-1 and Div-2 (distinct words and word pairs over all
words) and mBLEU-4 (each caption against the other captions of its image; lower is more diverse), per corpus and per
image. Over the whole set: share of distinct captions, mean length, lexical diversity (distinct words in thousands),
vocabulary, and share of captions that are not in a training set.
""",
    arguments="""\
    predictions: The captions of each of B images (`list[list[str]]`, at least two per image); or N captions, with
        `image_ids`.
    image_ids (N labels): The image of each of N captions.
    tokenize: `"ptb"`, or `"char"`: each character of a script without spaces (Chinese, Japanese, Thai) is a word.
    training_captions (`list[str]`): Captions of a training set, for `novel_captions`.
    min_frequency (`int`): Number of occurrences from which a word counts for `vocabulary_size`.
    max_order (`int`): Longest n-gram of mBLEU.
""",
    returns="""\
    div_1, div_2 (`float` in [0, 1], higher is more diverse); mbleu_1 ... mbleu_4 (corpus) and mbleu_1_per_image ...
    (mean over captions), lower is more diverse; unique_captions; length; lexical_diversity; vocabulary_size;
    novel_captions; empty and degenerate, shares of captions without letter or digit, and that repeat themselves; per_sample, lists for the images of div_1, div_2, mbleu_4_per_image (of max_order), and of their
    contributions to mbleu_4 and unique_captions; signature.
""",
    examples="""\
    >>> import evaluate
    >>> import hf_captionrl
    >>> metric = evaluate.load("caption_diversity")
    >>> found = metric.compute(predictions=[["a man rides a horse", "a man rides a horse"]])
    >>> found["div_1"], found["div_2"], round(found["mbleu_4"], 4), found["unique_captions"]
    (0.4, 0.4, 1.0, 0.5)
    >>> found = metric.compute(
    ...     predictions=["a cat", "two dogs", "one cat sleeps", "a dog"], image_ids=["c", "d", "c", "d"]
    ... )
    >>> found["per_sample"]["div_1"]
    [0.8, 1.0]
""",
    limitations="""\
Diversity alone is not quality: random words are the most diverse captions. Div-n decreases with the number and
length of captions, so compare sets of the same size. Div-2 is divided by words here, by word pairs elsewhere; corpus
mBLEU and the mean mBLEU of captions differ; the signature states which definition was used.
""",
    citation="""\
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
""",
    urls=("https://arxiv.org/abs/2003.03749", "https://arxiv.org/abs/1703.10476"),
    compute=compute,
    predictions=("texts", "text"),
    functions=("caption_diversity", "caption_statistics"),
    keys="`div_1`, `div_2`, `mbleu_4`, `mbleu_4_per_image`, `unique_captions`, `length`, `lexical_diversity`, `vocabulary_size`, `novel_captions`",
    data_arguments=("image_ids", "training_captions"),
    cases=(
        {
            "predictions": [["a man rides a horse", "a man rides a horse"]],
            "result": {"div_1": 0.4, "div_2": 0.4, "mbleu_4": 0.9999999995}
            | {"unique_captions": 0.5, "length": 5.0, "vocabulary_size": 0},
        },
        {
            "predictions": ["a cat", "two dogs", "one cat sleeps", "a dog"],
            "image_ids": ["c", "d", "c", "d"],
            "training_captions": ["a cat"],
            "min_frequency": 2,
            "result": {"div_1": 0.9, "div_2": 0.55, "mbleu_4": 4.14e-08, "unique_captions": 1.0}
            | {"length": 2.25, "vocabulary_size": 2, "novel_captions": 0.75},
        },
    ),
)


class CaptionDiversity(DeclaredMetric, evaluate.Metric):
    """Caption Diversity."""

    declaration = "caption_diversity"
