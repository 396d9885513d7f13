"""A killed `--adapt` resumes from its checkpoint for the remaining time; its bar; settings that need another adapter."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tqdm
from safetensors.torch import load_file
from transformers import TrainerControl, TrainerState

from hf_captionrl import load_captioner, load_scorer
from hf_captionrl.apps.album import candidates as adapt_captioner
from hf_captionrl.apps.album import command
from hf_captionrl.apps.album.candidates import _Clock, adapt_to_album
from hf_captionrl.apps.album.options import AlbumOptions
from hf_captionrl.apps.album.sources import AlbumSource
from hf_captionrl.cli import main
from hf_captionrl.utils.model_files import model_path
from tests.processes import Forked


def adapted(images, folder, **settings):
    scorers = [load_scorer(model_path(f"scenes:{name}"), device="cpu") for name in ("clip-reward", "siglip-held-out")]

    def load():
        return load_captioner(model_path("scenes:blip-mle"), device="cpu")

    return adapt_to_album(load, *scorers, images, folder, batch_size=4, seconds=3600, **settings)


def killed_in_step_4(images, folder):
    real = _Clock.on_step_end

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, args, state, control, **kwargs)

    _Clock.on_step_end = on_step_end
    adapted(images, folder, max_steps=5)


def test_killed_training_equals_one_that_was_not(tmp_path, monkeypatch, scenes):
    images = list(scenes[:8])
    monkeypatch.setattr(adapt_captioner, "_SAVE_SECONDS", 0)
    with Forked(killed_in_step_4, images, tmp_path / "killed") as process:
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert sorted(path.name for path in (tmp_path / "killed").glob("checkpoint-*"))[-1] == "checkpoint-3"
    assert not (tmp_path / "killed" / "adapter_model.safetensors").exists()
    kept = json.loads((tmp_path / "killed" / "checkpoint-3" / "trainer_state.json").read_text())
    used = kept["stateful_callbacks"]["_Clock"]["attributes"]["used"]
    assert 0 < used < 300
    clocks, real = [], _Clock.on_train_begin

    def on_train_begin(self, args, state, control, **kwargs):
        real(self, args, state, control, **kwargs)
        clocks.append((state.global_step, self.used))

    monkeypatch.setattr(_Clock, "on_train_begin", on_train_begin)
    found = adapted(images, tmp_path / "killed", max_steps=5, resume=True)
    whole = adapted(images, tmp_path / "whole", max_steps=5, resume=True)
    assert clocks == [(3, used), (0, 0.0)]
    assert found.facts["steps"] == whole.facts["steps"] == 5
    assert {name: found.facts[name] for name in ("before", "after")} == {
        name: whole.facts[name] for name in ("before", "after")
    }
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("killed", "whole"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


class Bar:
    """Records what a bar shows."""

    def __init__(self, **settings):
        self.n, self.settings, self.shown, self.is_closed = 0, settings, [], False

    def set_postfix_str(self, text, refresh):
        self.text = text

    def update(self, number):
        self.n += number
        self.shown.append((self.n, self.text))

    def close(self):
        self.is_closed = True


def test_clock_counts_earlier_seconds_saves_and_shows_the_steps(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(adapt_captioner.time, "monotonic", lambda: now[0])
    bars = []
    monkeypatch.setattr(tqdm, "tqdm", lambda **settings: bars.append(Bar(**settings)) or bars[-1])
    clock, args, control = _Clock(200.0), SimpleNamespace(train_batch_size=8), TrainerControl()
    state = TrainerState(global_step=7)
    state.stateful_callbacks = {"_Clock": {"args": {}, "attributes": {"used": 150.0}}}
    clock.on_train_begin(args, state, control)
    assert clock.interval == 40
    seen = []
    for seconds in (20.0, 25.0, 10.0):
        now[0] += seconds
        state.global_step += 1
        control.should_save = False
        clock.on_step_end(args, state, control)
        seen.append((clock.used, control.should_save, control.should_training_stop))
    clock.on_train_end(args, state, control)
    assert seen == [(170.0, False, False), (195.0, True, False), (205.0, True, True)]
    assert clock.state()["attributes"] == {"used": 205.0}
    (bar,) = bars
    assert bar.settings["total"] == 200
    assert bar.is_closed
    assert bar.shown == [
        (170.0, "8 steps"),
        (195.0, "9 steps"),
        (200.0, "10 steps"),
    ]
    # A new training has all its time, whatever an earlier one left in the state.
    clock.on_train_begin(args, TrainerState(global_step=0), TrainerControl())
    assert clock.used == 0


CHANGES = {
    "prompt": "a photo of",
    "split": "train",
    "max_images": 2,
    "image_root": "x",
    "revision": "a",
    "dtype": "bfloat16",
    "seed": 1,
    "scorer": "scenes:other",
    "held_out_scorer": "scenes:x",
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("file", ["decision.json", "asked.json"])
def test_work_of_other_settings_is_refused(tmp_path, monkeypatch, name, file):
    monkeypatch.chdir(tmp_path)
    options = AlbumOptions(images="photos", model="scenes:blip-mle", adapt="1s", output=[Path("o.jsonl")])
    source = AlbumSource(["a.png"], ["a.png"])
    Path("o.adapter").mkdir()
    asked = {"seconds": 1.0, "images": "photos", "model": "scenes:blip-mle", "dtype": "float32", "seed": 0}
    asked |= dict.fromkeys(("split", "image_root", "max_images", "revision", "prompt", "scorer", "held_out_scorer"))
    facts = {"kept": True, "asked": asked}
    Path("o.adapter", file).write_text(json.dumps(facts if file == "decision.json" else asked))
    if file == "decision.json":
        assert command.adapt(options, source, None) == facts
    setattr(options, name, CHANGES[name])
    with pytest.raises(ValueError, match=rf"{name} is now .* o\.adapter has an adapter of that command"):
        command.adapt(options, source, None)


def test_command_resumes_and_leaves_no_checkpoints(scenes, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for number in range(3):
        scenes[number].save(f"photos/{number}.png")
    asked, real = [], adapt_captioner.adapt_to_album

    def adapt(*arguments, **settings):
        asked.append((settings["resume"], sorted(path.name for path in Path("album.adapter").glob("checkpoint-*"))))
        found = real(*arguments, **settings)
        assert list(Path("album.adapter").glob("checkpoint-*")), "the last step is saved"
        if len(asked) == 1:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(command, "adapt_to_album", adapt)
    quick = "--num_beams 1 --num_samples 0 --max_new_tokens 6 --cache_dir cache --json".split()
    words = ["album", "photos", "--model", "scenes:blip-mle", "--adapt", "0.1s", *quick]
    assert main(words) != 0
    checkpoints = sorted(Path("album.adapter").glob("checkpoint-*"))
    checkpoint = max(checkpoints, key=lambda path: int(path.name.partition("-")[2]))
    assert main(words) == 0
    steps = json.loads(capsys.readouterr().out)["adapt"]["steps"]
    assert steps == int(checkpoint.name.partition("-")[2]) + 1
    assert asked == [(True, []), (True, [path.name for path in checkpoints])]
    assert not list(Path("album.adapter").glob("checkpoint-*"))
    # --overwrite starts again, also if checkpoints are left.
    checkpoint.mkdir()
    assert main([*words, "--overwrite"]) == 0
    assert asked[2] == (True, [])
