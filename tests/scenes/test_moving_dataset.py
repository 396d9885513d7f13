"""Clips show what their facts say, captions of them are true, and the checker knows what moves where."""

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from hf_captionrl.data import frames_of, is_video, load_caption_splits, sample_frames, verify_video
from hf_captionrl.scenes import (
    BAG_SIZES,
    Clip,
    MovingFacts,
    bags,
    check,
    full_caption,
    load_moving_scenes,
    render_clip,
    sample_clip,
)
from hf_captionrl.scenes.dataset import _gif
from hf_captionrl.scenes.grammar import ANNOTATORS, annotate
from hf_captionrl.scenes.moving_world import sample_clips_alike
from tests.tolerances import within

SIZES = {"num_train": 20, "num_validation": 6, "num_test": 32}
PIG = MovingFacts("pig", 1, "small", "sideways", "top", "blue", motion="left", speed="slow")


@pytest.fixture(scope="module")
def splits():
    return load_moving_scenes(**SIZES)


@pytest.fixture
def studio(monkeypatch):
    """Pictures without noise, clutter and bad light."""
    for name, value in {"CLUTTER": 0.0, "BRIGHTNESS": (1, 1), "SATURATION": (1, 1), "BLUR": (0.1, 0.1)}.items():
        monkeypatch.setattr(f"hf_captionrl.scenes.render.{name}", value)
    monkeypatch.setattr("hf_captionrl.scenes.render._noise", lambda: np.zeros((256, 256, 3), np.float32))


def test_pixels_move_as_the_facts_say(studio):
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(60):
        clip = sample_clip(rng, ("heart", "triangle", "arrow"))
        clip = replace(clip, facts=replace(clip.facts, pattern="", background="white"))
        frames = [np.asarray(f).astype(int) for f in render_clip(clip)]
        corners = frames[0][[0, 0, -1, -1], [0, -1, 0, -1]]
        ground = corners[np.argmax([(corners == c).all(1).sum() for c in corners])]
        centres = []
        for frame in frames:
            rows, columns = np.nonzero(np.abs(frame - ground).sum(-1) > 90)
            centres.append(((rows.min() + rows.max()) / 2 / 24, (columns.min() + columns.max()) / 2 / 24))
        down, right = np.subtract(centres[-1], centres[0])
        cells = {"": 0, "slow": 1, "fast": 2}[clip.facts.speed]
        expected = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0), "still": (0, 0)}
        assert (down, right) == within(tuple(np.multiply(expected[clip.facts.motion], cells)), 0.1)
        if clip.facts.position:
            place = ("top", "middle", "bottom").index(clip.facts.position)
            assert (centres[0][0], centres[-1][0]) == within((place + 0.5, place + 0.5), 0.3)
        else:
            assert clip.facts.motion in ("up", "down")
        seen.add((clip.facts.motion, clip.facts.speed))
    assert len(seen) == 9


@pytest.mark.parametrize("number", [2, 6])
def test_backwards_is_the_opposite_direction_seen_in_the_same_frames(number):
    """So that no captioner can tell the direction from the frames without their order."""
    there = Clip(replace(PIG, motion="right", speed="fast"), 0, 0)
    back = Clip(replace(PIG, motion="left", speed="fast"), 0, 2)
    one, other = ([f.tobytes() for f in sample_frames(_gif(clip), number)] for clip in (there, back))
    assert sorted(one) == sorted(other)
    assert one == other[::-1]
    assert one != other


def test_files_are_videos_close_to_what_was_drawn(splits):
    for row in splits["test"].select(range(12)):
        assert is_video(row["image"])
        verify_video(row["image"])
    clip = sample_clips_alike(np.random.default_rng((0, 1)), 7)[0]  # the first that the test split drew
    frames = sample_frames(splits["test"][0]["image"], 6)
    assert splits["test"][0]["facts"] == clip.facts.to_dict()
    for got, drawn in zip(frames, render_clip(clip), strict=True):
        assert np.abs(np.asarray(got).astype(int) - np.asarray(drawn)).mean() < 5  # 256 colours, and noise
    still = next(row for row in splits["train"] if row["facts"]["motion"] == "still")
    with Image.open(io.BytesIO(still["image"]["bytes"])) as image:
        assert getattr(image, "n_frames", 1) == 1
    assert is_video(still["image"])
    assert len(sample_frames(still["image"], 4)) == 4


def test_splits_share_no_facts_and_bags_are_near_duplicates(splits):
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 20, "validation": 6, "test": 32}
    facts = [MovingFacts(**row) for rows in splits.values() for row in rows["facts"]]
    assert len(set(facts)) == len(facts)
    for fact in facts:
        assert bool(fact.speed) == (fact.motion != "still")
        assert bool(fact.position) == (fact.motion not in ("up", "down"))
    test = splits["test"]
    for size in BAG_SIZES:
        for members in bags(list(test["bag_id"]), size):
            first, *others = (test[i]["facts"] for i in members)
            for other in others:
                differing = {name for name in first if first[name] != other[name]}
                assert 1 <= len(differing - {"speed", "position"} or differing) <= 2


def test_equal_seeds_give_equal_bytes():
    one, same, other = (load_moving_scenes(seed=s, num_train=3, num_validation=0, num_test=0) for s in (1, 1, 2))
    assert one["train"][:] == same["train"][:]
    assert one["train"]["image"][:] != other["train"]["image"][:]


def test_annotators_tell_the_truth_and_mention_motion_sometimes():
    rng = np.random.default_rng(0)
    mentions = wrong = claims = 0
    for _ in range(200):
        facts = sample_clip(rng).facts
        whole = check(full_caption(facts), facts)
        assert not whole.wrong
        assert not whole.missed
        assert not whole.unknown_words
        for annotator in ANNOTATORS:
            result = check(annotate(rng, facts, annotator), facts)
            wrong += len(result.wrong)
            claims += len(result.wrong) + len(result.right)
            assert not result.unknown_words
            mentions += "motion" in result.recalled
    assert 0.4 < mentions / 1000 < 0.7
    assert 0.01 < wrong / claims < 0.04


@pytest.mark.parametrize(
    ("caption", "right", "wrong"),
    [
        ("a pig moving left slowly", {("motion", "left"), ("speed", "slow")}, set()),
        ("a pig going right", set(), {("motion", "right")}),
        ("a fast pig", set(), {("speed", "fast")}),
        ("a pig that moves", {("moves", "moving")}, set()),
        ("a pig at rest", set(), {("motion", "still")}),
        ("a pig on the left", set(), set()),
        ("a pig on blue moving left", {("background", "blue"), ("motion", "left")}, set()),
        ("a pig moving at the top", {("moves", "moving"), ("position", "top")}, set()),
    ],
)
def test_claims_of_motion(caption, right, wrong):
    result = check(caption, PIG.to_dict())
    assert {(c.attribute, c.value) for c in result.right} - {("kind", "pig"), ("count", "1")} == right
    assert {(c.attribute, c.value) for c in result.wrong} == wrong


def test_what_has_no_position_or_motion_can_be_given_none():
    rising = replace(PIG, motion="up", position="")
    assert [c.attribute for c in check("a pig at the bottom", rising).wrong] == ["position"]
    assert "position" not in check("a pig", rising).missed
    resting = replace(PIG, motion="still", speed="")
    assert [c.attribute for c in check("a moving pig", resting).wrong] == ["moves"]
    assert set(check("a pig", resting).missed) == {"size", "orientation", "position", "background", "motion"}


def test_loaded_like_any_data(monkeypatch):
    import hf_captionrl.scenes as scenes

    monkeypatch.setattr(scenes, "load_moving_scenes", lambda: load_moving_scenes(**SIZES))
    splits = load_caption_splits("moving_scenes", num_frames=4)
    assert frames_of(splits["train"]) == 4
    assert splits["train"].column_names[:3] == ["image", "image_id", "captions"]
    detailed = load_caption_splits("moving_scenes", num_frames=4, caption_column="full_caption")
    assert detailed["test"][0]["captions"] == [splits["test"][0]["full_caption"]]
