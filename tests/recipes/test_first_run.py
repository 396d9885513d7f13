"""The first run of a user: the defaults change captions, a run that changes nothing says so, `--scorer none` alone is enough."""

import importlib
import json
import logging

import pytest

from hf_captionrl import (
    SelfRetrievalConfig,
    SelfRetrievalTrainer,
    SmileConfig,
    SmileTrainer,
    load_captions,
    load_scorer,
)
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers.publishing import read_run
from tests.tiny import write_photos

SMALL = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_completion_length": 12}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos") / "photos"
    write_photos(folder, load_scenes(num_train=0, num_validation=0, num_test=30)["test"])
    return folder


def self_retrieval(folder, photos, reward_funcs=None, **settings):
    train = load_captions("imagefolder", data_dir=str(photos), split="train")
    args = SelfRetrievalConfig(
        str(folder), **{**SMALL, "per_device_train_batch_size": len(train), "freeze_vision_tower": True, **settings}
    )
    scorer = load_scorer("scenes:clip-reward")
    trainer = SelfRetrievalTrainer("scenes:blip-mle", scorer, args, train, reward_funcs=reward_funcs)
    before = captions(trainer)
    trainer.train()
    return before, captions(trainer)


def captions(trainer):
    images = [row["image"] for row in load_scenes(num_train=0, num_validation=0, num_test=30)["test"]]
    model = trainer.captioner
    return model.generate(**model.encode_images(images), num_beams=1, max_new_tokens=12).captions


def test_the_default_rate_changes_captions_of_a_folder_of_photographs(photos, tmp_path, caplog):
    before, after = self_retrieval(tmp_path / "out", photos)
    assert before != after
    assert "learning_rate" not in caplog.text


def test_a_run_that_changes_nothing_says_so(photos, tmp_path, caplog):
    before, after = self_retrieval(tmp_path / "out", photos, learning_rate=1e-12, num_train_epochs=2)
    assert before == after
    assert "with learning_rate=1e-12. Use a higher learning_rate" in caplog.text


def test_a_run_with_equal_rewards_names_them(photos, tmp_path, caplog):
    def constant(completions, **kwargs):
        return [0.5] * len(completions)

    settings = {"baseline": "leave_one_out", "num_generations": 2, "num_train_epochs": 2}
    before, after = self_retrieval(tmp_path / "out", photos, constant, **settings)
    assert before == after
    assert "All advantages are 0" in caplog.text
    assert "higher learning_rate" not in caplog.text


@pytest.mark.parametrize(("rate", "says"), [(0.0, True), (1e-3, False)])
def test_captions_of_evaluations_are_compared(photos, tmp_path, caplog, rate, says):
    data = {
        split: load_captions("imagefolder", data_dir=str(photos), split=split) for split in ("train", "validation")
    }
    settings = {name: value for name, value in SMALL.items() if name != "max_completion_length"}
    args = SmileConfig(
        str(tmp_path),
        learning_rate=rate,
        eval_strategy="epoch",
        num_train_epochs=2,
        generation_max_new_tokens=8,
        **settings,
    )
    with caplog.at_level(logging.WARNING):
        SmileTrainer(
            "scenes:blip-mle", args, data["train"], data["validation"], scorer=load_scorer("scenes:clip-reward")
        ).train()
    assert ("are still those of step" in caplog.text) == says


@pytest.mark.parametrize("recipe", ["smile_blip", "self_retrieval_blip", "sle_blip", "scorer", "smile_llama_lora"])
@pytest.mark.parametrize("rate", ["-1", "nan", "inf"])
def test_a_rate_that_is_none_is_refused(tmp_path, recipe, rate, capsys):
    words = ["--learning_rate", rate, "--output_dir", str(tmp_path)]
    with pytest.raises((SystemExit, ValueError)) as stop:
        importlib.import_module(f"recipes.{recipe}").parse_args(words)
    assert "learning_rate" in str(stop.value) + capsys.readouterr().err


SHORT = (
    "--max_steps 2 --per_device_train_batch_size 4 --generation_max_new_tokens 8 --report_to none --use_cpu --disable_tqdm true "
    "--max_test_images 4"
).split()
RECIPES = {
    "smile_blip": ["--model_name_or_path", "scenes:blip-mle"],
    "sle_blip": ["--model_name_or_path", "scenes:blip-mle", "--num_generations", "2", "--max_completion_length", "8"],
}


@pytest.mark.parametrize("recipe", ["smile_blip", "sle_blip"])
def test_scorer_none_alone_is_enough(photos, tmp_path, monkeypatch, capsys, recipe):
    monkeypatch.chdir(tmp_path)
    words = [
        "--dataset_name",
        "imagefolder",
        "--data_dir",
        str(photos),
        "--scorer_name_or_path",
        "none",
        *RECIPES[recipe],
    ]
    results = importlib.import_module(f"recipes.{recipe}").main([*words, *SHORT, "--output_dir", "out"])
    facts = json.loads(results.read_text())
    assert facts["rows"][0]["cider_d"] is not None
    assert facts["rows"][0].get("perplexity") is None  # nobody asked
    line = facts["config"]["configuration"]
    assert line.startswith("Configuration: ")
    assert line in " ".join(capsys.readouterr().out.split())
    assert "the defaults, not" in line  # the model is another one
    for part in ("learning rate 1e-05", "length 2 steps", "batch 4", "beams ", "selection"):
        assert part in line.lower(), line
    settings = read_run("out/model")["settings"]
    assert settings.pop("configuration") in line
    assert ", ".join(f"{name} {value}" for name, value in settings.items()) in line.lower()
