import json
import math
from pathlib import Path

import pytest
import torch

from hf_captionrl.rewards import SelfRetrieval, WeightedRewards, retrieval_rewards
from tests.rewards.conftest import TableScorer
from tests.tolerances import assert_close, close

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "self_retrieval_reward.json").read_text())
KINDS = {"log_prob": "DiscriminativeLoss", "accuracy": "AccuracyLoss", "cosine": "SimilarityLoss"}
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


def plain(scorer, caption: str, own: int, compared: list[int], kind: str, scale: float = 100.0) -> float:
    text = scorer.texts[caption].tolist()

    def cosine(row: int) -> float:
        return sum(a * b for a, b in zip(text, scorer.images[row].tolist(), strict=True))

    if kind == "cosine":
        return cosine(own)
    if kind == "accuracy":
        return float(all(cosine(own) > cosine(row) for row in compared if row != own))
    largest = max(scale * cosine(row) for row in compared)
    total = sum(math.exp(scale * cosine(row) - largest) for row in compared)
    return scale * cosine(own) - largest - math.log(total)


# The function


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(("key", "scale"), [("cosine_times_100_as_coded", 100.0), ("raw_cosine_paper_literal", 1.0)])
def test_equals_the_authors_numbers(kind, key, scale):
    """The authors' values are losses, and their similarities include the scale of 100."""
    similarity = torch.tensor(VECTORS["text_features"]) @ torch.tensor(VECTORS["image_features"]).T
    found = retrieval_rewards(similarity, torch.arange(6), kind, scale)
    expected = -torch.tensor(VECTORS[key][KINDS[kind]]["loss"])
    assert_close(found, expected / scale if kind == "cosine" else expected, ulps=32)


def test_a_tie_is_not_a_success():
    """In the authors' code it is a success, because argmax takes the first of equals."""
    assert VECTORS["tie_all_zero_text_acc"] == [1.0, 1.0]
    assert retrieval_rewards(torch.zeros(2, 6), torch.arange(2), "accuracy").tolist() == [0, 0]
    similarity = torch.tensor([[0.5, 0.5, 0.1], [0.5, 0.4, 0.1]])
    assert retrieval_rewards(similarity, torch.tensor([0, 0]), "accuracy").tolist() == [0, 1]
    tied = retrieval_rewards(similarity, torch.tensor([0, 1]), "log_prob", 100.0)
    assert float(tied[0]) == close(-math.log(2), dtype="float32")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_nan_stays_nan_and_does_not_affect_other_captions(kind):
    similarity = torch.tensor([[0.5, 0.2], [math.nan, math.nan]])
    found = retrieval_rewards(similarity, torch.tensor([0, 1]), kind, 10.0)
    assert found.isnan().tolist() == [False, True]


def test_very_old_policies_give_finite_losses():
    similarity = torch.tensor([[-1.0, 1.0]])
    assert retrieval_rewards(similarity, torch.tensor([0]), "log_prob", 100.0).tolist() == [-200.0]


def test_unknown_reward_kind_is_refused():
    with pytest.raises(ValueError, match="reward_kind is 'rank'"):
        retrieval_rewards(torch.zeros(1, 2), torch.zeros(1).long(), "rank")  # type: ignore[arg-type]


# The reward


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("scope", ["batch", "bag", "hard"])
def test_every_scope_equals_a_plain_loop(rollouts, kind, scope):
    scorer, captions = world()
    reward = ready(rollouts, scorer, reward_kind=kind, distractor_scope=scope, num_hard_distractors=2, bags=True)
    context = rollouts.context(captions, ROWS, bag_size=3)
    found = reward(context)
    expected = []
    for n, caption in enumerate(captions):
        position = n // G
        own = ROWS[position]
        bag = ROWS[:3] if position < 3 else ROWS[3:]
        alike = sorted((r for r in ROWS if r != own), key=lambda r: -float(scorer.images[own] @ scorer.images[r]))
        compared = {"batch": ROWS, "bag": bag, "hard": [own, *alike[:2]]}[scope]
        expected.append(plain(scorer, caption, own, compared, kind))
    assert found.tolist() == close(expected, dtype="float32")
    assert context.statistics["recall_at_1"] == pytest.approx(
        sum(plain(scorer, c, ROWS[n // G], ROWS, "accuracy") for n, c in enumerate(captions)) / len(captions)
    )


def test_too_many_hard_distractors_are_the_whole_batch(rollouts):
    scorer, captions = world()
    whole, hard = (ready(rollouts, scorer, distractor_scope=s, num_hard_distractors=50) for s in ("batch", "hard"))
    contexts = [rollouts.context(captions, ROWS) for _ in range(2)]
    torch.testing.assert_close(whole(contexts[0]), hard(contexts[1]))
    assert whole.undefined(contexts[0]) == hard.undefined(contexts[1]) == pytest.approx(-2 * math.log(6))


@pytest.mark.parametrize(("given", "scale"), [("code", 100.0), ("paper", 1.0), (1.0, 1.0), ("7.5", 7.5)])
def test_similarity_scale(rollouts, given, scale):
    scorer, captions = world()
    found = ready(rollouts, scorer, similarity_scale=given)(rollouts.context(captions, ROWS))
    expected = [plain(scorer, c, ROWS[n // G], ROWS, "log_prob", scale) for n, c in enumerate(captions)]
    assert found.tolist() == close(expected, dtype="float32")


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


def test_one_and_several_captions_per_image_agree(rollouts):
    scorer, captions = world()
    reward = ready(rollouts, scorer)
    both = reward(rollouts.context(captions, ROWS)).view(6, G)
    for g in range(G):
        assert_close(reward(rollouts.context(captions[g::G], ROWS)), both[:, g], magnitude=100)


@pytest.mark.parametrize(("kind", "floor"), [("log_prob", -2 * math.log(6)), ("cosine", -1.0), ("accuracy", 0.0)])
@pytest.mark.parametrize("given", [None, -3.0])
def test_empty_captions_and_nan_features_get_the_floor_and_are_counted(rollouts, kind, floor, given):
    scorer, captions = world()
    captions[0], captions[3] = "", " . "
    scorer.texts |= {"": scorer.images[7], " . ": scorer.images[2], captions[5]: torch.full((5,), math.nan)}
    reward = ready(rollouts, scorer, reward_kind=kind, undefined_reward=given)
    context = rollouts.context(captions, ROWS)
    values = WeightedRewards([reward])(context)[:, 0]
    floor = floor if given is None else given
    assert values[[0, 3, 5]].tolist() == pytest.approx([floor] * 3)
    assert values.isfinite().all()
    assert context.is_empty.sum() == 2
    assert context.statistics["rewards/self_retrieval/undefined"] == 3
    clean = world()
    expected = ready(rollouts, clean[0], reward_kind=kind)(rollouts.context(clean[1], ROWS)).double()
    others = [n for n in range(12) if n not in (0, 3, 5)]
    assert_close(values[others], expected[others], dtype="float32", magnitude=100)


def test_floor_depends_on_the_number_of_candidates(rollouts):
    scorer, captions = world()
    context = rollouts.context(captions, ROWS, bag_size=3)
    for scope, number in (("batch", 6), ("bag", 3), ("hard", 5)):
        reward = ready(rollouts, scorer, distractor_scope=scope, num_hard_distractors=4, bags=True)
        assert reward.undefined(context) == pytest.approx(-2 * math.log(number))


def test_an_ensemble_averages_rewards(rollouts):
    (one, captions), (other, _) = world(0), world(1)
    alone = [ready(rollouts, scorer)(rollouts.context(captions, ROWS)) for scorer in (one, other)]
    assert (alone[0] - alone[1]).abs().max() > 0.1
    found = ready(rollouts, one, other)(rollouts.context(captions, ROWS))
    torch.testing.assert_close(found, (alone[0] + alone[1]) / 2)


def test_ensemble_alternates(rollouts):
    (one, captions), (other, _) = world(0), world(1)
    alone = [ready(rollouts, scorer) for scorer in (one, other)]
    reward = ready(rollouts, one, other, scorer_ensemble="alternate")
    for step in range(4):
        context = rollouts.context(captions, ROWS, step=step)
        mine, theirs = context, rollouts.context(captions, ROWS)
        assert reward(mine).equal(alone[step % 2](theirs))
        # Logged at every step, by the current scorer.
        assert mine.statistics == theirs.statistics
        assert "recall_at_1" in mine.statistics


def test_captions_truncated_by_the_scorer_are_counted(rollouts):
    scorer, captions = world()
    long = "a caption of more than twenty letters"
    scorer.texts[long] = scorer.images[0]
    context = rollouts.context([long, *captions[1:]], ROWS)
    ready(rollouts, scorer)(context)
    assert context.statistics["completions/truncated_by_scorer"] == pytest.approx(1 / 12)


def test_captions_are_encoded_once_and_images_are_not_opened(rollouts, monkeypatch):
    scorer, captions = world()
    reward = ready(rollouts, scorer)
    monkeypatch.setattr(scorer, "image_features", None)
    reward(rollouts.context(captions, ROWS))
    assert scorer.read == [captions]


def test_reward_without_a_scorer_uses_that_of_the_trainer(rollouts):
    scorer, captions = world()
    reward = SelfRetrieval()
    reward.prepare(rollouts.data([["a"]] * 8, scorer=scorer))
    expected = ready(rollouts, scorer)(rollouts.context(captions, ROWS))
    assert reward(rollouts.context(captions, ROWS)).equal(expected)


# Bad input


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"reward_kind": "rank"}, "reward_kind is 'rank'"),
        ({"distractor_scope": "world"}, "distractor_scope is 'world'"),
        ({"scorer_ensemble": "vote"}, "scorer_ensemble is 'vote'"),
        ({"similarity_scale": 0.0}, "similarity_scale is 0.0"),
        ({"similarity_scale": math.nan}, "similarity_scale is nan"),
        ({"similarity_scale": -1.0}, "similarity_scale is -1.0"),
        ({"num_hard_distractors": 0}, "num_hard_distractors is 0"),
    ],
)
def test_bad_arguments_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        SelfRetrieval(**kwargs)


def test_contradictory_arguments_are_errors_before_training(rollouts):
    scorer, _ = world()
    with pytest.raises(ValueError, match="needs a scorer"):
        SelfRetrieval().prepare(rollouts.data([["a"]]))
    with pytest.raises(ValueError, match="needs batches of bags"):
        SelfRetrieval(scorer, distractor_scope="bag").prepare(rollouts.data([["a"]] * 8))
    with pytest.raises(ValueError, match="features of 8 images for 3"):
        SelfRetrieval(scorer).prepare(rollouts.data([["a"]] * 3))


def test_incomplete_bags_are_refused(rollouts):
    scorer, captions = world()
    reward = ready(rollouts, scorer, distractor_scope="bag", bags=True)
    with pytest.raises(ValueError, match="this rollout has none"):
        reward(rollouts.context(captions, ROWS))
    with pytest.raises(ValueError, match="6 candidates are not a whole number of bags of 4"):
        reward(rollouts.context(captions, ROWS, bag_size=4))


def test_policy_with_longer_captions_than_the_scorer_reads_is_refused(rollouts):
    scorer, _ = world()
    reads = scorer.max_text_tokens - 2
    data = rollouts.data([["a"]] * 8)
    data.max_completion_length = reads
    SelfRetrieval(scorer).prepare(data)
    data.max_completion_length = reads + 1
    with pytest.raises(ValueError, match=f"Lower max_completion_length to {reads}"):
        SelfRetrieval(scorer).prepare(data)
    SelfRetrieval(scorer, allow_truncation_captions=True).prepare(data)
