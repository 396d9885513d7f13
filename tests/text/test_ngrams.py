"""N-grams equal those of plain loops, in any blocks of captions."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_captionrl.metrics import bleu, caption_diversity, cider, cider_d
from hf_captionrl.text import ngrams
from hf_captionrl.text.cider_d import CiderScorer, DocumentFrequencies
from hf_captionrl.text.ngrams import NgramCounts, TokenBatch, count_documents, count_ngrams, encode_words, group_blocks
from hf_captionrl.text.tokenize import encode_captions

CAPTIONS = st.lists(st.lists(st.sampled_from("abcd"), max_size=8), min_size=1, max_size=8)


def plain_counts(words, n):
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def spelled(counts: NgramCounts, names: list[str]) -> dict[int, tuple[str, ...]]:
    """The words of every n-gram id, from its prefixes."""
    found = {}
    for i in range(counts.offsets[-1]):
        words, at = [], i
        while at >= 0:
            words.append(names[int(counts.words[at])])
            at = int(counts.prefixes[at])
        found[i] = tuple(reversed(words))
    return found


@settings(max_examples=100, deadline=None)
@given(CAPTIONS, st.integers(1, 5))
def test_counts_equal_a_plain_loop(captions, max_order):
    vocabulary: dict[str, int] = {}
    counts = count_ngrams(encode_words(captions, vocabulary), max_order)
    names = spelled(counts, list(vocabulary))
    assert len(set(names.values())) == counts.offsets[-1]  # equal n-grams share an id, others do not
    found: list[Counter] = [Counter() for _ in captions]
    for row, i, count in zip(counts.rows.tolist(), counts.ids.tolist(), counts.counts.tolist(), strict=True):
        found[row][names[i]] += count
    expected = [sum((plain_counts(c, n) for n in range(1, max_order + 1)), Counter()) for c in captions]
    assert found == expected
    assert [len(names[i]) - 1 for i in counts.ids.tolist()] == counts.orders(counts.ids).tolist()
    assert counts.totals().tolist() == [[max(0, len(c) - n + 1) for n in range(1, max_order + 1)] for c in captions]


def test_large_ids_and_many_images_do_not_overflow():
    """Keys of (image, n-gram, caption) with more than 63 bits are reduced, and do not wrap."""
    big = 2**40
    batch = TokenBatch(torch.tensor([big, 1, big, 1, big + 1, 1]), torch.tensor([2, 2, 2]))
    groups = torch.tensor([2**60, 2**60, 3])
    counts = count_ngrams(batch, 2, groups)
    assert counts.offsets[-1] == 5  # three words, (big, 1) and (big + 1, 1)
    assert sorted(counts.counts.tolist()) == [1] * 9
    assert len(counts.column_ids) == 6


def test_unknown_words_are_numbered_after_the_known_ones():
    batch = encode_words([["a", "new", "b", "new"]], known={"a": 0, "b": 1})
    assert batch.tokens.tolist() == [0, 2, 1, 2]


def test_invalid_token_ids_are_refused():
    with pytest.raises(ValueError, match="negative id"):
        TokenBatch.from_ids(torch.tensor([[1, -100]]), torch.ones(1, 2))
    with pytest.raises(ValueError, match="ids and mask"):
        TokenBatch.from_ids(torch.tensor([1]), torch.ones(1))


BLOCKS = [1, 50]
"""Captions of a block; the corpus has about 900."""


def corpus(seed=0, images=101, fewest_words=0):
    """Several captions and 1 to 20 references per image, some of them empty; one image has 20."""
    rng = random.Random(seed)
    words = [f"w{i}" for i in range(30)]

    def caption():
        return [words[int(30 * rng.random() ** 2)] for _ in range(rng.randint(fewest_words, 9))]

    candidates = [[caption() for _ in range(rng.randint(2, 4))] for _ in range(images)]
    references = [[caption() for _ in range(rng.choice([1, 2, 5, 5, 7]))] for _ in range(images)]
    references[images // 2] = [caption() for _ in range(20)]
    return candidates, references


def texts(groups):
    """Captions as texts; those without words have a punctuation mark."""
    return [[" ".join(words) or "." for words in group] for group in groups]


def owners(groups):
    return torch.tensor([image for image, group in enumerate(groups) for _ in group])


@pytest.fixture(params=BLOCKS)
def size(request):
    return request.param


@pytest.fixture
def in_blocks(monkeypatch, size):
    def compute(function):
        whole = function()
        monkeypatch.setattr(ngrams, "_CAPTIONS_AT_ONCE", size)
        return whole, function()

    return compute


def test_unsorted_groups_are_one_block(monkeypatch):
    monkeypatch.setattr(ngrams, "_CAPTIONS_AT_ONCE", 1)
    batch = encode_words([["a"], ["b"], ["a", "b"]])
    groups = torch.tensor([1, 0, 1])
    ((part, (own,)),) = group_blocks(batch, groups)
    assert part is batch
    assert own is groups
    words, pairs = count_documents(batch, groups, 2)
    assert [count.tolist() for count in (words[1], pairs[1])] == [[1, 2], [1]]


def test_document_counts_equal_a_plain_loop(monkeypatch, size):
    least = 1 + BLOCKS.index(size)
    _, references = corpus()
    batch = encode_words([caption for group in references for caption in group])
    names = list(dict.fromkeys(word for group in references for caption in group for word in caption))
    monkeypatch.setattr(ngrams, "_CAPTIONS_AT_ONCE", size)
    before = [()]
    for order, (keys, counts) in enumerate(count_documents(batch, owners(references), 4, least), start=1):
        documents = Counter()
        for group in references:
            documents.update({tuple(words[i : i + order]) for words in group for i in range(len(words) - order + 1)})
        expected = {ngram: count for ngram, count in documents.items() if count >= least}
        assert keys.tolist() == sorted(set(keys.tolist()))
        before = [(*before[key // len(names)], names[key % len(names)]) for key in keys.tolist()]
        assert dict(zip(before, counts.tolist(), strict=True)) == expected


def test_scores_do_not_depend_on_the_blocks(in_blocks):
    candidates, references = map(texts, corpus(1))
    calls = (
        lambda: cider_d(candidates, references)["per_sample"],
        lambda: cider(candidates, references, eos=True)["per_sample"],
        lambda: np.stack(list(bleu(candidates, references)["per_sample"].values())),
        lambda: np.concatenate(list(caption_diversity(candidates)["per_sample"].values())),
        lambda: [v for v in caption_diversity(references[50:51] + candidates).values() if type(v) is float],
    )
    whole, parts = in_blocks(lambda: [call() for call in calls])
    assert all(map(np.array_equal, whole, parts))


def test_blocks_of_references_alone_are_left_out(in_blocks):
    candidates, references = corpus(3)
    candidates[3] = candidates[40] = []
    flat = [[caption for group in groups for caption in group] for groups in (candidates, references)]
    batch, given = encode_words(flat[0] + flat[1], words := {}), encode_words(flat[1], words)
    scorer = CiderScorer(DocumentFrequencies.from_token_batch(given, owners(references), words=words))
    assert torch.equal(*in_blocks(lambda: scorer.score_tokens(batch, owners(candidates), owners(references))))


def test_ngrams_of_one_image_do_not_change_scores():
    candidates, references = corpus(3)
    batch = encode_words([caption for group in references for caption in group], words := {})
    every = DocumentFrequencies.from_token_batch(batch, owners(references), words=words)
    few = DocumentFrequencies.from_token_batch(batch, owners(references), words=words, min_documents=2)
    assert len(few.keys[3]) < len(every.keys[3]) / 2
    for variant in ("cider_d", "cider"):
        scores = [CiderScorer(counted, variant=variant)(candidates, references) for counted in (every, few)]
        assert torch.equal(*scores)


def test_encoded_captions_equal_words_encoded_at_once(monkeypatch):
    _, references = corpus(5, images=7)
    monkeypatch.setattr("hf_captionrl.text.tokenize._IMAGES_AT_ONCE", 3)
    vocabulary: dict[str, int] = {}
    found, images = encode_captions(iter(texts(references)), vocabulary)
    expected = encode_words([caption for group in references for caption in group], words := {})
    assert vocabulary == words
    assert torch.equal(found.tokens.long(), expected.tokens)
    assert torch.equal(found.lengths, expected.lengths)
    assert torch.equal(images, owners(references))
    known, unknown = {"w0": 0, "w1": 1}, {}
    found, _ = encode_captions([["w1 x <eos>"], ["y w0 x"]], unknown, known=known, eos=True)
    assert isinstance(found, TokenBatch)
    assert found.lengths.tolist() == [4, 4]
    assert found.tokens.tolist()[0] == 1
    assert found.tokens.tolist()[4:7:2] == [unknown["y"], unknown["x"]]
