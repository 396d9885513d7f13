"""The self-retrieval reward equals plain loops, enumeration and the authors' numbers, also with a bank of distractors."""

import asyncio
import itertools
import json
import math
import pickle
from pathlib import Path

import pytest
import torch

from hf_captionrl.retrieval import NeighbourFile
from hf_captionrl.rewards import BankRewardFunction, ImageBank, SelfRetrieval, WeightedRewards, retrieval_rewards
from tests.rewards.conftest import TableScorer
from tests.tolerances import assert_close, close

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "self_retrieval_reward.json").read_text())

ROWS = [7, 2, 5, 0, 3, 6]  # of eight training images
G = 2


def world(seed: int = 0, width: int = 5):
    """A scorer with a feature for each of `G` captions of six images."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.nn.functional.normalize(torch.randn(8, width, generator=generator), dim=1)
    captions = [f"image {row} caption {g}" for row in ROWS for g in range(G)]
    near = torch.cat([images[row] + torch.randn(G, width, generator=generator) for row in ROWS])
    texts = torch.nn.functional.normalize(near, dim=1)
    return TableScorer(dict(zip(captions, texts, strict=True)), images), captions


def ready(rollouts, scorer, *others, bags: bool = False, **kwargs) -> SelfRetrieval:
    reward = SelfRetrieval([scorer, *others] if others else scorer, **kwargs)
    reward.prepare(rollouts.data([["a"]] * 8, has_bags=bags))
    return reward


def weighted(scorer, caption: str, own: int, weights: dict[int, float], scale: float = 100.0) -> float:
    """Log-probability of the target, in float64; `weights` are those of the distractors' exponentials."""
    text = scorer.texts[caption].double()
    logits = {row: scale * float(text @ scorer.images[row].double()) for row in [own, *weights]}
    largest = max(logits.values())
    total = sum(weight * math.exp(logits[row] - largest) for row, weight in weights.items())
    return logits[own] - largest - math.log(total + math.exp(logits[own] - largest))


def plain(scorer, caption: str, own: int, compared: list[int], kind: str, scale: float = 100.0) -> float:
    cosines = (scorer.images @ scorer.texts[caption]).tolist()
    if kind == "cosine":
        return cosines[own]
    if kind == "accuracy":
        return float(all(cosines[own] > cosines[row] for row in compared if row != own))
    return weighted(scorer, caption, own, {row: 1.0 for row in compared if row != own}, scale)


@pytest.mark.parametrize(("key", "scale"), [("cosine_times_100_as_coded", 100.0), ("raw_cosine_paper_literal", 1.0)])
def test_equals_the_authors_numbers(key, scale):
    """The authors' values are losses, and their similarities include the scale of 100."""
    similarity = torch.tensor(VECTORS["text_features"]) @ torch.tensor(VECTORS["image_features"]).T
    for kind, loss in (("log_prob", "DiscriminativeLoss"), ("accuracy", "AccuracyLoss"), ("cosine", "SimilarityLoss")):
        found = retrieval_rewards(similarity, torch.arange(6), kind, scale)
        expected = -torch.tensor(VECTORS[key][loss]["loss"])
        assert_close(found, expected / scale if kind == "cosine" else expected, ulps=32)


def test_a_tie_is_not_a_success():
    """In the authors' code it is a success, because argmax takes the first of equals."""
    assert VECTORS["tie_all_zero_text_acc"] == [1.0, 1.0]
    assert retrieval_rewards(torch.zeros(2, 6), torch.arange(2), "accuracy").tolist() == [0, 0]
    similarity = torch.tensor([[0.5, 0.5, 0.1], [0.5, 0.4, 0.1]])
    assert retrieval_rewards(similarity, torch.tensor([0, 0]), "accuracy").tolist() == [0, 1]
    tied = retrieval_rewards(similarity, torch.tensor([0, 1]), "log_prob", 100.0)
    assert float(tied[0]) == close(-math.log(2), dtype="float32")


@pytest.mark.parametrize(
    ("kind", "scope", "k"),
    [
        ("log_prob", "batch", 2),
        ("log_prob", "bag", 2),
        ("accuracy", "hard", 2),
        ("log_prob", "hard", 50),
        ("cosine", "batch", 2),
    ],
)
def test_every_scope_equals_a_plain_loop(rollouts, kind, scope, k):
    scorer, captions = world()
    reward = ready(rollouts, scorer, reward_kind=kind, distractor_scope=scope, num_hard_distractors=k, bags=True)
    context = rollouts.context(captions, ROWS, bag_size=3)
    found = reward(context)
    expected = []
    for n, caption in enumerate(captions):
        position = n // G
        own = ROWS[position]
        bag = ROWS[:3] if position < 3 else ROWS[3:]
        alike = sorted((r for r in ROWS if r != own), key=lambda r: -float(scorer.images[own] @ scorer.images[r]))
        compared = {"batch": ROWS, "bag": bag, "hard": [own, *alike[:k]]}[scope]
        expected.append(plain(scorer, caption, own, compared, kind))
    assert found.tolist() == close(expected, dtype="float32")
    hits = [plain(scorer, c, ROWS[n // G], ROWS, "accuracy") for n, c in enumerate(captions)]
    assert context.statistics["recall_at_1"] == list(hits)


@pytest.mark.parametrize("scope", ["batch", "bag", "hard"])
def test_two_processes_reward_as_one(rollouts, scope):
    """Candidates of all processes; positions count those of the processes before."""
    scorer, captions = world()
    reward = ready(rollouts, scorer, distractor_scope=scope, num_hard_distractors=2, bags=True)
    whole = reward(rollouts.context(captions, ROWS, bag_size=3))
    parts = [
        reward(
            rollouts.context(
                captions[G * start : G * (start + 3)],
                ROWS[start : start + 3],
                candidates=torch.tensor(ROWS),
                positions=torch.arange(start, start + 3),
                bag_size=3,
            )
        )
        for start in (0, 3)
    ]
    assert_close(torch.cat(parts), whole, magnitude=100)  # cosines times 100
    if scope == "batch":  # negative control: one process alone has easier distractors
        alone = reward(rollouts.context(captions[: 3 * G], ROWS[:3]))
        assert (alone > parts[0] + 1e-3).any()


@pytest.mark.parametrize(
    ("kind", "given", "floor"),
    [("log_prob", None, -2 * math.log(6)), ("cosine", None, -1.0), ("accuracy", None, 0.0), ("accuracy", -3.0, -3.0)],
)
def test_empty_captions_and_nan_features_get_the_floor_and_are_counted(rollouts, kind, given, floor):
    scorer, captions = world()
    captions[0], captions[3] = "", " . "
    scorer.texts |= {"": scorer.images[7], " . ": scorer.images[2], captions[5]: torch.full((5,), math.nan)}
    reward = ready(rollouts, scorer, reward_kind=kind, undefined_reward=given)
    context = rollouts.context(captions, ROWS)
    values = WeightedRewards([reward])(context)[:, 0]
    assert values[[0, 3, 5]].tolist() == pytest.approx([floor] * 3)
    assert values.isfinite().all()
    assert context.statistics["rewards/self_retrieval/undefined"] == 3
    clean = world()
    expected = ready(rollouts, clean[0], reward_kind=kind)(rollouts.context(clean[1], ROWS)).double()
    others = [n for n in range(12) if n not in (0, 3, 5)]
    assert_close(values[others], expected[others], dtype="float32", magnitude=100)


def test_an_ensemble_averages_rewards_or_alternates(rollouts):
    (one, captions), (other, _) = world(0), world(1)
    contexts = [rollouts.context(captions, ROWS) for _ in range(2)]
    alone = [ready(rollouts, scorer)(context) for scorer, context in zip((one, other), contexts, strict=True)]
    assert (alone[0] - alone[1]).abs().max() > 0.1
    found = ready(rollouts, one, other)(rollouts.context(captions, ROWS))
    torch.testing.assert_close(found, (alone[0] + alone[1]) / 2)
    reward = ready(rollouts, one, other, scorer_ensemble="alternate")
    for step in range(4):
        context = rollouts.context(captions, ROWS, step=step)
        assert reward(context).equal(alone[step % 2])
        assert context.statistics == contexts[step % 2].statistics  # logged at every step, by the current scorer
        assert "recall_at_1" in context.statistics


def test_captions_are_encoded_once_by_the_trainers_scorer_and_truncated_ones_counted(rollouts, monkeypatch):
    scorer, captions = world()
    captions[0] = "a caption of more than twenty letters"
    scorer.texts[captions[0]] = scorer.images[0]
    expected = ready(rollouts, scorer)(rollouts.context(captions, ROWS))
    scorer.read.clear()
    reward, context = SelfRetrieval(), rollouts.context(captions, ROWS)
    reward.prepare(rollouts.data([["a"]] * 8, scorer=scorer))
    monkeypatch.setattr(scorer, "image_features", None)  # images are not opened
    assert reward(context).equal(expected)
    assert scorer.read == [captions]
    assert context.statistics["completions/truncated_by_scorer"] == pytest.approx([1 / 12])


# A bank of distractors

IDS = [f"i{row}" for row in range(8)]


def nearest(scorer, row: int) -> list[int]:
    """The other images, the most similar one first."""
    others = [other for other in range(len(scorer.images)) if other != row]
    return sorted(others, key=lambda other: -float(scorer.images[row] @ scorer.images[other]))


def reward_with(rollouts, scorer, **kwargs) -> SelfRetrieval:
    return ready(rollouts, scorer, distractor_scope="bank", **kwargs)


def bank_of(scorer, rows, **kwargs) -> ImageBank:
    return ImageBank(scorer.images[rows], [IDS[row] for row in rows], scorer.signature, **kwargs)


def assert_weighted(rollouts, reward, scorer, captions, weights_of, rows=ROWS) -> None:
    """The rewards are those of a plain loop with these weights of the distractors of each target."""
    captions = captions[: G * len(rows)]
    targets = [row for row in rows for _ in range(G)]
    expected = [weighted(scorer, c, row, weights_of(row)) for c, row in zip(captions, targets, strict=True)]
    found = reward(rollouts.context(captions, rows))
    assert found.tolist() == close(expected, dtype="float32", magnitude=100)


@pytest.mark.parametrize(("rows", "batch_size"), [([4, 1], 6), ([7, 2, 5, 1], 100)])
def test_random_bank_equals_a_plain_loop(rollouts, rows, batch_size):
    scorer, captions = world()
    reward = reward_with(rollouts, scorer, bank=bank_of(scorer, rows), bank_batch_size=batch_size)

    def weights_of(own):
        others = [row for row in rows if row != own]
        return dict.fromkeys(others, (batch_size - 1) / len(others))

    assert_weighted(rollouts, reward, scorer, captions, weights_of)


@pytest.mark.parametrize("given", [False, True])
def test_nearest_bank_equals_a_plain_loop(rollouts, given):
    """The nearest images of each target among the training images, or neighbours that are given."""
    scorer, captions = world()
    near = {row: nearest(scorer, row)[:3] for row in range(8)}
    bank = None
    if given:
        order = [3, 0, 7, 1, 2, 6, 5, 4]  # the file's rows are not those of the bank
        indices = torch.tensor([[order.index(r) for r in near[row]] for row in order])
        file = NeighbourFile(indices, torch.zeros(8, 3), [IDS[row] for row in order], "table@1", "image")
        bank = bank_of(scorer, list(range(8)), neighbours=file)
    reward = reward_with(rollouts, scorer, bank=bank, bank_images="nearest", bank_size=3, bank_batch_size=10)
    assert_weighted(rollouts, reward, scorer, captions, lambda row: dict.fromkeys(near[row], 9 / 3))


def distractors_of(reward, row: int, step: int = 0) -> list[int]:
    """The nearest images of a target in the bank, and those that are drawn at a step."""
    bank, rows = reward._banks[0], torch.tensor([row])
    return [*bank._nearest[row].tolist(), *bank._drawn(rows, bank._nearest[rows], step)[0].tolist()]


def test_random_images_of_the_bank_are_drawn_evenly_and_anew_at_every_step():
    count, k, number = 40, 3, 13
    rows = (torch.arange(count)[:, None] + torch.arange(1, k + 1)) % count
    file = NeighbourFile(rows, torch.zeros(count, k), [str(row) for row in range(count)], "table@1", "image")
    features = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    bank = ImageBank(features, file.image_ids, "table@1", file, num_random=number)
    itself = torch.arange(count)
    steps = [bank._drawn(itself, rows, step) for step in range(5)]
    for drawn in steps:
        whole = torch.cat([itself[:, None], rows, drawn], 1)
        assert all(len(set(row)) == 1 + k + number for row in whole.tolist())
    assert steps[0].equal(bank._drawn(itself, rows, 0))  # after resuming
    assert not any(steps[0].equal(other) for other in steps[1:])
    assert steps[0][7:9].equal(bank._drawn(itself[7:9], rows[7:9], 0))  # on another process
    times = torch.bincount(torch.cat(steps).flatten(), minlength=count)
    # Each image is drawn 65 times in the mean; the standard deviation of such a count is below sqrt(65).
    assert (times - 5 * number).abs().max() < 4 * (5 * number) ** 0.5


def test_target_and_its_copies_are_not_distractors(rollouts):
    scorer, captions = world()
    target, others = ROWS[0], [4, 1]
    context = rollouts.context(captions[:G], [target])
    expected = reward_with(rollouts, scorer, bank=bank_of(scorer, others))(context)

    def with_extra(image_id: str, features) -> torch.Tensor:
        images = torch.cat([scorer.images[others], features[None]])
        bank = ImageBank(images, [*(IDS[row] for row in others), image_id], scorer.signature)
        return reward_with(rollouts, scorer, bank=bank)(context)

    near = scorer.images[target] + torch.tensor([0.001, 0, 0, 0, 0])
    itself, copy = with_extra(IDS[target], near), with_extra("copy", 2 * scorer.images[target])
    assert_close(itself, expected, magnitude=100)
    assert_close(copy, expected, magnitude=100)
    assert (with_extra("alike", near) - expected).abs().max() > 0.1  # negative control
    assert context.ranks is None
    assert "recall_at_1" not in context.statistics  # one image has no rank


def function(scorer, **kwargs) -> BankRewardFunction:
    return BankRewardFunction(scorer, bank_of(scorer, list(range(8))), **kwargs)


def test_function_for_trl_survives_pickling_and_threads(rollouts):
    """TRL's asynchronous trainer sends it to another process, which calls it group by group, each in a thread."""
    scorer, captions = world()
    expected = reward_with(rollouts, scorer, bank_size=5, bank_batch_size=7)(rollouts.context(captions, ROWS)).tolist()
    reward = function(scorer, bank_size=5, bank_batch_size=7)
    assert reward.__name__ == "self_retrieval"
    completions = [[{"role": "assistant", "content": caption}] for caption in captions]
    image_id = [IDS[row] for row in ROWS for _ in range(G)]
    found = reward(prompts=[""] * 12, completions=completions, completion_ids=[[1]] * 12, image_id=image_id)
    assert found == close(expected, dtype="float32", magnitude=100)
    sent = pickle.loads(pickle.dumps(reward))

    async def groups() -> list[list[float]]:
        parts = [(captions[G * n : G * (n + 1)], [IDS[row]] * G) for n, row in enumerate(ROWS)]
        return await asyncio.gather(*(asyncio.to_thread(sent, *part) for part in parts))

    found = [value for group in asyncio.run(groups()) for value in group]
    assert found == close(expected, dtype="float32", magnitude=100)


def test_nearest_and_random_images_equal_a_plain_loop(rollouts):
    """DiscriTune, Table 12: in the rollout, and one group alone in the function for TRL."""
    (scorer, captions), k, number = world(), 2, 5
    settings = {"bank_images": "nearest_and_random", "bank_batch_size": 6}
    settings |= {"num_hard_distractors": k, "bank_size": number}
    reward = reward_with(rollouts, scorer, **settings)
    columns = [distractors_of(reward, row) for row in range(8)]
    again = reward_with(rollouts, scorer, **settings)  # in every process
    assert [distractors_of(again, row) for row in range(8)] == columns
    assert [distractors_of(reward, row, step=1) for row in range(8)] != columns

    def weights_of(row):
        near, drawn = nearest(scorer, row)[:k], columns[row][k:]
        assert columns[row][:k] == near
        assert len({row, *near, *drawn}) == 1 + number
        return dict.fromkeys([*near, *drawn], 5 / number)

    assert_weighted(rollouts, reward, scorer, captions, weights_of)
    function = BankRewardFunction(scorer, bank_of(scorer, list(range(8))), **settings)
    alone = [function(completions=captions[G * n : G * n + G], image_id=[IDS[r]] * G) for n, r in enumerate(ROWS)]
    whole = reward(rollouts.context(captions, ROWS)).tolist()
    assert list(itertools.chain(*alone)) == close(whole, dtype="float32", magnitude=100)


# Bad input


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("reward_kind", {"reward_kind": "rank"}),
        ("distractor_scope", {"bank": "a bank"}),
        ("similarity_scale", {"similarity_scale": "big"}),
        ("reward_kind", {"distractor_scope": "bank", "reward_kind": "accuracy"}),
    ],
)
def test_arguments_that_are_refused(name, settings):
    with pytest.raises(ValueError, match=name):
        SelfRetrieval(**settings)


@pytest.mark.parametrize(
    ("named", "make", "settings"),
    [
        ("by 'clip@2'", lambda s: ImageBank(s.images, IDS, "clip@2"), {}),
        ("2 banks", lambda s: [bank_of(s, [1, 2])] * 2, {}),
        ("one id per image", lambda s: ImageBank(s.images, ["a"] * 8, "table"), {}),
        ("'i7' and copies", lambda s: ImageBank(s.images[[7, 7]], ["i7", "copy"], "table"), {}),
        ("bank_size", lambda s: None, {"bank_size": 9}),
        (
            "num_hard_distractors",
            lambda s: None,
            {"bank_images": "nearest_and_random", "num_hard_distractors": 10, "bank_size": 5},
        ),
    ],
)
def test_banks_that_are_refused(rollouts, named, make, settings):
    scorer, captions = world()
    with pytest.raises(ValueError, match=named):
        reward_with(rollouts, scorer, bank=make(scorer), **settings)(rollouts.context(captions[:G], [7]))


def test_data_and_rollouts_that_are_refused(rollouts):
    scorer, captions = world()
    bags = ready(rollouts, scorer, distractor_scope="bag", bags=True)
    weights = {"weights": torch.ones(1, 2)}
    data, reads = rollouts.data([["a"]] * 8), scorer.max_text_tokens - 2
    data.max_completion_length = reads + 1
    SelfRetrieval(scorer, allow_truncation_captions=True).prepare(data)
    for message, call in (
        ("scorer", lambda: SelfRetrieval().prepare(data)),
        ("bags", lambda: SelfRetrieval(scorer, distractor_scope="bag").prepare(data)),
        ("8.* images for 3", lambda: SelfRetrieval(scorer).prepare(rollouts.data([["a"]] * 3))),
        ("max_completion_length", lambda: SelfRetrieval(scorer).prepare(data)),
        ("bags", lambda: bags(rollouts.context(captions, ROWS))),
        ("'j9'", lambda: function(scorer, bank_size=5)(completions=captions[:1], image_id=["j9"])),
        ("accuracy", lambda: retrieval_rewards(torch.zeros(1, 2), torch.zeros(1).long(), "accuracy", **weights)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    data.max_completion_length = reads
    SelfRetrieval(scorer).prepare(data)


CONCEPTS = [0, 0, 1, 2, 2, 3, 2, 4]  # of the eight training images: 3, 4 and 6 show one thing, 0 and 1 another


@pytest.mark.parametrize(
    ("kind", "scope"),
    [("log_prob", "batch"), ("accuracy", "batch"), ("cosine", "batch"), ("log_prob", "bag"), ("log_prob", "hard")],
)
def test_images_of_one_concept_are_targets_of_each_other(rollouts, kind, scope):
    """The mean over all training images of the concept, also those outside the batch, and none of them is a distractor."""
    scorer, captions = world()
    reward = SelfRetrieval(scorer, reward_kind=kind, distractor_scope=scope, num_hard_distractors=2)
    reward.prepare(rollouts.data([["a"]] * 8, has_bags=True, concepts=CONCEPTS))
    context = rollouts.context(captions, ROWS, bag_size=3)
    values, expected, hits = reward(context), [], []
    for n, caption in enumerate(captions):
        position, target = n // G, ROWS[n // G]
        members = [row for row in range(8) if CONCEPTS[row] == CONCEPTS[target]]
        others = [row for row in ROWS if row not in members]
        if scope == "bag":
            others = [row for row in (ROWS[:3] if position < 3 else ROWS[3:]) if row not in members]
        elif scope == "hard":
            others = sorted(others, key=lambda r: -float(scorer.images[target] @ scorer.images[r]))[:2]
        each = [plain(scorer, caption, row, [row, *others], kind) for row in members]
        expected.append(sum(each) / len(each))
        others = [row for row in ROWS if row not in members]
        hits.append(max(plain(scorer, caption, row, [row, *others], "accuracy") for row in members))
    assert values.tolist() == close(expected, dtype="float32")
    assert context.statistics["recall_at_1"] == hits
    without = ready(rollouts, scorer, reward_kind=kind, distractor_scope=scope, num_hard_distractors=2, bags=True)
    assert values.tolist() != close(without(rollouts.context(captions, ROWS, bag_size=3)).tolist(), dtype="float32")


def test_one_concept_alone_is_refused_and_others_do_not_outlive_their_data(rollouts):
    scorer, captions = world()
    reward = SelfRetrieval(scorer)
    with pytest.raises(ValueError, match="concept_column"):
        reward.prepare(rollouts.data([["a"]] * 8, concepts=[0] * 8))
    reward.prepare(rollouts.data([["a"]] * 8, concepts=CONCEPTS))
    by_concept = reward(rollouts.context(captions, ROWS)).tolist()
    reward.prepare(rollouts.data([["a"]] * 8))
    plain_rewards = ready(rollouts, scorer)(rollouts.context(captions, ROWS)).tolist()
    assert reward(rollouts.context(captions, ROWS)).tolist() == plain_rewards != by_concept


@pytest.mark.parametrize("images", ["random", "nearest"])
def test_a_bank_has_no_distractors_of_the_targets_concept(rollouts, images):
    scorer, captions = world()
    size = 8 if images == "random" else 4  # of the others, 4 concepts
    reward = SelfRetrieval(scorer, distractor_scope="bank", bank_images=images, bank_size=size, bank_batch_size=3)
    reward.prepare(rollouts.data([["a"]] * 8, concepts=CONCEPTS))
    values, expected = reward(rollouts.context(captions, ROWS)), []
    for n, caption in enumerate(captions):
        members = [row for row in range(8) if CONCEPTS[row] == CONCEPTS[ROWS[n // G]]]
        others = [row for row in range(8) if row not in members]
        others.sort(key=lambda r: -float(scorer.images[ROWS[n // G]] @ scorer.images[r]))
        if images == "nearest":  # the nearest image of each other concept
            others = [row for at, row in enumerate(others) if CONCEPTS[row] not in {CONCEPTS[r] for r in others[:at]}]
        weights = dict.fromkeys(others, 2 / len(others))
        each = [weighted(scorer, caption, row, weights) for row in members]
        expected.append(sum(each) / len(each))
    assert values.tolist() == close(expected, dtype="float32")
