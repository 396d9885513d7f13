"""The numbers of the papers' tables equal plain loops, and each is declared once in the table of columns."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_captionrl.metrics import bleu, caption_diversity, cider_d, exact_interval
from hf_captionrl.metrics.bootstrap import leave_one_out
from hf_captionrl.metrics.caption_checks import EMPTY_CAPTION
from hf_captionrl.metrics.columns import SUITES, TABLE
from hf_captionrl.metrics.suites import SuiteRow, diversity_at_cider_d, suite
from hf_captionrl.text.cider_d import DocumentFrequencies
from hf_captionrl.text.tokenize import ptb_tokenize
from tests.tolerances import close, within

WORDS = "a red green small large dog cat bird tree house on under beside the of".split()


def sentences(number, seed, low=4, high=9):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(low, high))) for _ in range(number)]


def features(number, seed):
    return torch.nn.functional.normalize(torch.randn(number, 12, generator=torch.Generator().manual_seed(seed)), dim=1)


def check(caption, facts):
    right, wrong = ([word for word in caption.split() if word in facts[kind]] for kind in ("true", "false"))
    return SimpleNamespace(right=right, wrong=wrong, recalled=right, missed=["x"])


N = 130
CAPTIONS = sentences(N, 0)
REFERENCES = [sentences(3, 100 + i) for i in range(N)]
IMAGES = features(N, 1)
TEXT = torch.nn.functional.normalize(IMAGES + 0.5 * features(N, 2), dim=1)
FACTS = [{"true": ["dog", "red"], "false": ["cat"]}] * N
SEEN = {"text_features": TEXT, "image_features": IMAGES}
KNOWN = {"facts": FACTS, "check": check}


def hit(caption, images):
    """Whether a caption retrieves its image among some."""
    return all(TEXT[caption] @ IMAGES[caption] > TEXT[caption] @ IMAGES[j] for j in images if j != caption)


def test_smile_returns_details_only_on_request():
    row = suite("smile", CAPTIONS, references=REFERENCES, **SEEN, **KNOWN)
    numbers = "length lexical_diversity pool_recall_at_1 pool_recall_at_5 rd100_recall_at_1 rd100_recall_at_5".split()
    numbers += ["clip_score", "cider_d", "hallucination", "fact_recall"]
    expected = {*numbers, *(f"{key}_ci{end}" for key in numbers for end in ("", "_method")), "empty_captions", "ranks"}
    assert set(row) == expected | {"perplexity", "perplexity_reason"}
    detailed = suite("smile", CAPTIONS, references=REFERENCES, **SEEN, **KNOWN, details=True)
    assert set(detailed) - set(row) == {"per_sample", "groups", "signatures"}
    assert set(detailed["per_sample"]) == set(numbers)
    for key, values in detailed["per_sample"].items():
        assert np.mean(values) == close(row[key]), key
        low, high = row[f"{key}_ci"]
        assert low <= row[key] <= high
    methods = {key: row[f"{key}_ci_method"] for key in numbers}
    ratios = {"lexical_diversity", "hallucination", "fact_recall"}
    exact = {key for key in numbers if "recall_at" in key}
    assert {key for key in numbers if methods[key] == "clopper_pearson"} == exact
    assert {key for key in numbers if methods[key] == "bootstrap"} == ratios
    assert {methods[key] for key in {*numbers} - exact - ratios} == {"student_t"}
    lone = SuiteRow(captions=["a dog"]).compute("length").numbers
    assert lone["length_ci"] is None


def test_perplexity_has_an_interval_over_captions_and_contributions():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 9, N)  # a caption of one token has none to score
    nats = tokens * rng.uniform(1, 4, N)

    def measure(captions):
        assert captions == CAPTIONS
        return {"perplexity": math.exp(nats.sum() / tokens.sum()), "nats": nats, "tokens": tokens, "signature": "s"}

    row = suite("smile", CAPTIONS, perplexity=measure, details=True)
    value = math.exp(nats.sum() / tokens.sum())
    assert row["perplexity"] == pytest.approx(value)
    assert row["signatures"]["perplexity"] == "s"
    drawn = rng.integers(N, size=(4000, N))
    low, high = np.quantile(np.exp(nats[drawn].sum(1) / tokens[drawn].sum(1)), [0.025, 0.975])
    assert row["perplexity_ci"] == pytest.approx([low, high], rel=0.03)
    without = [math.exp(np.delete(nats, i).sum() / np.delete(tokens, i).sum()) for i in range(N)]
    assert row["per_sample"]["perplexity"] == pytest.approx(leave_one_out(value, without))


def test_parts_are_counted_by_a_plain_loop():
    parts = {"odd": [i % 2 == 1 for i in range(N)], "few": [i < 7 for i in range(N)], "none": [False] * N}
    row = suite("smile", CAPTIONS, **SEEN, **KNOWN, parts=parts)
    scores = TEXT @ IMAGES.T
    for name in ("odd", "few"):
        found, wrong, claims = [], 0, 0
        for i in (i for i in range(N) if parts[name][i]):
            better = int((scores[i] > scores[i, i]).sum())
            # Probability that none of the better images is among 99 distractors drawn from the other images.
            found.append(math.comb(N - 1 - better, 99) / math.comb(N - 1, 99))
            words = CAPTIONS[i].split()
            wrong += words.count("cat")
            claims += words.count("cat") + words.count("dog") + words.count("red")
        assert row[f"{name}_rd100_recall_at_1"] == pytest.approx(sum(found) / len(found))
        assert row[f"{name}_hallucination"] == pytest.approx(wrong / claims)
        for key in ("rd100_recall_at_1", "hallucination"):
            low, high = row[f"{name}_{key}_ci"]
            assert low <= row[f"{name}_{key}"] <= high
    assert row["none_rd100_recall_at_1"] is row["none_hallucination"] is None
    assert row["none_hallucination_reason"] == "no image of this part"


def test_leave_one_out_is_the_mean_for_a_mean_and_centred_for_a_ratio():
    values = np.array([1.0, 4.0, 2.0, 9.0])
    without = [np.delete(values, i).mean() for i in range(4)]
    assert leave_one_out(values.mean(), without) == pytest.approx(values)
    above, below = np.array([1.0, 0.0, 3.0]), np.array([2.0, 1.0, 4.0])
    without = [np.delete(above, i).sum() / np.delete(below, i).sum() for i in range(3)]
    assert leave_one_out(4 / 7, without).mean() == pytest.approx(4 / 7)
    row = SuiteRow(captions=["", "a dog"])
    assert row.texts[0] == EMPTY_CAPTION
    row.mean("share", [0, 0], weights=[0, 0])  # a ratio without any weight
    assert (row.numbers["share"], row.numbers["share_ci"]) == (0.0, None)
    assert "share" not in row.per_sample


def test_every_number_has_an_interval_that_contains_it():
    keys = [column.key for column in TABLE if column.function]
    captions = ["a dog", "two red cats run", "", "a dog"]
    row = SuiteRow(captions=captions, references=[["a dog"]] * 4, token_counts=[4, 6, 3, 4])
    row.compute(*(column.key for column in TABLE if column.function not in ("", None, "set_diversity")))
    pairs = SuiteRow(captions=["a dog", "a cat"] * 3, sampled=[["a dog", "a cat"]] * 3).compute(*SUITES["sle"])
    numbers = pairs.numbers | row.numbers
    named = [*(key for key in keys if numbers.get(key) is not None)]
    assert {"lexical_diversity", "vocabulary_size", "std_words", "max_words", "mbleu_4"} <= set(named)
    for key in {*named} - {"max_words"}:  # a maximum has none
        low, high = numbers[f"{key}_ci"]
        assert low <= numbers[key] <= high, key
    assert "max_words_ci" not in numbers
    assert row.numbers["empty_ci"] == list(exact_interval(1, 4))
    assert row.numbers["empty_captions"] == 4 * row.numbers["empty"] == 1


def test_the_interval_of_the_spread_is_that_of_a_bootstrap():
    rng = np.random.default_rng(0)
    words = rng.integers(1, 30, size=40)
    row = SuiteRow(captions=[" ".join(["a"] * n) for n in words]).compute("std_words")
    drawn = rng.choice(words, size=(20_000, 40))
    assert row.numbers["std_words"] == pytest.approx(words.std())
    assert row.numbers["std_words_ci"] == pytest.approx(np.quantile(drawn.std(axis=1), [0.025, 0.975]), abs=0.35)
    without = [np.delete(words, i).std() for i in range(40)]
    assert row.per_sample["std_words"] == pytest.approx(leave_one_out(words.std(), without))


def test_bleu_and_its_contributions_equal_a_plain_loop():
    captions = [r[0] if i % 3 else c for i, (c, r) in enumerate(zip(CAPTIONS, REFERENCES, strict=True))][:20]
    references = REFERENCES[:20]
    row = suite("discritune", captions, references=references, details=True)
    value = bleu(captions, references)["bleu_4"]
    assert row["bleu_4"] == pytest.approx(value, rel=1e-12)

    def of(rows):
        return bleu([captions[i] for i in rows], [references[i] for i in rows])["bleu_4"]

    without = [of([i for i in range(20) if i != left_out]) for left_out in range(20)]
    assert row["per_sample"]["bleu_4"] == pytest.approx(leave_one_out(value, without), rel=1e-9)
    # The interval from contributions is close to that of a bootstrap over images.
    drawn = [of(rows) for rows in np.random.default_rng(0).integers(20, size=(200, 20))]
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert row["bleu_4_ci"] == within([low, high], 0.25 * (high - low))


def test_blocks_drop_the_short_last_one():
    row = suite("discritune", CAPTIONS, **SEEN, details=True)
    hits = [hit(i, range(100)) for i in range(100)]
    assert row["blocks_recall_at_1"] == pytest.approx(np.mean(hits))
    assert len(row["per_sample"]["blocks_recall_at_1"]) == 100
    other = torch.cat([TEXT[:100], features(30, 9)])
    assert suite("discritune", CAPTIONS, **SEEN | {"text_features": other})["blocks_recall_at_1"] == np.mean(hits)
    few = suite("discritune", CAPTIONS[:99], text_features=TEXT[:99], image_features=IMAGES[:99])
    assert few["blocks_recall_at_1"] is None
    assert "fewer than 100" in few["blocks_recall_at_1_reason"]


def test_meteor_and_spice_are_values_or_reasons():
    def meteor(captions, references):
        assert isinstance(references[0], list)
        return {"meteor": 0.5, "per_sample": np.linspace(0, 0.6, len(captions)), "signature": "metric:meteor"}

    def spice(captions, references):
        raise RuntimeError("not run: there is no Java")

    row = suite("discritune", CAPTIONS, references=REFERENCES, meteor=meteor, spice=spice, details=True)
    assert row["meteor"] == 0.5  # METEOR of a corpus is not a mean; the interval is centred on it
    assert row["meteor_ci"][0] < 0.5 < row["meteor_ci"][1]
    assert row["per_sample"]["meteor"].mean() == pytest.approx(0.5)
    assert (row["spice"], row["spice_reason"]) == (None, "there is no Java")
    assert suite("discritune", CAPTIONS, references=REFERENCES)["meteor_reason"] == "METEOR was not requested"

    def low(captions, references):  # METEOR of a corpus is far below the mean of its captions
        return {"meteor": 0.01, "per_sample": np.linspace(0, 1, len(captions))}

    bounds = suite("discritune", CAPTIONS[:3], references=REFERENCES[:3], meteor=low)["meteor_ci"]
    assert 0.0 == bounds[0] < 0.01 < bounds[1] < 1


def test_objects_that_no_reference_names():
    """Of dog, frisbee, cat, bench and dog, no reference names the frisbee; a puppy is a dog."""
    captions = ["a dog and a frisbee", "a cat on a bench", "dogs"]
    references = [["a puppy runs", "a man"], ["a kitten", "it sleeps on benches"], ["two dogs"]]
    row = SuiteRow(captions=captions, references=references).compute("unmentioned_objects")
    assert row.numbers["unmentioned_objects"] == 1 / 5
    assert row.per_sample["unmentioned_objects"].mean() == pytest.approx(1 / 5)
    none = SuiteRow(captions=["it", "red"], references=[["a dog"], ["a cat"]]).compute("unmentioned_objects").numbers
    assert none["unmentioned_objects"] is None
    assert "no object" in none["unmentioned_objects_reason"]


def test_images_that_share_a_caption():
    row = SuiteRow(captions=["A dog.", "a dog", "a cat", "two dogs", "a cat", "a cow"]).compute("repeated_captions")
    assert row.numbers["repeated_captions"] == pytest.approx(4 / 6)
    without = np.array([0.4, 0.4, 0.4, 0.8, 0.4, 0.8])  # the share of the other five images
    found = 6 * 4 / 6 - 5 * without
    assert row.per_sample["repeated_captions"] == pytest.approx(found - found.mean() + 4 / 6)


def test_a_share_of_the_corpus_that_is_0_or_1_has_the_interval_of_a_proportion():
    texts = [f"a dog near {n} red trees" for n in range(12)]
    ends = SuiteRow(captions=texts, references=[[text] for text in texts]).compute("repeated_captions", "bleu_4")
    assert ends.numbers["repeated_captions_ci"] == list(exact_interval(0, 12))
    assert ends.numbers["bleu_4_ci"] == list(exact_interval(12, 12))
    between = SuiteRow(captions=[*texts, texts[0]]).compute("repeated_captions").numbers
    assert between["repeated_captions_ci_method"] == "bootstrap"


def test_recall_among_as_many_images_as_ranks_is_not_shown():
    keys = ("pool_recall_at_1", "pool_recall_at_5")
    for number in (5, 6):
        few = {name: features[:number] for name, features in SEEN.items()}
        row = SuiteRow(captions=CAPTIONS[:number], **few).compute(*keys)
        assert row.numbers["pool_recall_at_1_ci"]
        assert (row.numbers["pool_recall_at_5"] is None) == (number == 5)
        assert ("pool_recall_at_5" in row.per_sample) == (number == 6)


def test_sle_counts_sets_and_averages_cider_over_the_captions():
    groups = [sentences(5, 300 + i) for i in range(20)]
    row = suite("sle", groups, references=REFERENCES[:20], details=True)
    words = [" ".join(group).split() for group in groups]
    assert row["div_1"] == pytest.approx(np.mean([len(set(own)) / len(own) for own in words]))
    scores = cider_d(groups, REFERENCES[:20])["per_sample"]
    assert row["cider_d"] == pytest.approx(np.mean(scores))
    counts = DocumentFrequencies.from_references([list(map(ptb_tokenize, texts)) for texts in REFERENCES])
    counted = cider_d(groups, REFERENCES[:20], frequencies=counts)["cider_d"]
    assert suite("sle", groups, references=REFERENCES[:20], frequencies=counts)["cider_d"] == pytest.approx(counted)
    assert abs(counted - row["cider_d"]) > 1e-3
    best = [max(scores[5 * i : 5 * i + 5]) for i in range(20)]
    assert row["best_cider_d"] == pytest.approx(np.mean(best))
    whole = caption_diversity(groups)
    for key in ("div_2", "mbleu_4", "mbleu_4_per_image", "unique_captions"):
        assert row[key] == pytest.approx(whole[key]), key
    assert "per-image" in row["signatures"]["mbleu_4_per_image"]
    same = suite("sle", [[group[0]] * 5 for group in groups])
    assert same["mbleu_4_per_image"] == close(1.0, dtype="float32")
    assert same["cider_d_reason"] == "no references"
    row = suite("sle", [["a dog", "", "a red cat"], ["a tree", "a house"]], references=REFERENCES[:2], details=True)
    assert (row["empty_captions"], row["captions_per_image"]) == (1, 2.5)
    assert all(len(row["per_sample"][key]) == 2 for key in ("div_1", "cider_d", "mbleu_4_per_image"))


def test_ndlb_columns():
    captions = ["a dog"] * 5 + ["a cat"] * 4 + CAPTIONS[9:]
    bags = {3: [[0, 1, 2], [3, 4, 5]], 5: [[0, 1, 2, 3, 4]], 7: []}
    row = suite("ndlb", captions, references=REFERENCES, **SEEN, bags=bags, details=True)
    hits = [hit(i, bag) for bag in bags[3] for i in bag]
    assert row["bag_3_recall_at_1"] == pytest.approx(np.mean(hits))
    assert row["groups"]["bag_3_recall_at_1"].tolist() == [0, 0, 0, 1, 1, 1]
    assert row["bag_7_recall_at_1_reason"] == "no bags of 7 in the data"
    assert row["ndlb_clip_score"] == pytest.approx(float((100 * (TEXT * IMAGES).sum(1)).mean()), rel=1e-5)
    opposite = suite("ndlb", captions, text_features=-IMAGES, image_features=IMAGES)
    assert opposite["ndlb_clip_score"] == pytest.approx(-100, rel=1e-5)  # not clamped
    counts = {word: sum(c.split().count(word) for c in captions) for c in captions for word in c.split()}
    assert row["vocabulary_size"] == sum(count >= 5 for count in counts.values())
    assert suite("ndlb", captions[:9])["vocabulary_size"] == 2  # "a" and "dog"; "cat" occurs four times


@pytest.mark.parametrize("name", ["smile", "discritune", "ndlb"])
def test_common_behaviour_of_suites_of_single_captions(name):
    with pytest.raises(ValueError, match="130 captions but 129 references"):
        suite(name, CAPTIONS, references=REFERENCES[:-1])
    row = suite(name, ["", " ", *CAPTIONS[2:]], references=REFERENCES, **SEEN)
    assert row["empty_captions"] == 2
    assert row["hallucination_reason"] == "no facts to check captions with"
    for key, value in row.items():
        if key.endswith("_reason"):
            assert row[key.removesuffix("_reason")] is None
            assert value
    signatures = suite(name, CAPTIONS, scorer="clip@abc|float32", **SEEN, details=True)["signatures"]
    assert any("scorer:clip@abc,float32" in text for text in signatures.values())
    assert not any("scorer:" in text for text in suite(name, CAPTIONS, **SEEN, details=True)["signatures"].values())
    bare = suite(name, CAPTIONS)
    assert bare["cider_d_reason"] == "no references"
    assert (recalls := [key for key in bare if key.endswith("recall_at_1")])
    reasons = {False: "no scorer", True: "no facts to check captions with"}
    assert all(bare[key] is None and bare[f"{key}_reason"] == reasons["truth" in key] for key in recalls)


def test_truth_recall_counts_captions_that_fit_only_the_target():
    """Facts are sets of words, and a caption fits an image that has all of its words."""

    def fitting(caption, words):
        return SimpleNamespace(wrong=[word for word in caption.split() if word not in words])

    facts = [{"pig", "red"}, {"pig", "blue"}, {"pig", "green"}, {"cow", "red"}, {"cow", "blue"}, {"cow", "green"}]
    captions = ["pig", "pig blue", "pig red", "cow red", "", "green cow"]
    bags = {3: [[0, 1, 2], [3, 4, 5]], 2: [[0, 1], [4, 5]]}
    row = SuiteRow(captions=captions, facts=facts, check=fitting, bags=bags)
    row.texts = captions
    row.set_truth_recalls(["bag_3_truth_recall_at_1", "bag_2_truth_recall_at_1"])
    # "pig" fits all of its bag, "pig red" another image, and nothing is wrong in an empty caption.
    assert row.numbers["bag_3_truth_recall_at_1"] == pytest.approx(3 / 6)
    assert row.per_sample["bag_3_truth_recall_at_1"].tolist() == [0, 1, 0, 1, 0, 1]
    assert row.numbers["bag_2_truth_recall_at_1"] == pytest.approx(2 / 4)
    assert row.groups["bag_3_truth_recall_at_1"] == [0, 0, 0, 1, 1, 1]
    low, high = row.numbers["bag_3_truth_recall_at_1_ci"]
    assert low <= 0.5 <= high
    row = SuiteRow(captions=["a"], bags={3: [[0]]}).compute("bag_3_truth_recall_at_1")
    assert row.numbers["bag_3_truth_recall_at_1"] is None
    assert "facts" in row.numbers["bag_3_truth_recall_at_1_reason"]


def point(temperature, cider_d, div_2, mbleu=0.5):
    return {"temperature": temperature, "cider_d": cider_d, "div_2": div_2, "mbleu_4_per_image": mbleu}


def test_diversity_at_a_cider_d_is_interpolated_between_temperatures():
    points = [point(0.5, 1.4, 0.2, 0.8), point(1.0, 1.0, 0.4, 0.4), point(1.25, 0.5, 0.9, 0.1)]
    between = {"temperature": 0.875, "div_2": 0.35, "mbleu_4_per_image": 0.5}
    for order in (points, points[::-1]):
        assert diversity_at_cider_d(order, 1.1) == pytest.approx(between)
        assert diversity_at_cider_d(order, 0.6)["div_2"] == pytest.approx(0.8)
        assert diversity_at_cider_d(order, 1.0) == {"temperature": 1.0, "div_2": 0.4, "mbleu_4_per_image": 0.4}
        assert diversity_at_cider_d(order, 1.4)["temperature"] == 0.5
        assert diversity_at_cider_d(order, 1.5) is None
        assert diversity_at_cider_d(order, 0.4) is None
    points = [point(0.5, 0.8, 0.2), point(0.75, 1.2, 0.3), point(1.0, 0.8, 0.6)]
    assert diversity_at_cider_d(points, 0.8)["temperature"] == 1.0  # of several, the highest
    assert diversity_at_cider_d(points, 1.0)["div_2"] == pytest.approx(0.45)
    assert diversity_at_cider_d([point(1.0, 1.0, 0.4)], 1.0)["div_2"] == 0.4
    assert diversity_at_cider_d([point(1.0, 1.0, 0.4)], 0.9) is diversity_at_cider_d([], 0.9) is None
