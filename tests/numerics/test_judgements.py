"""Judgements of people and judges: scores in replies, shares of few answers, and paired captions."""

import math
import re
import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_captionrl.apps.gallery.gallery import cider_failures, unrewarded
from hf_captionrl.apps.instruct.judges import Rating, answer_statistics, parse_scores, relative_scores
from hf_captionrl.apps.studies.results import Pick, score_picks, score_ratings
from hf_captionrl.apps.studies.results import Rating as StudyRating
from hf_captionrl.metrics.bootstrap import exact_interval
from hf_captionrl.metrics.words import characteristic_words
from tests.numerics.drawn import few, fewer, seeds
from tests.tolerances import within

scores = st.integers(10, 100).map(lambda tenths: tenths / 10)
replies = st.text(st.sampled_from(string.digits + " .,/-:\n\u2212\u0663AB"), max_size=30)


# Judges


@few
@given(replies)
def test_every_reply_has_two_scores_on_the_scale_or_none(reply):
    found = parse_scores(reply)
    if found is not None:
        said = [float(number) for number in re.findall(r"[0-9]+(?:\.[0-9]+)?", reply)]
        assert all(1 <= score <= 10 and score in said for score in found)


@few
@given(
    scores, scores, st.sampled_from(["{} {}", "{}, {}", "{}/10 {}/10", "A: {}. B: {}.", "It is close.\n{}\t{}\nYes."])
)
def test_two_scores_are_parsed(one, other, form):
    assert parse_scores(form.format(f"{one:g}", f"{other:g}")) == (one, other)
    assert parse_scores(form.format(f"-{one:g}", f"{other:g}")) is None


@few
@given(st.lists(st.sampled_from(["", " ", "a", "a b", "b b b"]), min_size=1, max_size=6))
def test_answers_of_zero_and_one_words(answers):
    found = answer_statistics(answers)
    words = [answer.split() for answer in answers]
    assert found["length"] == pytest.approx(sum(map(len, words)) / len(answers))
    assert found["lexical_diversity"] == pytest.approx(len({w for answer in words for w in answer}) / 1000)
    assert found["empty"] == pytest.approx(sum(not answer for answer in words) / len(answers))


@fewer
@given(st.lists(st.tuples(st.sampled_from("pqr"), scores, scores, st.booleans()), min_size=1, max_size=8))
def test_relative_scores_are_a_quotient_of_sums(drawn):
    ratings = [Rating(question, "writing", one, other, first) for question, one, other, first in drawn]
    found = relative_scores(ratings, num_resamples=50)
    assert found["overall"] == found["writing"] == pytest.approx(sum(d[1] for d in drawn) / sum(d[2] for d in drawn))
    assert 0.1 <= found["overall"] <= 10
    questions = {d[0] for d in drawn}
    assert ("overall_ci" in found) == (len(questions) > 1)
    if len(questions) > 1:
        low, high = found["overall_ci"]
        assert 0.1 <= low <= high <= 10
    gaps = []
    for question in questions:
        gap = [[d[1] - d[2] for d in drawn if d[0] == question and d[3] is first] for first in (True, False)]
        if all(gap):
            gaps.append((np.mean(gap[0]) - np.mean(gap[1])) / 2)
    assert found["one_order"] == len(questions) - len(gaps)
    assert found["first_place"] == (pytest.approx(np.mean(gaps)) if gaps else None)
    # Exchanging captions and references inverts the score.
    other = relative_scores([Rating(q, "writing", r, c, f) for q, c, r, f in drawn], num_resamples=50)
    assert other["overall"] == pytest.approx(1 / found["overall"])


# Studies


@few
@given(st.integers(1, 40), st.data(), st.sampled_from([0.5, 0.9, 0.95, 0.999]))
def test_ends_of_exact_intervals(trials, data, confidence):
    successes = data.draw(st.integers(0, trials))
    low, high = exact_interval(successes, trials, confidence=confidence)

    def chance(share, counts):
        return sum(math.comb(trials, k) * share**k * (1 - share) ** (trials - k) for k in counts)

    tail = (1 - confidence) / 2
    assert low <= successes / trials <= high
    assert chance(low, range(successes, trials + 1)) == within(tail if successes else 1.0, 1e-9, dtype="float64")
    assert chance(high, range(successes + 1)) == within(tail if successes < trials else 1.0, 1e-9, dtype="float64")


picks = st.tuples(st.sampled_from("xy"), st.sampled_from("gh"), st.sampled_from(["A", "B", None]), st.integers(1, 3))


@fewer
@given(st.lists(picks, min_size=1, max_size=10, unique_by=lambda d: d[:3]))
def test_picks_of_few_people(drawn):
    answers = [Pick(person, "1", group, system, value, 2) for person, group, system, value in drawn]
    wrong = {p: sum(d[0] == p and d[2] is None and d[3] != 2 for d in drawn) for p in "xy"}
    kept = [d for d in drawn if d[2] is not None and wrong[d[0]] <= 1]
    if not kept:
        with pytest.raises(ValueError, match="No answers are left to score"):
            score_picks(answers, ["A", "B"], set_size=3, num_resamples=30)
        return
    found = score_picks(answers, ["A", "B"], set_size=3, num_resamples=30)
    assert {entry["participant"] for entry in found["dropped"]} == {p for p, n in wrong.items() if n > 1}
    for row in found["rows"]:
        hits = [d[3] == 2 for d in kept if d[2] == row["name"]]
        assert (row["correct"], row["answers"]) == (sum(hits), len(hits))
        assert row["accuracy"] == (pytest.approx(np.mean(hits)) if hits else None)
        if row.get("accuracy_ci"):
            low, high = row["accuracy_ci"]
            assert 0 <= low <= high <= 1


ratings = st.tuples(
    st.sampled_from("xy"), st.sampled_from("ij"), st.sampled_from("AB"), st.integers(1, 5), st.integers(1, 5)
)


@fewer
@given(st.lists(ratings, min_size=1, max_size=8, unique_by=lambda d: d[:3]))
def test_ratings_of_few_people(drawn):
    found = score_ratings(
        [StudyRating(p, i, s, (d, a)) for p, i, s, d, a in drawn],
        ["A", "B"],
        scales=("descriptiveness", "accuracy"),
        num_resamples=30,
    )
    for row in found["rows"]:
        own = [d for d in drawn if d[2] == row["name"]]
        assert row["ratings"] == len(own)
        if not own:
            assert row["f1"] is None
            continue
        d, a = np.mean([rating[3] for rating in own]), np.mean([rating[4] for rating in own])
        assert row["descriptiveness"] == pytest.approx(d)
        assert row["accuracy"] == pytest.approx(a)
        assert row["f1"] == pytest.approx(2 * d * a / (d + a))


# Captions compared


tables = st.integers(1, 5).flatmap(
    lambda N: st.fixed_dictionaries(
        {name: st.lists(st.integers(0, 3), min_size=N, max_size=N) for name in ("cider", "wrong", "right", "rank")}
    ).map(lambda columns: columns)
)


@few
@given(st.lists(tables, min_size=2, max_size=3).filter(lambda ts: len({len(t["cider"]) for t in ts}) == 1))
def test_cider_failures_equal_a_plain_loop(captioners):
    of = {key: {f"c{i}": t[key] for i, t in enumerate(captioners)} for key in ("cider", "wrong", "right", "rank")}
    cider = {name: np.array(values, dtype=float) for name, values in of["cider"].items()}
    found = cider_failures(cider, wrong=of["wrong"], recalled=of["right"], ranks=of["rank"])
    expected = set()
    for row in range(len(captioners[0]["cider"])):
        for high in cider:
            for low in cider:
                if cider[high][row] <= cider[low][row]:
                    continue
                better = (
                    (-of["wrong"][low][row], of["right"][low][row]),
                    (-of["wrong"][high][row], of["right"][high][row]),
                )
                faithful = all(x >= y for x, y in zip(*better, strict=True)) and better[0] != better[1]
                if faithful and of["rank"][low][row] < of["rank"][high][row]:
                    expected.add((row, high, low))
    assert {(case.row, case.preferred, case.better) for case in found["cases"]} == expected
    assert found["failures"] == len(expected)
    assert 0 <= found["faithful_failures"] <= 1
    assert [case.gap for case in found["cases"]] == sorted((case.gap for case in found["cases"]), reverse=True)
    # Without rewards, captions with errors are not compared.
    lost = unrewarded(cider, right=of["right"], wrong=of["wrong"], below=1.0)
    good = [(n, i) for n in cider for i in range(len(cider[n])) if of["right"][n][i] and not of["wrong"][n][i]]
    assert lost["right_captions"] == len(good)
    assert {(name, row) for row, name, _ in lost["cases"]} == {(n, i) for n, i in good if cider[n][i] < 1}


@fewer
@given(
    st.lists(
        st.lists(st.sampled_from(["", "red", "red cat", "dog dog"]), min_size=1, max_size=4), min_size=2, max_size=3
    ),
    seeds,
)
def test_words_of_captions_without_words(sources, seed):
    named = {f"s{i}": captions for i, captions in enumerate(sources)}
    if any(not caption for captions in sources for caption in captions):
        named = {name: [caption or "the" for caption in captions] for name, captions in named.items()}
    parts = {"red": "ADJ", "cat": "NOUN", "dog": "NOUN"}

    def tagger(texts):
        return [[(word, parts[word]) for word in text.split() if word in parts] for text in texts]

    found = characteristic_words(named, tagger=tagger, parts=("NOUN", "ADJ"), top=1 + seed % 2)
    for part in ("NOUN", "ADJ"):
        for name, words in found[part].items():
            assert len(words) <= 1 + seed % 2
            said = " ".join(named[name]).split()
            assert all(word in said and parts[word] == part and 0 < score < math.inf for word, score in words)
            assert [score for _, score in words] == sorted((score for _, score in words), reverse=True)
