"""Checks of a push before anything is sent, and its behaviour when the Hub fails."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hf_captionrl import SmileConfig, SmileTrainer
from hf_captionrl.captioners import load_captioner
from hf_captionrl.cli import main
from hf_captionrl.hub import (
    PushError,
    folder_contents,
    push_folder,
    write_manifest,
)
from hf_captionrl.hub.push import public_command, public_values
from hf_captionrl.scenes import load_scenes
from recipes import smile_blip, smile_llama_lora
from tests.hub.conftest import holders_of_tokens, running_hub
from tests.hub.folders import publishable
from tests.hub.server import READ, WRITE, WRONG
from tests.offline import python_path
from tests.tiny import tiny_captioner, tiny_images
from tests.tolerances import assert_close


@pytest.fixture
def folder(tmp_path):
    return publishable(tmp_path / "smile")


@pytest.mark.parametrize(
    "gone", ["model.safetensors", "tokenizer.json", "processor_config.json", "training_manifest.json"]
)
def test_each_part_is_required(folder, gone):
    (folder / gone).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")  # does not replace the missing part
    with pytest.raises(FileNotFoundError, match=gone.replace("model.", r"\*.")):
        folder_contents(folder)


def test_only_listed_kinds_of_files_are_published(folder):
    unfit = ["training_args.bin", "optimizer.pt", "rng_state.pth", "a.pkl", "weights.npz", ".env", "notes.docx"]
    unfit += ["checkpoint-7/model.safetensors", "checkpoint-7/optimizer.pt", "runs/events.out", "card.json"]
    unfit += ["trainer_state.json", ".git/config.json", "deep/er/model.safetensors"]
    for name in unfit:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    contents = folder_contents(folder)
    assert set(contents.left_out) == set(unfit)
    assert {"model.safetensors", "README.md", "generation_config.json", "results.json"} <= set(contents.published)


HIDING_PLACES = {
    "text.txt": lambda path, text: path.write_text(f"a {text} a"),
    "lines.json": lambda path, text: path.write_text(json.dumps({"a": f"x\n{text}"})),
    "name.json": lambda path, text: path.with_name(f"{text}.json").write_text("{}"),
}


@pytest.mark.parametrize("place", HIDING_PLACES)
def test_token_is_found_in_names_and_texts(place, folder):
    HIDING_PLACES[place](folder / place, WRITE)
    with pytest.raises(ValueError, match="token") as error:
        folder_contents(folder)
    assert WRITE not in str(error.value)


def test_symlink_out_of_the_folder_is_not_followed(folder, tmp_path):
    (tmp_path / "private.json").write_text("{}")
    (folder / "extra.json").symlink_to(tmp_path / "private.json")
    with pytest.raises(ValueError, match="outside the folder"):
        folder_contents(folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("license: bsd-3-clause", "", "licen"),
        ("---\n", "", "licen"),
        ("language: en", "language: [en", "YAML"),
    ],
)
def test_metadata_are_required(folder, old, new, message):
    card = folder / "README.md"
    card.write_text(card.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        folder_contents(folder)


@pytest.mark.parametrize(
    ("given", "named"),
    [({"token": WRITE + "\n"}, "Copy it again"), ({"commit_message": f"with {WRITE}"}, "commit_message")],
)
def test_token_in_an_argument_is_not_sent_or_printed(hub, folder, given, named):
    with pytest.raises(ValueError, match=named) as error:
        push(folder, **given)
    assert WRITE not in str(error.value)
    assert hub.requests == []


def test_a_dry_run_lists_files_and_sends_nothing(hub, folder, capfd):
    assert main(["push", str(folder)]) == 2
    assert "Use --repo_id" in capfd.readouterr().err
    assert main(["push", str(folder), "--dry_run", "--json"]) == 0
    assert "model.safetensors" in json.loads(capfd.readouterr().out)["published"]
    assert hub.requests == []


def test_manifest_contains_no_local_paths_or_secrets(tmp_path):
    home = "/" + "home/me"
    path = write_manifest(
        tmp_path,
        command=["recipe.py", "--hub_token", WRITE, f"--wandb_api_key={WRITE}", f"--data_dir={home}/photos", "--x=1"],
        seeds={"seed": 3},
        data={"name": "photos", "revision": "abc", "fingerprints": {"train": "f1"}},
        config={"Model": {"path": f"{home}/model", "hub_token": WRITE, "note": f"with {WRITE}"}},
    )
    text = path.read_text()
    found = json.loads(text)
    assert WRITE not in text
    assert home not in text
    assert "git" not in text
    said = ["recipe.py", "--hub_token", "***", "--wandb_api_key=***", "--data_dir=photos", "--x=1"]
    assert found["command"] == said
    assert found["config"]["Model"] == {"path": "model", "note": "with [removed]"}
    assert found["seeds"] == {"seed": 3}
    assert {"torch", "transformers", "python", "hf_captionrl"} <= set(found["versions"])
    assert public_command(["a", "--out=../x/y"]) == ["a", "--out=y"]
    # Neither paths nor secrets.
    kept = {"ratio": "3/4", "text": "a b", "max_new_tokens": "20", "pin": "1"}
    assert public_values({"password": "12345", **kept}) == kept
    command = ["smile.py", "--first_token", "shift", "--generation_max_new_tokens", "20", "--max_tokens=30"]
    assert public_command([*command, "--api-key", "20"]) == [*command, "--api-key", "***"]


def test_card_command(folder, capsys):
    card = folder / "README.md"
    before = card.read_text()
    card.write_text(before.replace("license:", "terms:"))
    assert main(["card", str(folder), "--check"]) == 2
    assert "no licence" in capsys.readouterr().err
    assert main(["card", str(folder)]) == 0
    assert card.read_text() == before
    assert main(["card", str(folder), "--check", "--json"]) == 0
    assert main(["card", str(folder), "--license", "mit"]) == 0
    assert "license: mit" in card.read_text()
    (folder / "results.json").unlink()
    assert main(["card", str(folder)]) == 2


@pytest.mark.parametrize(
    ("token", "name", "message"),
    [
        (None, "smile", "there is none"),
        (WRONG, "smile", "401"),
        (READ, "smile", "'smile'.*403"),
        (WRITE, "a b/c", "a b/c"),
    ],
    ids=["no token", "wrong token", "read-only token", "invalid name"],
)
def test_rejected_push_prints_one_line(token, name, message, hub, folder, monkeypatch, capfd):
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    capfd.readouterr()
    assert main(["push", str(folder), "--repo_id", name, "--json"]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    (line,) = [line for line in said.err.splitlines() if not line.startswith("Loading weights")]
    assert line.startswith("captionrl push: error: ")
    assert re.search(message, line), line
    assert not {name for repo in hub.repos.values() for name in repo.files} - {".gitattributes"}


ROOT = Path(__file__).parents[2]


def hashes(folder):
    """Content of a folder, except for files that a push may write."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "README.md"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def push(folder, repo_id="smile", **kwargs):
    return push_folder(folder, repo_id, **{"token": WRITE, **kwargs})


def assert_complete(hub, folder, repo_id="tester/smile"):
    files = hub.repo(repo_id).files
    for name in folder_contents(folder).published:
        assert files[name] == (folder / name).read_bytes(), name
    assert set(files) == {*folder_contents(folder).published, ".gitattributes"}
    assert hub.repo(repo_id).branches["main"] == list(hub.repo(repo_id).commits)[-1]


def test_push_uploads_all_files_and_a_second_push_changes_nothing(hub, folder):
    before = hashes(folder)
    address = push(folder)
    assert_complete(hub, folder)
    repo = hub.repo("tester/smile")
    assert repo.private
    assert address.endswith(repo.branches["main"])
    assert hashes(folder) == before
    assert len(repo.commits) == 2  # initial commit, the files
    assert 'load_captioner("tester/smile", revision="main")' in repo.files["README.md"].decode()
    push(folder)
    assert len(repo.commits) == 2
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes() + b" ")
    # Code examples load the repository, and prose stays.
    with (folder / "README.md").open("a") as card:
        card.write('\nAt revision="main": "smile".\n\n```python\nload("smile", revision="main")\n```\n')
    push(folder)
    assert_complete(hub, folder)
    text = repo.files["README.md"].decode()
    assert text.endswith('"smile".\n\n```python\nload("tester/smile", revision="main")\n```\n')


@pytest.mark.parametrize(
    ("place", "action"), [("POST /api/repos/create", 500), ("POST .*/preupload/", 429), ("POST .*/commit/", "cut")]
)
def test_failed_push_loses_nothing_and_can_be_repeated(hub, folder, place, action, monkeypatch, capfd):
    before = hashes(folder)
    hub.fail(place, action)
    with pytest.raises(PushError, match=str(action) if action != "cut" else "repeated") as error:
        push(folder)
    assert error.value.__cause__ is None
    assert hashes(folder) == before
    hub.faults.clear()
    monkeypatch.setenv("HF_TOKEN", WRITE)
    assert main(["push", str(folder), "--repo_id", "smile"]) == 0
    assert_complete(hub, folder)


def test_other_content_is_only_overwritten_on_request(hub, folder, monkeypatch):
    repo = hub.add("tester/smile", {"README.md": b"A thesis.", "thesis.tex": b"...", "old.safetensors": b"0"})
    with pytest.raises(
        FileExistsError, match=r"has other content \(README.md, old.safetensors, thesis.tex\).*--overwrite"
    ):
        push(folder)
    assert repo.files["README.md"] == b"A thesis."
    assert len(repo.commits) == 1
    monkeypatch.setenv("HF_TOKEN", WRITE)
    assert main(["push", str(folder), "--repo_id", "smile", "--overwrite"]) == 0
    assert repo.files["thesis.tex"] == b"..."
    assert "old.safetensors" not in repo.files  # it would be loaded with the new weights
    assert not repo.private  # the visibility of an existing repository does not change


def test_public_repositories_and_branches_on_request(hub, folder):
    push(folder, private=False, revision="v1")
    repo = hub.repo("tester/smile")
    assert not repo.private
    assert "model.safetensors" in repo.at("v1").files
    assert set(repo.files) == {".gitattributes"}


def fresh_process(command, hub, home, token, stdin=None):
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": token}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "PYTHONPATH": python_path(ROOT), "NO_PROXY": "*"}
    environment |= {"HF_DATASETS_OFFLINE": "0", "HF_EVALUATE_OFFLINE": "0", "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
    home.mkdir(parents=True, exist_ok=True)
    run = subprocess.run(
        [sys.executable, *command], input=stdin, env=environment, cwd=home, capture_output=True, text=True, check=False
    )
    assert token not in run.stdout + run.stderr
    return run


def test_the_scan_finds_a_token(hub, tmp_path):
    """Negative control of the check that `hub` runs at the end of each test."""
    hub.add("tester/leak", {"a.json": json.dumps({"token": READ}).encode()})
    (tmp_path / "note.txt").write_text(f"mine is {WRITE}")
    assert holders_of_tokens(hub, tmp_path) == [str(tmp_path / "note.txt"), "tester/leak: a.json"]
    hub.repos.clear()
    (tmp_path / "note.txt").unlink()


ROWS = load_scenes(num_train=4, num_validation=0, num_test=0)["train"]


def test_a_trainer_pushes_no_pickles_and_keeps_an_edited_card(tmp_path, hub):
    folder = tmp_path / "smile"
    settings = {"max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": "none"}
    args = SmileConfig(str(folder), push_to_hub=True, hub_token=WRITE, disable_tqdm=True, **settings)
    trainer = SmileTrainer(tiny_captioner("blip"), args, train_dataset=ROWS)
    assert not hub.repos  # no repository is created before the push
    folder.mkdir(exist_ok=True)
    (folder / "weights.bin").write_bytes(b"pickle")
    trainer.push_to_hub()
    repo = hub.repo("tester/smile")
    assert {"README.md", "model.safetensors", "captioner.json", "training_manifest.json"} <= set(repo.files)
    assert not [name for name in repo.files if name.endswith((".bin", ".pt")) or name.startswith("checkpoint-")]
    card = repo.files["README.md"].decode()
    assert "No results are in this card" in card
    (folder / "README.md").write_text(card + "\nOne more sentence.\n")
    trainer.save_model()  # pushes, as in transformers
    assert "One more sentence" in hub.repo("tester/smile").files["README.md"].decode()


SHORT = [
    *("--max_train_images", "8", "--max_eval_images", "8", "--max_test_images", "101", "--compare_mle_weights", "0.0"),
    *("--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "64"),
    *("--generation_max_new_tokens", "8", "--generation_num_beams", "1", "--use_cpu", "--disable_tqdm", "true"),
    *("--perplexity_name_or_path", "none", "--max_steps", "1", "--eval_strategy", "no", "--save_strategy", "no"),
    *("--load_best_model_at_end", "false"),
]


def test_recipe_publishes_its_model(tmp_path, monkeypatch, capsys):
    out = tmp_path / "smile-lora"
    argv = ["--output_dir", str(out), "--feature_cache_dir", str(tmp_path / "cache"), *SHORT, "--tune", "language"]
    argv += ["--push_to_hub", "--hub_token", WRITE, "--seed", "5"]
    monkeypatch.setattr("sys.argv", ["smile_blip.py", *argv])
    with running_hub(tmp_path) as hub:
        smile_blip.main(argv)
        repo = hub.repo("tester/smile-lora")
        assert holders_of_tokens(hub, tmp_path) == []
    assert WRITE not in "".join(capsys.readouterr())
    assert repo.private
    files = repo.files
    needed = {"README.md", "results.json", "results.md", "gallery.html", "training_manifest.json", "captioner.json"}
    needed |= {"model.safetensors", "processor_config.json", "tokenizer.json", "generation_config.json"}
    # The base model ships with the package as a local folder, so the adapter is merged for users of transformers alone.
    assert not [name for name in files if "adapter" in name]
    assert needed <= set(files)
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pth"))]
    for name, data in files.items():
        assert str(tmp_path).encode() not in data, name
    manifest = json.loads(files["training_manifest.json"])
    assert manifest["seeds"]["seed"] == 5
    assert manifest["data"]["rows"] == {"train": 8, "validation": 8, "test": 101}
    assert all(manifest["data"]["fingerprints"].values())
    assert manifest["command"][manifest["command"].index("--hub_token") + 1] == "***"
    assert 'load_captioner("tester/smile-lora", revision="' in files["README.md"].decode()
    # The finished model was pushed.
    for name in files:
        (tmp_path / "there").mkdir(exist_ok=True)
        (tmp_path / "there" / name).write_bytes(files[name])
    images = tiny_images(2, size=72)
    texts = []
    for place in (out / "model", tmp_path / "there"):
        captioner = load_captioner(str(place), dtype=torch.float32)
        texts.append(captioner.generate(**captioner.encode_images(images), num_beams=1).captions)
    assert texts[0] == texts[1]


def test_text_models_are_published_without_pickles_and_tokens(tmp_path, capsys):
    out = tmp_path / "out"
    argv = ["--output_dir", str(out), "--max_train_rows", "16", "--num_train_epochs", "1", "--pretrain_epochs", "1"]
    argv += ["--answer_max_new_tokens", "4", "--disable_tqdm", "true", "--compare_scopes", "document"]
    argv += ["--compare_mle_weights", "0", "--save_strategy", "epoch"]
    argv += ["--push_to_hub", "--hub_token", WRITE, "--hub_model_id", "tester/smile-text"]
    with running_hub(tmp_path) as hub:
        smile_llama_lora.main(argv)
        repo = hub.repo("tester/smile-text")
        assert holders_of_tokens(hub, tmp_path) == []
    assert WRITE not in "".join(capsys.readouterr())
    assert repo.private
    assert len(repo.commits) == 2  # one push at the end: initial commit, the files
    assert "No results are in this card" in repo.files["README.md"].decode()
    # The base model is a local folder, so the adapter is merged for others.
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= set(repo.files)
    assert not [name for name in repo.files if name.endswith((".bin", ".pt", ".pth"))]
    assert not [name for name, data in repo.files.items() if str(tmp_path).encode() in data]
    assert not list((out / "model").glob("*.bin"))
    (tmp_path / "there").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "there" / name).write_bytes(repo.files[name])
    ids, base = torch.arange(5)[None], AutoModelForCausalLM.from_pretrained(out / "base")
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "there")(ids).logits
        assert_close(merged, PeftModel.from_pretrained(base, out / "model")(ids).logits)
    # After the run, the card has its table, which stands beside model/.
    assert main(["card", str(out / "model"), "--license", "mit"]) == 0
    card = (out / "model" / "README.md").read_text()
    assert "No results are in this card" not in card
    lines = [line for line in (out / "results.md").read_text().splitlines() if line.startswith("|")]
    assert len(lines) > 3
    assert set(lines) <= set(card.splitlines())
