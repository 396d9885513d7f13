import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_captionrl.rewards import (
    LengthPenalty,
    PairwiseDiversity,
    RepetitionPenalty,
    TruncationPenalty,
    bleu34_distance,
    edit_distance,
    make_baseline,
    repeated_share,
)
from tests.text.test_bleu import plain_bleu
from tests.tolerances import assert_close, close

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "diversity.json").read_text())
SETS = VECTORS["caption_sets"]
FLAT = [caption for captions in SETS for caption in captions]


def ready(rollouts, *args, scorer=None, **kwargs) -> PairwiseDiversity:
    reward = PairwiseDiversity(*args, **kwargs)
    reward.prepare(rollouts.data([["a"]], scorer=scorer))
    return reward


def plain_bleu34(a: list, b: list) -> float:
    if a == b:
        return 0.0
    scores = plain_bleu(a, [b])
    return 1 - (scores[2] + scores[3]) / 2


def plain_edit(a: list, b: list) -> float:
    table = [[i + j if not i * j else 0 for j in range(len(b) + 1)] for i in range(len(a) + 1)]
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            change = table[i - 1][j - 1] + (a[i - 1] != b[j - 1])
            table[i][j] = min(change, table[i - 1][j] + 1, table[i][j - 1] + 1)
    return table[-1][-1] / max(len(a), len(b), 1)


def random_groups(seed: int, groups: int = 6, size: int = 4):
    """Captions over two words with different lengths, some empty, some equal; random ids behind the mask."""
    rng = random.Random(seed)
    rows = [[rng.randrange(1, 3) for _ in range(rng.choice([0, 1, 3, 4, 6, 8]))] for _ in range(groups * size)]
    rows[1], rows[size + 2] = list(rows[0]), list(rows[size])
    mask = torch.arange(8) < torch.tensor([len(row) for row in rows])[:, None]
    ids = torch.tensor([row + [rng.randrange(1, 3) for _ in range(8 - len(row))] for row in rows])
    return rows, ids, mask


@pytest.mark.parametrize(
    ("distance", "plain"), [(bleu34_distance, plain_bleu34), (edit_distance, plain_edit)], ids=["bleu34", "edit"]
)
def test_distances_equal_plain_loops(distance, plain):
    rows, ids, mask = random_groups(0)
    found = distance(ids, mask, 4)
    assert found.shape == (6, 4, 4)
    assert found.dtype == torch.float64
    for b in range(6):
        for j in range(4):
            for k in range(4):
                assert float(found[b, j, k]) == close(plain(rows[4 * b + j], rows[4 * b + k]))
    assert found.min() >= 0
    assert found.max() <= 1
    assert torch.diagonal(found, dim1=1, dim2=2).abs().max() == 0


@pytest.mark.parametrize(
    ("name", "plain", "include_eos"), [("bleu34", plain_bleu34, False), ("edit", plain_edit, True)]
)
def test_reward_and_baseline_are_those_of_sle(rollouts, name, plain, include_eos):
    """`(2/s) sum_k d(y_j, y_k)` against `(2/s^2) sum_jk d`."""
    reward = ready(rollouts, name, include_eos=include_eos)
    found = reward(rollouts.context(FLAT, [0, 1, 2])).view(3, 5)
    advantages = make_baseline(reward.baseline, 5)(found)
    for b, captions in enumerate(SETS):
        rows = [[*caption.split(), *(["<end>"] if include_eos else [])] for caption in captions]
        distances = [[plain(a, c) for c in rows] for a in rows]
        mean = 2 / 5**2 * sum(map(sum, distances))
        for j in range(5):
            assert float(found[b, j]) == close(2 / 5 * sum(distances[j]))
            assert float(advantages[b, j]) == close(2 / 5 * sum(distances[j]) - mean, ulps=32, magnitude=2)
    assert found[1].abs().max() == 0


def test_multi_reference_equals_the_authors_numbers(rollouts):
    reward = ready(rollouts, diversity="multi_reference")
    found = reward(rollouts.context(FLAT, [0, 1, 2])).view(3, 5)
    expected = torch.tensor(VECTORS["code_diverse_reward"], dtype=torch.float64)
    assert_close(found, expected, dtype="float32")
    assert reward.baseline == "group_floor"
    advantages = make_baseline(reward.baseline, 5)(found)
    assert_close((found - advantages)[:, 0], torch.tensor(VECTORS["code_baseline"]).double(), dtype="float32")
    expected = torch.tensor(VECTORS["code_diverse_advantage"], dtype=torch.float64)
    assert_close(advantages, expected, dtype="float32")
    # alpha = 0.75: the authors' weights are on the advantages, not on the rewards below the floor.
    quality = torch.tensor(VECTORS["quality_advantage"], dtype=torch.float64)
    expected = torch.tensor(VECTORS["combined_reward_alpha_div_0.25"], dtype=torch.float64)
    assert_close(0.75 * quality + 0.25 * advantages, expected, dtype="float32")
    wrong = 0.75 * quality + make_baseline(reward.baseline, 5)(0.25 * found)
    assert (wrong - expected).abs().max() > 0.05


class Given(PairwiseDiversity):
    """Diversity by the distances of the context."""

    def distances(self, context):
        return context.distances


def given(diversity: str, distances: torch.Tensor) -> torch.Tensor:
    """Rewards of the captions of one image by their distances."""
    return Given(diversity=diversity)(SimpleNamespace(group_size=len(distances), distances=distances[None]))


def expected_gradient(diversity: str, size: int, distance: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Mean over all groups of `size` samples of `mean_j advantage_j grad log p(y_j)`, weighted by their probability."""
    total = torch.zeros_like(logits)
    log_p = logits.log_softmax(0)
    scores = torch.autograd.functional.jacobian(lambda x: x.log_softmax(0), logits)  # (V, V)
    for group in itertools.product(range(len(logits)), repeat=size):
        rows = torch.tensor(group)
        values = given(diversity, distance[rows][:, rows])
        advantages = values - values.mean()  # its baseline, `group_mean`
        total += log_p[rows].sum().exp() * (advantages[:, None] * scores[rows]).mean(0)
    return total


@pytest.mark.parametrize("size", [3, 4, 5])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_gradients_of_all_groups_of_samples(size, is_symmetric):
    """Against the gradient of the mean distance, by enumeration of all samples of a tiny policy."""
    distance = torch.tensor([[0.0, 0.9, 0.3], [0.9, 0.0, 0.6], [0.3, 0.6, 0.0]], dtype=torch.float64)
    if not is_symmetric:
        distance = distance + torch.tensor([[0.0, 0.1, 0.5], [0.0, 0.0, -0.2], [0.0, 0.0, 0.0]], dtype=torch.float64)
    logits = torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64, requires_grad=True)
    p = logits.softmax(0)
    (true,) = torch.autograd.grad((p[:, None] * distance * p).sum(), logits)
    logits = logits.detach()
    assert PairwiseDiversity(diversity="unbiased").baseline == "group_mean"
    torch.testing.assert_close(expected_gradient("unbiased", size, distance, logits), true)
    papers = expected_gradient("pairwise", size, distance, logits)
    if is_symmetric:
        torch.testing.assert_close(papers, true * (size - 1) * (size - 2) / size**2)
    else:
        assert (papers - true * (size - 1) * (size - 2) / size**2).abs().max() > 0.005


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"distance": "jaccard"}, "distance"),
        ({"diversity": "triple"}, "diversity"),
        ({"diversity": "multi_reference", "distance": "edit"}, "distance"),
        ({}, "num_generations=1"),
    ],
)
def test_bad_arguments_are_refused(rollouts, kwargs, named):
    with pytest.raises(ValueError, match=named):
        ready(rollouts, **kwargs)(rollouts.context(["a cat", "a dog"], [0, 1]))


def test_repetition_finds_the_hacked_caption(rollouts):
    hacked = "a blue and blue blue blue and yellow blue"
    context = rollouts.context([hacked, "a cat left of two red dogs"], [0, 1])
    penalty = RepetitionPenalty()(context)
    assert penalty.tolist() == pytest.approx([-2 / 9, 0])
    assert RepetitionPenalty(1)(context)[0] < penalty[0]
    assert repeated_share(torch.zeros(2, 3).long(), torch.zeros(2, 3)).tolist() == [0, 0]


def test_long_and_truncated_captions_are_penalised(rollouts):
    context = rollouts.context(["a b c", "a b c d e f"], [0, 1])  # and the end token
    context.ended = torch.tensor([True, False])
    assert TruncationPenalty()(context).tolist() == [0, -1]
    assert LengthPenalty(4)(context).tolist() == pytest.approx([0, -3 / 4])
