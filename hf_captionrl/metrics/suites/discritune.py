"""The columns of DiscriTune's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_captionrl.metrics.suites.suite_row import SuiteRow, check_lengths
from hf_captionrl.metrics.word_statistics import Tagger, characteristic_words

__all__ = ["NlgMetric", "discritune_suite"]

NlgMetric = Callable[[list[str], list[list[str]]], Mapping[str, Any]]
"""Maps captions and references to a result like that of [`hf_captionrl.metrics.meteor_spice.meteor`]; raises a `RuntimeError`
with the reason if it cannot be computed."""


def discritune_suite(
    captions: Sequence[str],
    *,
    references: Sequence[Sequence[str]] | None = None,
    text_features: Any | None = None,
    image_features: Any | None = None,
    meteor: NlgMetric | None = None,
    spice: NlgMetric | None = None,
    facts: Sequence[Mapping[str, Any]] | None = None,
    check: Callable[[str, Any], Any] | None = None,
    tagger: Tagger | None = None,
    scorer: str = "",
    seed: int = 0,
    details: bool = False,
) -> dict[str, Any]:
    """The columns of DiscriTune's Tables 1 and 2, and the words of Tables 7 and 14.

    Source: Dessi et al. 2023, sections 4.1 and 5. P@1 is recall at 1 among the 100 images of the caption's block:
    consecutive blocks in the order of the data set; an incomplete last block is dropped. The paper multiplies by 100.

    Args:
        captions: N captions, one per image.
        references: References of each image; CIDEr-D counts document frequencies in them.
        text_features: `(N, D)` features of the captions by the scorer that evaluates.
        image_features: `(N, D)` features of the images by the same scorer.
        meteor: Computes METEOR, for instance [`hf_captionrl.metrics.meteor_spice.meteor`].
        spice: Computes SPICE, for instance [`hf_captionrl.metrics.meteor_spice.spice`].
        facts: Facts of each image.
        check: Checks a caption with the facts of its image.
        tagger: Gives lemmas and parts of speech, see [`hf_captionrl.metrics.word_statistics.spacy_tagger`]; with it the words that
            distinguish these captions from their references are returned too.
        scorer: Signature of the scorer, for the signatures of the numbers.
        seed: Seed of the bootstrap.
        details: Also return `per_sample`, `groups` and `signatures`, as [`smile_suite`] does.

    Returns:
        `dict`: `blocks_recall_at_1`, `bleu_4`, `meteor`, `cider_d`, `spice`, `hallucination`, `fact_recall`,
        `empty_captions`; with a tagger `nouns` and `adjectives`, the ten lemmas most associated with these captions;
        `<key>_ci` and `<key>_reason` as in [`smile_suite`].

    Raises:
        ValueError: If lengths differ.
    """
    check_lengths(captions, references=references, text_features=text_features, facts=facts)
    row = SuiteRow(captions, seed, scorer)
    if text_features is None or image_features is None:
        row.missing("no scorer", "blocks_recall_at_1")
    elif len(captions) < 100:
        row.missing("fewer than 100 images", "blocks_recall_at_1")
    else:
        text, images = torch.as_tensor(text_features), torch.as_tensor(image_features)
        row.recalls("blocks", (1,), text, images, num_distractors=99, protocol="blocks")
    row.bleu_4(references)
    row.cider_d(references)
    for key, metric in (("meteor", meteor), ("spice", spice)):
        if metric is None or references is None:
            row.missing("no references" if references is None else f"{key.upper()} was not requested", key)
            continue
        try:
            found = metric(row.texts, [list(group) for group in references])
        except RuntimeError as error:
            row.missing(str(error).removeprefix("not run: "), key)
        else:
            row.mean(key, found["per_sample"], value=found[key], signature=found.get("signature", ""))
            row.clip_interval(key)
    row.faithfulness(facts, check)
    if tagger is not None and references is not None:
        sources = {"captions": row.texts, "references": [text for group in references for text in group]}
        words = characteristic_words(sources, tagger=tagger)
        row.numbers["nouns"] = [word for word, _ in words["NOUN"]["captions"]]
        row.numbers["adjectives"] = [word for word, _ in words["ADJ"]["captions"]]
    return row.result(details)
