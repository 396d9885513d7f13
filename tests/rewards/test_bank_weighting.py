"""Importance weights make a bank of nearest and random images stand for a random batch."""

import itertools
import math

import pytest
import torch

from hf_captionrl.retrieval import NeighbourFile
from hf_captionrl.rewards import BankRewardFunction, ImageBank, SelfRetrieval, retrieval_rewards
from tests.rewards.conftest import TableScorer
from tests.rewards.test_image_bank import IDS, bank_of, reward_with
from tests.rewards.test_self_retrieval import ROWS, G, world
from tests.tolerances import assert_close, close

IMPORTANCE = {"bank_images": "nearest_and_random", "bank_weighting": "importance"}


def weighted(scorer, caption: str, own: int, weights: dict[int, float], scale: float = 100.0) -> float:
    """Log-probability of the target, in float64; `weights` are those of the distractors' exponentials."""
    text = scorer.texts[caption].double()
    logits = {row: scale * float(text @ scorer.images[row].double()) for row in [own, *weights]}
    largest = max(logits.values())
    total = sum(weight * math.exp(logits[row] - largest) for row, weight in weights.items())
    return logits[own] - largest - math.log(total + math.exp(logits[own] - largest))


def nearest(scorer, row: int) -> list[int]:
    """The other images, the most similar one first."""
    others = [other for other in range(len(scorer.images)) if other != row]
    return sorted(others, key=lambda other: -float(scorer.images[row] @ scorer.images[other]))


@pytest.mark.parametrize(("k", "number"), [(2, 5), (1, 3), (3, 4)])
def test_rewards_equal_a_plain_loop(rollouts, k, number):
    """In the rollout, and one group alone in the function for TRL."""
    scorer, captions = world()
    settings = {**IMPORTANCE, "num_hard_distractors": k, "bank_size": number, "bank_batch_size": 6}
    reward = reward_with(rollouts, scorer, **settings)
    drawn = [row[k:] for row in reward._banks[0]._nearest.tolist()]
    expected = []
    for n, caption in enumerate(captions):
        row = ROWS[n // G]
        near = nearest(scorer, row)[:k]
        assert not set(drawn[row]) & {row, *near}
        weights = dict.fromkeys(near, 5 / 7) | dict.fromkeys(drawn[row], 5 / 7 * (7 - k) / (number - k))
        expected.append(weighted(scorer, caption, row, weights))
    found = reward(rollouts.context(captions, ROWS))
    assert found.tolist() == close(expected, dtype="float32", magnitude=100)
    function = BankRewardFunction(scorer, bank_of(scorer, list(range(8))), **settings)
    alone = [function(completions=captions[G * n : G * n + G], image_id=[IDS[r]] * G) for n, r in enumerate(ROWS)]
    assert list(itertools.chain(*alone)) == close(expected, dtype="float32", magnitude=100)
    equal = reward_with(rollouts, scorer, **settings | {"bank_weighting": "equal"})(rollouts.context(captions, ROWS))
    assert (equal - found).abs().max() > 0.01  # negative control


def bank_with(scorer, row: int, distractors: list[int], counts=None) -> ImageBank:
    """A bank whose distractors of one target are given; those of the others do not matter."""
    columns = torch.tensor([[(other + 1) % 8] * len(distractors) for other in range(8)])
    columns[row] = torch.tensor(distractors)
    file = NeighbourFile(columns, torch.zeros(columns.shape), IDS, "table@1", "image")
    return bank_of(scorer, list(range(8)), neighbours=file, counts=counts)


@pytest.mark.parametrize(("weighting", "is_unbiased"), [("importance", True), ("equal", False)])
def test_mean_denominator_over_all_banks_is_that_over_all_batches(weighting, is_unbiased):
    """All banks of the 2 nearest of 7 images and 3 of the others, and all batches of 4 images, are enumerated."""
    scorer, captions = world()
    first, k, m = torch.tensor([0]), 2, 3
    counts = [1.0] * k + [(7 - k) / m] * m if weighting == "importance" else None
    for row, caption in ((ROWS[0], captions[0]), (ROWS[3], captions[3 * G])):
        order, text = nearest(scorer, row), scorer.texts[caption][None]
        batches = [
            retrieval_rewards(text @ scorer.images[[row, *others]].T, first, scale=5.0)
            for others in itertools.combinations(order, 3)
        ]
        banks = []
        for drawn in itertools.combinations(order[k:], m):
            bank = bank_with(scorer, row, [*order[:k], *drawn], counts)
            similarity, weights = bank.compare(text, scorer.images[row][None], [IDS[row]], 4)
            banks.append(retrieval_rewards(similarity, first, scale=5.0, weights=weights))
        expected, found = (float(torch.cat(rewards).neg().exp().mean()) for rewards in (batches, banks))
        if is_unbiased:
            assert found == close(expected, dtype="float32", ulps=64)
        else:
            assert abs((found - 1) / (expected - 1) - 1) > 0.1  # exp(-reward) is 1 without distractors


@pytest.mark.parametrize("k", [2, 6, 7])
def test_bank_of_all_images_has_equal_weights(rollouts, k):
    scorer, captions = world()
    whole = reward_with(rollouts, scorer, bank=bank_of(scorer, list(range(8))), bank_batch_size=6)
    settings = {**IMPORTANCE, "num_hard_distractors": k, "bank_size": 7, "bank_batch_size": 6}
    expected = whole(rollouts.context(captions, ROWS))
    assert_close(reward_with(rollouts, scorer, **settings)(rollouts.context(captions, ROWS)), expected, magnitude=100)


def test_random_bank_is_weighted_by_importance_as_it_is(rollouts):
    scorer, captions = world()
    found = [
        reward_with(rollouts, scorer, bank_size=5, bank_weighting=weighting)(rollouts.context(captions, ROWS))
        for weighting in ("equal", "importance")
    ]
    assert found[0].equal(found[1])


def test_copies_among_the_nearest_images_are_not_counted(rollouts):
    """With one copy, 1 of the 2 nearest images is left, and 6 of the 7 other images."""
    scorer, captions = world()
    row = ROWS[0]
    order = nearest(scorer, row)
    images = scorer.images.clone()
    images[order[0]] = images[row]
    copied = TableScorer(scorer.texts, images)
    settings = {**IMPORTANCE, "num_hard_distractors": 2, "bank_size": 4, "bank_batch_size": 6}
    reward = reward_with(rollouts, copied, **settings)
    columns = reward._banks[0]._nearest[row].tolist()
    assert columns[:2] == order[:2]
    weights = {order[1]: 5 / 6} | dict.fromkeys(columns[2:], 5 / 6 * 5 / 2)
    found = reward(rollouts.context(captions[:G], [row]))
    expected = [weighted(copied, caption, row, weights) for caption in captions[:G]]
    assert found.tolist() == close(expected, dtype="float32", magnitude=100)


def test_given_bank_has_its_own_counts(rollouts):
    scorer, captions = world()
    row = ROWS[0]
    shared = bank_of(scorer, [4, 1, 2], counts=[1, 2, 4])
    own = bank_with(scorer, row, [4, 1, 2], [1, 2, 4])
    expected = [weighted(scorer, c, row, {4: 9 / 7, 1: 18 / 7, 2: 36 / 7}) for c in captions[:G]]
    for bank in (shared, own):
        reward = reward_with(rollouts, scorer, bank=bank, bank_weighting="importance", bank_batch_size=10)
        found = reward(rollouts.context(captions[:G], [row]))
        assert found.tolist() == close(expected, dtype="float32", magnitude=100)


# Bad input


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"bank_images": "nearest"}, r"leaves all other images out.*Use bank_images='nearest_and_random'"),
        ({"reward_kind": "cosine"}, r"reward_kind='cosine' has none. Use reward_kind='log_prob'"),
        ({"reward_kind": "accuracy"}, r"cannot be weighted. Use reward_kind='log_prob'"),
    ],
)
def test_weights_without_meaning_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        SelfRetrieval(**{"distractor_scope": "bank", "bank_weighting": "importance", **kwargs})


def test_bank_without_random_images_is_refused(rollouts):
    scorer, _ = world()
    with pytest.raises(ValueError, match=r"is 3, as large as bank_size, so 4 of 7 images are never in the bank"):
        reward_with(rollouts, scorer, **IMPORTANCE, num_hard_distractors=3, bank_size=3)


def test_counts_that_do_not_match_are_refused():
    scorer, _ = world()
    for counts in ([1.0, 1.0], [1.0, 0.0, 1.0], [1.0, math.inf, 1.0]):
        with pytest.raises(ValueError, match=r"compared with 3 images. Pass 3 positive numbers"):
            bank_with(scorer, 0, [4, 1, 2], counts)
        with pytest.raises(ValueError, match=r"compared with 3 images. Pass 3 positive numbers"):
            bank_of(scorer, [4, 1, 2], counts=counts)
    kwargs = {"distractor_scope": "bank", "bank_weighting": "importance"}
    with pytest.raises(ValueError, match=r"needs the counts of a bank with neighbours. Use ImageBank"):
        SelfRetrieval(scorer, bank=[bank_with(scorer, 0, [4, 1, 2])], **kwargs)
    with pytest.raises(
        ValueError, match=r"has counts, and bank_weighting is 'equal'. Use bank_weighting='importance'"
    ):
        SelfRetrieval(scorer, bank=bank_of(scorer, [4, 1], counts=[1, 2]), **kwargs | {"bank_weighting": "equal"})
