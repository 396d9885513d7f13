import random

import pytest
import torch

from hf_captionrl.rewards import LengthPenalty, RepetitionPenalty, TruncationPenalty, repeated_share
from tests.tolerances import close


def plain_share(tokens: list[int], order: int) -> float:
    seen, repeats = set(), 0
    ngrams = [tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1)]
    for ngram in ngrams:
        repeats += ngram in seen
        seen.add(ngram)
    return repeats / len(ngrams) if ngrams else 0.0


@pytest.mark.parametrize("order", [1, 2, 3])
def test_repeated_share_equals_a_plain_loop(order):
    rng = random.Random(order)
    rows = [[rng.randrange(3) for _ in range(length)] for length in (0, 1, 2, 5, 12, 12)]
    mask = torch.arange(12) < torch.tensor([len(row) for row in rows])[:, None]
    ids = torch.tensor([row + [1] * (12 - len(row)) for row in rows])
    found = repeated_share(ids, mask, order)
    assert found.tolist() == close([plain_share(row, order) for row in rows])
    assert found.max() < 1


def test_a_batch_without_a_token_repeats_nothing():
    assert repeated_share(torch.zeros(2, 3).long(), torch.zeros(2, 3)).tolist() == [0, 0]


def test_repetition_finds_the_hacked_caption(rollouts):
    hacked = "a blue and blue blue blue and yellow blue"
    context = rollouts.context([hacked, "a cat left of two red dogs"], [0, 1])
    penalty = RepetitionPenalty()(context)
    expected = plain_share(context.ids[0][context.mask[0]].tolist(), 2)
    assert penalty.tolist() == pytest.approx([-expected, 0])
    assert expected == pytest.approx(2 / 9)
    assert RepetitionPenalty(1)(context)[0] < penalty[0]


def test_length_is_free_up_to_the_limit(rollouts):
    context = rollouts.context(["a", "a b c", "a b c d e f"], [0, 1, 2])  # and the end token
    assert LengthPenalty(4)(context).tolist() == pytest.approx([0, 0, -3 / 4])


def test_truncated_captions_are_penalised(rollouts):
    context = rollouts.context(["a", "b"], [0, 1])
    context.ended = torch.tensor([True, False])
    assert TruncationPenalty()(context).tolist() == [0, -1]


def test_an_order_below_one_is_refused():
    with pytest.raises(ValueError, match="order"):
        RepetitionPenalty(0)
