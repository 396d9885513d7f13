"""Early evaluations: the schedule, the selection against the start, an exact resume, and runs without an effect."""

import itertools
import math
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import TrainerState

from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import SmileConfig, SmileTrainer
from hf_captionrl.trainers.checkpoints import selection_line
from hf_captionrl.trainers.dose import _SIGNIFICANT, METRIC, DoseCallback, chance_of_best
from tests.tiny import tiny_captioner

from .one_step import SMALL, At, bits, different, largest_difference, weights

ROOT = Path(__file__).parents[2]
EARLY = [8, 20, 40]
"""Captions: steps 1, 3 and 5 of 8 captions."""
SETTINGS = {
    **SMALL,
    "max_steps": 6,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "early_evaluations": EARLY,
    "report_to": "none",
}


@pytest.fixture(scope="module")
def data():
    return load_scenes(num_train=16, num_validation=100, num_test=0)


def trainer_of(folder, data, scorer, **settings):
    config = SmileConfig(str(folder), **{**SETTINGS, **settings})
    return SmileTrainer(tiny_captioner("blip"), config, data["train"], data["validation"], scorer=scorer)


def evaluated(trainer):
    return [entry["step"] for entry in trainer.state.log_history if "eval_length" in entry]


# --- The test against the start ---


def test_probability_equals_the_enumeration_of_all_signs():
    generator = torch.Generator().manual_seed(0)
    start, checkpoints = torch.rand(10, generator=generator), torch.rand(4, 10, generator=generator)
    gains = checkpoints - start

    def statistics(signs):
        return [float((signs * row).sum() / row.square().sum().sqrt()) for row in gains]

    largest = [max(statistics(torch.tensor(signs))) for signs in itertools.product((-1.0, 1.0), repeat=10)]
    for best in range(4):
        observed = statistics(torch.ones(10))[best]
        exact = sum(value >= observed - 1e-6 for value in largest) / len(largest)
        assert chance_of_best(start, checkpoints, best) == pytest.approx(exact, abs=0.02)


@pytest.mark.parametrize("num_images", [100, 300])
@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_without_an_effect_the_start_is_delivered_in_95_of_100_runs(correlation, num_images):
    """With 12 evaluations; negative control: the best of them, tested alone, replaces the start much more often."""
    generator = torch.Generator().manual_seed(1)
    corrected = alone = 0
    for _ in range(200):
        shared, own = torch.randn(num_images, generator=generator), torch.randn(12, num_images, generator=generator)
        gains = correlation**0.5 * shared + (1 - correlation) ** 0.5 * own
        best = int(gains.mean(dim=1).argmax())
        corrected += chance_of_best(torch.zeros(num_images), gains, best, num_flips=1000) < _SIGNIFICANT
        alone += chance_of_best(torch.zeros(num_images), gains[best, None], 0, num_flips=1000) < _SIGNIFICANT
    assert corrected <= 5  # of 200
    assert alone > corrected


# --- Runs ---


def test_without_an_effect_the_start_is_delivered_after_three_evaluations_without_a_new_best(
    tmp_path, data, scorer, capsys
):
    trainer = trainer_of(tmp_path, data, scorer, learning_rate=0.0)
    start = weights(trainer)
    trainer.train()
    assert evaluated(trainer) == [0, 1, 2, 3, 4]  # an epoch has two steps; the first checkpoint is the best
    assert trainer.selection["start"]["delivered"]
    assert trainer.selection["start"]["p_value"] == 1
    printed = " ".join(capsys.readouterr().out.split())  # lines are folded
    assert "The start is delivered" in printed
    assert f"(p = 1, {len(data['validation'])} images)" in printed
    assert largest_difference(weights(trainer), start) == 0
    again = trainer_of(tmp_path, data, scorer, learning_rate=0.0)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4  # a run that has stopped is not trained further


def test_a_better_checkpoint_is_delivered(tmp_path, data, scorer, monkeypatch):
    ranks = {0: 60, 1: 50, 2: 10, 3: 20, 4: 30, 5: 40}

    def measured(self, *args):
        step = self.state.global_step
        ranks_now = torch.full((100,), ranks[step]) + torch.arange(100) % 7
        recall = float((1.0 / ranks_now).mean())
        return [""] * 100, ranks_now, {"eval_length": 5.0 + step, f"eval_{METRIC}": recall}

    monkeypatch.setattr(SmileTrainer, "_measure", measured)
    monkeypatch.setattr("hf_captionrl.trainers.dose.distractor_recall", lambda rank, number: 1 / rank.double())
    trainer = trainer_of(tmp_path, data, scorer)
    trainer.train()
    assert trainer.selection["step"] == 2
    assert not trainer.selection["start"]["delivered"]
    assert selection_line(trainer.selection).startswith("Best after 2 steps: 7.0 words. Selected checkpoint-2")
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(weights(trainer)[name], value) for name, value in saved.items())


def test_a_run_that_is_killed_between_two_early_evaluations_resumes_exactly(tmp_path, data, scorer):
    def stop():
        raise KeyboardInterrupt

    whole = trainer_of(tmp_path / "whole", data, scorer)
    whole.train()
    killed = trainer_of(tmp_path / "killed", data, scorer)
    killed.add_callback(At(4, lambda *_: stop()))
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    resumed = trainer_of(tmp_path / "killed", data, scorer)
    resumed.train(resume_from_checkpoint=True)
    assert different(bits(resumed), bits(whole)) == []
    assert resumed.selection == whole.selection
    assert evaluated(resumed) == evaluated(whole)
    # Another evaluation afterwards has a pool of its own.
    whole.evaluate(load_scenes(num_train=0, num_validation=120, num_test=0)["validation"])
    *during, after = (len(scores) for _, scores in whole.dose._scores(whole.state))
    assert (set(during), after) == ({100}, 120)


def test_a_step_that_is_the_last_of_an_epoch_is_evaluated_once(tmp_path, data, scorer):
    trainer = trainer_of(tmp_path, data, scorer, learning_rate=0.0, early_evaluations=[8, 16, 24, 32])
    trainer.train()
    assert evaluated(trainer) == [0, 1, 2, 3, 4]  # epochs end at 2 and 4
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*"))[-1] == "checkpoint-4"


@pytest.mark.parametrize("lacks", ["scorer", "images", "concepts", "scorer, with other metrics"])
def test_without_a_scorer_or_enough_images_the_run_stops_at_longer_captions(tmp_path, data, scorer, caplog, lacks):
    rows = data["validation"] if "scorer" in lacks else data["validation"].select(range(99))
    config = SmileConfig(str(tmp_path), **SETTINGS)
    if lacks == "concepts":  # of which two images each are 55
        rows = load_scenes(num_train=0, num_validation=110, num_test=0)["validation"]
        rows = rows.add_column("concept", [n // 2 for n in range(110)])
    own = {"compute_metrics": lambda prediction: {"own": 1.0}} if "other" in lacks else {}
    given = None if "scorer" in lacks else scorer
    trainer = SmileTrainer(tiny_captioner("blip"), config, data["train"], rows, scorer=given, **own)
    assert not config.load_best_model_at_end
    assert "1.1 times as long as the start's. Its last checkpoint is delivered" in caplog.text
    for lengths, is_over in (([4.0], False), ([4.0, 4.3], False), ([4.0, 4.5], True), ([0.0, 1.0], False)):
        state = TrainerState(log_history=[{"eval_length": length} for length in lengths])
        assert DoseCallback(trainer, EARLY).is_over(state) is is_over, lengths


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"early_evaluations": [0, 8]}, "early_evaluations"),
        ({"eval_strategy": "epoch", "save_strategy": "no"}, "load_best_model_at_end"),
        *(({"metric_for_best_model": name}, "SMILE's loss") for name in ("loss", "recall_at_1", f"eval_{METRIC}")),
    ],
)
def test_settings_that_contradict_early_evaluations_are_refused(tmp_path, settings, name):
    with pytest.raises(ValueError, match=name):
        SmileConfig(str(tmp_path), **{**SETTINGS, **settings})


def test_early_evaluations_of_several_splits_are_refused(tmp_path, data, scorer):
    config, rows = SmileConfig(str(tmp_path), **SETTINGS), data["validation"]
    with pytest.raises(ValueError, match="one split"):
        SmileTrainer(tiny_captioner("blip"), config, data["train"], {"a": rows, "b": rows}, scorer=scorer)


def test_early_evaluations_alone_evaluate_each_epoch(tmp_path):
    config = SmileConfig(str(tmp_path), early_evaluations=[8])
    assert [config.eval_strategy, config.save_strategy] == ["epoch", "epoch"]
    assert config.load_best_model_at_end


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_of_twenty_controls_at_most_one_replaces_the_start(tmp_path, scorer):
    """Further steps of maximum likelihood from a trained captioner."""
    data = load_scenes(num_train=2560, num_validation=300, num_test=0)
    settings = {"learning_rate": 2e-4, "num_train_epochs": 1, "per_device_eval_batch_size": 300, "max_steps": -1}
    settings |= {"optim": "adamw_torch", "generation_max_new_tokens": 30, "per_device_train_batch_size": 64}
    settings |= {"early_evaluations": [320, 640, 960, 1280, 1920], "cache_image_features": True, "mle_weight": 1.0}
    replaced = 0
    for seed in range(100, 120):
        config = SmileConfig(str(tmp_path / str(seed)), **{**SETTINGS, **settings, "seed": seed})
        trainer = SmileTrainer("scenes:clipcap-mle", config, data["train"], data["validation"], scorer=scorer)
        trainer.train()
        replaced += not trainer.selection["start"]["delivered"]
    assert replaced <= 1


def test_the_default_schedule_evaluates_eleven_times_in_two_epochs():
    """Which took 22 % of the time of a run that does not stop early, on one thread."""
    preset = yaml.safe_load((ROOT / "recipes/configs/smile_blip/dose.yaml").read_text(encoding="utf-8"))
    last, size = 2 * math.ceil(5000 / preset["per_device_train_batch_size"]), preset["per_device_train_batch_size"]
    early = {math.ceil(captions / size) for captions in preset["early_evaluations"]}
    steps = {0, *early, *range(preset["eval_steps"], last + 1, preset["eval_steps"])}
    assert len([step for step in steps if step <= last]) == 11
    assert max(b - a for a, b in itertools.pairwise(sorted(step for step in steps if step <= 20))) <= 5
