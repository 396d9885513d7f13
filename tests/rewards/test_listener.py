"""The reward of a listener equals a plain loop over a chat model whose probabilities are set by hand."""

import math

import pytest
import torch
from PIL import Image

from hf_captionrl.experimental.listener import ListenerReward
from hf_captionrl.rewards import WeightedRewards
from hf_captionrl.utils.prompts import AnswerScores, Failure
from tests.tiny.chat import HandSet, chat_backend
from tests.tolerances import assert_close

COLOURS = {"r": "red", "g": "green", "b": "blue"}
BATCH = "rgbr"  # colours of the images of a batch
G = 2


@pytest.fixture(scope="module")
def hand(tmp_path_factory):
    def decide(colours, text):
        """The letter of each picture of the colour that the sentence names."""
        right = [f"{COLOURS[colour]} car" in text for colour in colours]
        return {letter: 2.0 * own for letter, own in zip("ABCD", right, strict=False)}

    return HandSet(chat_backend("llava", tmp_path_factory.mktemp("chat")), decide)


def context_of(rollouts, captions, batch=BATCH, **more):
    images = [Image.new("RGB", (16, 16), COLOURS[colour]) for colour in batch]
    return rollouts.context(captions, list(range(len(batch))), columns={"image": images}, **more)


CAPTIONS = ["a red car", "a green car", "a green car", "a car", "a blue car", "a red car", "a red car", "..."]


def plain(hand, caption, target, names):
    """Log-probability of the target among the named images; the letters' order does not matter if all orders are averaged."""
    found = []
    for start in range(len(names)):
        turned = names[start:] + names[:start]
        raw = [hand.log_prob(list(turned), caption, letter) for letter in "ABCD"[: len(names)]]
        place = (target - start) % len(names)
        found.append(math.exp(raw[place]) / sum(map(math.exp, raw)))
    return math.log(sum(found) / len(found))


@pytest.mark.parametrize(("bag_size", "num_images"), [(0, 3), (0, 9), (2, 3)])
def test_reward_equals_a_loop(hand, rollouts, bag_size, num_images):
    reward = ListenerReward(hand.backend, num_images=num_images, num_orders=9)
    context = context_of(rollouts, CAPTIONS, bag_size=bag_size)
    found = reward(context)
    expected, hits = [], []
    for n, caption in enumerate(CAPTIONS[:-1]):
        i = n // G
        if bag_size:
            rows, target = [i // 2 * 2, i // 2 * 2 + 1], i % 2
        else:
            rows, target = [(i + k) % 4 for k in range(min(num_images, 4))], 0
        names = "".join(BATCH[row] for row in rows)
        each = [plain(hand, caption, place, names) for place in range(len(names))]
        expected.append(each[target])
        # A copy of the target in the batch is a tie, which counts against the caption.
        hits.append(all(value < each[target] - 1e-6 for place, value in enumerate(each) if place != target))
    assert_close(found[:-1], expected, dtype="float32", check_dtype=False)
    assert found[-1].isnan()  # no word
    assert found[0] > found[1]  # the right colour is worth more
    assert 0 < sum(hits) < 7
    assert context.statistics["listener/accuracy"] == hits
    assert context.statistics["listener/failed"] == 0


def test_through_reward_funcs_captions_without_answer_get_the_floor(rollouts):
    class Refuses(AnswerScores):
        model, revision, is_multimodal = "refuses", "1", True

        def score_answers(self, prompts, answers):
            for position, prompt in enumerate(prompts):
                yield position, Failure("backend_rejected", "no") if "green" in prompt.user else [0.0] * len(answers)

    rewards = WeightedRewards([ListenerReward(Refuses(), num_images=4)])
    context = context_of(rollouts, CAPTIONS)
    found = rewards(context)[:, 0]
    floor, unsure = 2 * math.log(1 / 4), math.log(1 / 4)
    assert_close(found, torch.tensor([unsure, floor, floor, *[unsure] * 4, floor], dtype=torch.float64))
    assert context.statistics["listener/failed"] == 2
    assert context.statistics["rewards/listener/undefined"] == 3
