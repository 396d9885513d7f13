import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_captionrl.text.bleu import bleu_matches, bleu_scores, corpus_bleu, pairwise_bleu, sibling_bleu
from hf_captionrl.text.ngrams import encode_words
from tests.tolerances import assert_close

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "diversity.json").read_text())
SETS = [[caption.split() for caption in captions] for captions in VECTORS["caption_sets"]]
FLAT = [caption for captions in SETS for caption in captions]
CAPTION = st.lists(st.sampled_from("abcd"), min_size=1, max_size=9)


def plain_bleu(candidate, references, max_order=4):
    """Sentence BLEU of pycocoevalcap with the closest reference, in a loop."""
    scores, product = [], 1.0
    length = len(candidate)
    closest = min((abs(len(r) - length), len(r)) for r in references)[1]
    for n in range(1, max_order + 1):
        ours = Counter(tuple(candidate[i : i + n]) for i in range(length - n + 1))
        most: Counter = Counter()
        for reference in references:
            most |= Counter(tuple(reference[i : i + n]) for i in range(len(reference) - n + 1))
        product *= (sum((ours & most).values()) + 1e-15) / (max(0, length - n + 1) + 1e-9)
        ratio = (length + 1e-15) / (closest + 1e-9)
        scores.append(product ** (1 / n) * (math.exp(1 - 1 / ratio) if ratio < 1 else 1.0))
    return scores


def test_pairwise_bleu_equals_the_authors_numbers():
    found = pairwise_bleu(encode_words(FLAT), 5)
    assert found.shape == (3, 5, 5, 4)
    assert_close(found, VECTORS["pairwise_bleu"])


@settings(max_examples=40, deadline=None)
@given(st.lists(CAPTION, min_size=6, max_size=6))
def test_pairwise_and_sibling_bleu_equal_plain_loops(captions):
    pairs = pairwise_bleu(encode_words(captions), 3)
    siblings = bleu_scores(*sibling_bleu(encode_words(captions), torch.tensor([0, 0, 0, 1, 1, 1])))
    for b in range(2):
        group = captions[3 * b : 3 * b + 3]
        for j in range(3):
            others = [c for k, c in enumerate(group) if k != j]
            assert_close(siblings[3 * b + j], plain_bleu(group[j], others))
            for k in range(3):
                assert_close(pairs[b, j, k], plain_bleu(group[j], [group[k]]))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(CAPTION, st.lists(CAPTION, min_size=1, max_size=3)), min_size=2, max_size=4))
def test_corpus_and_sentence_bleu_equal_pycocoevalcap(images):
    bleu_scorer = pytest.importorskip("pycocoevalcap.bleu.bleu_scorer", reason="the authors' code")
    scorer = bleu_scorer.BleuScorer(n=4)
    for candidate, references in images:
        scorer += (" ".join(candidate), [" ".join(reference) for reference in references])
    corpus, sentences = scorer.compute_score(option="closest")
    batch = encode_words([c for c, _ in images] + [r for _, references in images for r in references])
    owners = torch.tensor([i for i, (_, references) in enumerate(images) for _ in references])
    counts = bleu_matches(batch, torch.arange(len(images)), owners)
    assert_close(corpus_bleu(*counts), corpus)
    assert_close(bleu_scores(*counts).T, sentences)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda batch: pairwise_bleu(batch, 2), "groups of 2"),
        (lambda batch: sibling_bleu(batch, torch.tensor([0, 0, 1])), "Caption 2"),
        (lambda batch: bleu_matches(batch, torch.tensor([0, 1]), torch.tensor([0])), "no reference"),
        (lambda batch: bleu_matches(batch, torch.tensor([0]), torch.tensor([0])), "3 captions"),
    ],
)
def test_invalid_arguments_raise(call, named):
    with pytest.raises(ValueError, match=named):
        call(encode_words([["a"], ["b"], ["c"]]))
