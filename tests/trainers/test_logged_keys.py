"""Every key that a trainer logs is described in docs/logged_keys.yaml, and every described key is logged."""

import itertools
import re

import pytest
from peft import LoraConfig

from hf_captionrl.scenes import load_scenes
from scripts.docs_hooks import logged_keys

from .grpo_worker import make_trainer
from .one_step import tiny_trainer
from .rl_step import build, build_sle
from .test_smile_sft_trainer import make

TWO_STEPS = {"max_steps": 2, "logging_strategy": "steps", "logging_steps": 1, "report_to": "none"}
EVALUATED = {**TWO_STEPS, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 100}
EVALUATED |= {"generation_num_beams": 1, "generation_max_new_tokens": 8}
REWARDED = {**EVALUATED, "do_sample": True, "num_generations": 3, "beta": 0.1, "entropy_weight": 0.01, "guard": "warn"}


@pytest.fixture(scope="module")
def data():
    return load_scenes(num_train=16, num_validation=100, num_test=0)


def patterns(keys):
    """One regular expression per key: `{a,b}` stands for each of them, NAME for any name."""
    for key in keys.split():
        parts = [part.split(",") for part in re.split(r"[{}]", key)]
        yield from ("".join(one).replace("NAME", r"[^/]+") for one in itertools.product(*parts))


def differences(described, logged):
    """Keys that are logged and not described, and patterns that are described and not logged."""
    matches = {
        pattern: set(filter(re.compile(pattern).fullmatch, logged)) for keys in described for pattern in patterns(keys)
    }
    return sorted(logged - set().union(*matches.values())), [pattern for pattern, keys in matches.items() if not keys]


def smile(folder, data, scorer, held_out_scorer, parts):
    settings = {**EVALUATED, "early_evaluations": [8], "save_strategy": "steps", "save_steps": 1}
    return tiny_trainer(folder, data, trainer_arguments={"scorer": scorer}, **settings)


def self_retrieval(folder, data, scorer, held_out_scorer, parts):
    settings = {**REWARDED, "per_device_train_batch_size": 8, "num_iterations": 2, "baseline": "leave_one_out"}
    scorers = {"scorer": scorer, "held_out_scorer": held_out_scorer, "eval_dataset": data["validation"]}
    return build(folder, data["train"], bags=True, bag_schedule=2, rewards=["claim_f1=1"], **scorers, **settings)


def sle(folder, data, scorer, held_out_scorer, parts):
    given = {"eval_dataset": data["validation"], "held_out_scorer": held_out_scorer}
    return build_sle(folder, data["train"], trainer_arguments=given, **REWARDED, num_iterations=2)


def smile_text(folder, data, scorer, held_out_scorer, parts):
    return make(parts, folder, **TWO_STEPS)


def self_retrieval_grpo(folder, data, scorer, held_out_scorer, parts):
    adapter = {
        "trainer_arguments": {"peft_config": LoraConfig(target_modules="all-linear")}
    }  # the reference is the base
    return make_trainer(str(folder), per_device_train_batch_size=8, beta=0.1, **adapter, **TWO_STEPS)


@pytest.mark.parametrize(
    "build", [smile, self_retrieval, sle, smile_text, self_retrieval_grpo], ids=lambda f: f.__name__
)
def test_what_is_logged_is_described(build, tmp_path, data, scorer, held_out_scorer, parts):
    trainer = build(tmp_path, data, scorer, held_out_scorer, parts)
    trainer.train()
    assert trainer.state.global_step == 2
    shared = {smile: ["captioning"], sle: ["captioning"], self_retrieval: ["captioning", "claims"]}
    described = [keys for name in (build.__name__, *shared.get(build, [])) for keys in logged_keys(name)]
    assert differences(described, set().union(*trainer.state.log_history)) == ([], [])


def test_a_missing_and_a_superfluous_description_are_seen():
    described = {"loss eval_{a,b}": "", "rewards/NAME/mean": ""}
    assert differences(described, {"loss", "eval_a", "eval_b", "rewards/x/mean"}) == ([], [])
    assert differences(described, {"loss", "eval_a", "rewards/x/std"}) == (
        ["rewards/x/std"],
        ["eval_b", r"rewards/[^/]+/mean"],
    )
