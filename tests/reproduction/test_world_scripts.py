"""Programs on the embedded world: captions of reproduction/omission.py, clips of reproduction/frames.py, reproduction/boosted.py, a world drawn anew."""

import functools
import json

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from hf_captionrl import load_scenes, load_scorer, pipeline
from hf_captionrl.apps.boosting.backends import SceneDescriber, SceneWriter
from hf_captionrl.apps.boosting.boost import boost_rows
from hf_captionrl.apps.boosting.conflicts import scene_conflicts
from hf_captionrl.scenes import check
from hf_captionrl.scenes.render import render_clip
from hf_captionrl.scenes.world import SHAPE_KINDS, Facts
from reproduction import boosted, frames, omission
from scripts import train_scenes_models

SCENES = [Facts(**facts) for facts in load_scenes()["test"]["facts"][:200]]


@pytest.fixture(scope="module")
def made():
    rng = np.random.default_rng(0)
    return [omission.captions(rng, facts) for facts in SCENES]


def recalled(made, column):
    """What each caption recalls: scenes, captions, names of facts."""
    found = [[check(caption, facts) for caption in one[column]] for one, facts in zip(made, SCENES, strict=True)]
    assert not any(result.wrong or result.unknown_words for results in found for result in results)
    return [[set(result.recalled) for result in results] for results in found]


def test_captions_are_true_and_state_each_fact_with_the_probability(made):
    for percent in omission.PERCENT:
        stated = recalled(made, f"random_{percent}")
        assert all("kind" in names for scene in stated for names in scene)
        for name in ("size", "position", "background"):
            share = np.mean([name in names for scene in stated for names in scene])
            # At most five standard errors of 1,000 captions.
            assert abs(share - percent / 100) < 5 * (0.25 / 1000) ** 0.5
        assert len({frozenset(names) for names in stated[0]}) > 1


def test_shared_captions_state_the_same_facts_and_systematic_ones_the_same_kinds_of_facts(made):
    assert all(scene.count(scene[0]) == 5 for scene in recalled(made, "shared_40"))
    for scene, facts in zip(recalled(made, "systematic"), SCENES, strict=True):
        there = {name for name in ("kind", *omission.SYSTEMATIC) if facts.to_dict()[name]}
        assert all(names == there for names in scene)


def test_frames_differ_in_the_row_of_one_thing(monkeypatch, tmp_path):
    chosen = frames.clips(3, 4)
    for clip in chosen:
        rows = [facts.position for facts in frames.frame_facts(clip)]
        down = [*["top"] * 3, *["middle"] * 4, *["bottom"] * 3]
        assert rows == (down if clip.facts.motion == "down" else down[::-1])
        pictures = {frame.tobytes() for frame in render_clip(clip, frames.FRAMES)}
        assert len(pictures) == frames.FRAMES
    monkeypatch.setattr(frames, "clips", lambda seed: chosen)
    monkeypatch.setattr(frames, "load_scorer", lambda path: Listener("held-out" in str(path)))
    command = ["frames", "--models", "scenes:blip-mle", "--names", "MLE", "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", command)
    frames.main()
    facts, generic = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert (facts["name"], facts["hallucination"], generic["name"]) == ("facts", 0, "MLE")
    for row in (facts, generic):
        assert (row["recall_at_1_all"], row["reward_recall_at_1_all"]) == (1, 0)


class Listener:
    """A scorer to which each caption fits its frame best, or the next one, among those of its clip, and a frame of another clip better."""

    def __init__(self, is_right):
        self.is_right = is_right

    def image_features(self, images):
        return torch.eye(len(images))

    def text_features(self, captions):
        rows = torch.arange(len(captions))
        own = rows if self.is_right else rows // frames.FRAMES * frames.FRAMES + (rows + 1) % frames.FRAMES
        found = torch.zeros(len(rows), len(rows))
        found[rows, own] = 1
        found[rows, (rows + frames.FRAMES) % len(rows)] = 2
        return found


@pytest.mark.slow  # 18 seconds for one program of reproduction/worlds.py
def test_a_world_drawn_anew_has_its_own_scenes_scorers_and_captioner(tmp_path, monkeypatch):
    fit = train_scenes_models.fit
    monkeypatch.setattr(train_scenes_models, "fit", lambda title, steps, *args, **named: fit(title, 1, *args, **named))
    monkeypatch.setattr(train_scenes_models, "NUM_GROUPS", 125)
    few = functools.partial(load_scenes, num_train=20, num_validation=5, num_test=14)
    monkeypatch.setattr(train_scenes_models, "load_scenes", few)
    logs = [train_scenes_models.draw_world(tmp_path / str(seed), seed) for seed in (0, 1)]
    assert [log["seed"] for log in logs[0] + logs[1]] == [1001, 1002, 1004, 2001, 2002, 2004]
    drawn = [datasets.load_dataset(str(tmp_path / str(seed) / "scenes"), cache_dir=str(tmp_path)) for seed in (0, 1)]
    for seed, splits in enumerate(drawn):
        assert {name: len(rows) for name, rows in splits.items()} == {"train": 20, "validation": 5, "test": 14}
        assert list(splits["test"]["bag_id"]) == ["000"] * 7 + ["001"] * 7
        assert splits["test"][:]["facts"] == few(seed=1000 * (seed + 1))["test"][:]["facts"]
    images = drawn[0]["test"][:2]["image"]
    features = [load_scorer(str(tmp_path / str(seed) / "clip-reward")).image_features(images) for seed in (0, 1)]
    assert features[0].shape == features[1].shape
    assert not torch.allclose(features[0], features[1], atol=1e-2)
    assert load_scorer(str(tmp_path / "0" / "siglip-held-out")).text_features(["a cat"]).shape == (1, 160)
    assert len(pipeline(str(tmp_path / "1" / "blip-mle"), max_new_tokens=3)(images)) == 2
    # Other things and other annotators: nothing of the first world is left, and each name is a token.
    train_scenes_models.draw_world(tmp_path / "2", 2, "shapes", "alt_text")
    test = datasets.load_dataset(str(tmp_path / "2" / "scenes"), cache_dir=str(tmp_path))["test"]
    assert {row["facts"]["kind"] for row in test} <= set(SHAPE_KINDS)
    assert all(caption.startswith("image of ") for row in test for caption in row["captions"])
    for name in ("clip-reward", "siglip-held-out", "blip-mle"):
        tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "2" / name))
        words = {word for text in test["full_caption"] for word in text.split()}
        assert {tuple(tokenizer.tokenize(word)) for word in words} == {(word,) for word in words}


def test_rows_of_boosted_captions(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["boosted", "--scenes", "42", "--error_rate", "0.3", "--output", str(tmp_path)])
    boosted.main()
    rows = {row["name"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    assert list(rows) == ["references", "BlendCap", "VisualCap", "HolisticCap"]
    scenes = load_scenes(num_train=0, num_validation=0, num_test=42)["test"]
    describer = SceneDescriber(dict(zip(scenes["image_id"], scenes["facts"], strict=True)), error_rate=0.3)
    made = list(boost_rows(scenes, tmp_path / "again", text=SceneWriter(), vision=describer))
    for name in ("VisualCap", "HolisticCap"):
        pairs = [(one["blend_caption"], one[boosted.SOURCES[name]]) for one in made]
        words = [bool(boosted.text_conflicts(*pair)) for pair in pairs]
        exact = [bool(scene_conflicts(*pair, facts)) for pair, facts in zip(pairs, scenes["facts"], strict=True)]
        both = sum(a and b for a, b in zip(words, exact, strict=True))
        found = [rows[name][key] * 42 for key in ("conflicts", "conflicts_by_words", "false_conflicts")]
        assert found == pytest.approx([sum(exact), both, sum(words) - both])
    for name, column in boosted.SOURCES.items():
        wrong = [
            len(check(one[column], Facts(**facts)).wrong) for one, facts in zip(made, scenes["facts"], strict=True)
        ]
        assert rows[name]["wrong_claims"] == pytest.approx(sum(wrong) / 42)
        assert rows[name]["length"] == rows[name]["mean_words"] < rows[name]["mean_tokens"]
        assert {"rd100_recall_at_1", "reward_bag_7_recall_at_1", "bag_7_truth_recall_at_1"} <= rows[name].keys()
    assert (
        rows["HolisticCap"]["conflicts"]
        == 0
        < rows["VisualCap"]["conflicts_by_words"]
        < rows["VisualCap"]["conflicts"]
    )


CONFLICTS = [
    ("Two dogs on grass.", "Three brown dogs lie on grass.", "count"),
    ("A pair of small dogs", "There are 3 dogs", "count"),
    ("A white plate on a table", "A shiny gray plate with food", "colour"),
    ("A man hits a ball.", "A woman in white hits a ball.", "kind"),
    ("Two dogs.", "No dogs, just two cats.", "kind"),
    ("A cat to the left of a car", "A cat to the right of a car", "kind"),
]
AGREEMENTS = [
    ("A dog.", "Two brown dogs."),  # an article is not a number
    ("A white and brown plate", "A white plate"),
    ("Two dogs and three cats", "A pair of dogs, three black cats"),
    ("A cat on the left", "A cat on the left, a dog on the right"),
    ("Two dogs.", "Two dogs without any cats."),
    ("A boy", "Boys with a ball"),
    ("A blue sky over a green field", "A field of green, and the sky is blue"),
]


def test_known_conflicts_are_found_and_agreeing_captions_have_none():
    for blend, holistic, attribute in CONFLICTS:
        assert [conflict.attribute.split()[0] for conflict in boosted.text_conflicts(blend, holistic)] == [
            attribute
        ], blend
    assert [pair for pair in AGREEMENTS if boosted.text_conflicts(*pair)] == []
