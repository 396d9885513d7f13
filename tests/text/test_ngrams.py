from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_captionrl.text import ngrams
from hf_captionrl.text.ngrams import NgramCounts, TokenBatch, count_ngrams, distinct_share, encode_words

CAPTIONS = st.lists(st.lists(st.sampled_from("abcd"), max_size=8), min_size=1, max_size=8)


def plain_counts(words, n):
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def spelled(counts: NgramCounts, names: list[str]) -> dict[int, tuple[str, ...]]:
    """The words of every n-gram id, from its prefixes."""
    found = {}
    for i in range(counts.num_distinct):
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
    assert len(set(names.values())) == counts.num_distinct  # equal n-grams share an id, others do not
    found: list[Counter] = [Counter() for _ in captions]
    for row, i, count in zip(counts.rows.tolist(), counts.ids.tolist(), counts.counts.tolist(), strict=True):
        found[row][names[i]] += count
    expected = [sum((plain_counts(c, n) for n in range(1, max_order + 1)), Counter()) for c in captions]
    assert found == expected
    assert [len(names[i]) - 1 for i in counts.ids.tolist()] == counts.orders(counts.ids).tolist()
    assert counts.totals().tolist() == [[max(0, len(c) - n + 1) for n in range(1, max_order + 1)] for c in captions]


@settings(max_examples=60, deadline=None)
@given(CAPTIONS, st.data())
def test_table_has_the_counts_of_a_group(captions, data):
    groups = [data.draw(st.integers(0, 2)) for _ in captions]
    slots = [groups[:i].count(groups[i]) for i in range(len(groups))]
    left_out = data.draw(st.integers(0, len(captions) - 1))
    vocabulary: dict[str, int] = {}
    counts = count_ngrams(encode_words(captions, vocabulary), 3, torch.tensor(groups))
    names = spelled(counts, list(vocabulary))
    shown = torch.tensor(slots)
    shown[left_out] = -1
    table = counts.table(shown)
    seen = set()
    for column, (i, group) in enumerate(zip(counts.column_ids.tolist(), counts.column_groups.tolist(), strict=True)):
        seen.add((group, names[i]))
        for row, slot in enumerate(shown.tolist()):
            if groups[row] == group and slot >= 0:
                assert table[column, slot] == plain_counts(captions[row], len(names[i]))[names[i]]
    expected = {
        (g, gram) for g, c in zip(groups, captions, strict=True) for n in (1, 2, 3) for gram in plain_counts(c, n)
    }
    assert seen == expected
    for row, i, column in zip(counts.rows.tolist(), counts.ids.tolist(), counts.columns.tolist(), strict=True):
        assert (groups[row], i) == (int(counts.column_groups[column]), int(counts.column_ids[column]))


@settings(max_examples=60, deadline=None)
@given(CAPTIONS, st.sampled_from(["words", "ngrams"]), st.integers(1, 3))
def test_distinct_share_equals_a_plain_loop(captions, per, order):
    groups = [i % 2 for i in range(len(captions))]
    counts = count_ngrams(encode_words(captions), 3, torch.tensor(groups))
    shares = distinct_share(counts, order, 2, per=per)
    for group in range(2):
        own = [c for c, g in zip(captions, groups, strict=True) if g == group]
        distinct = len(set().union(*(plain_counts(c, order) for c in own)))
        total = sum(len(c) if per == "words" else max(0, len(c) - order + 1) for c in own)
        assert shares[group].item() == pytest.approx(distinct / max(total, 1))


def test_padded_token_ids_give_the_same_counts_as_words():
    ids = torch.tensor([[7, 8, 7, 2, 0], [8, 2, 0, 0, 0], [2, 0, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])
    batch = TokenBatch.from_ids(ids, mask)
    assert batch.tokens.tolist() == [7, 8, 7, 2, 8, 2, 2]
    assert batch.lengths.tolist() == [4, 2, 1]
    words = encode_words([["x", "y", "x", "e"], ["y", "e"], ["e"]])
    a, b = count_ngrams(batch), count_ngrams(words)
    assert (len(a.rows), a.num_distinct) == (len(b.rows), b.num_distinct)
    assert sorted(a.counts.tolist()) == sorted(b.counts.tolist())


def test_large_ids_and_many_images_do_not_overflow():
    """Keys of (image, n-gram, caption) with more than 63 bits are reduced, and do not wrap."""
    big = 2**40
    batch = TokenBatch(torch.tensor([big, 1, big, 1, big + 1, 1]), torch.tensor([2, 2, 2]))
    groups = torch.tensor([2**60, 2**60, 3])
    counts = count_ngrams(batch, 2, groups)
    assert counts.num_distinct == 5  # three words, (big, 1) and (big + 1, 1)
    assert sorted(counts.counts.tolist()) == [1] * 9
    assert len(counts.column_ids) == 6


def test_sort_falls_back_if_keys_and_positions_exceed_63_bits():
    keys = torch.tensor([2**62, 5, 2**62, -3])
    ordered, order = ngrams._sort(keys)
    assert ordered.tolist() == sorted(keys.tolist())
    assert keys[order].tolist() == ordered.tolist()


def test_empty_captions_have_no_ngrams():
    counts = count_ngrams(encode_words([[], []]), 2)
    assert counts.num_distinct == 0
    assert counts.totals().tolist() == [[0, 0], [0, 0]]
    assert distinct_share(counts, 1, 1).tolist() == [0.0]


def test_unknown_words_are_numbered_after_the_known_ones():
    batch = encode_words([["a", "new", "b", "new"]], known={"a": 0, "b": 1})
    assert batch.tokens.tolist() == [0, 2, 1, 2]


def test_invalid_token_ids_are_refused():
    with pytest.raises(ValueError, match="negative id"):
        TokenBatch.from_ids(torch.tensor([[1, -100]]), torch.ones(1, 2))
    with pytest.raises(ValueError, match="ids and mask"):
        TokenBatch.from_ids(torch.tensor([1]), torch.ones(1))
