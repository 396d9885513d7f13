"""CaptionRLTrainer: plain loops, splits of the batch, several processes, and resuming after a kill."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from hf_captionrl.captioners.captioner import split_greedy
from hf_captionrl.data import open_image
from hf_captionrl.rewards import PairwiseDiversity, SelfRetrieval
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import CaptionRLConfig, CaptionRLTrainer, EpochCallback
from hf_captionrl.trainers.caption_rl_trainer import reference_ids, write_completions
from tests.processes import run_in_processes
from tests.tiny import tiny_captioner, tiny_images
from tests.tolerances import close, resolution
from tests.trainers.grpo_worker import make_trainer
from tests.trainers.one_step import SAMPLED, bits, captioner, different, spy_on

from .one_step import assert_one_plain_step, largest_difference, weights
from .rl_step import GREEDY, build, train
from .test_checkpoints import losses


def test_one_step_equals_a_plain_loop(tmp_path, scenes, scorer):
    trained = weights(train(tmp_path, scenes["train"], per_device_train_batch_size=16))
    plain, rows = captioner(), scenes["train"]
    images = [open_image(row["image"]) for row in rows]
    pixels = plain.encode_images(images)["pixel_values"]
    written = plain.generate(pixel_values=pixels, max_new_tokens=12)
    text, pictures = scorer.text_features(written.captions), scorer.image_features(images)
    total = torch.zeros(())
    for i in range(16):
        scores = torch.stack([scorer.logit_scale * (text[i] * picture).sum() for picture in pictures])
        reward = F.log_softmax(scores, 0)[i]
        row = [*plain.prompt_ids(), *written.ids[i][written.mask[i]].tolist()]
        ids = torch.tensor([row])
        logits = plain.model(pixel_values=pixels[i : i + 1], input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        start = len(plain.prompt_ids())
        log_probs = [F.log_softmax(logits[0, t - 1], -1)[row[t]] for t in range(start, len(row))]
        total = total - reward * torch.stack(log_probs).mean() / 16
    assert_one_plain_step(trained, plain.model, total, ulps=128)


def _run(folder, arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    command += ["-m", "tests.trainers.rl_step", str(folder / "weights.safetensors"), json.dumps(arguments)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)


LOGGED = {"logging_strategy": "steps", "logging_steps": 1}
RESUMED = {**SAMPLED, "num_generations": 2, "bags": True, "bag_schedule": {1: 2, 2: 4}, "guard": "warn"}
RESUMED |= {"optim": "adamw_torch", "learning_rate": 1e-4, "max_steps": 5, "save_strategy": "steps"}
RESUMED |= {"save_steps": 3}  # in the middle of the second epoch


@pytest.mark.slow
def test_resume_is_bit_exact_after_sigkill_of_two_processes_with_workers(tmp_path):
    arguments = {**RESUMED, "per_device_train_batch_size": 4, "dataloader_num_workers": 1}
    through = _run(tmp_path / "through", {**arguments, "save_strategy": "no"})
    assert through.returncode == 0, through.stderr[-3000:]
    assert _run(tmp_path / "killed", {**arguments, "kill_at": 4}).returncode != 0
    assert not (tmp_path / "killed" / "weights.safetensors").exists()
    resumed = _run(tmp_path / "killed", {**arguments, "resume": True})
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    ours, theirs = (load_file(tmp_path / name / "weights.safetensors") for name in ("killed", "through"))
    assert largest_difference(ours, theirs) == 0.0
    log = json.loads((tmp_path / "killed" / "checkpoint-3" / "trainer_state.json").read_text())
    assert log["epoch"] == 1.5  # in the middle of the epoch of larger bags


def test_without_its_state_a_resumed_run_differs(tmp_path, scenes):
    train(tmp_path, scenes["train"], **{**RESUMED, "max_steps": 3})
    through = train(tmp_path / "through", scenes["train"], **{**RESUMED, "save_strategy": "no"})
    state = tmp_path / "checkpoint-3" / "caption_rl_state.json"
    assert state.exists()
    state.unlink()
    resumed = train(tmp_path, scenes["train"], resume=True, **RESUMED)
    assert largest_difference(weights(resumed), weights(through)) > 0.0


def test_greedy_baseline_with_beam_search(tmp_path, scenes):
    arguments = {"do_sample": False, "baseline": "greedy", "generation_kwargs": {"num_beams": 4}}
    trainer = build(tmp_path, scenes["train"], per_device_train_batch_size=8, **LOGGED, **arguments)
    wrote = spy_on(trainer.rollouts, "generate")
    trainer.train()
    beams, greedy = split_greedy(wrote[0], 1)
    fresh = captioner()
    images = [open_image(scenes["train"][row]["image"]) for row in next(iter(trainer.batch_sampler))]
    alone = fresh.generate(**fresh.encode_images(images), max_new_tokens=12).captions
    assert greedy.captions == alone
    assert beams.captions != alone
    assert next(e for e in trainer.state.log_history if "advantage_std" in e)["advantage_std"] > 0


def test_each_image_is_encoded_once(tmp_path, scenes):
    model, seen = captioner(), []
    # The tower is also called with known features, but only pixels become patches.
    model.vision_tower.embeddings.register_forward_hook(lambda _, __, output: seen.append(output.size(0)))
    arguments = {**SAMPLED, "num_generations": 3, "baseline": "greedy", "freeze_vision_tower": True}
    train(tmp_path, scenes["train"], policy=model, **arguments)
    assert sum(seen) == 8
    seen.clear()
    cached = {**arguments, "cache_image_features": True, "feature_cache_dir": str(tmp_path / "cache")}
    train(tmp_path, scenes["train"], policy=model, **{**cached, "max_steps": 4})
    assert sum(seen) == 16  # the whole run: once for each image of the data set


def test_a_second_iteration_reuses_the_rollout(tmp_path, scenes):
    trainer = build(tmp_path, scenes["train"], **SAMPLED, num_iterations=2, save_steps=2, max_steps=4)
    calls, kept, compute = spy_on(trainer.rollouts, "roll_out"), [], trainer.compute_loss

    def spy(model, inputs, **kwargs):
        kept.append((inputs["input_ids"].clone(), inputs["advantages"].clone(), "old_log_probs" in inputs))
        return compute(model, inputs, **kwargs)

    trainer.compute_loss = spy
    trainer.train()
    assert len(calls) == 2
    assert len(kept) == 4
    for first, second in ((0, 1), (2, 3)):
        assert torch.equal(kept[first][0], kept[second][0])
        assert torch.equal(kept[first][1], kept[second][1])
        assert (kept[first][2], kept[second][2]) == (False, True)
    assert not (kept[0][0].shape == kept[2][0].shape and torch.equal(kept[0][0], kept[2][0]))


@pytest.mark.parametrize(("loss_type", "longest"), [("dapo", 6), ("bnpo", 6), ("grpo", 1)])
def test_truncated_captions_are_left_out_of_the_loss(tmp_path, scenes, loss_type, longest):
    """A plain loop over the captions that ended; with one token, none does."""
    settings = {**SAMPLED, "loss_type": loss_type, "max_completion_length": longest, "temperature": 1.0}
    settings |= {"num_generations": 2, "mask_truncated_completions": True, "per_device_train_batch_size": 16}
    trainer = build(tmp_path, scenes["train"], **settings)
    rollouts = spy_on(trainer.rollouts, "roll_out")
    trainer.train()
    ((context, _, advantages),) = rollouts
    plain, total = captioner(), torch.zeros(())
    images = plain.encode_images([open_image(scenes["train"][row]["image"]) for row in context.rows.tolist()])
    assert bool(context.ended.any()) == (longest > 1)
    assert not context.ended.all()
    for n in torch.nonzero(context.ended).flatten().tolist():
        batch = plain.encode_completions(context.ids[n : n + 1], context.mask[n : n + 1])
        pixels = images["pixel_values"][n // 2 : n // 2 + 1]
        total = total - advantages[n] * plain.log_probs({**batch, "pixel_values": pixels}, of_generation=True).sum()
    if longest == 1:
        assert largest_difference(weights(trainer), dict(plain.model.named_parameters())) == 0
    else:
        tokens = context.mask[context.ended].sum()
        assert_one_plain_step(weights(trainer), plain.model, total / tokens, ulps=256)


@pytest.mark.parametrize("adapter", [pytest.param(False, marks=pytest.mark.slow), True])
def test_kl_penalty_keeps_the_policy_near_the_reference(tmp_path, scenes, adapter):
    arguments = {**SAMPLED, **LOGGED, "max_steps": 6, "optim": "adamw_torch", "freeze_vision_tower": True}
    adapting = {"learning_rate": 3e-3, "peft_config": {"tune": "language", "r": 4}}
    arguments |= adapting if adapter else {"learning_rate": 1e-4}
    kl = {}
    for beta in (1e-6, 30.0):
        trainer = train(tmp_path, scenes["train"], beta=beta, **arguments)
        assert (trainer.rollouts.reference is trainer.captioner) == adapter
        kl[beta] = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
        assert len(kl[beta]) == 6
        assert abs(kl[beta][0]) < resolution(1)  # the policy is its own reference at first
    assert kl[1e-6][-1] > 2 * kl[30.0][-1] > 0


def test_several_rewards_with_weights_and_names(tmp_path, scenes, scorer):
    settings = {**GREEDY, **SAMPLED, **LOGGED, "num_generations": 2, "baseline": "greedy"}
    rewards = [
        (SelfRetrieval(scorer), 1.0),
        ("cider", 0.5),
        (PairwiseDiversity(), 0.25),
        lambda completions: [None] * len(completions),
    ]
    trainer = CaptionRLTrainer(captioner(), rewards, CaptionRLConfig(str(tmp_path), **settings), scenes["train"])
    trainer.train()
    entry = next(e for e in trainer.state.log_history if "reward" in e)
    parts = [entry[f"rewards/{name}/mean"] for name in ("self_retrieval", "cider", "diversity")]
    assert entry["reward"] == close(parts[0] + 0.5 * parts[1] + 0.25 * parts[2], magnitude=max(map(abs, parts)))
    assert entry["rewards/<lambda>/undefined"] == 16
    assert "rewards/<lambda>/mean" not in entry  # there is none
    assert 0 <= entry["recall_at_1"] <= 1
    assert math.isfinite(entry["loss"])


def test_the_held_out_scorer_is_compared_at_every_step(tmp_path, scenes, held_out_scorer):
    settings = {**SAMPLED, **LOGGED, "guard": "warn", "max_steps": 3}
    trainer = build(tmp_path, scenes["train"], held_out_scorer=held_out_scorer, **settings)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(entries) == 3
    for entry in entries:
        gap = entry["guard/reward_minus_held_out"]
        assert -1 <= gap <= 1
        assert round(gap * 8, 6) == round(gap * 8)  # shares of eight captions
        assert entry["guard/length_p10"] <= entry["guard/length_p50"] <= entry["guard/length_p90"]
        watched = {"distinct_2", "longest_repeat_max", "degenerate", "truncated_by_scorer"}
        assert {f"guard/{name}" for name in watched} <= entry.keys()


REFUSED = [
    ("batch", {"bags": True, "bag_schedule": 9, **SAMPLED}),
    ("32 different images", {"per_device_train_batch_size": 32}),
    ("neighbours", {"bag_schedule": 2, **SAMPLED}),
    ("bags", {"distractor_scope": "bag", **SAMPLED}),
]


@pytest.mark.parametrize(("name", "arguments"), REFUSED)
def test_arguments_that_are_refused_before_training(tmp_path, scenes, name, arguments):
    with pytest.raises(ValueError, match=name):
        build(tmp_path, scenes["train"], **arguments)


STEPS = {**SAMPLED, **LOGGED, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 2}
STEPS |= {"num_iterations": 3, "max_completion_length": 5, "baseline": "leave_one_out", "beta": 0.1}
STEPS |= {"optim": "adamw_torch", "learning_rate": 1e-3, "max_steps": 8}
SAVED = {**STEPS, "save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def through(tmp_path_factory, scenes):
    trainer = build(tmp_path_factory.mktemp("through"), scenes["train"], **SAVED)
    trainer.train()
    return trainer


@pytest.mark.parametrize("step", [2, 3, 8])
def test_resumed_run_ends_with_the_same_bits(tmp_path, scenes, through, step):
    resumed = build(tmp_path, scenes["train"], **{**SAVED, "save_steps": 100})
    written, roll_out = [], resumed.rollouts.roll_out
    resumed.rollouts.roll_out = lambda *given: written.append(resumed.state.global_step) or roll_out(*given)
    resumed.train(resume_from_checkpoint=f"{through.args.output_dir}/checkpoint-{step}")
    assert resumed.state.global_step == 8
    assert written == [at for at in (0, 3, 6) if at >= step]  # no new captions between two iterations
    assert not different(bits(resumed), bits(through))
    assert losses(resumed) == losses(through)


def test_checkpoint_without_its_rollout_generates_a_new_one(tmp_path, scenes, through, caplog):
    """Like checkpoints of earlier versions, or of another number of processes."""
    copy = Path(shutil.copytree(f"{through.args.output_dir}/checkpoint-2", tmp_path / "checkpoint-2"))
    state = copy / "caption_rl_state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "rollout": 2}))
    resumed = build(tmp_path, scenes["train"], **{**SAVED, "save_steps": 100})
    resumed.train(resume_from_checkpoint=str(copy))
    assert "made anew" in caplog.text
    assert resumed.state.global_step == 8
    assert different(bits(resumed), bits(through))


def _run_rollout_resume(folder: str) -> None:
    data = load_scenes(num_train=16, num_validation=1, num_test=0)["train"]
    # A trained tower: rollouts then hold pixels, instead of features.
    settings = {**SAVED, "per_device_train_batch_size": 2, "max_steps": 5, "freeze_vision_tower": False}
    trainer = build(Path(folder) / "through", data, **settings)
    trainer.train()
    resumed = build(Path(folder) / "resumed", data, **settings)
    resumed.train(resume_from_checkpoint=str(Path(folder) / "through" / "checkpoint-2"))
    assert not different(bits(resumed), bits(trainer))
    assert torch.distributed.get_world_size() == 2


def test_two_processes_resume_between_iterations(tmp_path):
    run_in_processes(2, _run_rollout_resume, str(tmp_path), folder=tmp_path)


@pytest.mark.parametrize("family", ["blip", "git"])
def test_published_generation_settings_do_not_change_the_rollout(family):
    """Repetition penalties and forced ends would sample from another distribution than the scored one."""
    captioner = tiny_captioner(family)
    images = captioner.encode_images(tiny_images(2))

    def drawn(write):
        torch.manual_seed(0)
        return write(do_sample=True, num_return_sequences=3, max_new_tokens=8).ids.tolist()

    def rollout(**settings):
        return write_completions(captioner, [images], **settings)

    plain = drawn(rollout)
    writer = captioner.base_model.text_decoder if family == "blip" else captioner.base_model
    writer.generation_config.repetition_penalty = 50.0
    writer.generation_config.min_new_tokens = 8
    assert drawn(rollout) == plain
    assert writer.generation_config.repetition_penalty == 50.0  # kept in the saved model
    assert drawn(lambda **settings: captioner.generate(**images, **settings)) != plain


def test_generation_batch_size_does_not_change_the_captions():
    captioner = tiny_captioner("vit-gpt2")
    images = captioner.encode_images(tiny_images(5))["pixel_values"]
    batches = [{"pixel_values": images[:3]}, {"pixel_values": images[3:]}]
    greedy = {"do_sample": False, "max_new_tokens": 6}
    whole = write_completions(captioner, batches, **greedy)
    for size in (1, 2, 5):
        assert write_completions(captioner, batches, batch_size=size, **greedy).captions == whole.captions


def test_references_are_encoded_like_completions():
    captioner = tiny_captioner("blip", prompt="a ")
    ids, mask = reference_ids(captioner, ["red cat", "", "dog"])
    tokens = captioner.tokenizer("red cat", add_special_tokens=False).input_ids
    assert ids[0][mask[0]].tolist() == [*tokens, captioner.eos_token_id]
    assert ids[1][mask[1]].tolist() == [captioner.eos_token_id]
    assert mask.sum(1).tolist() == [3, 1, 2]


def self_retrieval(folder, scenes, **settings):
    """Two rollouts per epoch; bags of 2 in the first epoch, of 4 later."""
    bags = {**SAMPLED, "bags": True, "bag_schedule": {1: 2, 2: 4}, "max_completion_length": 3}
    return build(folder, scenes["train"], **{**bags, "max_steps": 4, **settings})


def grpo(folder, scenes):
    settings = {"bag_schedule": {1: 2, 2: 4}, "max_completion_length": 3, "max_steps": 4}
    ranked = {"neighbours": np.stack([np.r_[0:row, row + 1 : 8] for row in range(8)])}
    return make_trainer(str(folder), per_device_train_batch_size=8, trainer_arguments=ranked, **settings)


def bag_sizes(trainer, **arguments):
    contexts = spy_on(getattr(trainer, "rollouts", trainer), "reward_context")  # TRL's makes its rollouts itself
    trainer.train(**arguments)
    return [context.bag_size for context in contexts]


@pytest.mark.parametrize("make", [self_retrieval, grpo])
def test_epoch_is_set_only_by_the_callback(tmp_path, scenes, make):
    assert bag_sizes(make(tmp_path / "with", scenes)) == [2, 2, 4, 4]
    without = make(tmp_path / "without", scenes)
    without.remove_callback(EpochCallback)
    assert bag_sizes(without) == [2, 2, 2, 2]
