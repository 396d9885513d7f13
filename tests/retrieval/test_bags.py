"""Neighbours, bags and their files equal plain loops."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_captionrl.retrieval.bags import (
    BagFile,
    NeighbourFile,
    bag_similarities,
    candidate_bags,
    check_neighbours,
    curate_bags,
    load_bags,
    load_neighbours,
    save_bags,
    save_neighbours,
    training_bags,
)
from hf_captionrl.retrieval.neighbours import nearest_neighbours
from tests.retrieval.test_neighbours import clustered, cosine, plain_neighbours
from tests.tolerances import close

SIGNATURE = "clip@0123456789ab|float32|text:77"


def plain_training_bags(neighbours, order, size):
    """B.2 as written in the paper: bags that the neighbours cannot fill are omitted."""
    used, bags = set(), []
    for query in order:
        if query in used:
            continue
        members = [other for other in neighbours[query] if other not in used][: size - 1]
        if len(members) == size - 1:
            bags.append([query, *members])
            used.update(bags[-1])
    return bags


def test_algorithm_1_and_2_line_by_line():
    features = clustered(80)
    unit = [row.tolist() for row in torch.nn.functional.normalize(features.double(), dim=1)]
    bags, alphas = [], []
    for r, row in enumerate(plain_neighbours(features, 4)):
        bags.append([r, *(j for j, _ in row)])
        alphas.append(sum(cosine(unit[r], unit[j]) for j in bags[r][1:]) / 4)
    found, similarities = candidate_bags(features, 5)
    assert found.tolist() == bags
    assert similarities.tolist() == close(alphas, dtype="float32")
    assert bag_similarities(features, found).tolist() == close(alphas, dtype="float32")

    visited, chosen = set(), []
    for _, r in sorted((-alpha, r) for r, alpha in enumerate(alphas)):
        if not visited & set(bags[r]):
            visited |= set(bags[r])
            chosen.append(bags[r])
    curated, kept = curate_bags(found, similarities)
    assert curated.tolist() == chosen
    assert kept.tolist() == sorted(kept.tolist(), reverse=True)
    assert len(set(curated.flatten().tolist())) == curated.numel()
    assert len(curated) < len(bags)


def test_curation_by_hand_with_a_tie():
    bags = [[0, 1], [1, 2], [3, 4], [2, 5], [5, 6]]
    curated, similarities = curate_bags(bags, [0.5, 0.9, 0.4, 0.7, 0.4])
    assert curated.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert similarities.tolist() == pytest.approx([0.9, 0.4, 0.4])


@pytest.mark.parametrize(("size", "with_features"), [(3, False), (7, True)])
def test_training_bags_equal_the_paper_followed_by_leftovers(size, with_features):
    features = clustered(403)
    neighbours, _ = nearest_neighbours(features, 12)
    order = np.random.default_rng(5).permutation(403)
    bags = training_bags(neighbours, size, order=order, features=features if with_features else None)
    expected = plain_training_bags(neighbours.tolist(), order.tolist(), size)
    assert bags[: len(expected)].tolist() == expected
    assert len(expected) < 403 // size  # there are leftovers
    assert bags.shape == (403 // size, size)
    assert len(set(bags.flatten().tolist())) == bags.numel()


def test_leftovers_get_their_nearest_free_images():
    features = clustered(300, noise=0.5)
    neighbours, _ = nearest_neighbours(features, 6)
    order = np.random.default_rng(2).permutation(300)
    taken = {i for bag in plain_training_bags(neighbours.tolist(), order.tolist(), 4) for i in bag}
    left = [int(i) for i in order if i not in taken]
    exact, free = [], list(left)
    unit = torch.nn.functional.normalize(features.double(), dim=1)
    while len(free) >= 4:
        query = free[0]
        ranked = sorted(free[1:], key=lambda j: (-float(unit[query] @ unit[j]), free.index(j)))
        exact.append([query, *ranked[:3]])
        free = [i for i in free if i not in exact[-1]]
    assert len(exact) > 3
    bags = training_bags(neighbours, 4, order=order, features=features)
    assert bags[-len(exact) :].tolist() == exact
    by_graph = training_bags(neighbours, 4, order=order)[-len(exact) :]
    assert set(by_graph.flatten().tolist()) <= set(left)
    shuffled = torch.tensor(left)[torch.randperm(len(left), generator=torch.Generator().manual_seed(0))]
    by_chance = bag_similarities(features, shuffled[: len(exact) * 4].view(-1, 4)).mean()
    # Neighbours of neighbours are closer than random images.
    assert bag_similarities(features, by_graph).mean() > by_chance


def test_leftovers_that_are_not_connected_still_get_a_bag():
    # Rows 0-2 and 3-5 are only neighbours among themselves: bags of 2 leave one of each over.
    neighbours = [[1, 2], [0, 2], [0, 1], [4, 5], [3, 5], [3, 4]]
    bags = training_bags(neighbours, 2, order=range(6))
    assert bags.tolist() == [[0, 1], [3, 4], [2, 5]]


def test_only_the_top_neighbours_are_used():
    neighbours, _ = nearest_neighbours(clustered(120), 40)
    order = list(range(120))
    few = training_bags(neighbours, 3, order=order, top=5).tolist()
    expected = plain_training_bags(neighbours[:, :5].tolist(), order, 3)
    assert few[: len(expected)] == expected
    assert few != training_bags(neighbours, 3, order=order).tolist()


def test_training_bags_depend_only_on_the_seed():
    neighbours, _ = nearest_neighbours(clustered(100), 20)
    assert torch.equal(training_bags(neighbours, 5, seed=1), training_bags(neighbours.numpy(), 5, seed=1))
    assert not torch.equal(training_bags(neighbours, 5, seed=1), training_bags(neighbours, 5, seed=2))
    alone = training_bags(neighbours, 1, seed=1)
    assert sorted(alone.flatten().tolist()) == list(range(100))


RANKED = nearest_neighbours(clustered(30), 6)[0]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: check_neighbours(RANKED.float()), "neighbours must be integers"),
        (lambda: check_neighbours(RANKED[:-1], 30), "neighbours of 29 images"),
        (lambda: check_neighbours(RANKED + 1), "outside the data set"),
        (lambda: check_neighbours(RANKED.index_fill(1, torch.tensor([0]), 3)), r"neighbours\[3\] contains the image"),
        (lambda: check_neighbours(torch.cat([RANKED, RANKED[:, :1]], dim=1)), r"neighbours\[0\] .* twice \(30"),
        (lambda: training_bags(RANKED, 8), "7 ranked neighbours"),
        (lambda: training_bags(RANKED, 31), "bag_size"),
    ],
)
def test_the_argument_is_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


BAGS = [["a", "b", "c"], ["d", "e"], ["f", "é\n", "h"]]
BAG_FILE = BagFile(BAGS, [0.9, 0.25, 0.125], SIGNATURE, "image", "training")


def test_bag_files_round_trip(tmp_path):
    path = save_bags(tmp_path / "new" / "bags.json", BAG_FILE)
    ids = ["h", "é\n", "f", "e", "d", "c", "b", "a", "z"]
    assert load_bags(path, image_ids=ids, signature=SIGNATURE) == BAG_FILE
    assert load_bags(path, signature="clip@0123456789ab") == BAG_FILE
    assert BAG_FILE.rows(ids) == {3: [[7, 6, 5], [2, 1, 0]], 2: [[4, 3]]}
    assert [p.name for p in path.parent.iterdir()] == ["bags.json"]


def test_bags_of_another_model_or_data_set_raise(tmp_path):
    path = save_bags(tmp_path / "bags.json", BAG_FILE)
    for other in ("clip@ba9876543210|float32|text:77", "clip@0123"):
        with pytest.raises(ValueError, match=f"was created with features of .*{other.split('|')[0]}"):
            load_bags(path, signature=other)
    with pytest.raises(ValueError, match="contains image 'd', which is not in the data set of 7"):
        load_bags(path, image_ids=[*"abcefh", "é\n"])


@pytest.mark.parametrize(
    ("bags", "kind", "message"),
    [
        ([["a", "a"]], "candidates", "each once"),
        ([["a", "b"], ["c", "a"]], "truematch", "'a' is in bag 1 and in another"),
        ([["a"]], "training", "at least 2"),
        ([], "training", "has 0 bags"),
    ],
)
def test_repeated_ids_raise_when_writing_and_reading(tmp_path, bags, kind, message):
    scores = [0.5] * len(bags)
    with pytest.raises(ValueError, match=message):
        save_bags(tmp_path / "bags.json", BagFile(bags, scores, SIGNATURE, "image", kind))
    head = {"kind": kind, "features": "image", "signature": SIGNATURE}
    rows = [{"image_ids": bag, "similarity": 0.5} for bag in bags]
    (tmp_path / "bags.json").write_text(json.dumps({**head, "bags": rows}))
    with pytest.raises(ValueError, match=message):
        load_bags(tmp_path / "bags.json")


def test_overlap_is_allowed_between_candidates_and_between_sizes(tmp_path):
    for kind, bags in (("candidates", [["a", "b"], ["b", "a"]]), ("truematch", [["a", "b"], ["b", "a", "c"]])):
        file = BagFile(bags, [0.5, 0.5], SIGNATURE, "image", kind)
        assert load_bags(save_bags(tmp_path / "bags.json", file)) == file


IDS = [f"image {i}" for i in range(30)]
NEIGHBOURS = NeighbourFile(*nearest_neighbours(clustered(30), 6), IDS, SIGNATURE, "image")


ONE = BagFile([["a", "b"]], [0.5], SIGNATURE)


def other_file(folder):
    (folder / "a.json").write_text("[1]")
    return folder / "a.json"


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda folder: load_bags(folder / "none.json"), "captionrl bags"),
        (lambda folder: load_neighbours(folder / "none.safetensors"), "--mode neighbours"),
        (lambda folder: load_bags(other_file(folder)), "is not a bag file"),
        (lambda folder: save_bags(folder / "bags.json", replace(ONE, similarities=[0.5] * 2)), "2 similarities"),
    ],
)
def test_files_that_cannot_be_read_or_written(tmp_path, call, named):
    with pytest.raises((ValueError, FileNotFoundError), match=named):
        call(tmp_path)


def test_neighbour_files_round_trip_and_follow_the_data_set(tmp_path):
    path = save_neighbours(tmp_path / "n.safetensors", NEIGHBOURS)
    same = load_neighbours(path, image_ids=IDS, signature=SIGNATURE)
    assert torch.equal(same.indices, NEIGHBOURS.indices)
    assert torch.equal(same.similarities, NEIGHBOURS.similarities)
    assert (same.signature, same.features) == (SIGNATURE, "image")
    order = np.random.default_rng(0).permutation(30).tolist()
    ids = [IDS[i] for i in order]
    moved = load_neighbours(path, image_ids=ids)
    assert moved.image_ids == ids
    for row, old in enumerate(order):
        named = [ids[i] for i in moved.indices[row].tolist()]
        assert named == [IDS[i] for i in NEIGHBOURS.indices[old].tolist()]
        assert torch.equal(moved.similarities[row], NEIGHBOURS.similarities[old])


def test_neighbours_of_another_model_or_data_set_raise(tmp_path):
    path = save_neighbours(tmp_path / "n.safetensors", NEIGHBOURS)
    for options, named in (
        ({"signature": "clip@other"}, "was created with features of"),
        ({"image_ids": IDS[:-1]}, "data set has 29 images: image 'image 29'"),
        ({"image_ids": [*IDS, "new"]}, "some are missing"),
    ):
        with pytest.raises(ValueError, match=named):
            load_neighbours(path, **options)
