import math

import numpy as np
import pytest
import torch

from hf_captionrl.metrics import self_retrieval
from hf_captionrl.retrieval.ranking import concept_numbers
from tests.tolerances import assert_close, within


def features(rows: int, seed: int, dims: int = 8) -> torch.Tensor:
    return torch.randn(rows, dims, generator=torch.Generator().manual_seed(seed))


def plain_ranks(text, images, targets):
    text, images = (x / x.norm(dim=1, keepdim=True) for x in (text.double(), images.double()))
    scores = (text @ images.T).tolist()
    return [1 + sum(s >= row[t] for i, s in enumerate(row) if i != t) for row, t in zip(scores, targets, strict=True)]


def test_pool_equals_a_plain_loop():
    text, images = features(30, 0), features(30, 1)
    result = self_retrieval(7 * text, images * torch.linspace(0.1, 9, 30)[:, None])  # norms do not matter
    expected = plain_ranks(text, images, range(30))
    assert result["ranks"].tolist() == expected
    assert result["recall_at_5"] == pytest.approx(sum(r <= 5 for r in expected) / 30)
    assert result["mean_rank"] == pytest.approx(sum(expected) / 30)
    assert result["median_rank"] == np.median(expected)
    assert (result["num_captions"], result["pool_size"], result["num_duplicate_images"]) == (30, 30, 0)
    low, high = result["recall_at_1_ci"]
    assert low <= result["recall_at_1"] <= high
    assert "variant:pool|" in result["signature"]
    assert "ties:against" in result["signature"]


def test_rd100_is_the_exact_expectation():
    text, images = features(150, 0), features(150, 1)
    result = self_retrieval(text, images, num_distractors=99, ks=(1, 5))
    expected = [math.comb(150 - r, 99) / math.comb(149, 99) for r in plain_ranks(text, images, range(150))]
    assert result["recall_at_1"] == pytest.approx(sum(expected) / 150, rel=1e-9)
    assert_close(result["per_sample"]["recall_at_1"], expected, ulps=1024)
    options = {"num_distractors": 99, "protocol": "sampled", "repeats": 300, "ks": (1, 5), "num_bootstrap": 0}
    sampled = self_retrieval(text, images, **options)
    assert sampled["recall_at_5"] == within(result["recall_at_5"], 0.01)
    assert sampled["mean_rank"] == pytest.approx(result["mean_rank"], rel=0.01)
    assert len(sampled["ranks"]) == 300 * 150
    assert "rd100-sampled-300-seed-0" in sampled["signature"]


@pytest.mark.parametrize("options", [{}, {"num_distractors": 99}, {"num_distractors": 9, "protocol": "sampled"}])
def test_known_ranks_replace_the_comparison_of_all_images(options):
    text, images = features(150, 0), features(150, 1)
    known = plain_ranks(text, images, range(150))
    given = (None, known, [1] * 150)
    expected, found, best = (self_retrieval(text, images, pool_ranks=ranks, **options) for ranks in given)
    assert found.keys() == expected.keys()
    for key, value in found.items():
        if key == "per_sample":
            value, expected[key] = (np.array(list(part.values())) for part in (value, expected[key]))
        assert np.array_equal(value, expected[key]), key
    assert best["recall_at_1"] == 1 > expected["recall_at_1"]


def test_blocks_are_consecutive_and_the_short_last_one_is_dropped():
    text, images = features(25, 0), features(25, 1)
    result = self_retrieval(text, images, num_distractors=9, protocol="blocks")
    expected = [r for s in (0, 10) for r in plain_ranks(text[s : s + 10], images[s : s + 10], range(10))]
    assert result["ranks"].tolist() == expected
    assert result["captions"].tolist() == list(range(20))


def test_bags_average_over_all_captions_of_all_bags():
    text, images = features(12, 0), features(6, 1)
    targets = [i // 2 for i in range(12)]
    bags = [[0, 3, 5], [1, 2]]
    result = self_retrieval(text, images, targets=targets, bags=bags, ks=(1,))
    expected = []
    for number, bag in enumerate(bags):
        for row in bag:
            for caption in (2 * row, 2 * row + 1):
                rank = plain_ranks(text[caption : caption + 1], images[bag], [bag.index(row)])[0]
                expected.append((rank, caption, number))
    found = (result[key].tolist() for key in ("ranks", "captions", "groups"))
    assert list(zip(*found, strict=True)) == expected
    assert result["recall_at_1"] == pytest.approx(sum(rank == 1 for rank, *_ in expected) / 10)
    assert "variant:bags-2-3|" in result["signature"]


def test_sets_rank_each_caption_among_separate_candidates():
    text, images = features(2, 0), features(20, 1)
    result = self_retrieval(text, images, targets=[3, 15], sets=[range(10), range(10, 20)])
    expected = [plain_ranks(text[i : i + 1], images[10 * i : 10 * i + 10], [t])[0] for i, t in ((0, 3), (1, 5))]
    assert result["ranks"].tolist() == expected


def test_copies_in_the_pool_are_counted_and_can_be_merged():
    images = torch.eye(4)[[0, 1, 0, 2]]
    result = self_retrieval(images.clone(), images)
    assert result["num_duplicate_images"] == 1
    assert result["ranks"].tolist() == [2, 1, 2, 1]  # the copy ties, and ties count against the caption
    merged = self_retrieval(images.clone(), images, duplicates="merge")
    assert merged["ranks"].tolist() == [1, 1, 1, 1]
    assert merged["pool_size"] == 3
    bags = self_retrieval(images.clone(), images, duplicates="merge", bags=[[0, 1, 2], [2, 3]])
    assert bags["recall_at_1"] == 1.0


def test_features_are_accepted_in_every_form_and_invalid_rows_are_named():
    text, images = np.eye(3, dtype=np.float32)[:2], np.eye(3, dtype=np.float32)
    expected = self_retrieval(text, images, targets=[0, 1])["ranks"].tolist()
    for form in (torch.from_numpy, list, lambda rows: rows.tolist(), lambda rows: list(torch.from_numpy(rows))):
        assert self_retrieval(form(text), form(images), targets=[0, 1])["ranks"].tolist() == expected


@pytest.mark.parametrize("options", [{}, {"num_distractors": 3}, {"bags": [[0, 1], [2, 3]]}])
def test_recall_at_more_than_the_pool_is_1(options):
    found = self_retrieval(features(6, 0), features(6, 1), ks=(1, 2**31 - 1), num_bootstrap=0, **options)
    assert found["recall_at_1"] < 1
    assert found[f"recall_at_{2**31 - 1}"] == 1


def test_a_caption_retrieves_any_image_of_its_concept_among_other_concepts():
    text, images, things = features(30, 0), features(30, 1), [row % 7 if row < 20 else None for row in range(30)]
    numbers = [thing if thing is not None else row for row, thing in enumerate(things)]
    unit_text, unit_images = (x / x.norm(dim=1, keepdim=True) for x in (text.double(), images.double()))
    scores, expected = (unit_text @ unit_images.T).tolist(), []
    for row, line in enumerate(scores):
        best = {number: max(s for s, n in zip(line, numbers, strict=True) if n == number) for number in numbers}
        target = best.pop(numbers[row])
        expected.append(1 + sum(score >= target for score in best.values()))
    result = self_retrieval(text, images, concepts=things)
    assert result["ranks"].tolist() == expected
    assert result["pool_size"] == len(set(numbers)) == 17
    assert result["groups"].tolist()[:8] == [0, 1, 2, 3, 4, 5, 6, 0]  # intervals are over concepts
    among = self_retrieval(text, images, concepts=things, num_distractors=9)["recall_at_1"]
    assert among == pytest.approx(np.mean([math.comb(17 - r, 9) / math.comb(16, 9) for r in expected]))
    assert concept_numbers([float("nan"), float("nan"), "a", "a"]) == [0, 1, 2, 2]
    single = self_retrieval(text, images, concepts=range(100, 130))
    assert single["ranks"].tolist() == plain_ranks(text, images, range(30)) != expected
    assert single["signature"] == self_retrieval(text, images)["signature"] != result["signature"]


@pytest.mark.parametrize(
    "options", [{"concepts": [0, 1]}, {"bags": [[0, 2]]}, {"duplicates": "merge"}, {"sets": [[0, 1]] * 4}]
)
def test_what_concepts_cannot_do(options):
    with pytest.raises(ValueError, match="concept"):
        self_retrieval(features(4, 0), features(4, 1), **{"concepts": [0, 1, 0, 2], "targets": range(4), **options})
