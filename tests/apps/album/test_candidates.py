"""Pragmatic decoding against a plain loop over words and prefixes, and with beams of every family."""

import dataclasses
import json
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import TrainerControl, TrainerState

from hf_captionrl import load_captioner, load_scorer
from hf_captionrl.apps.album import candidates, command
from hf_captionrl.apps.album.candidates import PragmaticProcessor, _Clock, adapt_to_album, pragmatic_captions
from hf_captionrl.apps.album.command import check_options, load_model
from hf_captionrl.apps.album.options import AlbumOptions
from hf_captionrl.apps.album.sources import AlbumSource
from hf_captionrl.cli import main
from hf_captionrl.trainers.guard import GuardCallback
from hf_captionrl.utils.model_files import model_path
from tests.apps.album.conftest import write_images
from tests.processes import Forked
from tests.tiny import tiny_captioner, tiny_images
from tests.tolerances import assert_close


def listener_by_loop(speakers, words):
    """log L(image | prefix) for the listener of one prefix, word by word; `speakers[image][step][word]` are probabilities."""
    belief = [1 / len(speakers)] * len(speakers)
    for step, word in enumerate(words):
        joint = [b * speaker[step][word] for b, speaker in zip(belief, speakers, strict=True)]
        belief = [j / sum(joint) for j in joint]
    return belief


def test_scores_against_a_loop():
    generator = torch.Generator().manual_seed(0)
    K, V, T, groups, rationality = 3, 5, 4, 2, 2.5
    speakers = torch.rand(groups, K, T, V, generator=generator).softmax(-1)
    words = torch.randint(0, V, (groups, T), generator=generator)
    processor = PragmaticProcessor(K, rationality=rationality)
    ids = torch.zeros(groups * K, 1, dtype=torch.long)
    for step in range(T):
        found = processor(ids, speakers[:, :, step].reshape(-1, V).log()).view(groups, K, V)
        for group in range(groups):
            table = speakers[group].tolist()
            expected = []
            for word in range(V):
                belief = listener_by_loop(table, [*words[group, :step].tolist(), word])
                expected.append(table[0][step][word] * belief[0] ** rationality)
            expected = torch.tensor([math.log(e / sum(expected)) for e in expected])
            for row in range(K):
                assert_close(found[group, row], expected, magnitude=10)
        ids = torch.cat([ids, words[:, step].repeat_interleave(K)[:, None]], 1)


def test_listener_follows_reordered_beams():
    """Two beams that swap places between steps keep their own listeners."""
    V, K = 4, 2
    first = torch.log_softmax(torch.randn(K * 2, V, generator=torch.Generator().manual_seed(1)), -1)
    second = torch.log_softmax(torch.randn(K * 2, V, generator=torch.Generator().manual_seed(2)), -1)
    start = torch.zeros(4, 1, dtype=torch.long)
    # Rows: image 0 beams 0 and 1, image 1 beams 0 and 1. In the first step both beams have the same prefix.
    first = first[[0, 0, 2, 2]]
    straight, crossed = PragmaticProcessor(K, 2), PragmaticProcessor(K, 2)
    straight(start, first)
    crossed(start, first)
    ids = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 2]])
    swapped = [1, 0, 3, 2]
    one = straight(ids, second)
    other = crossed(ids[swapped], second[swapped])
    assert torch.equal(one, other[swapped])
    # A third step, where the parents' order differs from the children's.
    third = torch.cat([ids, torch.tensor([[3], [3], [3], [3]])], 1)
    scores = torch.log_softmax(torch.randn(K * 2, V, generator=torch.Generator().manual_seed(3)), -1)
    assert torch.equal(straight(third, scores), crossed(third, scores))


@pytest.mark.parametrize("family", ["blip", "clipcap"])
def test_without_rationality_it_is_beam_search(family):
    captioner, images = tiny_captioner(family), tiny_images(3)
    settings = {"num_beams": 3, "max_new_tokens": 6, "num_return_sequences": 2, "do_sample": False}
    found = pragmatic_captions(captioner, images, 0, **settings)
    assert found == captioner.generate(**captioner.encode_images(images[:1]), **settings).captions


@pytest.fixture(scope="module")
def scorers():
    return [load_scorer(model_path(f"scenes:{name}"), device="cpu") for name in ("clip-reward", "siglip-held-out")]


@pytest.fixture(scope="module")
def images(scenes):
    return scenes[:8]


def load():
    return load_captioner(model_path("scenes:blip-mle"), device="cpu")


def decide(monkeypatch, after):
    """Let the held-out scorer measure 0.25 before and another number after the training."""
    measured, real = iter([0.25, after]), candidates._measure
    monkeypatch.setattr(candidates, "_measure", lambda *all_: {**real(*all_), "held_out": next(measured)})


def test_held_out_scorer_decides(scorers, images, tmp_path, monkeypatch):
    decide(monkeypatch, 0.25)
    # One image twice: it must not be its own distractor.
    album, captioner = [*images, images[0]], load()
    facts = adapt_to_album(captioner, *scorers, album, tmp_path / "adapter", seconds=3600, max_steps=2, batch_size=4)
    assert (facts["kept"], facts["steps"]) == (False, 2)
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    assert "is not used" in facts["sentence"]
    assert captioner.generate(**captioner.encode_images(images[:1])).captions[0]


def test_guard_and_degenerate_captions_are_reasons():
    def reason(guard=None, **after):
        fine = {"degenerate": 0.0, "held_out": 0.5, "scorer": 0.5}
        return candidates._reason_against(guard, fine, fine | after)

    assert reason(held_out=0.6) is None
    assert "does not rank more" in reason(scorer=0.9)
    assert "degenerate" in reason(held_out=0.9, degenerate=0.2)
    guard = SimpleNamespace(trips=[{"reason": "loops"}], rolled_back_to=None)
    assert "loops" in reason(guard, held_out=0.6)
    guard.rolled_back_to = "checkpoint-3"
    assert reason(guard, held_out=0.6) is None


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
    monkeypatch.setattr(GuardCallback, "doubt", property(lambda guard: "Captions loop." if len(steps) >= 4 else None))
    monkeypatch.setattr(candidates._Clock, "on_step_end", on_step_end)
    decide(monkeypatch, 0.5)
    captioner = load()
    facts = adapt_to_album(captioner, *scorers, images, tmp_path, seconds=3600, max_steps=20, batch_size=4)
    assert (facts["steps"], facts["rolled_back_to"], facts["kept"]) == (7, "checkpoint-2", True)
    assert "The guard returned to checkpoint-2. The adapter is used." in facts["sentence"]
    delivered = dict(captioner.model.named_parameters())
    assert all(torch.equal(delivered[name], weight) for name, weight in weights[1].items())
    assert not all(torch.equal(delivered[name], weight) for name, weight in weights[3].items())


def test_one_scorer_cannot_reward_and_decide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "x").mkdir(parents=True)
    for more in (
        {"model": "a/b", "scorer": "google/siglip-base-patch16-224"},
        {"model": "scenes:blip-mle", "held_out_scorer": "scenes:clip-reward"},
        {"model": "a/b", "scorer": "models/x", "held_out_scorer": "./models/x/"},
    ):
        with pytest.raises(ValueError, match="held_out_scorer"):
            check_options(AlbumOptions(images="photos", adapt="1s", **more))
        check_options(AlbumOptions(images="photos", **more))
    for model in ("a/b", "scenes:blip-mle"):  # the defaults differ
        check_options(AlbumOptions(images="photos", adapt="1s", model=model))


def test_adapter_is_loaded_onto_the_base_of_the_options(tmp_path, monkeypatch):
    captioner = load()
    captioner.model = get_peft_model(captioner.model, captioner.lora_config())
    captioner.save_pretrained(tmp_path)
    asked, real = [], command.load_captioner

    def loaded(name, *, revision=None, **settings):
        asked.append(revision)
        return real(name, **settings)

    monkeypatch.setattr(command, "load_captioner", loaded)
    options = AlbumOptions(images="x", model="scenes:blip-mle", dtype="bfloat16", revision="abc", device="cpu")
    found = load_model(options, tmp_path)
    assert asked == ["abc", None]
    assert hasattr(found.model, "peft_config")
    assert {p.dtype for n, p in found.model.named_parameters() if "lora_" not in n} == {torch.bfloat16}


def adapted(images, folder, **settings):
    scorers = [load_scorer(model_path(f"scenes:{name}"), device="cpu") for name in ("clip-reward", "siglip-held-out")]
    return adapt_to_album(load(), *scorers, images, folder, batch_size=4, seconds=3600, **settings)


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
    monkeypatch.setattr(candidates, "_SAVE_SECONDS", 0)
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
    found = adapted(images, tmp_path / "killed", max_steps=5)
    whole = adapted(images, tmp_path / "whole", max_steps=5)
    assert clocks == [(3, used), (0, 0.0)]
    assert found["steps"] == 5
    assert {**found, "adapter": None, "sentence": None} == {**whole, "adapter": None, "sentence": None}
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("killed", "whole"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_clock_counts_earlier_seconds_and_saves(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(candidates.time, "monotonic", lambda: now[0])
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


def test_work_of_other_settings_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = AlbumSource(["a.png"], ["a.png"])
    asked = {"seconds": 1.0, "images": "photos", "model": "scenes:blip-mle", "dtype": "float32", "seed": 0}
    asked |= dict.fromkeys(("split", "image_root", "max_images", "revision", "prompt", "scorer", "held_out_scorer"))
    facts = {"kept": True, "asked": asked}
    for output, content in (("o", facts), ("p", {"asked": asked})):
        folder = Path(f"{output}.adapter")
        folder.mkdir()
        (folder / "decision.json").write_text(json.dumps(content))
        made = AlbumOptions(images="photos", model="scenes:blip-mle", adapt="1s", output=[Path(f"{output}.jsonl")])
        if "kept" in content:
            assert command.adapt(made, source, None) == facts
        for name, value in CHANGES.items():
            with pytest.raises(
                ValueError, match=rf"{name} is now .* {output}\.adapter has an adapter of that command"
            ):
                command.adapt(dataclasses.replace(made, **{name: value}), source, None)


def test_command_adapts_once_resumes_and_leaves_no_checkpoints(scenes, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_images(scenes, [f"{number}.png" for number in range(3)])
    asked, real = [], candidates.adapt_to_album

    def adapt(*arguments, **settings):
        asked.append(sorted(path.name for path in Path("album.adapter").glob("checkpoint-*")))
        found = real(*arguments, **settings)
        assert list(Path("album.adapter").glob("checkpoint-*")), "the last step is saved"
        if len(asked) in (1, 3):
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(command, "adapt_to_album", adapt)
    quick = "--num_beams 1 --num_samples 0 --max_new_tokens 6 --cache_dir cache --json".split()
    words = ["album", "photos", "--model", "scenes:blip-mle", "--adapt", "0.1s", *quick]
    assert main([*words, "--held_out_scorer", "scenes:clip-reward"]) == 2
    assert "held_out_scorer" in capsys.readouterr().err
    assert main(words) != 0
    checkpoints = sorted(Path("album.adapter").glob("checkpoint-*"))
    checkpoint = max(checkpoints, key=lambda path: int(path.name.partition("-")[2]))
    for _ in range(2):  # the second time, the decision is known
        assert main(words) == 0
        steps = json.loads(capsys.readouterr().out)["adapt"]["steps"]
        assert steps == int(checkpoint.name.partition("-")[2]) + 1
        assert asked == [[], [path.name for path in checkpoints]]
    assert not list(Path("album.adapter").glob("checkpoint-*"))
    # --overwrite starts again, also if checkpoints are left.
    checkpoint.mkdir()
    assert main([*words[:-1], "--overwrite"]) != 0
    assert asked[2] == []
    # What was decided about the earlier adapter does not count for that of a killed training.
    assert main(words[:-1]) == 0
    assert len(asked) == 4
    assert "\nAdapted in " in capsys.readouterr().out
