"""`scripts/benchmark.py recipe`: both settings train the same, and the page has the committed numbers."""

import argparse
import json
import subprocess
from pathlib import Path

import pytest

from hf_captionrl.captioners import captioner as generation
from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.pipeline import generate_captions
from hf_captionrl.utils.model_files import model_path
from scripts import benchmark
from scripts.benchmarks import recipe, recipe_process
from tests.data.sample_photo import photograph

ROOT = Path(__file__).parents[1]
TINY = ["--rounds", "1", "--hidden-size", "24", "--num-layers", "1", "--image-size", "32"]


def test_runs_and_writes_its_section(tmp_path):
    page, output = tmp_path / "benchmarks.md", tmp_path / "recipe.json"
    case = "smile_blip on photographs"
    words = ["--write", "--page", str(page), "recipe", "--cases", case, *TINY, "--output", str(output)]
    assert benchmark.main(words) == 0
    found = json.loads(output.read_text())["cases"][case]
    assert found["losses_equal"] is True
    assert 0 < found["step"]["seconds"]["after"] < found["whole"]["seconds"]["after"]
    assert recipe.CASES[case].title in page.read_text()
    assert (
        "random weights and 32 pixels, and the images are 24 JPEG files of 10 photographs of COCO" in page.read_text()
    )


def recorded(monkeypatch, losses):
    """Runs that take 3 and 2 seconds in the first round, 8 and 2 in the second."""
    calls = []

    def run_once(case, arguments, folder, *, loop):
        calls.append((loop, arguments[-1]))
        seconds = (3.0 if len(calls) <= 2 else 8.0) if loop == "transformers" else 2.0
        found = losses[loop]
        return {"whole": seconds, "step": seconds / 2, "losses": found(len(calls)) if callable(found) else found}

    monkeypatch.setattr(recipe, "run_once", run_once)
    return calls


def parsed(*words):
    parser = argparse.ArgumentParser()
    recipe.add_arguments(parser)
    return parser.parse_args([*words])


def test_settings_alternate_and_ratios_are_of_a_round(monkeypatch):
    calls = recorded(monkeypatch, {"transformers": [1.0], "package": [1.0]})
    found = recipe.measure("smile_blip on scenes", parsed("--rounds", "2"))
    before, after = ("transformers", "false"), ("package", "true")
    assert calls == [before, after, after, before]
    assert found["step"]["speedup"]["values"] == [1.5, 4.0]
    assert found["whole"]["seconds"] == {"before": 5.5, "after": 2.0}


@pytest.mark.parametrize("other", [[], [1.0, 2.0]])
def test_other_losses_are_an_error(monkeypatch, other):
    recorded(monkeypatch, {"transformers": [1.0], "package": other})
    with pytest.raises(RuntimeError, match="smile_blip on scenes: the losses of the runs differ"):
        recipe.measure("smile_blip on scenes", parsed("--rounds", "1"))
    recorded(monkeypatch, {"transformers": [1.0], "package": other})
    assert recipe.measure("self_retrieval_blip on scenes", parsed("--rounds", "1"))["losses_equal"] is None


def test_losses_of_every_round_are_compared(monkeypatch):
    recorded(monkeypatch, {"transformers": [1.0], "package": lambda call: [1.0 if call < 3 else 2.0]})
    with pytest.raises(RuntimeError, match="losses of the runs differ"):
        recipe.measure("smile_blip on scenes", parsed("--rounds", "2"))


def test_steps_do_not_reach_from_one_training_into_the_next(tmp_path, monkeypatch):
    def run(command, env, **kwargs):
        times = {"trainings": [[0.0, 1.0, 3.0], [100.0, 101.0]], "seconds": 102.0, "losses": [0.5]}
        (tmp_path / "times.json").write_text(json.dumps(times))
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(recipe.subprocess, "run", run)
    found = recipe.run_once(recipe.CASES["smile_blip on scenes"], (), tmp_path, loop="package")
    assert found == {"whole": 102.0, "step": 1.0, "losses": [0.5]}


def test_captions_come_from_the_chosen_loop(tmp_path, monkeypatch):
    """In this process: the loop of `generate` is used when the package's is refused."""
    captioner = load_captioner(model_path("scenes:blip-mle"))
    images = [photograph(0).resize((72, 72))]
    settings = {"do_sample": False, "num_beams": 1, "max_new_tokens": 6}
    ours = generate_captions(captioner, images, **settings)
    calls = []
    monkeypatch.setattr(
        generation, "DecodingLoop", lambda **kwargs: calls.append(1) or recipe_process._refuse(**kwargs)
    )
    assert generate_captions(captioner, images, **settings) == ours
    assert calls


def test_a_recipe_that_fails_is_said(tmp_path):
    with pytest.raises(RuntimeError, match=r"smile_blip exited with 1:[\s\S]*Unknown argument"):
        recipe.run_once(recipe.CASES["smile_blip on scenes"], ("--no_such_option", "1"), tmp_path, loop="package")


def test_the_page_has_the_committed_numbers():
    result = json.loads((ROOT / "docs" / "results" / "benchmark_recipe.json").read_text())
    assert recipe.markdown(result) in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert set(result["cases"]) == set(recipe.CASES)
