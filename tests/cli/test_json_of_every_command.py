"""Every command with --json: one JSON object on stdout, everything else on stderr; no output and no file contains the token.

A new command needs a line in `RUNS`.
"""

import json
import os
import sys
import tempfile

import pytest
import torch

from hf_captionrl.cli import main
from hf_captionrl.data import open_image
from hf_captionrl.scenes import load_scenes
from hf_captionrl.utils.io import write_json
from tests.cli.test_main import COMMANDS
from tests.tiny import write_captions

TOKEN = "hf_" + "FAKEtoken" * 4
IMAGES = 24
FEW = ["--max_images", str(IMAGES), "--cache_dir", "cache"]
FILES = ["--captions", "a.jsonl", "b.jsonl", "--max_images", str(IMAGES)]

RUNS = {
    "metrics path": ["self_retrieval"],
    "agreement": ["--benchmark", "flickr8k-expert", "--data_root", ".", "--num_bootstrap", "9"],
    "env": [],
    "caption": ["scenes:blip-mle", "--max_images", "3", "--max_new_tokens", "6", "--num_beams", "1"],
    "album": "scenes --model scenes:blip-mle --max_images 3 --max_new_tokens 6 --cache_dir cache".split(),
    "evaluate": [*FILES, "--suite", "smile", "--language_model", "none", "--cache_dir", "cache"],
    "bags": [*FEW, "--bag_sizes", "3"],
    "truematch build": ["--output", "truematch", *FEW, "--bag_sizes", "3"],
    "truematch review": ["truematch"],
    "truematch apply": ["truematch"],
    "truematch evaluate": ["truematch", *FILES, "--cache_dir", "cache", "--output_dir", "judged"],
    "pairs": ["--captions", "a.jsonl", "b.jsonl", "--reward", "cider", "--margin", "0.01"],
    "boost": ["--max_images", "4", "--output", "boosted"],
    "card": ["boosted", "--license", "mit"],
    "push": ["boosted", "--dry_run"],
    "convert": ["old.bin", "new.safetensors"],
    "assemble": ["scenes:clip-reward", "scenes:gpt2-perplexity", "clipcap"],
    "demo": ["--no_browser"],
    "train": ["smile", "--steps", "3", "--hub_token", TOKEN],
}
"""Arguments of each command, in the order of the runs: some read the output of others."""

RECIPE = """
from dataclasses import dataclass, field
import json, os, sys
from pathlib import Path

from hf_captionrl.hub import write_manifest


@dataclass
class Arguments:
    steps: int = field(default=1)
    hub_token: str = field(default="")


def main(argv=None):
    from transformers import HfArgumentParser

    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(argv)
    if arguments.steps < 0:
        sys.exit(7)
    print("a table, on stdout")
    write_manifest("trained", command=sys.argv, seeds={}, data={}, config={"Arguments": arguments})
    Path("trained/results.json").write_text(json.dumps({"steps": arguments.steps}))
    return Path("trained/results.json")


if __name__ == "__main__":
    main()
"""


def captured(argv):
    """Exit code and output, including that of subprocesses."""
    sys.stdout.flush(), sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(2), "w")
        try:
            code = main(argv)
        finally:
            sys.stdout.close(), sys.stderr.close()
            sys.stdout, sys.stderr = before
            os.dup2(kept[0], 1), os.dup2(kept[1], 2)
            os.close(kept[0]), os.close(kept[1])
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
    return code, *said


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder in which every command was run with --json, and the outputs."""
    folder = tmp_path_factory.mktemp("world")
    scenes = load_scenes(num_train=0, num_validation=0)["test"].select(range(IMAGES))
    for name, captions in (("a", [c[0] for c in scenes["captions"]]), ("b", list(scenes["full_caption"]))):
        write_captions(folder / f"{name}.jsonl", scenes["image_id"], captions)
    open_image(scenes[0]["image"]).save(folder / "photo.png")
    torch.save({"weight": torch.ones(2)}, folder / "old.bin")
    sentences = {"0.jpg": ["a pig", "two pigs"], "1.jpg": ["a small car", "a car"]}
    rated = [{"filename": name, "sentences": [{"raw": text} for text in texts]} for name, texts in sentences.items()]
    write_json(folder / "dataset_flickr8k.json", {"images": rated})
    (folder / "ExpertAnnotations.txt").write_text("0.jpg\t1.jpg#0\t1\t1\t2\n1.jpg\t0.jpg#1\t1\t3\t1\n")
    (folder / "recipes").mkdir()
    (folder / "recipes" / "smile_blip.py").write_text(RECIPE)
    said = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setenv("CAPTIONRL_CACHE", str(folder / "cache"))
        patch.setattr("hf_captionrl.cli.train.recipe_path", lambda *parts: folder.joinpath("recipes", *parts))
        patch.setattr("hf_captionrl.apps.album.demo.load_demo", lambda arguments: None)
        patch.setattr(
            "hf_captionrl.apps.album.demo.serve", lambda demo, options: print('{"url": "http://127.0.0.1:7860"}')
        )
        for name, arguments in RUNS.items():
            words = name.split()
            # Options of `train` stand before the method; the rest belongs to the recipe.
            argv = [*words, "--json", *arguments]
            said[name] = captured(argv)
        said["failed train"] = captured(["train", "--json", "smile", "--steps", "-1"])
    return folder, said


def test_stdout_is_one_json_object(world):
    assert {tuple(name.split()) for name in RUNS} == set(COMMANDS)
    for name in RUNS:
        code, out, err = world[1][name]
        assert code == 0, (name, err)
        assert isinstance(json.loads(out), dict), name
        assert TOKEN not in out + err, name


def test_train_json_has_results_and_the_exit_code_of_the_recipe(world):
    folder, said = world
    _, out, err = said["train"]
    found = json.loads(out)
    assert found["results"] == {"steps": 3}
    assert found["path"] == "trained/results.json"
    assert "a table, on stdout" in err
    manifest = json.loads((folder / "trained/training_manifest.json").read_text())
    assert manifest["command"] == ["smile_blip.py", "--steps", "3", "--hub_token", "***"]
    assert found["arguments"] == ["--steps", "3", "--hub_token", "***"]
    code, out, _ = said["failed train"]
    assert (code, out) == (7, "")


def test_access_token_is_not_in_any_file(world):
    folder = world[0]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 40
    assert {"truematch.json", "boosting.json", "results.json"} <= {f.name for f in files}
    assert [str(file) for file in files if TOKEN.encode() in file.read_bytes()] == []
    # That the search would find one.
    write_json(folder / "leak" / "config.json", {"token": TOKEN})
    assert [f.name for f in folder.rglob("*") if f.is_file() and TOKEN.encode() in f.read_bytes()] == ["config.json"]


@pytest.mark.parametrize(
    "argv",
    [
        ["caption", "./nowhere", "--json"],
        ["push", "gone", "--repo_id", "a b", "--json"],
        ["train", "--json", "--processes", "0", "smile"],
    ],
    ids=lambda argv: argv[0],
)
def test_failure_prints_one_line_on_stderr_and_nothing_on_stdout(argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code, out, err = captured(argv)
    assert (code, out) == (2, "")
    assert [line for line in err.splitlines() if "error:" in line] == err.splitlines()[-1:]
    assert TOKEN not in err
