"""Scores of human studies: published alphas, plain loops, permutations, the paper's F1s."""

import itertools
import random

import pytest

from hf_captionrl.apps.studies.results import Pick, Rating, krippendorff_alpha, score_picks, score_ratings
from hf_captionrl.metrics.bootstrap import exact_interval
from tests.tolerances import close, within

# Krippendorff, Computing Krippendorff's Alpha-Reliability, 2011: sections A, B and C to E; None: not rated.
TWO_BINARY = ["0100000010", "1110010000"]
TWO_NOMINAL = ["aabbdcccedda", "babbbccceddd"]
FOUR = [
    [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
    [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
    [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
    [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
]


def triples(table):
    return [
        (unit, person, value)
        for person, row in enumerate(table)
        for unit, value in enumerate(row)
        if value is not None
    ]


def plain_alpha(table, level):
    """The definition as loops over pairs of values, with ordinal distances counted one by one."""
    columns = [[v for v in column if v is not None] for column in zip(*table, strict=True)]
    columns = [column for column in columns if len(column) > 1]
    values = [v for column in columns for v in column]

    def distance(a, b):
        if level == "nominal":
            return float(a != b)
        if level == "interval":
            return float((a - b) ** 2)
        low, high = min(a, b), max(a, b)
        between = sum(low <= v <= high for v in values)
        return (between - (values.count(low) + values.count(high)) / 2) ** 2 if a != b else 0.0

    observed = sum(
        distance(a, b) / (len(column) - 1) for column in columns for a, b in itertools.permutations(column, 2)
    ) / len(values)
    expected = sum(distance(a, b) for a, b in itertools.permutations(values, 2)) / (len(values) * (len(values) - 1))
    return 1 - observed / expected


@pytest.mark.parametrize(
    ("table", "level", "alpha"),
    [
        (TWO_BINARY, "nominal", 0.095),
        (TWO_NOMINAL, "nominal", 0.692),
        (FOUR, "nominal", 0.743),
        (FOUR, "ordinal", 0.815),
        (FOUR, "interval", 0.849),
    ],
)
def test_alpha_equals_published_values(table, level, alpha):
    found = krippendorff_alpha(triples(table), level=level)
    assert found["alpha"] == within(alpha, 6e-4)
    assert found["alpha"] == close(plain_alpha(table, level), ulps=128)


@pytest.mark.parametrize("level", ["nominal", "ordinal", "interval"])
def test_alpha_against_loops_and_permutations(level):
    rng = random.Random(level)
    for _ in range(20):
        table = [[rng.choice([1, 2, 2, 4, 7, None]) for _ in range(9)] for _ in range(4)]
        wanted = plain_alpha(table, level)
        given = triples(table)
        rng.shuffle(given)
        renamed = [(f"u{unit}", f"p{person}", value) for unit, person, value in given]
        assert krippendorff_alpha(renamed, level=level)["alpha"] == within(wanted, 1e-12, dtype="float64")
        if level == "nominal":
            other = [(unit, person, {1: "x", 2: "y", 4: "a", 7: "q"}[value]) for unit, person, value in given]
            assert krippendorff_alpha(other)["alpha"] == within(wanted, 1e-12, dtype="float64")
    # Interval alpha is invariant to shift and scale, ordinal alpha to any increasing function.
    moved = [(unit, person, 3 * value + 11 if level == "interval" else value**3) for unit, person, value in given]
    assert krippendorff_alpha(moved, level=level)["alpha"] == within(wanted, 1e-12, dtype="float64")
    # Values permuted among units: only agreement by chance is left.
    alone = [(unit, person, rng.randint(1, 5)) for unit in range(3000) for person in range(2)]
    assert abs(krippendorff_alpha(alone, level=level)["alpha"]) < 0.08
    full = [(unit, person, unit % 5) for unit in range(20) for person in range(3)]
    assert krippendorff_alpha(full, level=level)["alpha"] == 1.0


def test_undefined_alpha_has_a_reason():
    assert krippendorff_alpha([("a", 1, 3), ("b", 2, 3)])["alpha_reason"] == "no unit was rated by two people"
    same = krippendorff_alpha([("a", 1, 3), ("a", 2, 3)], level="ordinal")
    assert same["alpha"] is None
    assert "all ratings are equal" in same["alpha_reason"]
    with pytest.raises(ValueError, match="rated 'a' twice"):
        krippendorff_alpha([("a", 1, 3), ("a", 1, 4)])
    with pytest.raises(ValueError, match="finite numbers"):
        krippendorff_alpha([("a", 1, "good"), ("a", 2, "bad")], level="ordinal")


def some_picks(rng, rates, *, people=4, sets=30, wrong_controls=None):
    picks = []
    for person in range(people):
        for number in range(sets):
            for system, rate in rates.items():
                right = rng.randint(1, 10)
                value = right if rng.random() < rate else right % 10 + 1
                picks.append(Pick(f"p{person}", f"b{person % 2}", f"set-{number}", system, value, right))
        for control in range(5):
            value = 2 if control < (wrong_controls or {}).get(person, 0) else 1
            picks.append(Pick(f"p{person}", f"b{person % 2}", f"control-{control}", None, value, 1))
    return picks


def test_picks_against_loops():
    rng = random.Random(0)
    picks = some_picks(rng, {"A": 0.8, "B": 0.3}, wrong_controls={0: 1, 2: 2})
    result = score_picks(picks, ["A", "B"])
    assert [(d["participant"], d["part"]) for d in result["dropped"]] == [("p2", "b0")]
    assert result["dropped"][0]["reason"] == "2 of 5 controls wrong, but at most 1 are allowed"
    assert [entry["wrong_controls"] for entry in result["participants"]] == [1, 0, 2, 0]
    for row in result["rows"]:
        own = [p for p in picks if p.system == row["name"] and p.participant != "p2"]
        right = [p for p in own if p.value == p.right]
        assert (row["answers"], row["correct"]) == (len(own), len(right)) == (90, len(right))
        assert row["accuracy"] == pytest.approx(len(right) / 90)
        wide = max((row["accuracy_ci_questions"], row["accuracy_ci_participants"]), key=lambda ci: ci[1] - ci[0])
        assert row["accuracy_ci"] == wide
        assert row["accuracy_exact_ci"] == exact_interval(len(right), 90)
    difference = result["rows"][0]["accuracy"] - result["rows"][1]["accuracy"]
    (pair,) = result["paired"]
    assert (pair["a"], pair["b"], pair["num_groups"]) == ("A", "B", 30)
    assert pair["difference"] == pytest.approx(difference)
    assert pair["p_value"] < 0.01
    assert result["agreement"][0]["units"] == 60  # b1 holds p1 and p3; b0 only p0 once p2 is gone
    assert result["chance"] == 0.1
    # Neither the order of answers nor the participants' names matter.
    rng.shuffle(picks)
    again = score_picks(picks, ["A", "B"])
    for name in ("participants", "dropped"):
        assert again[name] == result[name]
    for one, other in zip(again["rows"], result["rows"], strict=True):
        assert one["accuracy"] == pytest.approx(other["accuracy"])
    # A stricter rule drops more, and equal systems do not differ.
    strict = score_picks(picks, ["A", "B"], max_wrong_controls=0)
    assert [d["participant"] for d in strict["dropped"]] == ["p0", "p2"]
    alike = score_picks(some_picks(random.Random(1), {"A": 0.5, "B": 0.5}), ["A", "B"])
    assert alike["paired"][0]["p_value"] > 0.05


def test_outlier_participant_widens_the_interval():
    rng = random.Random(3)
    picks = []
    for person, rate in enumerate((0.9, 0.9, 0.9, 0.1)):
        picks += [p._replace(participant=f"p{person}") for p in some_picks(rng, {"A": rate}, people=1)]
    (row,) = score_picks(picks, ["A"])["rows"]
    (low, high), (first, last) = row["accuracy_ci_participants"], row["accuracy_ci_questions"]
    assert high - low > 2 * (last - first)
    (alone,) = score_picks([p for p in picks if p.participant == "p0"], ["A"])["rows"]
    assert alone["accuracy_ci_participants"] is None
    assert alone["accuracy_ci"] == alone["accuracy_ci_questions"]


def test_score_without_answers_is_an_error():
    with pytest.raises(ValueError, match=r"No answers are left .*p0 in b0: 5 of 5 controls wrong"):
        score_picks(some_picks(random.Random(0), {"A": 1.0}, people=1, wrong_controls={0: 5}), ["A"])
    result = score_picks(some_picks(random.Random(0), {"A": 1.0}), ["A", "B"])
    assert result["rows"][1]["accuracy"] is None
    assert result["paired"][0]["difference"] is None


def test_f1_equals_the_paper():
    # SMILE, Table 2: means of descriptiveness and accuracy, and F1.
    table = {
        "CapEnrich": (390, 442, 4.14),
        "BLIP": (332, 453, 3.83),
        "SMILE": (464, 417, 4.39),
        "Human": (347, 454, 3.93),
    }
    ratings = []
    for system, (d, a, _) in table.items():
        # 100 integer ratings with these means.
        rows = zip(*([total // 100 + (n < total % 100) for n in range(100)] for total in (d, a)), strict=True)
        ratings += [Rating(f"p{n % 5}", f"i{n // 5}", system, (x, y, 5)) for n, (x, y) in enumerate(rows)]
    result = score_ratings(ratings, list(table), num_resamples=50)
    for row in result["rows"]:
        d, a, f1 = table[row["name"]]
        assert (row["descriptiveness"], row["accuracy"]) == (pytest.approx(d / 100), pytest.approx(a / 100))
        assert round(row["f1"], 2) == f1
    assert len(result["paired"]) == 6 * 4


def test_ratings_against_loops():
    rng = random.Random(5)
    ratings = [
        Rating(f"p{person}", f"i{image}", system, (min(5, base + rng.randint(0, 2)), rng.randint(2, 5), 5))
        for person in range(5)
        for image in range(20)
        for system, base in (("A", 3), ("B", 1))
    ]
    result = score_ratings(ratings, ["A", "B"])
    for row in result["rows"]:
        own = [r.values for r in ratings if r.system == row["name"]]
        d, a, f = (sum(column) / 100 for column in zip(*own, strict=True))
        assert (row["descriptiveness"], row["accuracy"], row["fluency"]) == pytest.approx((d, a, f))
        assert row["f1"] == pytest.approx(2 * d * a / (d + a))
        # The interval of F1 by resampling images: the linearisation is close to it.
        redrawn = []
        by_image = {
            i: [r.values for r in ratings if r.system == row["name"] and r.item == i]
            for i in {r.item for r in ratings}
        }
        images = sorted(by_image)
        for _ in range(1000):
            drawn = [v for i in rng.choices(images, k=20) for v in by_image[i]]
            dd, aa = sum(v[0] for v in drawn) / 100, sum(v[1] for v in drawn) / 100
            redrawn.append(2 * dd * aa / (dd + aa))
        redrawn.sort()
        low, high = row["f1_ci_questions"]
        assert (low, high) == (within(redrawn[25], 0.03), within(redrawn[974], 0.03))
    paired = {(p["a"], p["b"], p["measure"]): p for p in result["paired"]}
    rows = {row["name"]: row for row in result["rows"]}
    for measure in ("descriptiveness", "accuracy", "fluency", "f1"):
        found = paired["A", "B", measure]
        assert found["difference"] == pytest.approx(rows["A"][measure] - rows["B"][measure])
        assert found["num_groups"] == 20
    assert paired["A", "B", "descriptiveness"]["p_value"] < 0.001
    assert paired["A", "B", "fluency"]["p_value"] == 1.0
    levels = [(entry["measure"], entry["level"], entry["alpha"] is None) for entry in result["agreement"]]
    assert levels[::2] == [
        ("descriptiveness", "ordinal", False),
        ("accuracy", "ordinal", False),
        ("fluency", "ordinal", True),
    ]
