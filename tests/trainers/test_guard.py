"""GuardCallback: warn, stop, or roll back to the newest good checkpoint."""

import json
import random
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerControl

from hf_captionrl.captioners.pipeline import GeneratedCaptions
from hf_captionrl.metrics import self_retrieval
from hf_captionrl.text.degenerate_captions import degenerate
from hf_captionrl.trainers import CaptionRLConfig, CaptionRLTrainer
from hf_captionrl.trainers.caption_rl_trainer import STATE_FILE
from hf_captionrl.trainers.guard import GuardCallback, GuardThresholds, describe_completions
from hf_captionrl.trainers.publishing import read_run
from tests.text.test_degenerate_captions import GOOD, HACKED, LOOP, longest_repeat
from tests.trainers.one_step import SAMPLED, captioner
from tests.trainers.rl_step import build


def plainly_degenerate(words):
    phrases = [tuple(words[i : i + 3]) for i in range(len(words) - 2)]
    few = len(words) >= 6 and len(set(words)) <= len(words) / 2
    return len(phrases) != len(set(phrases)) or any(a == b for a, b in pairwise(words)) or few


@pytest.mark.parametrize("words", [2, 8])
def test_statistics_equal_plain_loops(words):
    rng = random.Random(0)
    captions = [" ".join(rng.choice("abcdefgh"[:words]) for _ in range(rng.randrange(14))) for _ in range(300)]
    cut = [c.split() for c in captions]
    ended = [len(w) % 3 > 0 for w in cut]
    bad, repeats = [plainly_degenerate(w) for w in cut], [longest_repeat(w) for w in cut]
    assert degenerate(captions) == bad
    expected = {f"length_p{q}": np.percentile([len(w) for w in cut], q) for q in (10, 50, 90)}
    for n in (1, 2):
        grams = [[tuple(w[i : i + n]) for i in range(len(w) - n + 1)] for w in cut if len(w) >= n]
        expected[f"distinct_{n}"] = np.mean([len(set(g)) / len(g) for g in grams])
    expected |= {"longest_repeat_max": max(repeats), "longest_repeat_mean": np.mean(repeats)}
    expected |= {"degenerate": np.mean(bad), "empty": np.mean([not w for w in cut])}
    expected |= {"clipped_ratio": 1 - np.mean(ended), "distinct_captions": len(set(captions)) / len(captions)}
    assert describe_completions(captions, torch.tensor(ended))[0] == pytest.approx(expected)


def test_a_guard_trips_when_the_window_is_full():
    guard = GuardCallback(GuardThresholds(window=3))
    for _ in range(2):
        logged = guard.observe([HACKED, GOOD])
        assert guard.reason is None
    assert logged["guard/degenerate"] == 0.5
    guard.observe([GOOD])  # the example is that of another step
    assert all(part in guard.reason for part in ("degenerate is 0.333", "max_degenerate=0.1", HACKED, "3 steps"))
    for _ in range(3):
        guard.observe([GOOD])
    assert guard.reason is None


LONG = "one small cat two large dogs three red birds four green trees five blue cars six old houses"
RULES = {
    "max_degenerate": ({"captions": [LOOP]}, LOOP),
    "max_length_growth": ({"captions": [LONG, "a cat"]}, LONG),
    "min_distinct": ({"captions": ["a cat a cat a cat"]}, "a cat a cat"),
    "max_clipped_ratio": ({"captions": ["a dog", "a red cat"], "ended": torch.tensor([True, False])}, "a red cat"),
    "max_truncated_by_scorer": ({"captions": ["a cat"], "truncated_by_scorer": 0.5}, "a cat"),
    "max_gap_growth": ({"captions": ["a cat", "a red dog"], "reward": 0.7, "held_out_scorer": 0.3}, "a red dog"),
}


@pytest.mark.parametrize("rule", RULES)
def test_every_limit_names_itself_and_can_be_switched_off(rule):
    step, example = RULES[rule]
    off = dict.fromkeys(set(RULES) - {rule})
    fine = {"ended": torch.ones(2), "truncated_by_scorer": 0.0, "reward": 0.5, "held_out_scorer": 0.5}
    for more, trips in (({}, True), ({rule: None}, False)):
        guard = GuardCallback(GuardThresholds(1, **off | more))
        guard.observe(["a cat", "a dog"], **fine)
        assert guard.reason is None
        guard.observe(**step)
        assert (guard.reason is not None) is trips
        if trips:
            assert rule in guard.reason
            assert example in guard.reason


def test_captions_that_the_scorer_truncates_have_their_own_message(tmp_path, scenes, scorer, caplog, monkeypatch):
    monkeypatch.setattr(type(scorer), "count_truncated", lambda self, captions: len(captions) // 2)
    settings = {**SAMPLED, "max_steps": 2, "guard": "stop", "scorer": scorer}
    trainer = build(tmp_path / "a", scenes["train"], **settings, guard_thresholds=GuardThresholds(window=1))
    trainer.train()
    assert trainer.state.global_step == 1
    assert "max_truncated_by_scorer=0.1" in trainer.collapsed
    assert "max_completion_length" in trainer.collapsed
    assert "collapsed" not in caplog.text
    trainer = build(tmp_path / "b", scenes["train"], **settings, max_truncated_by_scorer=0.6)
    assert trainer.guard.thresholds.max_truncated_by_scorer == 0.6


def test_lengths_are_compared_with_the_references():
    limits = GuardThresholds(window=1, max_length_growth=2.0)
    short, long = ["a cat"] * 20, [GOOD] * 20  # 2 and 12 words
    for references, trips in ((short, True), (long, False), (["a cat"] * 17 + [GOOD] * 3, False)):
        guard = GuardCallback(limits, reference_captions=references)
        guard.observe(long)
        assert (guard.reason is not None) is trips


def test_guard_resumes_exactly():
    rng = random.Random(1)
    steps = [[rng.choice([HACKED, GOOD, "a cat"]) for _ in range(5)] for _ in range(14)]

    def run(guard, part):
        out = []
        for captions in part:
            logged = guard.observe(captions, reward=len(captions[0]), held_out_scorer=1.0)
            out.append((logged, guard.reason, guard.doubt))
        return out

    limits = GuardThresholds(window=4, max_degenerate=0.4)
    whole = run(GuardCallback(limits), steps)
    for cut in (2, 9):
        first, second = GuardCallback(limits), GuardCallback(limits)
        run(first, steps[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert second.reason == first.reason
        assert run(second, steps[cut:]) == whole[cut:]
    assert len({reason is None for _, reason, _ in whole}) == 2  # the test sees both


def events(step, folder="."):
    state = SimpleNamespace(global_step=step, is_world_process_zero=True)
    return SimpleNamespace(output_dir=str(folder)), state, TrainerControl(should_save=True)


@pytest.mark.parametrize("kept", [4, None])
def test_rollback_loads_the_newest_good_checkpoint_that_was_not_removed(tmp_path, caplog, kept):
    loaded = []
    guard = GuardCallback(GuardThresholds(window=1), "rollback", loaded.append)
    guard.load_state_dict({"good": [3, 4, 5]})
    for step in (kept, 6):  # 6 was not known to be good
        (tmp_path / f"checkpoint-{step}").mkdir()
    guard.observe([HACKED])
    args, state, control = events(7, tmp_path)
    guard.on_step_end(args, state, control)
    assert control.should_training_stop
    assert loaded == ([] if kept is None else [str(tmp_path / "checkpoint-4")])
    assert guard.rolled_back_to == (loaded[0] if loaded else None)
    assert control.should_save == (kept is None)
    assert HACKED in caplog.text
    # A new training starts anew.
    guard.on_train_begin(*events(0))
    assert guard.rolled_back_to is None
    assert guard.state_dict()["good"] == guard.trips == []


def test_a_resumed_run_knows_that_its_checkpoint_is_good():
    before, after = GuardCallback(), GuardCallback()
    before.observe([GOOD])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.state_dict()["good"] == []  # saved before it was known to be good
    after.on_train_begin(*events(3))
    assert after.state_dict()["good"] == [3]
    after.observe([HACKED] * 2)
    after.on_save(*events(4))
    assert after.state_dict()["good"] == [3]


# Runs of the captioner with a given R@1 after each step

LOOPED = "a blue and blue blue blue and yellow blue"
EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
BEST = {**EVERY_STEP, **SAMPLED, "load_best_model_at_end": True, "learning_rate": 0.01, "generation_num_beams": 1}
QUERY = "text_decoder.bert.encoder.layer.0.attention.self.query.weight"


def evaluated(folder, scenes, recalls, hacked=(), *, samples_hacked=(), resume=False, **arguments):
    """Captions of the evaluations or of the rollouts of some steps are hacked."""
    settings = {**BEST, "max_steps": len(recalls), "guard": "warn", **arguments}
    settings |= {"eval_dataset": scenes["validation"], "guard_thresholds": GuardThresholds(window=2)}
    trainer = build(folder, scenes["train"], **settings)
    generate, describe, roll_out = trainer._generate, trainer._describe, trainer.rollouts.generate

    def generate_or_hack(dataset, **overrides):
        if trainer.state.global_step in hacked:
            return GeneratedCaptions([LOOPED] * len(dataset), [True] * len(dataset))
        return generate(dataset, **overrides)

    def describe_as_given(dataset, captions):
        metrics, ranks = describe(dataset, captions)
        return metrics | {"recall_at_1": recalls[trainer.state.global_step - 1]}, ranks

    def roll_out_or_hack(images, **overrides):
        completions = roll_out(images, **overrides)
        if trainer.state.global_step + 1 in samples_hacked:
            completions.captions = [LOOPED] * len(completions.captions)
        return completions

    trainer._generate, trainer._describe = generate_or_hack, describe_as_given
    trainer.rollouts.generate = roll_out_or_hack
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def has_weights_of(trainer, folder):
    return torch.equal(trainer.model.state_dict()[QUERY], load_file(folder / "model.safetensors")[QUERY])


def test_an_accepted_checkpoint_is_selected_although_a_collapsed_one_has_a_higher_recall(tmp_path, scenes, capsys):
    trainer = evaluated(tmp_path, scenes, [0.2, 0.9, 0.4, 0.4], hacked=[2, 4])
    assert has_weights_of(trainer, tmp_path / "checkpoint-3")
    assert not has_weights_of(trainer, tmp_path / "checkpoint-2")
    selection = trainer.selection
    assert (selection["step"], selection["value"], selection["evaluations"]) == (3, 0.4, 2)
    assert selection["ties"] == []  # a refused evaluation is none
    assert trainer.collapsed is None
    # The samples of all steps were fine: the greedy captions of the evaluation decided.
    assert selection["guard"]["trips"] == []
    refused, other = selection["guard"]["refused"]
    assert (refused["step"], other["step"]) == (2, 4)
    assert "degenerate is 1 in 12 evaluated captions" in refused["reason"]
    assert LOOPED in refused["reason"]
    line = "Selected checkpoint-3: eval_recall_at_1 = 0.4, the best of 2 evaluations; the guard refused the evaluation at step 2, 4."
    assert line in capsys.readouterr().out.replace("\n  ", " ")  # where it is folded
    evaluations = {e["step"]: e for e in trainer.state.log_history if "eval_degenerate" in e}
    assert {step: e["eval_degenerate"] for step, e in evaluations.items()} == {1: 0.0, 2: 1.0, 3: 0.0, 4: 1.0}
    assert all(0 <= e["eval_clipped_ratio"] <= 1 for e in evaluations.values())
    trainer.save_model()
    assert read_run(tmp_path)["selection"]["guard"]["refused"] == [refused, other]


def test_no_checkpoint_is_selected_while_the_samples_are_hacked(tmp_path, scenes):
    """Beam search may hide for some steps what the samples already show."""
    trainer = evaluated(tmp_path, scenes, [0.2, 0.3, 0.9, 0.8], samples_hacked=[3, 4])
    assert trainer.selection["step"] == 2
    assert [entry["step"] for entry in trainer.selection["guard"]["refused"]] == [3, 4]
    # A broken limit is warned of once.
    assert [(trip["step"], trip["action"]) for trip in trainer.selection["guard"]["trips"]] == [(3, "warn")]


def test_if_every_evaluation_is_refused_the_trainer_says_that_the_model_has_collapsed(tmp_path, scenes, caplog):
    trainer = evaluated(tmp_path, scenes, [0.2, 0.9], hacked=[1, 2])
    assert has_weights_of(trainer, tmp_path / "checkpoint-2")
    assert trainer.selection["step"] is None
    assert trainer.selection["kept_instead"] == "the weights of step 2 are kept"
    assert trainer.collapsed == trainer.selection["collapsed"]
    assert "degenerate is 1" in trainer.collapsed
    assert "Do not use this model." in caplog.text
    # The next training of this trainer is judged anew.
    trainer._generate = lambda data, **_: GeneratedCaptions(["a cat"] * len(data), [True] * len(data))
    trainer.train()
    assert trainer.collapsed is None
    assert trainer.selection["guard"]["refused"] == []


def test_after_a_rollback_the_best_accepted_checkpoint_is_loaded(tmp_path, scenes):
    trainer = evaluated(tmp_path, scenes, [0.9, 0.5, 0.1, 0.1], samples_hacked=[3, 4], guard="rollback")
    assert trainer.state.global_step == 3
    (trip,) = trainer.selection["guard"]["trips"]
    assert (trip["step"], trip["action"], trip["rolled_back_to"]) == (3, "rollback", "checkpoint-2")
    assert trainer.selection["step"] == 1
    assert "kept_instead" not in trainer.selection
    assert has_weights_of(trainer, tmp_path / "checkpoint-1")
    # At step 3 the policy is that of step 2 again: there is nothing to evaluate or save.
    assert [e["step"] for e in trainer.state.log_history if "eval_recall_at_1" in e] == [1, 2]
    assert not (tmp_path / "checkpoint-3").exists()


def test_a_stopped_run_without_selection_says_that_its_weights_have_collapsed(tmp_path, scenes):
    settings = {"samples_hacked": [3, 4], "load_best_model_at_end": False}
    trainer = evaluated(tmp_path, scenes, [0.2, 0.3, 0.9, 0.8], **settings, guard="stop")
    assert trainer.state.global_step == 3
    assert trainer.collapsed is not None
    assert "the weights of step 3 are kept" in trainer.selection["kept_instead"]
    rolled = evaluated(tmp_path / "b", scenes, [0.2, 0.3, 0.9], **settings, guard="rollback")
    assert rolled.collapsed is None
    assert has_weights_of(rolled, tmp_path / "b" / "checkpoint-2")
    assert rolled.selection["kept_instead"] == "the weights of checkpoint-2 are kept"


def test_a_resumed_run_knows_its_refused_evaluations_and_trips(tmp_path, scenes):
    evaluated(tmp_path, scenes, [0.4, 0.9, 0.3], hacked=[2], samples_hacked=[2])
    state = json.loads((tmp_path / "checkpoint-3" / STATE_FILE).read_text())["guard"]
    assert [entry["step"] for entry in state["refused"]] == [2, 3]
    assert [entry["step"] for entry in state["trips"]] == [2]
    trainer = evaluated(tmp_path, scenes, [0.0, 0.0, 0.0, 0.2, 0.5], resume=True)
    assert trainer.selection["step"] == 5
    assert trainer.selection["guard"]["refused"][:2] == state["refused"]
    assert trainer.selection["guard"]["trips"] == state["trips"]


def test_a_stopped_run_that_is_resumed_stops_again(tmp_path, scenes):
    settings = {"samples_hacked": [2, 3, 4, 5], "guard": "stop"}
    assert evaluated(tmp_path, scenes, [0.2] * 5, **settings).state.global_step == 2
    resumed = evaluated(tmp_path, scenes, [0.2] * 5, resume=True, **settings)
    assert resumed.state.global_step == 3
    assert [trip["step"] for trip in resumed.guard.trips] == [2, 3]
    assert resumed.selection["step"] == 1


def test_the_reward_scorer_selects_and_not_the_held_out_one(tmp_path, scenes, scorer, held_out_scorer):
    settings = {**BEST, "guard": "warn", "eval_dataset": scenes["validation"], "scorer": scorer}
    trainer = build(tmp_path, scenes["train"], **settings, held_out_scorer=held_out_scorer)
    assert trainer.args.metric_for_best_model == "reward_recall_at_1"
    assert trainer.args.greater_is_better
    found = trainer.evaluate(scenes["validation"])
    captions = trainer.generate_captions(scenes["validation"])
    for name, used in (("reward_recall_at_1", scorer), ("recall_at_1", held_out_scorer)):
        images = trainer.scorer_image_features(used, trainer._rows_of(scenes["validation"]))
        expected = self_retrieval(torch.as_tensor(used.text_features(captions)), images)["recall_at_1"]
        assert found[f"eval_{name}"] == pytest.approx(float(expected))
    assert "eval_reward_rd100_recall_at_1" not in found  # 12 images


def test_a_single_scorer_selects_by_its_recall_and_a_metric_that_is_named_stays(tmp_path, scenes):
    settings = {**BEST, "eval_dataset": scenes["validation"]}
    assert build(tmp_path, scenes["train"], **settings).args.metric_for_best_model == "recall_at_1"
    named = build(tmp_path, scenes["train"], **settings, metric_for_best_model="length")
    assert named.args.metric_for_best_model == "length"
    config = CaptionRLConfig(str(tmp_path), use_cpu=True, **BEST)
    without = CaptionRLTrainer(captioner(), "cider", config, scenes["train"], scenes["validation"])
    assert not without.args.load_best_model_at_end  # there is nothing to select by
