"""A recipe with `--push_to_hub`, from the command line to the files on the Hub."""

import json
import re

import pytest
import torch

from hf_captionrl.captioners import load_captioner
from recipes import smile_blip, smile_llama_lora
from tests.hub.conftest import holders_of_tokens, running_hub
from tests.hub.server import WRITE
from tests.tiny import tiny_images

SHORT = [
    *("--max_train_images", "8", "--max_eval_images", "8", "--max_test_images", "101", "--compare_mle_weights", "0.0"),
    *("--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "64", "--gallery_size", "2"),
    *("--generation_max_new_tokens", "8", "--generation_num_beams", "1", "--use_cpu", "--disable_tqdm", "true"),
    *("--perplexity_name_or_path", "none", "--max_steps", "1", "--eval_strategy", "no", "--save_strategy", "no"),
    *("--load_best_model_at_end", "false"),
]


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_intermediate_checkpoints_are_not_pushed(tmp_path, strategy):
    with pytest.raises(ValueError, match="hold the optimizer as a pickle"):
        smile_blip.main(["--output_dir", str(tmp_path / "out"), "--push_to_hub", "--hub_strategy", strategy, *SHORT])
    assert not (tmp_path / "out").exists()


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
    wanted = {"README.md", "results.json", "results.md", "gallery.html", "training_manifest.json"}
    wanted |= {
        "model.safetensors",
        "processor_config.json",
        "tokenizer.json",
        "captioner.json",
        "generation_config.json",
    }
    # The base model ships with the package as a local folder, so the adapter is merged for users of transformers alone.
    wanted |= {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}
    assert wanted <= set(files)
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pth"))]
    for name, data in files.items():
        assert str(tmp_path).encode() not in data, name
    manifest = json.loads(files["training_manifest.json"])
    assert manifest["seeds"]["seed"] == 5
    assert manifest["data"]["rows"] == {"train": 8, "validation": 8, "test": 101}
    assert all(manifest["data"]["fingerprints"].values())
    assert manifest["command"][manifest["command"].index("--hub_token") + 1] == "***"
    card = files["README.md"].decode()
    assert 'load_captioner("tester/smile-lora", revision="' in card
    # The finished model was pushed.
    for name in files:
        (tmp_path / "there" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "there" / name).write_bytes(files[name])
    images = tiny_images(2, size=72)
    texts = []
    for place in (out / "model", tmp_path / "there"):
        captioner = load_captioner(str(place), dtype=torch.float32)
        texts.append(captioner.generate(**captioner.encode_images(images), num_beams=1).captions)
    assert texts[0] == texts[1]
    assert re.search(r"hallucination", card)


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
    assert "No results: nothing was measured with this model" in repo.files["README.md"].decode()
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= set(repo.files)
    assert not [name for name in repo.files if name.endswith((".bin", ".pt", ".pth"))]
    assert not list((out / "model").glob("*.bin"))
