"""Which words tell caption sources apart, and how long captions are.

Legend: S sources (captioners, people), L lemmas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from hf_captionrl.metrics.caption_checks import check_captions
from hf_captionrl.metrics.signature import signature
from hf_captionrl.text.spacy_models import load_spacy

__all__ = [
    "PARTS_OF_SPEECH",
    "Tagger",
    "characteristic_words",
    "length_statistics",
    "local_mutual_information",
    "spacy_tagger",
]

Tagger = Callable[[Sequence[str]], Iterable[Sequence[tuple[str, str]]]]
"""From captions to the (lemma, part of speech) pairs of each, parts of speech as Universal Dependencies names them."""

PARTS_OF_SPEECH = ("NOUN", "ADJ")
"""Those that DiscriTune looks at: the most visually descriptive."""


def spacy_tagger(model: str | None = None, *, batch_size: int = 256) -> Tagger:
    """A tagger by spaCy's English model (extra `[analysis]`)."""
    # Lemmas need the tagger and the lemmatizer only; parsing would take most of the time.
    pipeline = load_spacy(model, exclude=["parser", "ner"])

    def tag(captions: Sequence[str]) -> Iterable[Sequence[tuple[str, str]]]:
        for document in pipeline.pipe(captions, batch_size=batch_size):
            yield [(token.lemma_.lower(), token.pos_) for token in document]

    return tag


def local_mutual_information(counts: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, float]]:
    r"""Association of each word with each source, `O * log(O / E)`.

    Reference: Evert 2005, "The Statistics of Word Cooccurrences", as DiscriTune uses it (section 5). O is how often
    the word stands in the source; E is what would be expected if words did not depend on the source: the word's count
    in all sources, times the source's share of all words. Natural logarithm; 0 where O is 0.

    Args:
        counts: For each of the S sources how often each word stands in it.

    Returns:
        `dict`: For each source the score of each word that stands in it, above 0 where it is more frequent than
        expected.

    Raises:
        ValueError: If there are fewer than two sources, a count is negative, or no word is counted.
    """
    if len(counts) < 2:
        raise ValueError(f"There is {len(counts)} source; words tell sources apart, so give two or more.")
    for source, words in counts.items():
        for word, count in words.items():
            if not (isinstance(count, Real) and 0 <= count < math.inf):
                raise ValueError(f"counts[{source!r}][{word!r}] is {count}; counts are numbers of 0 or more.")
    of_word: Counter[str] = Counter()
    for words in counts.values():
        of_word.update(words)
    of_source = {source: sum(words.values()) for source, words in counts.items()}
    total = sum(of_source.values())
    if total == 0:
        raise ValueError("No source has a word. Check the captions, the tagger and the parts of speech.")
    return {
        source: {
            word: observed * math.log(observed * total / (of_word[word] * of_source[source]))
            for word, observed in words.items()
            if observed > 0
        }
        for source, words in counts.items()
    }


def characteristic_words(
    sources: Mapping[str, Sequence[str]],
    *,
    tagger: Tagger | None = None,
    parts: Sequence[str] = PARTS_OF_SPEECH,
    top: int = 10,
) -> dict[str, Any]:
    """The nouns and adjectives most associated with each caption source.

    Reference: Dessi et al. 2023 (DiscriTune), Tables 7 (adjectives) and 14 (nouns). The association is taken within a
    part of speech: a source with many adjectives does not thereby favour each of them.

    Args:
        sources: For each of at least two sources its captions; their numbers may differ.
        tagger: Lemmas and parts of speech; None for [`spacy_tagger`].
        parts: Parts of speech, as Universal Dependencies names them.
        top: How many words a source.

    Returns:
        `dict`: For each part of speech and source its words with their association, the strongest first, at most
        `top` and only those above 0; `signature`.

    Raises:
        ValueError: If there are fewer than two sources, a caption is bad, or the tagger loses captions.
        ModuleNotFoundError: If no tagger is given and spaCy is not installed.
    """
    if len(sources) < 2:
        raise ValueError(f"There is {len(sources)} source; words tell sources apart, so give two or more.")
    tag = spacy_tagger() if tagger is None else tagger
    counts: dict[str, dict[str, Counter[str]]] = {part: {source: Counter() for source in sources} for part in parts}
    for source, captions in sources.items():
        texts = check_captions(captions, f"sources[{source!r}]")
        seen = 0
        for pairs in tag(texts):
            seen += 1
            for lemma, part in pairs:
                if part in counts:
                    counts[part][source][lemma] += 1
        if seen != len(texts):
            raise ValueError(f"The tagger gave {seen} results for {len(texts)} captions of {source!r}; give one each.")
    result: dict[str, Any] = {}
    for part, of_source in counts.items():
        # Captions without any adjective are no error; there is nothing to list then.
        scores = local_mutual_information(of_source) if any(of_source.values()) else {name: {} for name in of_source}
        result[part] = {
            # Equal scores in the order of the alphabet, so that two runs give one list.
            source: [(w, s) for w, s in sorted(words.items(), key=lambda item: (-item[1], item[0]))[:top] if s > 0]
            for source, words in scores.items()
        }
    result["signature"] = signature(metric="local_mutual_information", log="e", unit="lemma", parts="-".join(parts))
    return result


def length_statistics(
    captions: Sequence[str], *, count_tokens: Callable[[list[str]], Sequence[int]] | None = None
) -> dict[str, Any]:
    """Mean and spread of words and tokens of captions.

    Reference: Gaur et al. 2024 (No Detail Left Behind), Table 9; words are whitespace words. For Figure 4 draw
    `words` with [`hf_captionrl.reports.length_plots.write_length_histogram`].

    Args:
        captions: The captions.
        count_tokens: From captions to their numbers of tokens, special ones included (the paper: CLIP's tokenizer);
            None leaves tokens out.

    Returns:
        `dict`: `mean_words`, `std_words` (of the population), `max_words`; with `count_tokens` the same of `tokens`;
        `words` and `tokens`, the numbers of each caption; `signature`.

    Raises:
        ValueError: If a caption is bad (its index is named), or there are not as many token counts as captions.
    """
    texts = check_captions(captions)
    found = {"words": np.array([len(text.split()) for text in texts])}
    if count_tokens is not None:
        found["tokens"] = np.asarray(count_tokens(texts))
        if found["tokens"].shape != found["words"].shape:
            raise ValueError(f"count_tokens gave {len(found['tokens'])} numbers for {len(texts)} captions.")
    result: dict[str, Any] = {}
    for unit, numbers in found.items():
        result |= {f"mean_{unit}": float(numbers.mean()), f"std_{unit}": float(numbers.std())}
        result |= {f"max_{unit}": int(numbers.max()), unit: numbers}
    return result | {"signature": signature(metric="length_statistics", words="whitespace", std="population")}
