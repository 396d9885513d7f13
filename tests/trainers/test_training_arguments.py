"""Each field of TrainingArguments works, is refused by the configuration, or has no effect on training."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
import types
from pathlib import Path

import accelerate
import peft
import pytest
import torch
import transformers
import trl
from accelerate.parallelism_config import ParallelismConfig
from transformers import Trainer, TrainingArguments

from hf_captionrl.apps.instruct.instructions import tiny_llama
from hf_captionrl.data import CaptionDataset
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import (
    CaptionRLConfig,
    CaptionRLTrainer,
    CaptionTrainer,
    SelfRetrievalConfig,
    SelfRetrievalGRPOConfig,
    SelfRetrievalGRPOTrainer,
    SelfRetrievalTrainer,
    SLEConfig,
    SLETrainer,
    SmileConfig,
    SmileSFTConfig,
    SmileSFTTrainer,
    SmileTrainer,
    caption_config,
)
from hf_captionrl.trainers.policy import refuse_data_parallel
from tests.rewards.conftest import OfContext
from tests.tiny import tiny_captioner
from tests.tolerances import resolution
from tests.trainers import test_reward_functions as rewarding
from tests.trainers.grpo_worker import make_trainer
from tests.trainers.one_step import PLAIN_SGD, largest_difference, weights
from tests.trainers.rl_step import build, train

FIELDS = {field.name for field in dataclasses.fields(TrainingArguments)}
RL_CONFIGS = (CaptionRLConfig, SelfRetrievalConfig, SLEConfig)

REFUSED = {
    "average_tokens_across_devices": False,
    "label_smoothing_factor": 0.1,
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "use_liger_kernel": True,
    "liger_kernel_config": {"rope": True},
    "include_for_metrics": ["loss"],
    "batch_eval_metrics": True,
    "eval_do_concat_batches": False,
    "enable_jit_checkpoint": True,
    "hub_strategy": "all_checkpoints",
    "hub_always_push": True,
    "parallelism_config": ParallelismConfig(tp_size=2),
    "remove_unused_columns": True,
    "label_names": ["targets"],
    "train_sampling_strategy": "group_by_length",
    "length_column_name": "number_of_words",
}
"""A value of each refused field that is an error."""

REFUSED_RL = {
    **REFUSED,
    "auto_find_batch_size": True,
    "neftune_noise_alpha": 5.0,
    "ignore_data_skip": True,
    "accelerator_config": {"split_batches": True},
    "train_sampling_strategy": "sequential",
}

TESTED = {
    "auto_find_batch_size": "test_batch_size_is_reduced_after_out_of_memory",
    "data_seed": "test_data_seed_determines_batches_and_captions",
    "dataloader_drop_last": "test_the_incomplete_last_batch",
    "dataloader_in_order": "test_loader_settings",
    "dataloader_multiprocessing_context": "test_loader_settings",
    "dataloader_num_workers": "test_loader_settings",
    "dataloader_persistent_workers": "test_loader_settings",
    "dataloader_pin_memory": "test_loader_settings",
    "dataloader_prefetch_factor": "test_loader_settings",
    "eval_on_start": "test_evaluation_at_the_start_and_by_plateau",
    "hub_model_id": "test_settings_of_a_push",
    "hub_private_repo": "test_settings_of_a_push",
    "hub_revision": "test_settings_of_a_push",
    "hub_token": "test_settings_of_a_push",
    "include_num_input_tokens_seen": "test_tokens_of_text_are_counted",
    "metric_for_best_model": "test_evaluation_at_the_start_and_by_plateau",
    "neftune_noise_alpha": "test_neftune_adds_noise_to_the_words",
    "per_device_eval_batch_size": "test_the_batch_size_of_evaluation",
    "prediction_loss_only": "test_prediction_loss_only",
    "push_to_hub": "test_settings_of_a_push",
    "skip_memory_metrics": "test_memory_is_measured",
    "torch_compile": "test_a_compiled_model_learns_the_same",
    "torch_compile_backend": "test_a_compiled_model_learns_the_same",
    "use_cache": "test_caches_do_not_change_training",
}
"""Fields that this package reads itself, or that could conflict with its code, and the test of each in this file."""


@pytest.fixture(autouse=True, scope="module")
def one_folder(tmp_path_factory):
    """Configurations write nothing, so all share one folder."""
    return tmp_path_factory.mktemp("arguments")


def reads(function) -> set[str]:
    """Fields of `args` or `self.args` that a function reads."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in FIELDS:
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if name == "args":
                found.add(node.attr)
    return found


def replaced(cls) -> set[str]:
    """Methods of the Trainer that our classes replace without calling what they replace."""
    found = set()
    for owner in cls.__mro__[: cls.__mro__.index(Trainer)]:
        for name, method in vars(owner).items():
            if inspect.isfunction(method) and hasattr(Trainer, name):
                found |= set() if f"super().{name}(" in inspect.getsource(method) else {name}
    return found


def never_run(cls) -> set[str]:
    """Methods of the Trainer that are replaced, and those that are only used by them."""
    methods = {name: inspect.getsource(method) for name, method in vars(Trainer).items() if inspect.isfunction(method)}
    ours = "".join(inspect.getsource(owner) for owner in cls.__mro__[: cls.__mro__.index(Trainer)])
    dead = replaced(cls) & methods.keys()
    users = {
        name: {other for other, text in methods.items() if other != name and re.search(rf"self\.{name}\b", text)}
        for name in methods
    }
    while more := {
        name
        for name in methods.keys() - dead
        if users[name] and users[name] <= dead and not re.search(rf"(self|super\(\))\.{name}\b", ours)
    }:
        dead |= more
    return dead


def assigned(source: str, *owners: str) -> set[str]:
    """Attributes that a program sets on one of the named variables."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id in owners else set()
    return found


@functools.cache
def set_by_integrations() -> set[str]:
    """Attributes that the integrations of transformers, peft, trl and accelerate set on a trainer."""
    found = set()
    for library in (transformers, peft, trl, accelerate):
        for file in Path(library.__file__).parent.rglob("*.py"):
            if re.search(r"\btrainer\.\w+ = ", text := file.read_text(encoding="utf-8")):
                found |= assigned(text, "trainer")
    return found


SET_ON_PURPOSE = {
    "args",
    "train_dataset",
    "data_collator",
    "model_init",  # used before the Trainer's constructor
    "model_accepts_loss_kwargs",
    "control",
    "lr_scheduler",
    "reward_weights",
    "hub_model_id",
    "push_in_progress",
    "_train_batch_size",
}
"""Attributes of the Trainer that our trainers set too, with its meaning."""

TRAINERS = [CaptionTrainer, SmileTrainer, CaptionRLTrainer, SelfRetrievalTrainer, SLETrainer, SmileSFTTrainer]
TRAINERS += [SelfRetrievalGRPOTrainer]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("cls", TRAINERS)
def test_defaults_work_without_an_accelerator_and_warn_of_nothing(cls, one_folder, recwarn):
    args = cls.config_class(str(one_folder))
    assert not args.bf16  # TRL's default, which transformers refuses here
    assert not args.dataloader_pin_memory
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("cls", TRAINERS)
def test_names_of_our_trainers_are_not_those_of_the_libraries(cls):
    """Of two things with one name, the one that is set last replaces the other, such as a method by None."""
    ours = [owner for owner in cls.__mro__ if owner.__module__.startswith("hf_captionrl.")]
    theirs = [owner for owner in cls.__mro__ if owner not in (*ours, object)]
    set_by_them = set_by_integrations().union(*(assigned(inspect.getsource(owner), "self") for owner in theirs))
    assert {"objective", "model_wrapped", "hp_space"} <= set_by_them  # the test finds them
    defined = {name for owner in ours for name in vars(owner) if not name.startswith("__")}
    assert defined & set_by_them - SET_ON_PURPOSE == set()
    known = {name for owner in theirs for name in vars(owner)}
    set_by_us = set().union(*(assigned(inspect.getsource(owner), "self") for owner in ours))
    assert set_by_us & (known | set_by_them) - SET_ON_PURPOSE == set()
    for owner in ours:  # and what replaces a method of theirs can be called as theirs is
        for name, method in vars(owner).items():
            original = next((vars(their)[name] for their in theirs if name in vars(their)), None)
            if inspect.isfunction(original) and not name.startswith("_"):
                assert inspect.isfunction(method), name
                mine, kinds = inspect.signature(method).parameters, inspect.Parameter
                any_name = any(p.kind is kinds.VAR_KEYWORD for p in mine.values())
                assert any_name or set(inspect.signature(original).parameters) <= set(mine), name


@pytest.mark.parametrize("cls", [SmileTrainer, SelfRetrievalTrainer, SLETrainer])
def test_fields_left_to_the_trainer_are_read_by_code_that_runs(cls):
    """A field that the Trainer reads only in replaced code must be read, tested or refused by this package."""
    dead = never_run(cls)
    assert {"evaluate", "evaluation_loop", "prediction_step"} <= dead  # the test detects replaced methods
    assert ("_get_train_sampler" in dead) == (cls is not SmileTrainer)
    methods = {name: method for name, method in vars(Trainer).items() if inspect.isfunction(method)}
    alive = set().union(*(reads(method) for name, method in methods.items() if name not in dead))
    lost = set().union(*(reads(methods[name]) for name in dead)) - alive
    assert "eval_accumulation_steps" in lost
    without_effect = {"eval_accumulation_steps", "eval_use_gather_object"}  # captions are gathered as text
    assert lost - TESTED.keys() - cls.config_class.refused.keys() - without_effect == set()
    assert all(test in globals() for test in TESTED.values())


# Refused


def test_every_refused_field_exists_and_has_a_refused_value():
    assert caption_config.REFUSED.keys() == REFUSED.keys() <= FIELDS
    assert caption_config.RL_REFUSED.keys() == REFUSED_RL.keys() <= FIELDS


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_a_smile_configuration(name, one_folder):
    with pytest.raises(ValueError, match=name):
        SmileConfig(str(one_folder), use_cpu=True, **{name: REFUSED[name]})


@pytest.mark.parametrize("config", RL_CONFIGS)
@pytest.mark.parametrize("name", REFUSED_RL)
def test_refused_by_configurations_of_reinforcement_learning(config, name, one_folder):
    with pytest.raises(ValueError, match=name):
        config(str(one_folder), use_cpu=True, **{name: REFUSED_RL[name]})


def test_a_field_set_later_is_refused_by_the_trainer(one_folder, scenes):
    config = SmileConfig(str(one_folder), use_cpu=True)
    config.label_smoothing_factor = 0.1
    with pytest.raises(ValueError, match="mle_label_smoothing"):
        SmileTrainer(tiny_captioner("blip"), config, scenes["train"])


@pytest.mark.parametrize("config", [SmileConfig, *RL_CONFIGS])
def test_defaults_are_accepted(config, one_folder):
    config(str(one_folder), use_cpu=True)
    config(str(one_folder), use_cpu=True, label_names=None, include_for_metrics=["inputs"], hub_strategy="end")


# Works


def trainer_of(folder, scenes, *, cls=SmileTrainer, **arguments):
    settings = {**PLAIN_SGD, "per_device_train_batch_size": 8, "generation_max_new_tokens": 4, **arguments}
    return cls(
        tiny_captioner("blip"),
        SmileConfig(str(folder), **settings),
        train_dataset=scenes["train"],
        eval_dataset=scenes["validation"],
    )


def trained(folder, scenes, **arguments):
    trainer = trainer_of(folder, scenes, **arguments)
    trainer.train()
    return trainer


def rl_trainer(folder, scenes, scorer, **arguments):
    settings = {**PLAIN_SGD, "per_device_train_batch_size": 8, "max_completion_length": 6, "guard": "off", **arguments}
    return SelfRetrievalTrainer(
        tiny_captioner("blip"), scorer, SelfRetrievalConfig(str(folder), **settings), scenes["train"]
    )


def same(a, b):
    a, b = weights(a), weights(b)
    return all(torch.equal(a[name], b[name]) for name in a)


def test_batch_size_is_reduced_after_out_of_memory(tmp_path, scenes):
    sizes = []

    class Small(SmileTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            if len(inputs["labels"]) > 4:
                raise RuntimeError("CUDA out of memory.")
            sizes.append(len(inputs["labels"]))
            return super().compute_loss(model, inputs, **kwargs)

    trainer = trainer_of(tmp_path, scenes, cls=Small, auto_find_batch_size=True)
    trainer.train()
    assert sizes
    assert max(sizes) <= 4
    assert trainer.state.global_step == 1


def test_neftune_adds_noise_to_the_words(tmp_path, scenes):
    plain, noisy = trained(tmp_path / "a", scenes), trained(tmp_path / "b", scenes, neftune_noise_alpha=5.0)
    assert not same(plain, noisy)
    embeddings = noisy.captioner.base_model.get_input_embeddings()
    assert embeddings is noisy.captioner.base_model.text_decoder.get_input_embeddings()
    assert not embeddings._forward_hooks  # removed at the end


@pytest.mark.slow  # compiles for ten seconds
def test_a_compiled_model_learns_the_same(tmp_path, scenes):
    plain = trained(tmp_path / "a", scenes)
    compiled = trained(tmp_path / "b", scenes, torch_compile=True, torch_compile_backend="eager")
    a, b = weights(plain), weights(compiled)
    for name in a:
        torch.testing.assert_close(b[name.removeprefix("_orig_mod.")], a[name])
    assert hasattr(compiled.model_wrapped, "_orig_mod")


def test_caches_do_not_change_training(tmp_path, scenes):
    assert same(trained(tmp_path / "a", scenes), trained(tmp_path / "b", scenes, use_cache=True))


def test_data_seed_determines_batches_and_captions(tmp_path, scenes):
    first = trained(tmp_path / "a", scenes, data_seed=1)
    assert same(first, trained(tmp_path / "b", scenes, data_seed=1))
    assert not same(first, trained(tmp_path / "c", scenes, data_seed=2))
    drawn = CaptionDataset(scenes["train"], seed=1)
    assert [first.train_dataset[i]["caption"] for i in range(16)] == [drawn[i]["caption"] for i in range(16)]


def test_sequential_sampling(tmp_path, scenes):
    seen = []

    class Spy(SmileTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            seen.extend(self.captioner.decode(inputs["input_ids"][:, 1:]))
            return super().compute_loss(model, inputs, **kwargs)

    trainer = trainer_of(tmp_path, scenes, cls=Spy, train_sampling_strategy="sequential", max_steps=2)
    trainer.train()
    items = [trainer.train_dataset[i] for i in range(16)]
    batches = [trainer.caption_collator(items[start : start + 8]) for start in (0, 8)]
    assert seen == [text for batch in batches for text in trainer.captioner.decode(batch["input_ids"][:, 1:])]


def test_the_incomplete_last_batch(tmp_path, scenes, scorer):
    settings = {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 6}
    assert trained(tmp_path / "a", scenes, **settings).state.global_step == 3
    assert trained(tmp_path / "b", scenes, **settings, dataloader_drop_last=True).state.global_step == 2
    for drop in (False, True):
        trainer = rl_trainer(tmp_path / "c", scenes, scorer, **settings, dataloader_drop_last=drop)
        assert [len(batch) for batch in trainer.get_train_dataloader().batch_sampler] == [6, 6]


def test_loader_settings(tmp_path, scenes, scorer):
    workers = {
        "dataloader_num_workers": 1,
        "dataloader_persistent_workers": True,
        "dataloader_prefetch_factor": 3,
        "dataloader_multiprocessing_context": "spawn",
        "dataloader_in_order": False,
    }
    for trainer in (trainer_of(tmp_path, scenes, **workers), rl_trainer(tmp_path, scenes, scorer, **workers)):
        trainer.args.dataloader_pin_memory = True  # use_cpu switches it off
        loader = trainer.get_train_dataloader()
        assert (loader.num_workers, loader.prefetch_factor, loader.in_order) == (1, 3, False)
        assert (loader.persistent_workers, loader.pin_memory) == (True, True)
        assert loader.multiprocessing_context.get_start_method() == "spawn"


def test_tokens_of_text_are_counted(tmp_path, scenes, scorer):
    counted = {"all": 0, "non_padding": 0}

    class Spy(SmileTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            counted["all"] += inputs["input_ids"].numel()
            counted["non_padding"] += int(inputs["attention_mask"].sum())
            return super().compute_loss(model, inputs, **kwargs)

    for kind in ("all", "non_padding"):
        counted.update(dict.fromkeys(counted, 0))
        trainer = trainer_of(tmp_path, scenes, cls=Spy, include_num_input_tokens_seen=kind, max_steps=2)
        trainer.train()
        assert trainer.state.num_input_tokens_seen == counted[kind] > 0
    assert counted["all"] > counted["non_padding"]

    trainer = rl_trainer(tmp_path, scenes, scorer, include_num_input_tokens_seen="non_padding", num_generations=2)
    begin, seen = trainer.begin_step, []
    trainer.begin_step = lambda batches: seen.extend(batches) or begin(batches)
    trainer.train()
    assert 0 < trainer.state.num_input_tokens_seen == int(sum(b["attention_mask"].sum() for b in seen))


def test_evaluation_at_the_start_and_by_plateau(tmp_path, scenes):
    trainer = trained(
        tmp_path,
        scenes,
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=1,
        max_steps=2,
        lr_scheduler_type="reduce_lr_on_plateau",
    )
    entries = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [entry["step"] for entry in entries] == [0, 1, 2]
    assert trainer.args.metric_for_best_model == "loss"
    # The scheduler ignores gains below 1e-4.
    assert trainer.lr_scheduler.best == pytest.approx(min(entry["eval_loss"] for entry in entries[1:]), rel=2e-4)


def test_the_batch_size_of_evaluation(tmp_path, scenes, monkeypatch):
    trainer = trainer_of(tmp_path, scenes, per_device_eval_batch_size=5)
    sizes = {"loss": [], "generate": []}
    loss_sum, generate = trainer.loss_sum, trainer.captioner.generate
    monkeypatch.setattr(trainer, "loss_sum", lambda b: (sizes["loss"].append(len(b["labels"])), loss_sum(b))[1])
    monkeypatch.setattr(
        trainer.captioner,
        "generate",
        lambda **k: (sizes["generate"].append(len(k["pixel_values"])), generate(**k))[1],
    )
    trainer.evaluate()
    assert sizes == {"loss": [5, 5, 2], "generate": [5, 5, 2]}


def test_prediction_loss_only(tmp_path, scenes):
    whole = trainer_of(tmp_path, scenes).evaluate()
    alone = trainer_of(tmp_path, scenes, prediction_loss_only=True).evaluate()
    assert "eval_length" in whole
    assert not {"eval_length", "eval_lexical_diversity"} & alone.keys()
    assert alone["eval_loss"] == whole["eval_loss"]


def test_settings_of_a_push(tmp_path, scenes, monkeypatch):
    pushed = []
    monkeypatch.setattr(
        "hf_captionrl.hub.cards.push_folder", lambda *args, **settings: pushed.append((args, settings))
    )
    settings = {"push_to_hub": True, "hub_model_id": "me/x", "hub_token": "t", "hub_revision": "r"}
    trainer_of(tmp_path, scenes, **settings).push_to_hub()
    trainer_of(tmp_path, scenes, **settings, hub_private_repo=False).save_model()
    assert [args for args, _ in pushed] == [(str(tmp_path), "me/x")] * 2
    assert [(p["private"], p["token"], p["revision"]) for _, p in pushed] == [(True, "t", "r"), (False, "t", "r")]


def test_memory_is_measured(tmp_path, scenes):
    metrics = trainer_of(tmp_path, scenes, skip_memory_metrics=False, prediction_loss_only=True).evaluate()
    assert "eval_mem_cpu_alloc_delta" in metrics


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
    with pytest.raises(ValueError, match=r"baseline.*\['group_mean', 'running_mean'\]"):
        trainer.rollouts.reset(trainer.captioner)


def smile(folder, *_):
    return SmileTrainer(tiny_captioner("blip"), SmileConfig(str(folder), use_cpu=True), rewarding.marked())


def smile_sft(folder, *_):
    model, tokenizer = tiny_llama(["a cat"], vocab_size=300, width=32, layers=1)
    config, data = SmileSFTConfig(str(folder), use_cpu=True), [{"text": "a cat"}]
    return SmileSFTTrainer(model, config, train_dataset=data, processing_class=tokenizer)


def self_retrieval_grpo(folder, *_):
    return make_trainer(str(folder), per_device_train_batch_size=8)


REWARDING = [rewarding.caption_rl, rewarding.sle, rewarding.self_retrieval]


@pytest.mark.parametrize("make", [*REWARDING, smile, smile_sft, self_retrieval_grpo])
def test_two_gpus_of_one_process_are_refused(tmp_path, monkeypatch, make):
    for config in (SmileConfig, SmileSFTConfig, SelfRetrievalGRPOConfig, *RL_CONFIGS):
        monkeypatch.setattr(config, "n_gpu", 2)  # what `TrainingArguments` finds on such a machine
    with pytest.raises(ValueError, match=r"2 GPUs.*--num_processes 2.*CUDA_VISIBLE_DEVICES=0"):
        make(tmp_path, rewarding.marked(), "length")


def test_model_spread_over_gpus_is_accepted():
    """The Trainer itself then sets the number of GPUs to 1."""
    args = types.SimpleNamespace(n_gpu=2)
    spread, single = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    spread.hf_device_map, single.hf_device_map = {"a": 0, "b": 1}, {"": 0}
    refuse_data_parallel(args, spread)
    refuse_data_parallel(types.SimpleNamespace(n_gpu=1), single)
    with pytest.raises(ValueError, match="2 GPUs"):
        refuse_data_parallel(args, single)
