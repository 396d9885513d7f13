"""Precision, recall and F1 of claims against plain loops; credit of tokens."""

import numpy as np
import pytest

from hf_captionrl.experimental.claim_rewards import CheckedCaption, ClaimReward
from hf_captionrl.rewards import LengthPenalty
from hf_captionrl.scenes import Facts, check, full_caption
from hf_captionrl.scenes.truth_checker import mark_caption

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
