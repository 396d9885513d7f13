"""SelfRetrievalConfig: the papers' defaults, dependent defaults, and errors that name the remedy."""

import pytest

from hf_captionrl.rewards import SelfRetrieval
from hf_captionrl.rewards.base import resolve_rewards
from hf_captionrl.trainers import SelfRetrievalConfig


class NamedScorer:
    signature = "none"


def rewards(config):
    return [(type(reward), weight) for reward, weight in config.make_rewards(scorer=[NamedScorer()])]


def test_defaults_are_the_papers_but_for_the_rate(tmp_path):
    config = SelfRetrievalConfig(str(tmp_path))
    assert (config.learning_rate, config.num_train_epochs, config.per_device_train_batch_size) == (1e-5, 20, 100)
    assert config.lr_scheduler_type == "constant"
    assert (config.reward_kind, config.distractor_scope, config.generation_num_beams) == ("log_prob", "batch", 5)
    assert (config.retrieval_weight, config.cider_weight) == (1.0, 0.0)
    assert (config.do_sample, config.baseline, config.similarity_scale) == (False, "running_mean", "code")
    assert rewards(config) == [(SelfRetrieval, 1.0)]


@pytest.mark.parametrize(
    ("arguments", "do_sample", "baseline"),
    [
        ({}, False, "running_mean"),
        ({"num_generations": 5}, True, "running_mean"),
        ({"cider_weight": 0.5}, True, "greedy"),
        ({"rewards": ["cider=0.5"]}, True, "greedy"),
        # Values that are set are never replaced.
        ({"cider_weight": 0.5, "do_sample": False, "baseline": "running_mean"}, False, "running_mean"),
    ],
)
def test_defaults_that_depend_on_other_arguments(tmp_path, arguments, do_sample, baseline):
    config = SelfRetrievalConfig(str(tmp_path), **arguments)
    assert (config.do_sample, config.baseline) == (do_sample, baseline)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [({"temperature": 0.7}, "temperature"), ({"generation_kwargs": {"temperature": 0.7}}, "generation_kwargs")],
)
def test_a_temperature_that_generation_or_loss_would_not_see_is_refused(tmp_path, arguments, field):
    with pytest.raises(ValueError, match=field):
        SelfRetrievalConfig(str(tmp_path), **arguments)


def test_rewards_get_the_arguments_of_the_configuration(tmp_path):
    config = SelfRetrievalConfig(
        str(tmp_path),
        reward_kind="cosine",
        distractor_scope="hard",
        num_hard_distractors=5,
        scorer_ensemble="alternate",
    )
    ((reward, _),) = config.make_rewards(scorer=[NamedScorer(), NamedScorer()])
    assert (reward.reward_kind, reward.distractor_scope, reward.num_hard_distractors) == ("cosine", "hard", 5)
    assert (reward.scorer_ensemble, len(reward.scorers)) == ("alternate", 2)
    (named,) = resolve_rewards("self_retrieval", options=config).rewards
    assert (named.reward_kind, named.distractor_scope, named.num_hard_distractors) == ("cosine", "hard", 5)
