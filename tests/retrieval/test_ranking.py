import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_captionrl.retrieval.ranking import (
    bag_ranks,
    check_features,
    check_targets,
    distractor_recall,
    duplicate_images,
    ranks,
    ranks_from_scores,
    recall_at_k,
    sampled_ranks,
    set_ranks,
)
from tests.tolerances import close

VECTORS = Path(__file__).parents[1] / "vectors"
SEEDS = st.integers(0, 10_000)


def unit(rows: int, features: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(rows, features, generator=generator), dim=1)


def plain_rank(scores: list[float], own: int) -> int:
    return 1 + sum(score >= scores[own] for i, score in enumerate(scores) if i != own)


def test_bag_with_a_tie_computed_by_hand():
    scores = torch.tensor([[0.9, 0.9, 0.1], [0.2, 0.5, 0.4], [0.3, 0.3, 0.3]])
    # In a tie, the other image ranks first; a constant caption is always last.
    assert ranks_from_scores(scores, torch.tensor([0, 1, 2])).tolist() == [2, 1, 3]


def test_nan_scores_rank_last():
    scores = torch.tensor([[math.nan, 0.5], [0.5, math.nan]])
    assert ranks_from_scores(scores, torch.tensor([0, 0])).tolist() == [2, 2]


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 12), st.integers(1, 9), st.integers(1, 5))
def test_ranks_equal_a_plain_loop_for_any_block(seed, captions, images, block_size):
    text, pool = unit(captions, 4, seed), unit(images, 4, seed + 1)
    targets = torch.randint(images, (captions,), generator=torch.Generator().manual_seed(seed))
    expected = [plain_rank((text[i].double() @ pool.double().T).tolist(), int(targets[i])) for i in range(captions)]
    assert ranks(text, pool, targets, block_size=block_size).tolist() == expected
    assert ranks(text.numpy(), pool.numpy(), targets.tolist()).tolist() == expected


def test_ranks_equal_the_code_of_no_detail_left_behind():
    vectors = json.loads((VECTORS / "ndlb_ranks.json").read_text())
    found = ranks(vectors["text_feats_unit"], vectors["image_feats_unit"])
    assert found.double().mean().item() == close(vectors["ndlb_eval"]["mean_rank"], dtype="float32")
    assert found.median().item() == vectors["ndlb_eval"]["median_rank"]
    assert (found == 1).double().tolist() == vectors["ndlb_eval"]["acc"]
    images = torch.tensor(vectors["imagecode_images"])
    one = set_ranks(vectors["text_feats_unit"][:1], images, [range(10)], [0])
    assert (one == 1).double().tolist() == vectors["imagecode_acc"]


def test_ranks_equal_the_hard_pool_of_capenrich():
    vectors = json.loads((VECTORS / "retrieval.json").read_text())["capenrich_pool_recall"]
    found = ranks(vectors["text_features_x10"], vectors["pool_features"], vectors["targets"])
    assert found.tolist() == vectors["rank_of_target"]
    assert {k: recall_at_k(found, int(k)) for k in vectors["recall"]} == vectors["recall"]


def test_target_score_is_read_from_the_same_block():
    """Copies of the target tie with it bit-exactly, which fails with a separate dot product."""
    pool = unit(1, 512, 0).repeat(700, 1)
    text = unit(40, 512, 1)
    targets = torch.arange(40) * 17
    assert ranks(text, pool, targets).tolist() == [700] * 40
    separate = (text * pool[targets]).sum(1)
    assert ((text @ pool.T) >= separate[:, None]).sum(1).tolist() != [700] * 40


def test_exact_copies_tie_if_a_product_rounds_their_columns_differently():
    pool = unit(10, 512, 0)
    pool[9] = pool[0]
    text = unit(200, 512, 1)
    own = torch.zeros(200, dtype=torch.long)
    scores = torch.cat([row[None] @ pool.T for row in text])  # columns 0 and 9 may differ in the last bit
    others = (scores[:, 1:9] >= scores[:, :1]).sum(1)
    for block_size in (1, 3, None):
        assert torch.equal(ranks(text, pool, own, block_size=block_size), others + 2)
    assert torch.equal(set_ranks(text, pool, [range(10)] * 200, own), others + 2)
    assert set_ranks(text, pool, [[9, 0]] * 200, own).tolist() == [2] * 200
    own[1] = 9
    single = [bag_ranks(text[i : i + 2], pool, [[0, 9]], own[:2])[0] for i in range(0, 200, 2)]
    assert torch.stack(single).tolist() == [[2, 2]] * 100
    # Known copies are not searched again.
    known = torch.tensor([0, 0, *range(2, 10)])
    assert set_ranks(text, pool, [[1, 0]] * 200, own * 0, duplicate_of=known).tolist() == [2] * 200


@pytest.mark.parametrize(("pool", "drawn", "k"), [(6, 3, 2), (7, 6, 5), (4, 1, 5)])
def test_distractor_recall_equals_enumeration(pool, drawn, k):
    found = distractor_recall(torch.arange(1, pool + 1), pool, k=k, num_distractors=drawn)
    for rank in range(1, pool + 1):
        draws = list(itertools.combinations(range(pool - 1), drawn))  # the first rank - 1 images are better
        successes = sum(sum(image < rank - 1 for image in draw) < k for draw in draws)
        assert found[rank - 1].item() == close(successes / len(draws))


def test_duplicate_images_returns_the_first_copy():
    pool = unit(3, 4, 0)[[0, 1, 0, 2, 1]]
    assert duplicate_images(pool).tolist() == [0, 1, 0, 3, 1]
    assert duplicate_images(pool.double()).tolist() == [0, 1, 0, 3, 1]
    # The same numbers in another order have equal sums of their bits, but are another image.
    assert duplicate_images(torch.stack([pool[0], pool[0].flip(0), pool[0]])).tolist() == [0, 1, 0]


GOOD, TEXT, POOL, TARGETS = unit(3, 4, 0), unit(3, 4, 0), unit(4, 4, 1), [0, 1, 2]
SECOND = (torch.arange(3) == 1)[:, None]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: ranks(GOOD.masked_fill(SECOND, 0.0), GOOD), r"text_features\[1\] is zero"),
        (lambda: ranks(GOOD, GOOD.masked_fill(SECOND, math.nan)), r"image_features\[1\] is NaN"),
        (lambda: ranks(GOOD, GOOD.double()), "image_features"),
        (lambda: ranks(GOOD, GOOD[:, :3].clone()), "image_features"),
        (lambda: check_features(torch.ones(2, 2, dtype=torch.long)), "floating point"),
        (lambda: ranks(TEXT, POOL), "targets"),
        (lambda: ranks(TEXT, POOL, [0, 1, 4]), r"targets\[2\]"),
        (lambda: check_targets([0.0, 1.0, 2.0], 3, 4), "targets"),
        (lambda: bag_ranks(TEXT, POOL, [[0, 1], [1, 9]], TARGETS), r"bags\[1\] contains image 9"),
        (lambda: bag_ranks(TEXT, POOL, [[1, 1]], TARGETS), r"bags\[0\]"),
        (lambda: bag_ranks(TEXT, POOL, [[1, 3]], TARGETS), r"bags\[0\] contains image 3"),
        (lambda: set_ranks(TEXT, POOL, [[0, 1], [2, 3], [2, 3]], TARGETS), r"sets\[1\]"),
        (lambda: set_ranks(TEXT, POOL, [[0, 1], [2, 3]], TARGETS), "2 sets"),
        (lambda: distractor_recall(torch.tensor([1, 9]), 5, num_distractors=2), r"rank\[1\]"),
        (lambda: sampled_ranks(torch.tensor([1]), 5, num_distractors=5, repeats=1, seed=0), "num_distractors"),
        (lambda: recall_at_k(torch.tensor([1, 2]), 0), "k is 0"),
    ],
)
def test_the_argument_is_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_noncontiguous_row_of_a_wider_matrix():
    pool = torch.randn(4, 8)[:1, :3]
    assert ranks(torch.randn(1, 3), pool).tolist() == [1]
    assert duplicate_images(pool).tolist() == [0]
