"""Judges equal plain loops over a chat model whose probabilities are set by hand; bad answers are counted, never 0."""

import json
import math

import numpy as np
import pytest
from PIL import Image

from hf_captionrl.experimental.judges import clair, found_target, judge_metric, listener_log_probs, vqa_score
from hf_captionrl.utils.prompts import AnswerScores, Failure, KeptAnswers, Truncated
from tests.tiny.chat import HandSet, chat_backend
from tests.tolerances import assert_close, close

COLOURS = {"r": "red", "g": "green", "b": "blue"}
IMAGES = [Image.new("RGB", (16, 16), colour) for colour in COLOURS.values()]
CAPTIONS = ["a red car", "a green car", "a blue car"]


@pytest.fixture(scope="module")
def hand(tmp_path_factory):
    """The backend of a tiny LLaVA whose logits each test sets."""
    return HandSet(chat_backend("llava", tmp_path_factory.mktemp("chat")))


@pytest.fixture
def chat(hand):
    return hand.backend


def says_yes(colours, text):
    """Yes where the sentence names the colour of the picture, more surely for red."""
    right = any(f"{COLOURS[colour]} car" in text for colour in colours)
    return {"Y": (3.0 if colours == ["r"] else 1.5) if right else -2.0, "N": 0.5, "e": 1.0}


def test_vqa_score_is_the_probability_of_yes(hand, chat):
    hand.decide = says_yes
    captions, images = [*CAPTIONS, "a red car"], [*IMAGES, IMAGES[2]]
    found = vqa_score(captions, images, chat)
    expected = []
    for caption, colour in zip(captions, "rgbb", strict=True):
        yes, no = (math.exp(hand.log_prob([colour], caption, answer)) for answer in ("Yes", "No"))
        expected.append(yes / (yes + no))
    assert_close(found["per_sample"], expected, dtype="float32")
    assert found["vqa_score"] == close(np.mean(expected), dtype="float32")
    assert found["num_failed"] == 0
    assert expected[0] > expected[1] == expected[2] > expected[3]  # the judge sees the picture
    assert "revision:" in found["signature"]


def finds(colours, text):
    """Names the letter of the picture whose colour the sentence has, and prefers the first."""
    letters = {"A": 0.7} | {chr(ord("A") + i): 0.0 for i in range(1, len(colours))}
    for letter, colour in zip("ABC", colours, strict=False):
        if f"{COLOURS[colour]} car" in text:
            letters[letter] += 2.0
    return letters


@pytest.mark.parametrize("num_orders", [1, 2, 3, 9])
def test_listener_that_sees_all_images_equals_a_loop_over_orders(hand, chat, num_orders):
    hand.decide = finds
    captions = [*CAPTIONS, "a car"]
    bags = [IMAGES, IMAGES[:2], IMAGES, IMAGES]
    names = ["rgb", "rg", "rgb", "rgb"]
    found = listener_log_probs(captions, bags, chat, num_orders=num_orders)
    for caption, name, log_probs in zip(captions, names, found, strict=True):
        K, seen = len(name), []
        for start in range(K):  # every rotation; the hash of the caption chooses among them
            turned = name[start:] + name[:start]
            raw = [hand.log_prob(list(turned), caption, letter) for letter in "ABC"[:K]]
            total = sum(map(math.exp, raw))
            by_colour = {colour: math.exp(value) / total for colour, value in zip(turned, raw, strict=True)}
            seen.append([by_colour[colour] for colour in name])
        used = min(num_orders, K)
        options = [
            np.mean([seen[(first + turn * K // used) % K] for turn in range(used)], axis=0) for first in range(K)
        ]
        assert np.exp(log_probs).sum() == close(1.0)
        assert min(np.abs(np.exp(log_probs) - option).max() for option in options) < 1e-5
    if num_orders >= 3:  # without its preference for a place, the listener is unsure about "a car"
        assert_close(np.exp(found[3]), [1 / 3] * 3, dtype="float32")
        assert not found_target(found[3], 0)


def test_decided_answers_do_not_follow_the_caption_by_chance(hand, chat):
    """Negative control: a listener that ignores the caption is at chance, and its preference does not count."""
    hand.decide = lambda colours, text: {"A": 3.0}
    found = listener_log_probs(CAPTIONS, [IMAGES] * 3, chat, num_orders=3)
    assert_close(found, np.full((3, 3), math.log(1 / 3)), dtype="float32")
    assert not any(found_target(row, place) for place, row in enumerate(found))  # all are ties


class Written(AnswerScores):
    """A judge that writes what it is told to, attempt by attempt."""

    model, revision, is_multimodal = "written", "1", True

    def __init__(self, *attempts):
        self.attempts, self.asked = attempts, []

    def complete(self, prompts):
        for position, prompt in enumerate(prompts):
            self.asked.append(prompt)
            yield position, self.attempts[prompt.attempt](prompt)

    def score_answers(self, prompts, answers):
        for position, prompt in enumerate(prompts):
            failed = "green" in prompt.user
            value = math.nan if "black" in prompt.user else -0.5
            yield position, Failure("backend_failed", "timeout") if failed else [value] * len(answers)


REFERENCES = [["a car", "one red car"], ["grass"], ["the sea"]]


def test_clair_reads_json_alone_and_asks_once_more():
    first = {"red": '{"score": 85, "reason": "same"}', "green": "I would say 70", "blue": "I cannot help with that."}
    again = {"green": '```json\n{"score": 40.5}\n```', "blue": '{"score": "90"}'}
    of = lambda answers: lambda prompt: next(answers[c] for c in answers if f"a {c} car" in prompt.user)  # noqa: E731
    judge = Written(of(first), of(again))
    found = clair(CAPTIONS, REFERENCES, judge)
    assert found["per_sample"].tolist()[:2] == [0.85, 0.405]
    assert math.isnan(found["per_sample"][2])
    assert found["clair"] == close((0.85 + 0.405) / 2)  # a failure is not 0
    assert (found["num_failed"], len(found["failures"])) == (1, 1)
    assert "caption 2" in found["failures"][0]
    assert found["reasons"] == ["same", "", ""]
    assert [prompt.attempt for prompt in judge.asked] == [0, 0, 0, 1, 1]
    assert "- a car\n- one red car" in judge.asked[0].user


@pytest.mark.parametrize(
    "answer",
    [
        *(
            "",
            "85",
            "[85]",
            '{"score": 101}',
            '{"score": -1}',
            '{"score": true}',
            '{"score": null}',
            '{"reason": "x"}',
        ),
        *('{"score": 85} and more', '{"score": NaN}', "[" * 5000, Truncated('{"score": 85')),
        Failure("backend_failed", "no answer in 6 tries"),
    ],
)
def test_nonsense_and_refusals_are_failures(answer):
    judge = Written(lambda prompt: answer, lambda prompt: answer)
    found = clair(["a"], [["b"]], judge)
    assert found["clair"] is None
    assert found["num_failed"] == 1
    assert len(judge.asked) == (1 if isinstance(answer, Failure) else 2)  # a backend repeats its requests itself


def test_captions_without_probabilities_are_left_out_and_counted():
    judge = Written()
    found = vqa_score(CAPTIONS, IMAGES, judge)
    assert (found["vqa_score"], found["num_failed"]) == (0.5, 1)
    assert math.isnan(found["per_sample"][1])
    assert vqa_score(["a black car"], IMAGES[:1], judge)["num_failed"] == 1  # a model that overflows has none
    found, failed = listener_log_probs(CAPTIONS[:2], [IMAGES] * 2, judge)
    assert found.shape == (3,)
    assert isinstance(failed, Failure)
    with pytest.raises(
        ValueError, match="vqa_score: captions without a rating: 1"
    ):  # every number is compared with a rating
        judge_metric("vqa_score", judge)(CAPTIONS, REFERENCES, IMAGES)
    with pytest.raises(ValueError, match="--judge"):
        judge_metric("clair", None)
    judge = Written(lambda prompt: '{"score": 50}')
    assert judge_metric("clair", judge)(CAPTIONS, REFERENCES, []).tolist() == [0.5] * 3


def test_kept_answers_serve_every_metric(hand, chat, tmp_path):
    hand.decide = finds
    with KeptAnswers(chat, tmp_path / "kept.jsonl") as judge:
        first = [vqa_score(CAPTIONS, IMAGES, judge)["per_sample"], listener_log_probs(CAPTIONS, [IMAGES] * 3, judge)]
        forwards = hand.forwards
        second = [vqa_score(CAPTIONS, IMAGES, judge)["per_sample"], listener_log_probs(CAPTIONS, [IMAGES] * 3, judge)]
    assert (hand.forwards, judge.num_requests) == (forwards, 6)
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(one, other)
    assert len({json.loads(line)["image_id"] for line in (tmp_path / "kept.jsonl").read_text().splitlines()}) > 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda judge: vqa_score(CAPTIONS, IMAGES[:2], judge), "3 captions and 2 images"),
        (lambda judge: clair(CAPTIONS, [["a"]], judge), "3 captions and 1 lists of references"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(Written())


def test_rounding_does_not_break_a_tie():
    thirds = np.log([1 / 3, 1 / 3, 1 / 3 + 1e-16])
    assert thirds[2] > thirds[0]
    assert not found_target(thirds, 2)
    assert found_target(np.log([0.3, 0.3, 0.4]), 2)
