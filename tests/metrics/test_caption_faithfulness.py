from types import SimpleNamespace

import pytest

from hf_captionrl.metrics import bootstrap_interval, chair, faithfulness
from hf_captionrl.metrics.coco_objects import COCO_OBJECTS


def word_check(caption: str, facts: dict):
    """A checker for tests: words among the facts are right, words marked ! are wrong."""
    words = caption.split()
    right = tuple(word for word in words if word in facts["true"])
    wrong = tuple(word for word in words if word.startswith("!"))
    missed = tuple(fact for fact in facts["true"] if fact not in words)
    return SimpleNamespace(right=right, wrong=wrong, recalled=right, missed=missed)


FACTS = [{"true": ["red", "dog"]}, {"true": ["cat"]}, {"true": ["bus", "big"]}]


def test_averages_are_over_claims_and_facts_not_over_captions():
    result = faithfulness(["red dog", "!dog !red cat", "words"], FACTS, word_check)
    assert result["hallucination"] == 2 / 5
    assert result["fact_recall"] == 3 / 5
    assert result["wrong_captions"] == 1 / 3
    assert result["per_sample"] == {"right": [2, 1, 0], "wrong": [0, 2, 0], "recalled": [2, 1, 0], "missed": [0, 0, 2]}
    assert "check:tests.metrics.test_caption_faithfulness.word_check" in result["signature"]
    claims = [r + w for r, w in zip(result["per_sample"]["right"], result["per_sample"]["wrong"], strict=True)]
    low, high = bootstrap_interval(result["per_sample"]["wrong"], weights=claims)
    assert low <= result["hallucination"] <= high


def test_captions_without_claims_have_no_hallucination():
    assert faithfulness(["words"], [{"true": []}], word_check)["hallucination"] == 0.0


SYNONYMS = {"dog": ["puppy", "hound"], "hot dog": ["frankfurter"], "dining table": ["table", "desk"]}
SYNONYMS |= {"person": ["man", "woman"]}


def test_chair_counts_mentions_and_captions():
    captions = ["Two men and a puppy at a table.", "a hot dog on a desk", "a quiet morning"]
    objects = [["person", "dining table"], ["hot dog", "dining table"], ["dog"]]
    result = chair(captions, objects, synonyms=SYNONYMS)
    assert result["per_sample"]["mentioned"] == [["person", "dog", "dining table"], ["hot dog", "dining table"], []]
    assert result["per_sample"]["wrong"] == [["dog"], [], []]
    assert result["chair_i"] == 1 / 5
    assert result["chair_s"] == 1 / 3
    assert result["object_recall"] == 4 / 5


def test_longest_name_matches_and_plurals_are_reduced():
    captions, synonyms = ["three frankfurters, hot dogs and dogs", "babies, people"], SYNONYMS | {"baby": []}
    result = chair(captions, [["dog"], []], synonyms=synonyms)
    assert result["per_sample"]["mentioned"] == [["hot dog", "hot dog", "dog"], ["baby", "person"]]


COCO = """person bicycle car motorcycle airplane bus train truck boat traffic_light fire_hydrant stop_sign parking_meter bench bird
cat dog horse sheep cow elephant bear zebra giraffe backpack umbrella handbag tie suitcase frisbee skis snowboard sports_ball kite
baseball_bat baseball_glove skateboard surfboard tennis_racket bottle wine_glass cup fork knife spoon bowl banana apple sandwich
orange broccoli carrot hot_dog pizza donut cake chair couch potted_plant bed dining_table toilet tv laptop mouse remote keyboard
cell_phone microwave oven toaster sink refrigerator book clock vase scissors teddy_bear hair_drier toothbrush"""
NAMES = [name.replace("_", " ") for name in COCO.split()]
ENDING_IN_ES = [*"bus bench sandwich couch toothbrush box potato dish dress lens canvas".split(), "wine glass"]
ENDING_IN_ES += "virus status bonus lotus atlas".split()
IRREGULAR = {"people": "person", "sheep": "sheep", "knives": "knife", "mice": "mouse", "scissors": "scissors"}
REGULAR = {*NAMES, "ski"} - {*ENDING_IN_ES, *IRREGULAR.values(), "skis"}
REGULAR |= {"house", "cookie", "movie", "nurse", "rose", "shoe", "toe"}
PLURALS = {f"{n}es": n for n in ENDING_IN_ES} | IRREGULAR | {f"{n}s": n for n in REGULAR}


def test_plurals_of_what_is_in_photographs():
    for many, one in PLURALS.items():
        found = chair([f"two {many}", f"a {one}"], [[one], [many]])
        assert found["per_sample"] == {"wrong": [[], []], "mentioned": [[one], [one]]}, many


def test_without_a_recognised_object_chair_is_not_defined_and_the_counts_say_why():
    found = chair(["a thing", "nice"], [["dog"], ["cat", "dog"]])
    assert found["chair_i"] is found["chair_s"] is None
    assert "2 captions" in found["chair_i_reason"]
    assert (found["num_mentions"], found["num_wrong"], found["num_objects"], found["num_captions"]) == (0, 0, 3, 2)
    assert found["object_recall"] == 0
    found = chair(["a dog", "a dog"], [[], []], synonyms={"dog": []})
    assert (found["chair_i"], found["chair_s"], found["object_recall"]) == (1, 1, None)
    assert "chair_i_reason" not in found
    assert (found["num_mentions"], found["num_wrong"], found["num_objects"]) == (2, 2, 0)


def test_coco_objects_are_found_in_captions():
    assert list(COCO_OBJECTS) == NAMES
    assert len(NAMES) == 80
    # Every name of every object is recognised, also after other words, and means this object.
    words = {other: name for name, others in COCO_OBJECTS.items() for other in (name, *others)}
    found = chair([f"there is one {word} here" for word in words], [[]] * len(words), synonyms="coco")
    mentioned = zip(words, found["per_sample"]["mentioned"], strict=True)
    assert {word: names for word, names in mentioned if names != [words[word]]} == {}
    captions = {
        "Two puppies and a baby elephant beside teddy bears": ["dog", "elephant", "teddy bear"],
        "A man eats hot dogs on a sofa": ["person", "hot dog", "couch"],
        "women with scissors, glasses and skis": ["person", "scissors", "skis"],
        "a TV, a toilet seat and a bow tie": ["tv", "toilet", "tie"],
        "Mice on benches, knives on dining tables": ["mouse", "bench", "knife", "dining table"],
        "a sheep between wine glasses and a fire truck": ["sheep", "wine glass", "truck"],
        "A couple of dogs steer clear of the seat.": ["dog"],
        "The sky is blue.": [],
        # Compounds that are another thing, and the object itself.
        "A bird house beside train tracks and a train": ["train"],
        "a ski lift over the ski slopes, orange juice and an orange": ["orange"],
    }
    found = chair(list(captions), [[]] * len(captions), synonyms="coco")
    assert found["per_sample"]["mentioned"] == list(captions.values())
    with pytest.raises(ValueError, match="synonyms is 'COCO'"):
        chair(["a dog"], [["dog"]], synonyms="COCO")

    # An object of that name that is in the image is meant.
    assert chair(["train tracks"], [["train track"]], synonyms="coco")["per_sample"]["mentioned"] == [["train track"]]
