"""Statistics of completions, and the limits of the guard."""

import json
import random

import numpy as np
import pytest
import torch

from hf_captionrl.text.degenerate_captions import degenerate
from hf_captionrl.trainers.guard import GuardCallback, GuardThresholds, describe_completions
from tests.text.test_degenerate_captions import GOOD, HACKED, LOOP, ORDINARY, plainly_degenerate


def random_captions(number=300, words=6, longest=14):
    rng = random.Random(0)
    return [" ".join(rng.choice("abcdefgh"[:words]) for _ in range(rng.randrange(longest))) for _ in range(number)]


def longest_repeat(words):
    best = 0
    for i in range(len(words)):
        for j in range(i + 1, len(words)):
            n = 0
            while j + n < len(words) and words[i + n] == words[j + n]:
                n += 1
            best = max(best, n)
    return best


def share_of_different(words, n):
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


@pytest.mark.parametrize("words", [2, 5, 8])
def test_statistics_equal_plain_loops(words):
    captions = random_captions(words=words)
    cut = [c.split() for c in captions]
    ended = [len(w) % 3 > 0 for w in cut]
    found = describe_completions(captions, torch.tensor(ended))[0]
    assert degenerate(captions) == [plainly_degenerate(w) for w in cut]
    lengths = [len(w) for w in cut]
    repeats = [longest_repeat(w) for w in cut]
    for q in (10, 50, 90):
        assert found[f"length_p{q}"] == pytest.approx(np.percentile(lengths, q))
    for n in (1, 2):
        shares = [s for w in cut if (s := share_of_different(w, n)) is not None]
        assert found[f"distinct_{n}"] == pytest.approx(np.mean(shares))
    assert found["longest_repeat_max"] == max(repeats)
    assert found["longest_repeat_mean"] == pytest.approx(np.mean(repeats))
    assert found["degenerate"] == pytest.approx(np.mean([plainly_degenerate(w) for w in cut]))
    assert found["empty"] == pytest.approx(np.mean([not w for w in cut]))
    assert found["clipped_ratio"] == pytest.approx(np.mean([not e for e in ended]))
    assert found["distinct_captions"] == len(set(captions)) / len(captions)


def test_statistics_of_empty_captions():
    found = describe_completions(["", "."])[0]
    assert found["empty"] == 1
    assert found["distinct_2"] == 1
    assert found["degenerate"] == found["longest_repeat_max"] == found["length_p90"] == 0
    assert "clipped_ratio" not in found


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="one string"):
        degenerate("a cat")
    with pytest.raises(ValueError, match="window is 0"):
        GuardThresholds(window=0)
    with pytest.raises(ValueError, match=r"max_degenerate is 1\.5"):
        GuardThresholds(max_degenerate=1.5)
    with pytest.raises(ValueError, match="max_length_growth is nan"):
        GuardThresholds(max_length_growth=float("nan"))


def test_a_guard_trips_when_the_window_is_full():
    guard = GuardCallback(GuardThresholds(window=3))
    for _ in range(2):
        logged = guard.observe([HACKED, GOOD])
        assert guard.reason is None
    assert logged["guard/degenerate"] == 0.5
    guard.observe([GOOD, HACKED])
    assert guard.reason is not None
    for part in ("degenerate", "0.5", "0.1", "max_degenerate", HACKED, "3 steps"):
        assert part in guard.reason
    for _ in range(3):
        guard.observe([GOOD])
    assert guard.reason is None


def test_ordinary_steps_never_trip():
    guard = GuardCallback(GuardThresholds(window=2), reference_captions=ORDINARY)
    for _ in range(5):
        guard.observe(ORDINARY, ended=torch.ones(5), truncated_by_scorer=0.0, reward=0.5, held_out_scorer=0.5)
        assert guard.reason is None
        assert guard.doubt is None


LONG = "one small cat two large dogs three red birds four green trees five blue cars six old houses"
RULES = {
    "max_degenerate": ({"captions": [LOOP]}, LOOP),
    "max_length_growth": ({"captions": [LONG, "a cat"]}, LONG),
    "min_distinct": ({"captions": ["a cat a cat a cat"]}, "a cat a cat"),
    "max_clipped_ratio": ({"captions": ["a dog", "a cat"], "ended": torch.tensor([True, False])}, "a cat"),
    "max_truncated_by_scorer": ({"captions": ["a cat"], "truncated_by_scorer": 0.5}, "a cat"),
    "max_gap_growth": ({"captions": ["a cat", "a red dog"], "reward": 0.7, "held_out_scorer": 0.3}, "a red dog"),
}


@pytest.mark.parametrize("rule", RULES)
def test_every_limit_names_itself_and_can_be_switched_off(rule):
    step, example = RULES[rule]
    off = dict.fromkeys(set(RULES) - {rule})
    start = {
        "captions": ["a cat", "a dog"],
        "ended": torch.ones(2),
        "truncated_by_scorer": 0.0,
        "reward": 0.5,
        "held_out_scorer": 0.5,
    }
    for thresholds, trips in (
        (GuardThresholds(window=1, **off), True),
        (GuardThresholds(1, **off | {rule: None}), False),
    ):
        guard = GuardCallback(thresholds)
        guard.observe(**start)
        assert guard.reason is None
        guard.observe(**step)
        assert (guard.reason is not None) is trips
        if trips:
            assert rule in guard.reason
            assert example in guard.reason


def test_lengths_are_compared_with_the_references():
    limits = GuardThresholds(window=1, max_length_growth=2.0)
    short, long = ["a cat"] * 20, [GOOD] * 20  # 2 and 12 words
    for references, trips in ((short, True), (long, False), (["a cat"] * 17 + [GOOD] * 3, False)):
        guard = GuardCallback(limits, reference_captions=references)
        guard.observe(long)
        assert (guard.reason is not None) is trips


def test_non_finite_rewards_are_counted_and_excluded():
    guard = GuardCallback(GuardThresholds(window=1))
    logged = guard.observe(["a", "b", "c"], reward=0.75, held_out_scorer=0.5)
    assert logged["guard/reward_minus_held_out"] == pytest.approx(0.25)
    assert logged["guard/nonfinite_reward"] == 0
    logged = guard.observe(["a"], reward=float("nan"), held_out_scorer=0.5)
    assert "guard/reward_minus_held_out" not in logged
    assert logged["guard/nonfinite_reward"] == 1
    assert guard.reason is None
    json.dumps(guard.state_dict(), allow_nan=False)


def test_constant_gap_is_not_hacking():
    guard = GuardCallback(GuardThresholds(window=2))
    for _ in range(6):
        guard.observe(["a cat"], reward=3.0, held_out_scorer=0.5)
        assert guard.reason is None


def test_gap_limit_works_with_a_late_and_rare_held_out_scorer():
    guard = GuardCallback(GuardThresholds(window=2))
    for step in range(12):
        scored = {"reward": 1.0, "held_out_scorer": 0.9 if step < 6 else 0.1} if step % 2 else {}
        guard.observe(["a cat"], **scored)
        assert (guard.reason is None) is (step < 7)


def test_processes_decide_by_the_mean_over_all_processes():
    guards = [GuardCallback(GuardThresholds(window=1, max_degenerate=0.3)) for _ in range(2)]
    steps = [[HACKED, HACKED, HACKED, GOOD], [GOOD] * 4]
    each = [list(GuardCallback().observe(step).values()) for step in steps]
    mean = np.mean(each, axis=0).tolist()
    logged = [g.observe(s, means_over_processes=lambda values: mean) for g, s in zip(guards, steps, strict=True)]
    assert logged[0] == logged[1]
    assert logged[0]["guard/degenerate"] == 0.375
    assert all(g.reason is not None for g in guards)


def test_guard_resumes_exactly():
    rng = random.Random(1)
    steps = [[rng.choice([HACKED, GOOD, "a cat"]) for _ in range(5)] for _ in range(14)]

    def run(guard, part):
        out = []
        for captions in part:
            logged = guard.observe(captions, reward=len(captions[0]), held_out_scorer=1.0)
            out.append((logged, guard.reason, guard.doubt))
        return out

    limits = GuardThresholds(window=4, max_degenerate=0.4)
    whole = run(GuardCallback(limits), steps)
    for cut in (2, 9):
        first, second = GuardCallback(limits), GuardCallback(limits)
        run(first, steps[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert second.reason == first.reason
        assert run(second, steps[cut:]) == whole[cut:]
    assert len({reason is None for _, reason, _ in whole}) == 2  # the test sees both


def test_a_checkpoint_of_a_late_collapse_is_not_healthy():
    guard = GuardCallback(GuardThresholds(window=8, max_degenerate=0.5))
    for _ in range(6):
        guard.observe([GOOD])
    assert guard.doubt is None
    for _ in range(2):
        guard.observe([HACKED])
    assert guard.reason is None
    assert guard.doubt is not None
