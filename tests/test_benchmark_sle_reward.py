"""`sle_reward`: the rollout that is timed earns what SLETrainer would pay, and its page says what was measured."""

import argparse

import pytest
import torch

from hf_captionrl.trainers import SLEConfig
from scripts.benchmarks import sle_reward


@pytest.fixture(scope="module")
def result():
    parser = argparse.ArgumentParser()
    sle_reward.add_arguments(parser)
    small = ["--width", "48", "--layers", "1", "--image-size", "32", "--tokens", "4", "--rounds", "2", "--steps", "1"]
    small += ["--training-images", "110", "--vocabulary", "300"]
    threads = torch.get_num_threads()
    found = sle_reward.run(parser.parse_args(small))
    assert torch.get_num_threads() == threads
    return found


@pytest.mark.slow
def test_steps_and_rewards_are_timed(result):
    assert set(result["reward"]) == {"bleu34", "edit", "multi_reference"}
    for name in ("all trained", "frozen tower, cached features"):
        found = result["blip_base"][name]
        assert [one["num_images"] for one in found["measured"]] == [1, 3]
        assert all(0 < one["reward_seconds"] < one["seconds"] for one in found["measured"])
        assert found["fixed_seconds"] >= 0
    assert 0 < result["share"]["embedded"] < 1


@pytest.mark.slow
def test_the_page_names_shape_share_and_how_it_was_scaled(result):
    text = sle_reward.markdown(result)
    assert "BLIP of width 48, 1 layers, 32 px, 4 tokens; all trained" in text
    assert "measured with 1 and 3 images" in text
    assert f"{result['share']['embedded']:.1%}" in text


def test_the_rollout_has_the_promised_size(tmp_path):
    args = SLEConfig(str(tmp_path), use_cpu=True)
    rewards, sampled, greedy = sle_reward.rollout(args, num_images=6, training_images=9, vocabulary=50, seed=0)
    assert len(sampled.captions) == 30
    assert len(greedy.captions) == 6
    assert 12 <= int(sampled.mask.sum(1).min()) <= int(sampled.mask.sum(1).max()) <= 20
    values = rewards(sampled)
    assert values.shape == (30, 2)
    # Captions are references with some words changed: they agree with them more than with those of other images.
    shifted = sampled.rows.roll(1)
    sampled.rows = shifted
    assert float(rewards(sampled)[:, 0].mean()) < float(values[:, 0].mean()) / 2


def test_a_rollout_of_more_images_than_there_are_is_refused(tmp_path):
    args = SLEConfig(str(tmp_path), use_cpu=True)
    with pytest.raises(IndexError):
        sle_reward.rollout(args, num_images=10, training_images=9, vocabulary=50, seed=0)
