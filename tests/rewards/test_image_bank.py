"""Rewards with a bank of distractors equal plain loops, and stand for rewards within a batch."""

import asyncio
import itertools
import math
import pickle

import pytest
import torch

from hf_captionrl.retrieval import FeatureCache, NeighbourFile
from hf_captionrl.rewards import BankRewardFunction, ImageBank, SelfRetrieval, retrieval_rewards
from hf_captionrl.rewards.self_retrieval import _with_random
from tests.rewards.conftest import TableScorer
from tests.rewards.test_self_retrieval import ROWS, G, world
from tests.tolerances import assert_close, close

IDS = [f"i{row}" for row in range(8)]
ALONE = [4, 1]  # two training images that are not in the rollout


def reward_with(rollouts, scorer, **kwargs) -> SelfRetrieval:
    reward = SelfRetrieval(scorer, distractor_scope="bank", **kwargs)
    reward.prepare(rollouts.data([["a"]] * 8))
    return reward


def bank_of(scorer, rows, **kwargs) -> ImageBank:
    return ImageBank(scorer.images[rows], [IDS[row] for row in rows], scorer.signature, **kwargs)


def weighted(scorer, caption: str, own: int, negatives: list[int], batch_size: int, scale: float = 100.0) -> float:
    """Log-probability of the target with the sum over the negatives weighted by (C - 1) / M, in float64."""
    text = scorer.texts[caption].double()
    cosine = [float(text @ image.double()) for image in scorer.images]
    weight = (batch_size - 1) / len(negatives)
    largest = max(scale * cosine[row] for row in [own, *negatives])
    total = weight * sum(math.exp(scale * cosine[row] - largest) for row in negatives)
    return scale * cosine[own] - largest - math.log(total + math.exp(scale * cosine[own] - largest))


@pytest.mark.parametrize("batch_size", [2, 6, 100])
@pytest.mark.parametrize("rows", [[4, 1], [7, 2, 5, 1]])
def test_random_bank_equals_a_plain_loop(rollouts, rows, batch_size):
    scorer, captions = world()
    reward = reward_with(rollouts, scorer, bank=bank_of(scorer, rows), bank_batch_size=batch_size)
    found = reward(rollouts.context(captions, ROWS))
    expected = [
        weighted(scorer, caption, ROWS[n // G], [row for row in rows if row != ROWS[n // G]], batch_size)
        for n, caption in enumerate(captions)
    ]
    assert found.tolist() == close(expected, dtype="float32", magnitude=100)


@pytest.mark.parametrize("given", [False, True])
def test_nearest_bank_equals_a_plain_loop(rollouts, given):
    """The nearest images of each target among the training images, or neighbours that are given."""
    scorer, captions = world()
    near = {
        row: sorted((r for r in range(8) if r != row), key=lambda r: -float(scorer.images[row] @ scorer.images[r]))[:3]
        for row in range(8)
    }
    bank = None
    if given:
        order = [3, 0, 7, 1, 2, 6, 5, 4]  # the file's rows are not those of the bank
        indices = torch.tensor([[order.index(r) for r in near[row]] for row in order])
        file = NeighbourFile(indices, torch.zeros(8, 3), [IDS[row] for row in order], "table@1", "image")
        bank = bank_of(scorer, list(range(8)), neighbours=file)
    reward = reward_with(rollouts, scorer, bank=bank, bank_images="nearest", bank_size=3, bank_batch_size=10)
    found = reward(rollouts.context(captions, ROWS))
    expected = [weighted(scorer, c, ROWS[n // G], near[ROWS[n // G]], 10) for n, c in enumerate(captions)]
    assert found.tolist() == close(expected, dtype="float32", magnitude=100)


@pytest.mark.parametrize(("k", "number"), [(2, 5), (1, 7), (6, 7)])
def test_nearest_and_random_images_equal_a_plain_loop(rollouts, k, number):
    """DiscriTune, Table 12: the k nearest images of each target, and random ones."""
    scorer, captions = world()
    settings = {"bank_images": "nearest_and_random", "num_hard_distractors": k, "bank_batch_size": 10}
    reward = reward_with(rollouts, scorer, bank_size=number, **settings)
    columns = reward._banks[0]._nearest.tolist()
    for row, mine in enumerate(columns):
        others = sorted((r for r in range(8) if r != row), key=lambda r: -float(scorer.images[row] @ scorer.images[r]))
        assert mine[:k] == others[:k]
        assert len(set(mine) - {row}) == number
    found = reward(rollouts.context(captions, ROWS))
    expected = [weighted(scorer, c, ROWS[n // G], columns[ROWS[n // G]], 10) for n, c in enumerate(captions)]
    assert found.tolist() == close(expected, dtype="float32", magnitude=100)
    again = reward_with(rollouts, scorer, bank_size=number, **settings)
    assert again._banks[0]._nearest.tolist() == columns  # the same in every process


def test_random_images_of_the_bank_are_drawn_evenly():
    count, k, number = 40, 3, 13
    rows = (torch.arange(count)[:, None] + torch.arange(1, k + 1)) % count
    found = _with_random(rows, number)
    assert torch.equal(found[:, :k], rows)
    times = torch.bincount(found[:, k:].flatten(), minlength=count)
    # Each image is drawn 10 times in the mean; the standard deviation of such a count is below sqrt(10).
    assert (times - (number - k)).abs().max() < 4 * (number - k) ** 0.5


def test_more_nearest_images_than_the_bank_has_are_refused(rollouts):
    scorer, _ = world()
    with pytest.raises(ValueError, match="num_hard_distractors is 10, but bank_size 5"):
        reward_with(rollouts, scorer, bank_images="nearest_and_random", bank_size=5)


def test_bank_of_the_batch_equals_the_reward_within_the_batch(rollouts):
    scorer, captions = world()
    batch = SelfRetrieval(scorer)
    batch.prepare(rollouts.data([["a"]] * 8))
    bank = reward_with(rollouts, scorer, bank=bank_of(scorer, ROWS), bank_batch_size=len(ROWS))
    contexts = [rollouts.context(captions, ROWS) for _ in range(2)]
    assert_close(bank(contexts[0]), batch(contexts[1]), magnitude=100)
    assert contexts[0].statistics == contexts[1].statistics
    assert bank.undefined(contexts[0]) == batch.undefined(contexts[1])


def test_weighted_sum_is_the_mean_sum_over_all_batches():
    """exp(-reward) is linear in the sum over distractors, so its mean over all batches is that of the bank."""
    generator = torch.Generator().manual_seed(0)
    similarity = 0.02 * torch.randn(3, 9, generator=generator, dtype=torch.float64)
    target, scale = torch.zeros(3, dtype=torch.long), 10.0
    batches = list(itertools.combinations(range(1, 9), 3))
    sums = [retrieval_rewards(similarity[:, [0, *batch]], target, scale=scale).neg().exp() for batch in batches]
    weights = torch.full((3, 9), 3 / 8, dtype=torch.float64)
    weights[:, 0] = 1
    found = retrieval_rewards(similarity, target, scale=scale, weights=weights)
    assert_close(found.neg().exp(), torch.stack(sums).mean(0))
    unweighted = retrieval_rewards(similarity, target, scale=scale)
    assert (unweighted.neg().exp() - torch.stack(sums).mean(0)).abs().max() > 1  # negative control


def test_target_and_its_copies_are_not_distractors(rollouts):
    scorer, captions = world()
    target, others = ROWS[0], ALONE
    context = rollouts.context(captions[:G], [target])
    expected = reward_with(rollouts, scorer, bank=bank_of(scorer, others))(context)

    def with_extra(image_id: str, features) -> torch.Tensor:
        images = torch.cat([scorer.images[others], features[None]])
        bank = ImageBank(images, [*(IDS[row] for row in others), image_id], scorer.signature)
        return reward_with(rollouts, scorer, bank=bank)(context)

    itself, copy = with_extra(IDS[target], scorer.images[3]), with_extra("copy", 2 * scorer.images[target])
    assert_close(itself, expected, magnitude=100)
    assert_close(copy, expected, magnitude=100)
    alike = with_extra("alike", scorer.images[target] + torch.tensor([0.001, 0, 0, 0, 0]))
    assert (alike - expected).abs().max() > 0.1  # negative control


def test_a_group_alone_has_the_rewards_that_it_has_in_a_batch(rollouts):
    scorer, captions = world()
    reward = reward_with(rollouts, scorer, bank_size=5)
    whole = reward(rollouts.context(captions, ROWS))
    for position, row in enumerate(ROWS):
        context = rollouts.context(captions[G * position : G * (position + 1)], [row])
        assert_close(reward(context), whole[G * position : G * (position + 1)], magnitude=100)
        assert context.ranks is None
        assert "recall_at_1" not in context.statistics  # one image has no rank


def test_random_bank_is_the_same_for_every_scorer_and_process(rollouts):
    one, two = (reward_with(rollouts, [world()[0], world(1)[0]], bank_size=4) for _ in range(2))
    ids = [bank.image_ids for reward in (one, two) for bank in reward._banks]
    assert len(set(ids[0])) == 4
    assert ids == [ids[0]] * 4


def test_bank_takes_the_features_of_a_cache(rollouts, tmp_path):
    scorer, captions = world()
    cache = FeatureCache(tmp_path, model_id="table", revision="1")
    cache.put(IDS, scorer.images)
    bank = ImageBank(cache.get([IDS[row] for row in ALONE]), [IDS[row] for row in ALONE], "table")
    rewards = [reward_with(rollouts, scorer, bank=one) for one in (bank, bank_of(scorer, ALONE))]
    found, expected = (reward(rollouts.context(captions, ROWS)) for reward in rewards)
    assert found.equal(expected)


# The function for TRL


def function(scorer, **kwargs) -> BankRewardFunction:
    return BankRewardFunction(scorer, bank_of(scorer, list(range(8))), **kwargs)


@pytest.mark.parametrize("messages", [False, True])
def test_function_for_trl_returns_the_rewards(rollouts, messages):
    scorer, captions = world()
    expected = reward_with(rollouts, scorer, bank_size=5, bank_batch_size=7)(rollouts.context(captions, ROWS))
    reward = function(scorer, bank_size=5, bank_batch_size=7)
    completions = [[{"role": "assistant", "content": caption}] for caption in captions] if messages else captions
    image_id = [IDS[row] for row in ROWS for _ in range(G)]
    found = reward(prompts=[""] * 12, completions=completions, completion_ids=[[1]] * 12, image_id=image_id)
    assert found == close(expected.tolist(), dtype="float32", magnitude=100)
    assert reward.__name__ == "self_retrieval"


def test_function_for_trl_survives_pickling_and_threads():
    """TRL's asynchronous trainer sends it to another process, which calls it group by group, each in a thread."""
    scorer, captions = world()
    reward = function(scorer, bank_size=5)
    whole = reward(completions=captions, image_id=[IDS[row] for row in ROWS for _ in range(G)])
    sent = pickle.loads(pickle.dumps(reward))

    async def groups() -> list[list[float]]:
        calls = [
            asyncio.to_thread(sent, completions=captions[G * n : G * (n + 1)], image_id=[IDS[row]] * G)
            for n, row in enumerate(ROWS)
        ]
        return await asyncio.gather(*calls)

    found = [value for group in asyncio.run(groups()) for value in group]
    assert found == close(whole, dtype="float32", magnitude=100)


def test_function_for_trl_gives_empty_captions_the_floor():
    scorer, captions = world()
    scorer.texts[""] = scorer.images[0]
    found = function(scorer, bank_size=5, bank_batch_size=7)(completions=[captions[0], " "], image_id=[IDS[7]] * 2)
    assert found[0] > found[1] == close(-2 * math.log(7))


def test_function_for_trl_refuses_unknown_images_and_other_scorers():
    scorer, captions = world()
    with pytest.raises(ValueError, match=r"no features of the image 'j9'. Pass targets with all training images"):
        function(scorer, bank_size=5)(completions=captions[:1], image_id=["j9"])
    other = TableScorer(scorer.texts, scorer.images)
    other.signature = "another"
    with pytest.raises(ValueError, match=r"by the reward scorer 'another'. Compute the features of the bank"):
        BankRewardFunction(other, bank_of(scorer, list(range(8))))


# Bad input


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"reward_kind": "accuracy"}, r"depend on the size of the bank.*Use reward_kind='log_prob'"),
        ({"distractor_scope": "batch", "bank": "a bank"}, r"Use distractor_scope='bank'"),
    ],
)
def test_bad_arguments_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        SelfRetrieval(**{"distractor_scope": "bank", **kwargs})


def test_weights_of_accuracies_are_refused():
    with pytest.raises(ValueError, match=r"counts images, which have no weights"):
        retrieval_rewards(torch.zeros(1, 2), torch.zeros(1).long(), "accuracy", weights=torch.ones(1, 2))


@pytest.mark.parametrize(("kind", "most"), [("random", 8), ("nearest", 7), ("nearest_and_random", 7)])
def test_bank_larger_than_the_training_images_is_refused(rollouts, kind, most):
    scorer, _ = world()
    assert reward_with(rollouts, scorer, bank_images=kind, bank_size=most, num_hard_distractors=2)._banks
    with pytest.raises(ValueError, match=f"8 training images allow a bank of {most}. Lower bank_size"):
        reward_with(rollouts, scorer, bank_images=kind, bank_size=most + 1)


def test_bank_that_is_too_small_is_refused(rollouts):
    scorer, captions = world()
    with pytest.raises(ValueError, match=r"one image, which is not a distractor of itself. Use 2 or more"):
        bank_of(scorer, [3])
    images = torch.stack([scorer.images[7], scorer.images[7]])
    reward = reward_with(rollouts, scorer, bank=ImageBank(images, ["i7", "copy"], "table"))
    with pytest.raises(ValueError, match=r"no other image than the image 'i7' and copies of it. Use a larger bank"):
        reward(rollouts.context(captions[:G], [7]))


def test_bank_of_another_scorer_is_refused(rollouts):
    scorer, _ = world()
    of_other = ImageBank(scorer.images, IDS, "clip@2")
    with pytest.raises(ValueError, match=r"5 features per image by 'clip@2', and the targets 5 by the reward scorer"):
        reward_with(rollouts, scorer, bank=of_other)
    wide = ImageBank(torch.ones(8, 6), IDS, "table")
    with pytest.raises(ValueError, match=r"6 features per image by 'table', and the targets 5"):
        reward_with(rollouts, scorer, bank=wide)
    with pytest.raises(ValueError, match=r"1 banks for 2 scorers. Pass one per scorer"):
        reward_with(rollouts, [scorer, world(1)[0]], bank=bank_of(scorer, [1, 2]))


def test_bank_without_features_of_neighbours_is_refused(rollouts):
    scorer, _ = world()
    indices = torch.tensor([[(row + 1) % 8, (row + 2) % 8] for row in range(8)])
    file = NeighbourFile(indices, torch.zeros(8, 2), IDS, "table@1")
    whole = bank_of(scorer, list(range(8)), neighbours=file)
    assert reward_with(rollouts, scorer, bank=whole)._banks == [whole]
    with pytest.raises(ValueError, match=r"no features of 1 neighbours of the image 'i2' .2 of 8 images lack some"):
        reward_with(rollouts, scorer, bank=bank_of(scorer, [0, 1, 2, 3, 5, 6, 7], neighbours=file))
    others = NeighbourFile(indices, torch.zeros(8, 2), ["i9", *IDS[1:]], "table@1")
    nine = ImageBank(torch.cat([scorer.images, torch.ones(1, 5)]), [*IDS, "i9"], "table", neighbours=others)
    with pytest.raises(ValueError, match=r"has no neighbours for 1 of 8 images .first: 'i0'.*Use neighbours of all"):
        reward_with(rollouts, scorer, bank=nine)


def test_ids_must_be_unique_and_complete():
    scorer, _ = world()
    for ids in (["a"] * 8, IDS[:7]):
        with pytest.raises(ValueError, match=r"Pass one id per image, each once"):
            ImageBank(scorer.images, ids, "table")
