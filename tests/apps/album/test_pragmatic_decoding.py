"""Pragmatic decoding against a plain loop over words and prefixes, and with beams of every family."""

import math

import pytest
import torch

from hf_captionrl.apps.album.candidates import PragmaticProcessor, pragmatic_captions
from tests.tiny import FAMILIES, tiny_captioner, tiny_images
from tests.tolerances import assert_close


def listener_by_loop(speakers, words):
    """log L(image | prefix) for the listener of one prefix, word by word; `speakers[image][step][word]` are probabilities."""
    belief = [1 / len(speakers)] * len(speakers)
    for step, word in enumerate(words):
        joint = [b * speaker[step][word] for b, speaker in zip(belief, speakers, strict=True)]
        belief = [j / sum(joint) for j in joint]
    return belief


@pytest.mark.parametrize("rationality", [0.0, 1.0, 2.5])
def test_scores_against_a_loop(rationality):
    generator = torch.Generator().manual_seed(0)
    K, V, T, groups = 3, 5, 4, 2
    speakers = torch.rand(groups, K, T, V, generator=generator).softmax(-1)
    words = torch.randint(0, V, (groups, T), generator=generator)
    processor = PragmaticProcessor(K, rationality=rationality)
    ids = torch.zeros(groups * K, 1, dtype=torch.long)
    for step in range(T):
        found = processor(ids, speakers[:, :, step].reshape(-1, V).log()).view(groups, K, V)
        for group in range(groups):
            table = speakers[group].tolist()
            expected = []
            for word in range(V):
                belief = listener_by_loop(table, [*words[group, :step].tolist(), word])
                expected.append(table[0][step][word] * belief[0] ** rationality)
            expected = torch.tensor([math.log(e / sum(expected)) for e in expected])
            for row in range(K):
                assert_close(found[group, row], expected, magnitude=10)
        ids = torch.cat([ids, words[:, step].repeat_interleave(K)[:, None]], 1)


def test_listener_follows_reordered_beams():
    """Two beams that swap places between steps keep their own listeners."""
    V, K = 4, 2
    first = torch.log_softmax(torch.randn(K * 2, V, generator=torch.Generator().manual_seed(1)), -1)
    second = torch.log_softmax(torch.randn(K * 2, V, generator=torch.Generator().manual_seed(2)), -1)
    start = torch.zeros(4, 1, dtype=torch.long)
    # Rows: image 0 beams 0 and 1, image 1 beams 0 and 1. In the first step both beams have the same prefix.
    first = first[[0, 0, 2, 2]]
    straight, crossed = PragmaticProcessor(K, 2), PragmaticProcessor(K, 2)
    straight(start, first)
    crossed(start, first)
    ids = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 2]])
    swapped = [1, 0, 3, 2]
    one = straight(ids, second)
    other = crossed(ids[swapped], second[swapped])
    assert torch.equal(one, other[swapped])
    # A third step, where the parents' order differs from the children's.
    third = torch.cat([ids, torch.tensor([[3], [3], [3], [3]])], 1)
    scores = torch.log_softmax(torch.randn(K * 2, V, generator=torch.Generator().manual_seed(3)), -1)
    assert torch.equal(straight(third, scores), crossed(third, scores))


@pytest.mark.parametrize("family", FAMILIES)
def test_without_rationality_it_is_beam_search(family):
    captioner = tiny_captioner(family)
    images = tiny_images(3)
    settings = {"num_beams": 3, "max_new_tokens": 6}
    found = pragmatic_captions(
        captioner, images, [[0, 1, 2], [1, 2, 0]], rationality=0, num_return_sequences=2, **settings
    )
    plain = captioner.generate(
        **captioner.encode_images(images[:2]), do_sample=False, num_return_sequences=2, **settings
    ).captions
    assert found == [plain[:2], plain[2:]]


def test_listener_prefers_what_others_would_not_say():
    """Both images may be called 'animal', only the target 'dog'; the captioner alone prefers 'animal'."""
    animal, dog, cat = range(3)
    speakers = torch.tensor([[0.6, 0.4, 1e-9], [0.6, 1e-9, 0.4]]).log()
    ids = torch.zeros(2, 1, dtype=torch.long)
    assert PragmaticProcessor(2, rationality=0)(ids, speakers).argmax(-1).tolist() == [animal, animal]
    assert PragmaticProcessor(2, rationality=1)(ids, speakers).argmax(-1).tolist() == [dog, dog]
    swapped = speakers.flip(0)
    assert PragmaticProcessor(2, rationality=1)(ids, swapped).argmax(-1).tolist() == [cat, cat]
