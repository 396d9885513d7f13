"""Evaluation as users of transformers know it: eval_loss, several data sets, predict, compute_metrics, model_init."""

import json
from pathlib import Path

import numpy as np
import optuna
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset, DatasetDict
from peft import LoraConfig

from hf_captionrl.captioners.captioner import is_sharded
from hf_captionrl.captioners.pipeline import generate_captions
from hf_captionrl.data import CaptionDataset
from hf_captionrl.metrics import cider_d
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import (
    CaptionRLConfig,
    CaptionRLTrainer,
    SelfRetrievalConfig,
    SelfRetrievalTrainer,
    SLEConfig,
    SLETrainer,
    SmileConfig,
    SmileTrainer,
)
from hf_captionrl.trainers.policy import default_output_dir
from hf_captionrl.trainers.publishing import read_run
from tests.captioners.test_distributed import shard
from tests.processes import run_in_processes
from tests.tiny import tiny_blip, tiny_captioner
from tests.trainers.one_step import SMALL, tiny_trainer, weights


def looped_loss(captioner, dataset, seed, *, smile):
    """Mean nats per token, one image and one token at a time, from full logits of one drawn caption each."""
    items = CaptionDataset(dataset, seed=seed)
    total, number = 0.0, 0
    for item in (items[i] for i in range(len(items))):
        batch = captioner.collate([item["image"]], [item["caption"]])
        labels = batch.pop("labels")[0, 1:]
        with torch.no_grad():
            logits = captioner.model(**batch).logits[0, -len(labels) - 1 : -1].double()  # GIT's begin with the image
        words = sorted({int(w) for w in labels if w != -100})
        first = True
        for scores, word in zip(logits, labels.tolist(), strict=True):
            if word == -100:
                continue
            whole = -float(F.log_softmax(scores, -1)[word])
            subset = -float(F.log_softmax(scores[words], -1)[words.index(word)])
            total += subset if smile and not first else whole
            number += 1
            first = False
    return total / number


def test_cider_d_selects_where_it_is_named_and_skips_images_without_captions(tmp_path, scenes):
    rows = scenes["validation"].to_list()
    rows[1]["captions"] = []
    trainer = tiny_trainer(
        tmp_path,
        scenes,
        metric_for_best_model="cider_d",
        load_best_model_at_end=True,
        save_strategy="epoch",
        eval_strategy="epoch",
    )
    data = Dataset.from_list(rows, features=scenes["validation"].features)
    metrics, captions = trainer.evaluate(data), trainer.generate_captions(data)
    referenced = [index for index in range(len(rows)) if index != 1]
    expected = cider_d([captions[i] for i in referenced], [rows[i]["captions"] for i in referenced])
    assert metrics["eval_cider_d"] == pytest.approx(expected["cider_d"], rel=1e-12)
    trainer.train()
    assert trainer.state.best_metric == trainer.evaluate()["eval_cider_d"]


@pytest.mark.parametrize(("mle_weight", "batch"), [(0.0, 5), (1.0, 12)])
def test_eval_loss_equals_a_loop(tmp_path, scenes, mle_weight, batch):
    trainer = tiny_trainer(tmp_path, scenes, mle_weight=mle_weight, per_device_eval_batch_size=batch)
    expected = looped_loss(trainer.captioner, scenes["validation"], 42, smile=mle_weight == 0.0)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    trainer.state.epoch = 3.0  # the same captions in every epoch
    trainer.accelerator.step = 7
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_eval_loss_of_rl_is_the_cross_entropy_of_the_references(tmp_path, scenes, scorer):
    config = SelfRetrievalConfig(str(tmp_path), **SMALL, guard="off", max_completion_length=4)
    trainer = SelfRetrievalTrainer(tiny_captioner("git"), scorer, config, scenes["train"], scenes["validation"])
    expected = looped_loss(trainer.captioner, scenes["validation"], 42, smile=False)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_images_without_captions_are_excluded_from_the_loss(tmp_path, scenes):
    some = scenes["validation"].map(lambda row, i: {"captions": row["captions"] if i % 2 else []}, with_indices=True)
    trainer = tiny_trainer(tmp_path, scenes, mle_weight=1.0)
    metrics = trainer.evaluate(some)
    odd = some.select(range(1, len(some), 2))
    assert metrics["eval_loss"] == pytest.approx(looped_loss(trainer.captioner, odd, 42, smile=False), rel=1e-5)
    assert "eval_loss" not in trainer.evaluate(scenes["validation"].remove_columns("captions"))


def test_several_evaluation_sets_have_names(tmp_path, scenes):
    a, b = scenes["validation"].select(range(4)), scenes["validation"].select(range(4, 12))
    trainer = tiny_trainer(tmp_path, scenes, trainer_arguments={"eval_dataset": {"a": a, "b": b}})
    metrics = trainer.evaluate()
    assert {"eval_a_loss", "eval_b_loss", "eval_a_length", "eval_b_length"} <= metrics.keys()
    assert "eval_loss" not in metrics
    alone = tiny_trainer(tmp_path, scenes).evaluate(a)
    assert metrics["eval_a_loss"] == pytest.approx(alone["eval_loss"], rel=1e-6)
    assert metrics["eval_a_length"] == alone["eval_length"]
    assert trainer.evaluate("b")["eval_loss"] == pytest.approx(metrics["eval_b_loss"], rel=1e-6)
    assert "eval_c_loss" in trainer.evaluate({"c": a})


@pytest.mark.parametrize("skips", [True, False])
def test_memory_metrics_of_evaluations(tmp_path, scenes, skips):
    trainer = tiny_trainer(tmp_path, scenes, skip_memory_metrics=skips)
    assert ("eval_mem_cpu_alloc_delta" in trainer.evaluate(scenes["validation"])) != skips
    assert ("test_mem_cpu_alloc_delta" in trainer.predict(scenes["validation"]).metrics) != skips


def test_compute_metrics_gets_captions_and_references(tmp_path, scenes):
    seen = []

    def measure(prediction):
        seen.append(prediction)
        return {
            "words": np.float64(sum(len(c.split()) for c in prediction.predictions)),
            "eval_named": torch.tensor(2.0),
        }

    trainer = tiny_trainer(tmp_path, scenes, trainer_arguments={"compute_metrics": measure})
    metrics = trainer.evaluate()
    rows = scenes["validation"]
    assert seen[0].predictions == trainer.generate_captions(rows)
    assert seen[0].label_ids == [list(captions) for captions in rows["captions"]]
    assert metrics["eval_words"] == sum(len(c.split()) for c in seen[0].predictions)
    assert metrics["eval_named"] == 2.0
    assert {type(metrics["eval_words"]), type(metrics["eval_named"])} == {float}


SEARCHED = {0.5: 8, 0.1: 4}  # learning rates, and the batch of each


def searching(kind, folder, scenes, scorer, **settings):
    """A trainer that makes its tiny captioner itself, and so can be searched."""
    rows = {"train_dataset": scenes["train"], "eval_dataset": scenes["validation"]}
    rows["model_init"] = lambda: tiny_captioner("blip")
    settings = {**SMALL, "save_strategy": "steps", "save_steps": 1, **settings}
    if kind == "smile":
        return SmileTrainer(None, SmileConfig(str(folder), **settings), **rows)
    settings |= {"max_completion_length": 4, "guard": "off", "do_sample": True, "num_generations": 3, "beta": 0.1}
    if kind == "sle":
        return SLETrainer(None, SLEConfig(str(folder), **settings), **rows)
    if kind == "self-retrieval":
        return SelfRetrievalTrainer(None, scorer, SelfRetrievalConfig(str(folder), **settings), **rows)
    return CaptionRLTrainer(None, "cider", CaptionRLConfig(str(folder), **settings), **rows)


KINDS = ["smile", "sle", "self-retrieval", "caption-rl"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_trial_of_a_search_is_the_training_with_its_settings(tmp_path, scenes, scorer, kind):
    trainer, trials, losses = searching(kind, tmp_path, scenes, scorer), [], []

    def space(trial):
        rate = trial.suggest_categorical("learning_rate", list(SEARCHED))
        trials.append({"learning_rate": rate, "per_device_train_batch_size": SEARCHED[rate]})
        return trials[-1]

    def objective(metrics):
        losses.append(metrics["eval_loss"])
        return losses[-1]

    both = optuna.samplers.GridSampler({"learning_rate": list(SEARCHED)})
    best = trainer.hyperparameter_search(space, objective, n_trials=2, backend="optuna", sampler=both)
    assert losses[0] != losses[1]
    assert best.objective == min(losses)
    for number, (settings, loss) in enumerate(zip(trials, losses, strict=True)):
        saved = read_run(tmp_path / f"run-{number}" / "checkpoint-1")["configuration"]
        assert saved["learning_rate"] == settings["learning_rate"]
        alone = searching(kind, tmp_path / f"alone-{number}", scenes, scorer, **settings)
        alone.train()
        assert alone.evaluate()["eval_loss"] == loss


def test_a_trial_resumes_from_the_checkpoint_that_ray_passes(tmp_path, scenes, scorer):
    """Ray removes the model, and saves a trial without random states; it may continue with another learning rate."""
    trainer = searching("smile", tmp_path, scenes, scorer)
    trainer.train()
    trainer._tune_save_checkpoint(str(tmp_path / "ray"))
    trainer.model, trainer.args.max_steps, trainer.args.learning_rate = None, 2, 0.01
    assert trainer.train(str(tmp_path / "ray" / "checkpoint-1"), trial={}).global_step == 2
    with pytest.raises(ValueError, match="save_only_model"):  # the control: it is no checkpoint of a run
        trainer.train(resume_from_checkpoint=str(tmp_path / "ray" / "checkpoint-1"))


def test_model_init_resets_adapter_and_cached_features(tmp_path, scenes):
    seeds = iter([0, 0, 1])
    arguments = {"model_init": lambda: tiny_captioner("blip", seed=next(seeds))}
    arguments["peft_config"] = LoraConfig(r=2, target_modules=r"text_decoder\.bert\..*\.query")
    cache = {"cache_image_features": True, "feature_cache_dir": str(tmp_path / "cache")}
    trainer = tiny_trainer(tmp_path, scenes, trainer_arguments=arguments, **cache)
    trainer.train()
    first, features = weights(trainer), trainer.train_dataset[0]["image_features"]
    trainer.train()
    other = trainer.train_dataset[0]["image_features"]
    assert any("lora" in name for name in first)
    assert not torch.equal(features, other)  # of the new model's tower
    pixels = trainer.captioner.encode_images([scenes["train"][0]["image"]])
    torch.testing.assert_close(other[None], trainer.captioner.image_features(**pixels).detach())


def test_model_and_model_init_exclude_each_other(tmp_path, scenes):
    optimizer, new = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1), lambda: tiny_captioner("blip")
    for arguments in ({"model": new(), "model_init": new}, {"model_init": new, "optimizers": (optimizer, None)}):
        with pytest.raises(ValueError, match="model_init"):
            tiny_trainer(tmp_path, scenes, trainer_arguments=arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_public_methods_outside_a_run(tmp_path, scenes, scorer, kind):
    trainer, rows = searching(kind, tmp_path, scenes, scorer), scenes["validation"].select(range(5))
    output = trainer.predict(DatasetDict({"validation": scenes["validation"], "test": rows}))
    assert output.predictions == trainer.generate_captions(rows)
    assert output.label_ids == [list(captions) for captions in rows["captions"]]
    batches = list(trainer.get_test_dataloader(rows))  # one
    loss, *nothing = trainer.prediction_step(trainer.model, dict(batches[0]), prediction_loss_only=False)
    assert (float(loss), nothing) == (pytest.approx(output.metrics["test_loss"], rel=1e-5), [None, None])
    for loader in (trainer.get_eval_dataloader(), trainer.get_eval_dataloader(rows)):
        assert trainer.evaluation_loop(loader, "evaluation").metrics["eval_loss"] > 0
    if kind in ("smile", "sle"):  # SLE begins with cross-entropy
        assert trainer.compute_loss(trainer.model, batches[0], return_outputs=True)[0].requires_grad
    else:
        with pytest.raises(ValueError, match="no rollout"):
            trainer.compute_loss(trainer.model, batches[0], return_outputs=True)
    with pytest.raises(ValueError, match="evaluation data"):
        tiny_trainer(tmp_path, scenes, trainer_arguments={"eval_dataset": None}).evaluate()


def test_default_output_folder_has_the_name_of_the_model(tmp_path, scenes, scorer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, processor = tiny_blip()
    for part in (model, processor):
        part.save_pretrained(tmp_path / "my-blip")
    trainer = SmileTrainer(str(tmp_path / "my-blip"), train_dataset=scenes["train"].select([0]))
    assert trainer.args.output_dir == "my-blip-SMILE"
    assert SelfRetrievalTrainer("my-blip", scorer).args.output_dir == "my-blip-SelfRetrieval"
    assert default_output_dir("Salesforce/blip-base", "SMILE") == "blip-base-SMILE"
    assert default_output_dir(model, "SMILE") == "blip-SMILE"
    assert default_output_dir("scenes:blip-mle", "SMILE") == "blip-mle-SMILE"  # valid on every file system
    assert default_output_dir(None, "SMILE") == "captioner-SMILE"
    with pytest.raises(TypeError, match="SmileConfig"):
        SmileTrainer(model, CaptionRLConfig(str(tmp_path), use_cpu=True), processing_class=processor)


def test_other_column_names_are_accepted_in_evaluate(tmp_path, scenes):
    rows = scenes["validation"].select(range(4))
    raw = rows.remove_columns("captions").add_column("text", [captions[0] for captions in rows["captions"]])
    raw = raw.select_columns(["image", "text"])
    trainer = tiny_trainer(tmp_path, scenes, cache_image_features=True, feature_cache_dir=str(tmp_path / "cache"))
    first = trainer.evaluate(raw)
    known = len(trainer._once)
    assert trainer.evaluate(raw)["eval_loss"] == first["eval_loss"]
    assert len(trainer._once) == known  # encoded once
    assert "eval_raw_loss" in trainer.evaluate({"raw": raw})
    named, given = trainer.evaluate("scenes"), trainer.evaluate(load_scenes()["validation"])
    assert named["eval_loss"] == given["eval_loss"]
    with pytest.raises(ValueError, match="no column 'image'"):
        trainer.evaluate(raw.remove_columns("image"))


def images(number):
    return load_scenes(num_train=number, num_validation=1, num_test=0)["train"]


def _evaluate(folder: str) -> None:
    caching = {"freeze_vision_tower": True, "cache_image_features": True, "feature_cache_dir": f"{folder}/cache"}
    settings = {"use_cpu": True, "report_to": "none", "per_device_eval_batch_size": 1}
    trainer = SmileTrainer(
        tiny_captioner("blip"), SmileConfig(folder, generation_max_new_tokens=6, **settings, **caching)
    )
    shard(trainer.captioner, head_alone=False)
    assert is_sharded(trainer.captioner.model)
    # Each process runs two forwards of one image; the second of the other process does not count.
    found = {"loss": trainer.evaluate(images(3))["eval_loss"]}
    for number in (3, 1):  # two images and one; one and none
        for beams in (1, 3):
            found[f"{number} {beams}"] = trainer.generate_captions(images(number), num_beams=beams)
    (Path(folder) / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


def test_unequal_shares_give_the_captions_of_one_process(tmp_path):
    run_in_processes(2, _evaluate, str(tmp_path), folder=tmp_path)
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert one == other
    captioner = tiny_captioner("blip")
    for number in (3, 1):
        for beams in (1, 3):
            alone = generate_captions(
                captioner, [row["image"] for row in images(number)], batch_size=1, num_beams=beams, max_new_tokens=6
            )
            assert one[f"{number} {beams}"] == alone
    assert one["loss"] == pytest.approx(looped_loss(captioner, images(3), 42, smile=True), rel=1e-5)
