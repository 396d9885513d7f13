"""Finetuning on an album: time, decision, adapter. Results are not tested, since they depend on the models."""

import dataclasses
import json

import pytest
import torch
from peft import get_peft_model

from hf_captionrl import load_captioner, load_scorer
from hf_captionrl.apps.album import candidates as adapt_captioner
from hf_captionrl.apps.album import command as pipelines
from hf_captionrl.apps.album.candidates import adapt_to_album
from hf_captionrl.apps.album.command import check_options, load_model
from hf_captionrl.apps.album.options import AlbumOptions
from hf_captionrl.cli import main
from hf_captionrl.trainers.guard import GuardCallback
from hf_captionrl.utils.model_files import model_path


@pytest.fixture(scope="module")
def scorers():
    return [load_scorer(model_path(f"scenes:{name}"), device="cpu") for name in ("clip-reward", "siglip-held-out")]


@pytest.fixture(scope="module")
def images(scenes):
    return scenes[:8]


def load():
    return load_captioner(model_path("scenes:blip-mle"), device="cpu")


@pytest.mark.parametrize("better", [True, False])
def test_held_out_scorer_decides(scorers, images, tmp_path, monkeypatch, better):
    measured = iter([0.25, 0.5 if better else 0.25])
    real = adapt_captioner._measure

    def decided(*arguments):
        return {**real(*arguments), "held_out": next(measured)}

    monkeypatch.setattr(adapt_captioner, "_measure", decided)
    # One image twice: it must not be its own distractor.
    album = [*images, images[0]]
    found = adapt_to_album(load, *scorers, album, tmp_path / "adapter", seconds=3600, max_steps=2, batch_size=4)
    assert found.facts["kept"] is better
    assert found.facts["steps"] == 2
    assert hasattr(found.captioner.model, "peft_config") is better
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    assert ("is used" if better else "is not used") in found.facts["sentence"]
    assert found.captioner.generate(**found.captioner.encode_images(images[:1])).captions[0]


def test_time_ends_the_training(scorers, images, tmp_path):
    found = adapt_to_album(load, *scorers, images, tmp_path, seconds=0.01, batch_size=4)
    assert found.facts["steps"] == 1


def test_guard_and_degenerate_captions_are_reasons():
    class Trainer:
        guard = None

    fine = {"degenerate": 0.0, "held_out": 0.5, "scorer": 0.5}
    assert adapt_captioner._reason_against(Trainer, fine, {**fine, "held_out": 0.6}) is None
    assert "does not rank more" in adapt_captioner._reason_against(Trainer, fine, {**fine, "scorer": 0.9})
    assert "degenerate" in adapt_captioner._reason_against(Trainer, fine, {**fine, "held_out": 0.9, "degenerate": 0.2})
    Trainer.guard = type("Guard", (), {"trips": [{"reason": "loops"}], "rolled_back_to": None})
    assert "loops" in adapt_captioner._reason_against(Trainer, fine, {**fine, "held_out": 0.6})
    Trainer.guard.rolled_back_to = "checkpoint-3"
    assert adapt_captioner._reason_against(Trainer, fine, {**fine, "held_out": 0.6}) is None


def test_guard_returns_to_the_last_good_checkpoint(scorers, images, tmp_path, monkeypatch):
    steps, weights = [], []

    def reason(guard):
        return "Captions loop." if len(steps) == 6 else None

    def on_step_end(self, args, state, control, *, model, **kwargs):
        steps.append(state.global_step)
        weights.append({name: w.detach().clone() for name, w in model.named_parameters() if "lora" in name})
        control.should_save = len(steps) in (2, 4)

    # The guard acts after the sixth step; checkpoints exist of the second and the fourth.
    monkeypatch.setattr(GuardCallback, "reason", property(reason))
    monkeypatch.setattr(GuardCallback, "doubt", property(lambda guard: None if len(steps) < 4 else "Captions loop."))
    monkeypatch.setattr(adapt_captioner._Clock, "on_step_end", on_step_end)
    measured = iter([0.25, 0.5])
    real = adapt_captioner._measure
    monkeypatch.setattr(adapt_captioner, "_measure", lambda *all_: {**real(*all_), "held_out": next(measured)})
    found = adapt_to_album(load, *scorers, images, tmp_path, seconds=3600, max_steps=20, batch_size=4)
    assert (found.facts["steps"], found.facts["rolled_back_to"], found.facts["kept"]) == (7, "checkpoint-2", True)
    assert "The guard returned to checkpoint-2." in found.facts["sentence"]
    delivered = dict(found.captioner.model.named_parameters())
    assert all(torch.equal(delivered[name], weight) for name, weight in weights[1].items())
    assert not all(torch.equal(delivered[name], weight) for name, weight in weights[3].items())


@pytest.mark.parametrize(
    ("scorers", "refused"),
    [
        ({"model": "a/b", "scorer": "google/siglip-base-patch16-224"}, True),
        ({"model": "a/b", "held_out_scorer": "openai/clip-vit-base-patch32"}, True),
        ({"model": "scenes:blip-mle", "held_out_scorer": "scenes:clip-reward"}, True),
        ({"model": "scenes:blip-mle", "scorer": "scenes:siglip-held-out"}, True),
        ({"model": "a/b", "scorer": "models/x", "held_out_scorer": "./models/x/"}, True),
        ({"model": "a/b"}, False),
        ({"model": "scenes:blip-mle"}, False),
    ],
)
def test_one_scorer_cannot_reward_and_decide(tmp_path, monkeypatch, scorers, refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "x").mkdir(parents=True)
    options = AlbumOptions(images="photos", adapt="1s", **scorers)
    if refused:
        with pytest.raises(ValueError, match="held_out_scorer"):
            check_options(options)
    else:
        check_options(options)
    check_options(dataclasses.replace(options, adapt=None))


def test_adapter_is_loaded_onto_the_base_of_the_options(tmp_path, monkeypatch):
    captioner = load()
    captioner.model = get_peft_model(captioner.model, captioner.lora_config())
    captioner.save_pretrained(tmp_path)
    asked, real = {}, pipelines.pipeline

    def pipeline(name, **settings):
        asked.update(settings)
        return real(name, **{**settings, "revision": None})

    monkeypatch.setattr(pipelines, "pipeline", pipeline)
    options = AlbumOptions(images="x", model="scenes:blip-mle", dtype="bfloat16", revision="abc", device="cpu")
    found = load_model(options, tmp_path)
    assert asked["revision"] == "abc"
    assert hasattr(found.model, "peft_config")
    assert {p.dtype for n, p in found.model.named_parameters() if "lora_" not in n} == {torch.bfloat16}


def test_command_adapts_once(images, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for number, image in enumerate(images[:4]):
        image.save(tmp_path / "photos" / f"{number}.png")
    quick = ["--num_beams", "1", "--num_samples", "0", "--max_new_tokens", "6", "--cache_dir", "cache", "--json"]
    command = ["album", "photos", "--model", "scenes:blip-mle", "--adapt", "1s", *quick]
    assert main([*command, "--held_out_scorer", "scenes:clip-reward"]) == 2
    assert "held_out_scorer" in capsys.readouterr().err
    assert main(command) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["adapt"]["steps"] >= 1
    monkeypatch.setattr(pipelines, "adapt_to_album", None)
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["adapt"] == first["adapt"]
