"""Precision, recall and F1 of claims against plain loops; a checker by a language model with answers set by hand; credit of tokens."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hf_captionrl.experimental.claim_rewards import (
    CheckedCaption,
    ClaimReward,
    LanguageModelChecker,
    listed_claims,
    verdict,
)
from hf_captionrl.rewards import LengthPenalty
from hf_captionrl.scenes import Facts, check, full_caption
from hf_captionrl.scenes.truth_checker import mark_caption
from hf_captionrl.utils.prompts import Truncated

PIGS = Facts("pig", 2, "small", "sideways", "top", "blue", "mushroom", "left of")
APPLE = Facts("apple", 1, "large", "upright", "bottom", "gray")
CAPTIONS = [
    "two large pigs on a blue background",
    full_caption(PIGS),
    "a nice picture",
    "a large apple",
    "two apples at the top",
    "an apple in the rain",
]
FACTS = [PIGS.to_dict()] * 3 + [APPLE.to_dict()] * 3


class Spoken:
    """A backend that answers by a function of the question, and counts."""

    model, revision = "spoken", "1"

    def __init__(self, answer, is_multimodal=False):
        self.answer, self.is_multimodal, self.asked = answer, is_multimodal, []

    def complete(self, prompts):
        for position, prompt in enumerate(prompts):
            self.asked.append(prompt)
            yield position, self.answer(prompt)


def scene_context(rollouts, captions=CAPTIONS, **kwargs):
    """Three captions of each of two scenes."""
    columns = {"facts": [PIGS.to_dict(), APPLE.to_dict()], "captions": [["two pigs"], ["an apple"]]}
    return rollouts.context(captions, [0, 1], columns=columns, **kwargs)


def by_hand(caption, facts):
    found = check(caption, facts)
    right, wrong = len(found.right), len(found.wrong)
    precision = right / (right + wrong) if right + wrong else 0.0
    recall = len(found.recalled) / (len(found.recalled) + len(found.missed))
    return precision, recall, 2 * precision * recall / (precision + recall) if precision + recall else 0.0


@pytest.mark.parametrize(("score", "place"), [("precision", 0), ("recall", 1), ("f1", 2)])
def test_scores_of_scenes_equal_a_loop(rollouts, score, place):
    reward = ClaimReward(score=score)
    expected = [by_hand(caption, facts)[place] for caption, facts in zip(CAPTIONS, FACTS, strict=True)]
    context = scene_context(rollouts)
    assert reward(context).tolist() == pytest.approx(expected)
    assert expected[1] == 1.0
    assert len(set(expected)) > 3  # a reward that distinguishes captions
    assert np.mean(context.statistics["claims/wrong"]) == pytest.approx(
        sum(len(check(c, f).wrong) for c, f in zip(CAPTIONS, FACTS, strict=True))
        / sum(len(check(c, f).wrong + check(c, f).right) for c, f in zip(CAPTIONS, FACTS, strict=True))
    )
    # Negative control: with the facts of the other scene, full captions are false.
    context.columns = {"facts": [APPLE.to_dict(), PIGS.to_dict()]}
    assert reward(rollouts.context(CAPTIONS, [0, 1], columns=context.columns))[1] < 0.5


REFUSED = [
    (lambda: ClaimReward(credit="word"), "credit"),
    (lambda: LengthPenalty().as_function(), "captions and columns"),
    (lambda: ClaimReward(lambda completions: [CheckedCaption([])]).as_function()(["a"]), "score"),
    (lambda: ClaimReward(lambda completions: []).as_function()(["a"]), "checker"),
]


@pytest.mark.parametrize(("call", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_bad_input_is_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


# --- Credit of tokens ---


def words_decoded(rollouts):
    """The tokenizer's way back: words by id, without the end token."""

    def decode(ids, mask):
        names = {number: word for word, number in rollouts.words.ids.items()}
        rows = zip(ids.tolist(), mask.tolist(), strict=True)
        return [" ".join(names[i] for i, keep in zip(row, kept, strict=True) if keep and i) for row, kept in rows]

    return decode


def test_credit_equals_a_loop_over_marks(rollouts):
    captions = ["two large pigs on a yellow background", "some pigs", "nothing at all", *CAPTIONS[3:]]
    context = scene_context(rollouts, captions)
    reward = ClaimReward(score="precision", credit="claim")
    reward.prepare(rollouts.data([["a"]], columns=["facts"], decode=words_decoded(rollouts)))
    precision, credit = reward(context), reward.token_credit(context)
    assert credit.shape == context.ids.shape
    seen = set()
    for n, (caption, facts) in enumerate(zip(captions, FACTS, strict=True)):
        marks, at = mark_caption(caption, facts), 0
        for t, word in enumerate(caption.split()):
            inside = [m for m in marks if m.start <= at < m.end]
            truths = [float(m.verdict == "right") for m in inside]
            expected = sum(truths) / len(truths) - float(precision[n]) if truths else 0.0
            assert float(credit[n, t]) == pytest.approx(expected), (caption, word)
            seen.add(round(expected, 3))
            at += len(word) + 1
        assert (credit[n, len(caption.split()) :] == 0).all()  # the end token and the padding
    assert len(seen) > 4
    # With the mean of the group as baseline, a token has the verdict of its claim minus the group's mean precision.
    advantages = precision.view(2, 3) - precision.view(2, 3).mean(1, keepdim=True)
    of_large = advantages.flatten()[0] + credit[0, 1]
    assert float(of_large) == pytest.approx(0.0 - float(precision[:3].mean()))


# --- A language model as checker ---


@pytest.mark.parametrize(
    ("answer", "claims", "said"),
    [
        ("- two pigs\n- a blue background\n- two pigs", ["two pigs", "a blue background"], None),
        ("Here they are:\n* one\n  • two  ", ["one", "two"], None),
        ("None.", [], None),
        ("I cannot help with that.", None, None),
        ("", None, None),
        (None, None, None),
        ("Yes.", None, "yes"),
        ("no, it is red", None, "no"),
        ("Unclear", None, "unclear"),
        ("It is not: yes", None, None),
        ("Yes and no", None, None),
        ("Yesterday", None, None),
    ],
)
def test_answers_are_read_strictly(answer, claims, said):
    assert listed_claims(answer) == claims
    assert verdict(answer) == said


def world(prompt):
    """Splits at " and "; true is what the descriptions, or the picture of a red cat, contain."""
    text = prompt.user
    if prompt.stage == "split":
        said = text.partition("Description: ")[2]
        parts = [part.strip("- ") for line in said.splitlines() for part in line.split(" and ")]
        return "gibberish" if "garbled" in said else "\n".join(f"- {part}" for part in parts)
    claim = text.rpartition("Statement: ")[2]
    if claim == "odd":
        return "perhaps"
    if claim == "endless":
        return Truncated("Well")
    told = (
        "a cat red"
        if "Look at the picture" in text
        else "\n".join(line for line in text.splitlines() if line.startswith("- "))
    )
    return "unclear" if claim == "dark" else "Yes." if claim in told else "No."


def numbers(found):
    return None if found is None else ([(c.text, c.is_true) for c in found.claims], found.num_stated, found.num_facts)


def test_a_language_model_checks_against_references(tmp_path):
    backend = Spoken(world)
    checker = LanguageModelChecker(backend, tmp_path / "answers.jsonl")
    captions = ["a cat and a dog and dark", "garbled", "odd and endless", "", "a cat and a cat and x and y and a mat"]
    found = checker(captions, [["a cat and a mat", "a mouse"]] * 5)
    assert numbers(found[0]) == ([("a cat", True), ("a dog", False), ("dark", None)], 1, 3)
    assert found[1] is None
    assert numbers(found[2]) == ([("odd", None), ("endless", None)], 0, 3)
    assert numbers(found[3]) == ([], 0, 3)
    assert numbers(found[4]) == ([("a cat", True), ("x", False), ("y", False), ("a mat", True)], 2, 3)
    assert [(c.start, c.end) for c in found[0].claims] == [(0, 5), (10, 15), (20, 24)]
    assert checker.num_unreadable == 3  # the caption, and two verdicts; "unclear" is an answer
    assert not any(prompt.user.endswith(": ") for prompt in backend.asked)  # an empty caption has nothing to split
    # Nothing is asked twice, also by another process with the same file.
    number = len(backend.asked)
    assert len({prompt.hash for prompt in backend.asked}) == number
    checker.backend.close()
    again = LanguageModelChecker(backend, tmp_path / "answers.jsonl")
    assert [numbers(one) for one in again(captions, [["a cat and a mat", "a mouse"]] * 5)] == list(map(numbers, found))
    assert len(backend.asked) == number


def test_a_vision_model_checks_against_the_image(tmp_path):
    backend = Spoken(world, is_multimodal=True)
    checker = LanguageModelChecker(backend, tmp_path / "a.jsonl", recall=False)
    images = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    found = checker(["a cat and a dog"] * 2, image=images)
    assert [numbers(one) for one in found] == [([("a cat", True), ("a dog", False)], None, None)] * 2
    asked = [prompt for prompt in backend.asked if prompt.stage == "verify"]
    assert len({prompt.image_id for prompt in asked}) == 2  # the picture is part of the question
    assert len(asked) == 4
    assert all(prompt.image is not None for prompt in backend.asked)
    for given in ({"recall": True}, {"recall": False}):
        with pytest.raises(ValueError, match=r"captions|image"):
            LanguageModelChecker(backend, tmp_path / f"{len(given)}{given['recall']}.jsonl", **given)(["a"])


KILLED = """
import os, signal, sys
from hf_captionrl.experimental.claim_rewards import LanguageModelChecker
from tests.rewards.test_claim_rewards import Spoken, world

def answer(prompt):
    if len(backend.asked) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return world(prompt)

backend = Spoken(answer)
LanguageModelChecker(backend, sys.argv[1])(["a cat and a dog", "x and y"], [["a cat"]] * 2)
"""


def test_a_killed_process_loses_no_answer(tmp_path):
    path = tmp_path / "answers.jsonl"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -signal.SIGKILL
    lines = path.read_bytes().splitlines()
    assert len(lines) == 5
    path.write_bytes(path.read_bytes() + b'["half a li')  # as a power failure may leave it
    backend = Spoken(world)
    found = LanguageModelChecker(backend, path)(["a cat and a dog", "x and y"], [["a cat"]] * 2)
    fresh = Spoken(world)
    expected = LanguageModelChecker(fresh, tmp_path / "fresh.jsonl")(["a cat and a dog", "x and y"], [["a cat"]] * 2)
    assert list(map(numbers, found)) == list(map(numbers, expected))
    assert len(backend.asked) == len(fresh.asked) - 5
    assert all(json.loads(line) for line in path.read_text().splitlines())
