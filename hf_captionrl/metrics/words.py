"""Words, lengths and diversity of captions: of a set, of the captions of an image, and compared between sources."""

from __future__ import annotations

import math
import string
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hf_captionrl.metrics.bootstrap import leave_one_out, numbered, signature
from hf_captionrl.metrics.caption_checks import as_sequence, check_captions, checked_groups
from hf_captionrl.text.bleu import bleu_scores, corpus_bleu, sibling_bleu
from hf_captionrl.text.ngrams import count_ngrams, distinct_share, group_blocks
from hf_captionrl.text.tokenize import encode_captions, load_spacy, ptb_tokenize

Tagger = Callable[[Sequence[str]], Iterable[Sequence[tuple[str, str]]]]
"""Maps captions to the (lemma, part of speech) pairs of each; parts of speech are those of Universal Dependencies."""

PARTS_OF_SPEECH = ("NOUN", "ADJ")
"""The parts of speech in DiscriTune's tables, the most visually descriptive ones."""


def spacy_tagger(model: str | None = None, *, batch_size: int = 256) -> Tagger:
    """A tagger with spaCy's English model (extra `[analysis]`)."""
    # Lemmas need only the tagger and the lemmatizer; parsing would take most of the time.
    pipeline = load_spacy(model, exclude=["parser", "ner"])
    return lambda captions: (
        [(token.lemma_.lower(), token.pos_) for token in document]
        for document in pipeline.pipe(captions, batch_size=batch_size)
    )


def local_mutual_information(counts: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, float]]:
    r"""Association of each word with each source, `O * log(O / E)`.

    Reference: Evert 2005, "The Statistics of Word Cooccurrences", as DiscriTune uses it (section 5). O is the
    number of occurrences of the word in the source. E is the expected number if words did not depend on the source: the
    word's count in all sources, times the source's share of all words. Natural logarithm; 0 if O is 0.

    Args:
        counts: For each of at least two sources the number of occurrences of each word.
    Returns:
        `dict`: For each source the score of each of its words, above 0 if the word is more frequent than expected.
    """
    if len(counts) < 2:
        raise ValueError(f"counts has {len(counts)} source. Pass at least two sources to compare.")
    of_word: Counter[str] = Counter()
    for words in counts.values():
        of_word.update(words)
    of_source = {source: sum(words.values()) for source, words in counts.items()}
    total = sum(of_source.values())
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

    Reference: Dessi et al. 2023 (DiscriTune), Tables 7 (adjectives) and 14 (nouns). The association is computed within
    a part of speech, so a source with many adjectives does not get higher scores for all of them.

    Args:
        sources: Captions of each of at least two sources; their numbers may differ.
        tagger: Gives lemmas and parts of speech; None: [`spacy_tagger`].
        parts: Parts of speech of Universal Dependencies.
        top: Number of words per source.
    Returns:
        `dict`: For each part of speech and source at most `top` words with their associations above 0, the strongest
        first; `signature`.
    """
    if len(sources) < 2:
        raise ValueError(f"sources has {len(sources)} source. Pass at least two sources to compare.")
    tag = spacy_tagger() if tagger is None else tagger
    counts: dict[str, dict[str, Counter[str]]] = {part: {source: Counter() for source in sources} for part in parts}
    for source, captions in sources.items():
        for pairs in tag(check_captions(captions, f"sources[{source!r}]")):
            for lemma, part in pairs:
                if part in counts:
                    counts[part][source][lemma] += 1
    result: dict[str, Any] = {}
    for part, of_source in counts.items():
        result[part] = {
            # Equal scores in alphabetical order, so that two runs give the same list.
            source: [(w, s) for w, s in sorted(words.items(), key=lambda item: (-item[1], item[0]))[:top] if s > 0]
            for source, words in local_mutual_information(of_source).items()
        }
    result["signature"] = signature(metric="local_mutual_information", log="e", unit="lemma", parts="-".join(parts))
    return result


def length_statistics(
    captions: Iterable[str], *, count_tokens: Callable[[list[str]], Sequence[int]] | None = None
) -> dict[str, Any]:
    """Mean, standard deviation and maximum of the numbers of words and tokens of captions.

    Reference: Gaur et al. 2024 (No Detail Left Behind), Table 9; words are separated by whitespace. For Figure 4 plot
    `words` with [`hf_captionrl.evaluation.plots.write_length_histogram`].

    Args:
        captions: The captions.
        count_tokens: Maps the captions to their numbers of tokens, including special tokens (the paper: CLIP's tokenizer);
            None: no numbers of tokens.
    Returns:
        `dict`: `mean_words`, `std_words` (of the population), `max_words`; with `count_tokens` the same for `tokens`;
        `words` and `tokens`, the numbers of each caption; `signature`.
    """
    texts = check_captions(captions)
    counts = {"words": np.array([len(text.split()) for text in texts])}
    if count_tokens is not None:
        counts["tokens"] = np.asarray(count_tokens(texts))
    result: dict[str, Any] = {}
    for unit, numbers in counts.items():
        result |= {f"mean_{unit}": float(numbers.mean()), f"std_{unit}": float(numbers.std())}
        result |= {f"max_{unit}": int(numbers.max()), unit: numbers}
    return result | {"signature": signature(metric="length_statistics", words="whitespace", std="population")}


_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def caption_statistics(captions: Any) -> dict[str, Any]:
    """Length and lexical diversity of a set of captions, as defined in SMILE.

    Reference: Yue et al. 2023, Section 4.1: the five COCO reference sets give 3.7 to 4.2 (the paper says 4.1).

    Args:
        captions: One caption per image.
    Returns:
        `dict`: `length`, mean number of whitespace-separated words; `lexical_diversity`, distinct words in thousands, case kept
        and punctuation removed; `per_sample`, the lengths, and the contributions ([`leave_one_out`]) of the captions to
        the lexical diversity; `signature`.
    """
    texts = check_captions(captions)
    lengths = [len(text.split()) for text in texts]
    number, without = vocabulary_size((text.translate(_NO_PUNCTUATION).split() for text in texts), 1)
    named = signature(metric="caption_statistics", words="whitespace", case="kept", punctuation="removed")
    each = {"length": lengths, "lexical_diversity": leave_one_out(number / 1000, without / 1000)}
    means = {"length": sum(lengths) / len(lengths), "lexical_diversity": number / 1000}
    return {**means, "per_sample": each, "signature": named}


def vocabulary_size(words: Iterable[Sequence[str]], min_frequency: int) -> tuple[int, np.ndarray]:
    """Number of words that occur at least `min_frequency` times in the captions, and the numbers without each caption `(N,)`."""
    ids: dict[str, int] = {}
    items, sizes = array("q"), array("q")
    for caption in words:
        items.extend(ids.setdefault(word, len(ids)) for word in caption)
        sizes.append(len(caption))
    return count_distinct(np.array(items), np.repeat(np.arange(len(sizes)), sizes), len(sizes), min_frequency)


def count_distinct(
    items: np.ndarray, owners: np.ndarray, num_owners: int | None = None, min_frequency: int = 1
) -> tuple[int, np.ndarray]:
    """How many different items occur at least `min_frequency` times, and how many do without those of each owner.

    `items` and `owners` are `(P,)` integers from 0; owners are images or captions.
    """
    times = np.bincount(items, minlength=1)
    pairs, own = np.unique(owners * len(times) + items, return_counts=True)
    owner, item = np.divmod(pairs, len(times))
    lost = (times[item] >= min_frequency) & (times[item] - own < min_frequency)
    number = int((times >= min_frequency).sum())
    return number, number - np.bincount(owner[lost], minlength=num_owners or int(owners.max()) + 1)


def caption_diversity(
    captions: Any, *, training_captions: Iterable[str] | None = None, min_frequency: int = 5, max_order: int = 4
) -> dict[str, Any]:
    """Diversity of several captions per image.

    Reference: Chen and Jin 2020 (SLE), Table 4; Shetty et al. 2017. Div-n divides distinct n-grams by *words* (other
    toolkits divide by n-grams: 0.792 instead of 0.722 on the same captions). mBLEU-4 compares each caption with the other
    captions of its image as references; lower is more diverse.

    Args:
        captions: Captions of each image, at least two.
        training_captions: Captions of the training set, needed for `novel_captions`.
        min_frequency: Number of occurrences from which a word counts for `vocabulary_size`.
        max_order: Longest n-gram of mBLEU.
    Returns:
        `dict`, shares in [0, 1]: `div_1`, `div_2`, means over images; `mbleu_1` ... `mbleu_4` of the corpus (the k-th
        captions of all images against the others, mean over k); `mbleu_1_per_image` ... (mean sentence BLEU over
        captions); `unique_captions`, distinct captions divided by captions; `length`, `lexical_diversity` as in
        [`caption_statistics`]; `vocabulary_size`; `novel_captions` (only with `training_captions`); `per_sample`,
        of each image `div_1`, `div_2`, `mbleu_<max_order>_per_image`, and its contributions ([`leave_one_out`]) to
        `mbleu_<max_order>` and `unique_captions`; `signature`.
    """
    groups = as_sequence(captions, "captions")
    batch, images = encode_captions(checked_groups(groups, "captions", minimum=2))
    vocabulary = int((torch.bincount(batch.tokens) >= min_frequency).sum())
    sizes = torch.bincount(images)
    slot = torch.arange(len(batch)) - torch.repeat_interleave(torch.cumsum(sizes, 0) - sizes, sizes)
    shares = [
        [distinct_share(counts, n, int(own.max()) + 1) for n in (1, 2)]
        for part, (own,) in group_blocks(batch, images)
        for counts in [count_ngrams(part, 2, own)]
    ]
    div = {f"div_{n}": torch.cat(found) for n, found in zip((1, 2), zip(*shares, strict=True), strict=True)}
    siblings = sibling_bleu(batch, images, max_order)
    zeros = torch.zeros(len(groups), max_order, dtype=torch.float64)
    per_image = zeros.index_add_(0, images, bleu_scores(*siblings)) / sizes[:, None]
    by_slot = []
    without = torch.zeros(2, len(groups), dtype=torch.float64)  # sum over the slots without an image, and their number
    for k in range(int(sizes.max())):
        parts, own = [part[slot == k] for part in siblings], images[slot == k]
        by_slot.append(corpus_bleu(*parts))
        rest = torch.tensor([float(by_slot[-1][-1]), 1.0], dtype=torch.float64)[:, None].repeat(1, len(groups))
        rest[0, own] = bleu_scores(*(part.double().sum(0) - part.double() for part in parts))[:, -1]
        without += rest if len(own) > 1 else rest.index_fill(1, own, 0.0)
    corpus = torch.stack(by_slot).mean(0)
    result: dict[str, Any] = {name: float(share.mean()) for name, share in div.items()}
    result |= {f"mbleu_{n}": float(score) for n, score in enumerate(corpus, start=1)}
    result |= {f"mbleu_{n}_per_image": float(score) for n, score in enumerate(per_image.mean(0), start=1)}
    tokens, ends = batch.tokens.numpy(), [0, *torch.cumsum(batch.lengths, 0).tolist()]
    equal = numbered(tokens[start:end].tobytes() for start, end in pairwise(ends))
    distinct, distinct_without = count_distinct(np.array(equal), images.numpy())
    result["unique_captions"] = distinct / len(batch)
    basic = caption_statistics(caption for group in groups for caption in group)
    result |= {"length": basic["length"], "lexical_diversity": basic["lexical_diversity"]}
    result["vocabulary_size"] = vocabulary
    if training_captions is not None:
        known = {" ".join(ptb_tokenize(caption)) for caption in check_captions(training_captions, "training_captions")}
        texts = (" ".join(ptb_tokenize(caption)) for group in groups for caption in group)
        result["novel_captions"] = sum(text not in known for text in texts) / len(batch)
    others = np.maximum(len(batch) - sizes.numpy(), 1)
    result["per_sample"] = {name: share.numpy() for name, share in div.items()}
    result["per_sample"] |= {
        f"mbleu_{max_order}_per_image": per_image[:, -1].numpy(),
        f"mbleu_{max_order}": leave_one_out(float(corpus[-1]), without[0] / without[1].clamp(min=1)),
        "unique_captions": leave_one_out(result["unique_captions"], distinct_without / others),
    }
    counted = {"captions": "-".join(map(str, sizes.unique().tolist())), "vocabulary": f">={min_frequency}"}
    named = signature(metric="caption_diversity", tok="ptb", div="distinct/words", mbleu="corpus", **counted)
    return result | {"signature": named}
