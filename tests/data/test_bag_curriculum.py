"""BagCurriculumSampler: batches, epochs, processes, and resuming."""

import json

import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from torch.utils.data import DataLoader, Dataset

from hf_captionrl.data import PAPER_SCHEDULE, BagCurriculumSampler
from hf_captionrl.retrieval import nearest_neighbours, training_bags

# bagcurri of the reference vectors: bag size of each epoch from 0, and images per batch of 100.
SIZES = [2, 2, 2, 3, 3, 3, 3, 3, 5, 5, 7, 7, 10, 10, 15, 15, 15, 20, 20, 20]
IMAGES = {2: 100, 3: 99, 5: 100, 7: 98, 10: 100, 15: 90, 20: 100}
COUNT = 731


@pytest.fixture(scope="module")
def features():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(30, 12, generator=generator)
    return centres[torch.randint(30, (COUNT,), generator=generator)] + torch.randn(COUNT, 12, generator=generator)


@pytest.fixture(scope="module")
def neighbours(features):
    return nearest_neighbours(features, 60)[0]


def batches(sampler, epoch=None):
    if epoch is not None:
        sampler.set_epoch(epoch)
    return list(sampler)


def test_schedule_of_the_paper_in_every_epoch(neighbours):
    sampler = BagCurriculumSampler(neighbours, 100)
    assert dict(PAPER_SCHEDULE) == {3: 2, 8: 3, 10: 5, 12: 7, 14: 10, 17: 15, 20: 20}
    for epoch, size in enumerate([*SIZES, 20, 20]):  # later epochs keep the last size
        found = batches(sampler, epoch)
        assert sampler.bag_size == sampler.bag_size_at(epoch) == size
        assert sampler.bags_per_batch == 100 // size
        assert len(found) == len(sampler) == COUNT // 100
        assert {len(batch) for batch in found} == {IMAGES[size]}
        flat = [i for batch in found for i in batch]
        assert len(set(flat)) == len(flat)
        assert set(flat) <= set(range(COUNT))


def test_bags_are_contiguous_and_begin_with_their_query(neighbours):
    sampler, epoch = BagCurriculumSampler(neighbours, 100, seed=3), 9
    found = batches(sampler, epoch)
    size = sampler.bag_size
    order = np.random.default_rng([3, epoch]).permutation(COUNT)
    true = {tuple(bag) for bag in training_bags(neighbours, size, order=order).tolist()}
    seen = [tuple(batch[at : at + size]) for batch in found for at in range(0, len(batch), size)]
    assert set(seen) <= true
    assert len(set(seen)) == len(seen)
    # A bag holds neighbours of its first image, except a few bags of left-over images.
    lists = neighbours.tolist()
    near = np.mean([set(bag[1:]) <= set(lists[bag[0]]) for bag in seen])
    assert near > 0.7
    turned = np.mean([set(bag[:-1]) <= set(lists[bag[-1]]) for bag in seen])
    assert turned < near  # the last image is not the query


def test_an_epoch_is_a_function_of_seed_and_epoch(neighbours):
    first, second = (BagCurriculumSampler(neighbours, 50, seed=1) for _ in range(2))
    batches(first, 0), batches(first, 7)
    assert batches(first, 4) == batches(second, 4) == batches(second)
    assert batches(first, 4) != batches(first, 5)
    assert batches(first, 4) != batches(BagCurriculumSampler(neighbours, 50, seed=2), 4)
    assert batches(first, 4) == batches(BagCurriculumSampler(neighbours.numpy().astype("int32"), 50, seed=1), 4)


def test_leftovers_are_not_always_dropped(neighbours):
    sampler = BagCurriculumSampler(neighbours, 100, 15)
    counts = np.bincount([i for e in range(30) for batch in batches(sampler, e) for i in batch], minlength=COUNT)
    assert counts.min() > 10  # 630 of 731 images per epoch: 25.9 of 30 on average
    assert counts.max() <= 30


@pytest.mark.parametrize(("processes", "epoch"), [(2, 0), (2, 3), (3, 8)])
def test_parts_of_the_processes_form_the_global_batch(neighbours, processes, epoch):
    whole = BagCurriculumSampler(neighbours, 100, seed=1)
    parts = [
        BagCurriculumSampler(neighbours, 100, seed=1, process_index=p, num_processes=processes)
        for p in range(processes)
    ]
    size = whole.bag_size_at(epoch)
    share = 100 // size // processes
    # One process draws the same bags in the same order; bags that cannot be shared are dropped from each batch.
    bags = [bag for batch in batches(whole, epoch) for bag in zip(*[iter(batch)] * size, strict=True)]
    found = [batches(part, epoch) for part in parts]
    assert {len(part) for part in found} == {len(whole)}
    for number, pieces in enumerate(zip(*found, strict=True)):
        assert {len(piece) for piece in pieces} == {share * size}
        together = [i for piece in pieces for i in piece]
        start = number * share * processes
        assert together == [i for bag in bags[start : start + share * processes] for i in bag]
    if 100 // size % processes == 0:
        joined = [[i for piece in pieces for i in piece] for pieces in zip(*found, strict=True)]
        assert joined == batches(whole, epoch)


class Rows(Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return index


def test_resuming_in_the_middle_of_an_epoch(neighbours):
    for p in range(2):
        part = {"process_index": p, "num_processes": 2}
        straight = BagCurriculumSampler(neighbours, 50, seed=5, **part)
        expected = [batches(straight, epoch) for epoch in range(9, 12)]
        straight.set_epoch(9)
        saved = json.loads(json.dumps(straight.state_dict()))  # values that JSON can store
        resumed = BagCurriculumSampler(neighbours, 50, seed=5, **part)
        resumed.load_state_dict(saved)
        loader = DataLoader(Rows(), batch_sampler=resumed)
        assert (resumed.epoch, len(loader)) == (9, COUNT // 50)
        assert [b.tolist() for b in skip_first_batches(loader, 6)] == expected[0][6:]
        for epoch in (10, 11):
            resumed.set_epoch(epoch)
            assert [b.tolist() for b in loader] == expected[epoch - 9]


# --- variants -------------------------------------------------------------------------------------------------------


def test_random_distractors(neighbours):
    size = 5
    sampler = BagCurriculumSampler(None, 100, size, distractors="random", num_images=COUNT)
    first, second = batches(sampler, 0), batches(sampler, 1)
    assert first != second
    assert len(first) == COUNT // 100
    flat = [i for batch in first for i in batch]
    assert len(set(flat)) == len(flat) == 700
    lists, nearest = neighbours.tolist(), batches(BagCurriculumSampler(neighbours, 100, size))
    nearest = [i for batch in nearest for i in batch]
    near, other = (np.mean([f[at + 1] in lists[f[at]] for at in range(0, 700, size)]) for f in (nearest, flat))
    assert other < 0.25  # chance: 60 of 730 images are on the list
    assert near > 0.7
    # Neighbours may be passed, but are not used.
    same = BagCurriculumSampler(neighbours, 100, size, distractors="random")
    assert batches(same, 0) == first


# --- bad input ------------------------------------------------------------------------------------------------------


FULL = np.array([[i for i in range(300) if i != row] for row in range(300)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 39, "num_processes": 2}, "2 process.*Raise batch_size to 40"),
        ({"batch_size": COUNT + 1}, "batch_size"),
        ({"schedule": 62, "batch_size": 200}, "needs 61 ranked neighbours per image, of which 60"),
        ({"schedule": {}}, "schedule"),
        ({"schedule": {0: 2}}, "schedule"),
        ({"num_images": COUNT - 1}, "the data set has 730"),
        ({"distractors": "hard"}, "distractors"),
        ({"neighbours": None}, "distractors"),
        ({"neighbours": FULL, "batch_size": 300, "schedule": 250}, "of which 200 are used"),
    ],
)
def test_bad_input_is_refused_at_the_start(neighbours, arguments, message):
    with pytest.raises(ValueError, match=message):
        BagCurriculumSampler(**{"neighbours": neighbours, "batch_size": 100, **arguments})
