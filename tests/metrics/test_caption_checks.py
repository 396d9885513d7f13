"""What is suspicious in captions and references: each sign alone, and nothing in what people and models write."""

import json
import warnings
from pathlib import Path

import evaluate
import pytest

import hf_captionrl  # noqa: F401  (makes the names of the modules known)
from hf_captionrl.metrics.caption_checks import TEXT_WARNINGS, text_warnings
from hf_captionrl.scenes import load_scenes

ROOT = Path(__file__).parents[2]
COCO = [json.loads(line) for line in (ROOT / "tests/vectors/coco_sample.jsonl").read_text().splitlines()]
REFERENCES = [row["references"][1:] for row in COCO]
CAPTIONS = [row["references"][0] for row in COCO]
SENTENCES = {name: sentence.partition(":")[0] for name, _, _, sentence in TEXT_WARNINGS}
GERMAN = [f"ein {kind} in {place}" for kind in "Hund Mann Bus Baum Haus".split() for place in ("Rom", "der Stadt")]
CHINESE = [f"一{kind}在{place}上" for kind in ("只狗", "个人", "辆车", "棵树", "只猫") for place in ("草地", "路")]
CHAT = ["Here is a caption: a dog", "Sure! A dog runs.", "**Caption:** a dog", "Here's a description of it:\na dog"]


def cut(caption):
    return " ".join(caption.split()[:5]) + " with a"


CASES = {
    "lists": [(CAPTIONS, [[str(group)] for group in REFERENCES], 100), (CAPTIONS[:1], [["['a dog' 'a cat']\n"]], 1)],
    "chat": [([text, *CAPTIONS[1:]], REFERENCES, 1) for text in CHAT],
    "think": [(["a dog", "<think>\nhm</think> a cat"], None, 1)],
    "letters": [([*CAPTIONS[:98], "0.83", "..."], REFERENCES, 2)],
    "prompt": [
        ([f"a photo of {text}" for text in CAPTIONS], REFERENCES, 100),
        ([f"{text} in high resolution" for text in CAPTIONS], REFERENCES, 100),
        ([f"这张图{text[1:]}" for text in CHINESE], None, 10),
    ],
    "equal": [(CAPTIONS, [row["references"] for row in COCO], 100)],
    "truncated": [([*map(cut, CAPTIONS[:11]), *CAPTIONS[11:]], REFERENCES, 11)],
    "limit": [
        (
            [" ".join(f"{text.rstrip(' .')} {text}".split()[:14]).rstrip(".") + "s" for text in CAPTIONS],
            REFERENCES,
            100,
        )
    ],
    "language": [(GERMAN, REFERENCES[:10], 10), (CHINESE, REFERENCES[:10], 10), (CAPTIONS[:10], [CHINESE] * 10, 10)],
}
BELOW = {  # as many as may be, and what only resembles them
    "lists": (CAPTIONS, [["[a dog] on a sign saying 'dog'", *group] for group in REFERENCES]),
    "chat": (["Here is a sandwich on a plate.", "Surely a dog", "A description on a sign: closed"], None),
    "think": (["two people think about a move"], None),
    "letters": (["7 o", "犬"], None),
    "prompt": (["a man in a blue shirt"] * 99 + ["a dog"], None),
    "equal": (CAPTIONS[:10], [*([text] for text in CAPTIONS[:8]), *REFERENCES[8:10]]),
    "truncated": ([*map(cut, CAPTIONS[:10]), *CAPTIONS[10:]], REFERENCES),
    "limit": (["a dog on the grass runs after a ball and barks."] * 10 + ["a cat"], None),
    "language": ([*GERMAN[:8], *CAPTIONS[8:10]], REFERENCES[:10]),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_each_sign_is_seen_alone_with_its_count_and_first_example(name):
    for captions, references, count in CASES[name]:
        (sentence,) = text_warnings(captions, references)
        assert sentence.startswith(f"{SENTENCES[name]}: {count} of {len(captions)}, such as ")
    assert text_warnings(*BELOW[name]) == []


def test_people_and_models_cause_no_warning():
    scenes = load_scenes(num_train=0, num_validation=0)["test"]["captions"][:]
    groups = [row["references"] for row in COCO]
    for images in (groups, scenes, groups[:10]):
        assert text_warnings([group[0] for group in images], [group[1:] for group in images]) == []
    assert text_warnings(["a man in a hat"] * 9, [["a man in a hat"]] * 9) == []  # too few for shares
    for name in ("clipcap_coco", "clipcap_conceptual"):
        assert text_warnings([row[name] for row in COCO], groups) == []
    for path in (ROOT / f"reproduction/results/dose_captions/clipcap_lambda-{n}_seed-0.txt" for n in (0, 1)):
        rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]
        assert text_warnings([row[0] for row in rows], scenes) == []


def test_modules_of_evaluate_warn_of_captions_and_of_references_that_are_captions():
    vectors = {"text_features": [[1.0, 0.0], [0.0, 1.0]], "image_features": [[1.0, 0.0], [0.0, 1.0]]}
    retrieval = evaluate.load("self_retrieval")
    with pytest.warns(UserWarning, match="<think>: 1 of 2, such as '<think></think>a cat'"):
        retrieval.compute(predictions=["a dog", "<think></think>a cat"], **vectors)
    with pytest.warns(UserWarning, match="lists printed as text: 2 of 2"):
        evaluate.load("caption_nlg").compute(predictions=["a dog", "a cat"], references=[["['a dog']"]] * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        retrieval.compute(predictions=["a dog", "a cat"], **vectors)
        # Names of objects are no captions.
        evaluate.load("caption_faithfulness").compute(predictions=["a dog"], references=[["['dog']"]])
