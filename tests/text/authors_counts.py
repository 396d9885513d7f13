"""The document frequencies of the authors of CIDEr-D."""

from __future__ import annotations

import torch

from hf_captionrl.text.cider_d import DocumentFrequencies


def frequencies_from_counts(counts: dict[str, float], num_documents: int, *, eos: bool = False) -> DocumentFrequencies:
    """From n-grams as texts; the prefix of each is counted too."""
    words: dict[str, int] = {}
    split = [(tuple(ngram.split(" ")), count) for ngram, count in counts.items()]
    for ngram, _ in split:
        for word in ngram:
            words.setdefault(word, len(words))
    keys, found = [], []
    before: dict[tuple[str, ...], int] = {(): 0}
    for order in range(1, max(len(ngram) for ngram, _ in split) + 1):
        rows = []
        for ngram, count in split:
            if len(ngram) != order:
                continue
            rows.append((before[ngram[:-1]] * len(words) + words[ngram[-1]], ngram, count))
        rows.sort()
        before = {ngram: i for i, (_, ngram, _) in enumerate(rows)}
        keys.append(torch.tensor([key for key, _, _ in rows], dtype=torch.long))
        found.append(torch.tensor([int(count) for _, _, count in rows], dtype=torch.int32))
    return DocumentFrequencies(num_documents, words, tuple(keys), tuple(found), len(words), eos)
