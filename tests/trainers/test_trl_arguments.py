"""TRL's arguments of the objective in this package's trainers: what they do, and what is refused."""

from __future__ import annotations

import pytest
import torch

from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import CaptionRLConfig
from tests.rewards.conftest import OfContext
from tests.tolerances import resolution
from tests.trainers.one_step import largest_difference, weights
from tests.trainers.rl_step import build, train

GROUPS = {"num_generations": 3, "do_sample": True, "seed": 5}
LONGEST = 12  # the setting of `train`


@pytest.fixture(scope="module")
def data():
    return load_scenes(num_train=4, num_validation=1, num_test=1)["train"]


def one_step(folder, data, accumulation: int = 2, **settings) -> dict[str, torch.Tensor]:
    arguments = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
    return weights(train(folder, data, **{**GROUPS, **arguments, **settings}))


def test_defaults_are_those_of_the_papers_code():
    config = CaptionRLConfig("out")
    assert (config.loss_type, config.scale_rewards) == ("grpo", "none")
    assert config.multi_objective_aggregation == "sum_then_normalize"


@pytest.mark.parametrize(("given", "meaning"), [(True, "group"), (False, "none"), ("batch", "batch")])
def test_scale_rewards_may_be_a_boolean(given, meaning):
    assert CaptionRLConfig("out", scale_rewards=given, num_generations=2).scale_rewards == meaning


def test_dr_grpo_is_the_sum_divided_by_the_maximum_length(tmp_path, data):
    """After one step of SGD the weights show the gradient; the number of micro-batches does not change it."""
    whole = one_step(tmp_path / "sum", data, loss_type="sum", learning_rate=0.1)
    scaled = one_step(tmp_path / "dr", data, loss_type="dr_grpo", learning_rate=0.1 * LONGEST)
    assert largest_difference(scaled, whole) < resolution(1, ulps=128)
    unscaled = one_step(tmp_path / "other", data, loss_type="dr_grpo", learning_rate=0.1)
    assert largest_difference(unscaled, whole) > 1e-3  # negative control


@pytest.mark.parametrize(
    "objective", [{"scale_rewards": "group"}, {"multi_objective_aggregation": "normalize_then_sum"}]
)
def test_scaled_advantages_reach_the_gradient(tmp_path, data, objective):
    """A factor on the reward disappears with scaling, and multiplies the gradient without it."""
    settings = {"baseline": "group_mean", "max_steps": 1}

    def step(name: str, factor: float, **more) -> dict[str, torch.Tensor]:
        return one_step(tmp_path / name, data, **settings, retrieval_weight=factor, **more)

    # Factors that are large against the 1e-4 that is added to the standard deviation.
    scaled = [step(f"scaled_{factor}", factor, **objective) for factor in (1e4, 1e6)]
    assert largest_difference(*scaled) < resolution(1, ulps=128)
    plain = [step(f"plain_{factor}", factor) for factor in (1.0, 100.0)]
    assert largest_difference(*plain) > 1e-2


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        *(({"loss_type": name}, "loss_type") for name in ("bnpo", "cispo", "luspo", "sapo", "vespo", "mean")),
        ({"scale_rewards": "image"}, "scale_rewards"),
        ({"scale_rewards": True}, "num_generations"),
        ({"multi_objective_aggregation": "product"}, "multi_objective_aggregation"),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "num_generations": 2, "scale_rewards": "batch"},
            "scale_rewards",
        ),
        ({"multi_objective_aggregation": "normalize_then_sum", "num_generations": 2}, "baseline"),
        ({"baseline": "group", "num_generations": 2}, "baseline"),
        *(({name: 0}, name) for name in ("num_generations", "max_completion_length", "num_iterations")),
        *(({name: -0.1}, name) for name in ("beta", "entropy_weight", "epsilon", "bag_recall_threshold")),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"guard": "pray"}, "guard"),
        ({"bag_distractors": "far"}, "bag_distractors"),
    ],
)
def test_values_that_are_refused(settings, name):
    with pytest.raises(ValueError, match=name):
        CaptionRLConfig("out", **settings)


def test_rewards_with_another_baseline_cannot_be_normalised_one_by_one(tmp_path, data):
    other = OfContext(lambda context: [0.0] * len(context.captions), "other")
    other.baseline = "running_mean"
    settings = {**GROUPS, "baseline": "group_mean", "multi_objective_aggregation": "normalize_then_sum"}
    trainer = build(tmp_path, data, per_device_train_batch_size=4, **settings)
    trainer.rewards.rewards.append(other)
    with pytest.raises(ValueError, match=r"the baselines \['group_mean', 'running_mean'\]. Leave out rewards"):
        trainer.rollouts.reset(trainer.captioner)
