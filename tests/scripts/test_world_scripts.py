"""scripts/omission.py: what its captions state. scripts/frames.py: its clips. scripts/boosted.py, and what both measure."""

import json

import numpy as np
import pytest
import torch

from hf_captionrl import load_scenes
from hf_captionrl.apps.boosting.backends import SceneDescriber, SceneWriter
from hf_captionrl.apps.boosting.boost import boost_shard
from hf_captionrl.scenes import check
from hf_captionrl.scenes.render import render_clip
from hf_captionrl.scenes.world import Facts
from scripts import boosted, frames, omission

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


def test_rows_of_boosted_captions(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["boosted", "--scenes", "42", "--error_rate", "0.3", "--output", str(tmp_path)])
    boosted.main()
    rows = {row["name"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    assert list(rows) == ["references", "BlendCap", "VisualCap", "HolisticCap"]
    scenes = load_scenes(num_train=0, num_validation=0, num_test=42)["test"]
    describer = SceneDescriber(dict(zip(scenes["image_id"], scenes["facts"], strict=True)), error_rate=0.3)
    made = boost_shard(scenes, tmp_path / "again", text=SceneWriter(), vision=describer)
    for name, column in boosted.SOURCES.items():
        wrong = [len(check(one[column], Facts(**facts)).wrong) for one, facts in zip(made, scenes["facts"], strict=True)]
        assert rows[name]["wrong_claims"] == pytest.approx(sum(wrong) / 42)
        assert rows[name]["length"] == rows[name]["mean_words"] < rows[name]["mean_tokens"]
        assert {"rd100_recall_at_1", "reward_bag_7_recall_at_1", "bag_7_truth_recall_at_1"} <= rows[name].keys()
    assert rows["HolisticCap"]["conflicts"] == 0 < rows["VisualCap"]["conflicts_by_words"] < rows["VisualCap"]["conflicts"]
