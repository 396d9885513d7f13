"""Degenerate captions are detected, and ordinary ones are not."""

import random
from itertools import pairwise

import pytest

from hf_captionrl.scenes import load_scenes
from hf_captionrl.text import degenerate_captions
from hf_captionrl.text.degenerate_captions import caption_words, degenerate, find_repeats, is_empty
from hf_captionrl.text.tokenize import lacks_blanks, split_characters

HACKED = "a blue and blue blue blue and yellow blue"
LOOP = "a mushroom left of a pig on a blue background on a blue background on a blue background"
GOOD = "two large red cats left of a small dog on a blue background"
ORDINARY = [GOOD, "a man and a woman and a dog on a beach", "A red bus, a red car and a red bike.", "dog", ""]


@pytest.mark.parametrize(
    "caption", [HACKED, LOOP, "a Dog on the the grass", "on a blue background a cat sits on a blue background"]
)
def test_hacked_captions_are_degenerate(caption):
    assert degenerate([GOOD, caption, GOOD]) == [False, True, False]


def test_ordinary_captions_are_not_degenerate():
    assert degenerate(ORDINARY) == [False] * len(ORDINARY)
    assert degenerate([]) == []


def test_full_captions_of_the_embedded_world_are_not_degenerate():
    scenes = load_scenes(num_train=16, num_validation=12, num_test=0)
    captions = [*scenes["train"]["full_caption"], *scenes["validation"]["full_caption"]]
    assert not any(degenerate(captions))


def test_parts_of_many_captions_change_nothing(monkeypatch):
    captions = ["a cat on a mat", "a cat on a blue mat on a blue mat", "a dog dog", "", "a tree"]
    whole = degenerate(captions)
    monkeypatch.setattr(degenerate_captions, "_CHUNK", 2)
    assert degenerate(captions) == whole == [False, True, True, False, False]


def longest_repeat(words):
    """By comparing all pairs of phrases."""
    sizes = range(1, len(words))
    repeats = [n for n in sizes if len({tuple(words[i : i + n]) for i in range(len(words) - n + 1)}) <= len(words) - n]
    return max(repeats, default=0)


@pytest.mark.parametrize("vocabulary", [1, 4])
def test_longest_repeats_equal_those_of_all_pairs_of_phrases(vocabulary):
    draw = random.Random(vocabulary)
    captions = [[f"w{draw.randrange(vocabulary)}" for _ in range(draw.randrange(40))] for _ in range(100)]
    repeats, doubled = find_repeats(caption_words([" ".join(words) for words in captions]))
    assert repeats.tolist() == [longest_repeat(words) for words in captions]
    assert doubled.tolist() == [any(a == b for a, b in pairwise(words)) for words in captions]
    repeats, doubled = find_repeats(caption_words(["", "..."]))
    assert (repeats.tolist(), doubled.tolist()) == ([0, 0], [False, False])


RUNS = ["!!!! " * 10, "!!!!" * 10, "...", "😀" * 30, "一只狗" * 12, "a" * 200, "หมา" * 12, "कुत्ता" * 12]
SCRIPTS = [
    "एक कुत्ता घास पर दौड़ता है",
    "दो बच्चे समुद्र तट पर खेल रहे हैं।",
    "बिल्ली",
    "一只狗在草地上奔跑",
    "一个男人和一个女人站在红色的公共汽车旁边。",
    "人山人海",
    "犬が公園でボールを追いかけている。",
    "カレーライス",
    "สุนัขตัวหนึ่งกำลังวิ่งอยู่บนสนามหญ้า",
    "เด็กเล่นอยู่ที่ชายหาด",
    "A crowded bookkeeper's committee meets at www.example.com in 2000000",
    "Zzz... a cat sleeps!!!",
    "a dog 🐶🐶🐶 on the beach 🏖️",
    "كلب يركض على العشب الأخضر",
]


@pytest.mark.parametrize("caption", RUNS)
def test_runs_without_letters_or_blanks_are_degenerate(caption):
    assert degenerate([GOOD, caption, *SCRIPTS]) == [False, True] + [False] * len(SCRIPTS)


def test_captions_without_letter_or_digit_are_empty():
    assert list(map(is_empty, ["", " ", "...", "!!!!", "😀" * 30, "\u0941", "—", "🐶🏖️"])) == [True] * 8
    assert not any(map(is_empty, [*SCRIPTS, "7", "½", "²", "कि"]))


def test_characters_count_as_words_on_request():
    assert split_characters(["一只 dog在跑。", ["a dog"], "กำลัง"]) == ["一 只 dog 在 跑", ["a dog"], "ก ำ ลั ง"]
    loop = "一只狗在草地上奔跑，一只狗在家"  # no run, but a phrase of three characters twice
    assert degenerate([loop, *split_characters([loop, *SCRIPTS[:5]])]) == [False, True] + [False] * 5
    assert lacks_blanks(SCRIPTS[3:10])
    assert not any(map(lacks_blanks, [SCRIPTS[:4], ["dog"] * 3]))
