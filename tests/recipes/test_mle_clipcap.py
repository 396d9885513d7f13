"""The recipe from the command line's arguments to every file it promises, and its configs against the paper."""

import json
from pathlib import Path

import torch
from PIL import Image
from transformers import set_seed

from hf_captionrl.captioners import load_captioner
from recipes import mle_clipcap as recipe

CONFIGS = Path(recipe.__file__).parent / "configs" / "mle_clipcap"
SHORT = [
    *"--max_steps 12 --warmup_steps 2 --per_device_train_batch_size 16".split(),
    *("--eval_steps", "6", "--per_device_eval_batch_size", "64", "--generation_max_new_tokens", "10"),
    *("--max_train_images", "32", "--max_eval_images", "8", "--max_test_images", "105"),
    *("--use_cpu", "--disable_tqdm", "true", "--logging_steps", "1"),
]


def test_everything_is_written(run):
    for name in ("results.md", "gallery.html", "curves.png", "model/README.md", "model/model.safetensors"):
        assert (run / name).stat().st_size > 100, name
    results = json.loads((run / "results.json").read_text())
    assert [row["name"] for row in results["rows"]] == ["MLE", "references"]
    assert results["config"]["ClipCapArguments"]["prefix_length"] == 5
    assert results["rows"][0]["length"] > 0
    card = (run / "model" / "README.md").read_text()
    assert "hf-captionrl-scenes-gpt2-perplexity" in card
    for text in (card, (run / "model" / "config.json").read_text()):
        assert str(run.parent) not in text
        assert "checkpoints" not in text  # the folder of the parts it was made of


def test_mapper_and_language_model_learn_and_the_tower_does_not(run):
    captioner = load_captioner(str(run / "model"), dtype=torch.float32)
    assert captioner.family == "clipcap"
    image = Image.new("RGB", (72, 72), "white")
    assert captioner.generate(**captioner.encode_images([image])).captions[0]
    after = dict(captioner.model.named_parameters())
    # It can be trained further.
    arguments, *_ = recipe.parse_args(["--model_name_or_path", str(run / "model"), "--dataset_name", "scenes"])
    assert all(torch.equal(value, after[name]) for name, value in arguments.load().model.named_parameters())
    arguments, *_, config = recipe.parse_args(["--config", str(CONFIGS / "scenes.yaml")])
    set_seed(config.seed)
    before = dict(arguments.load().model.named_parameters())
    arguments.attn_implementation = "eager"
    assert arguments.load().base_model.language_model.config._attn_implementation == "eager"
    tower = {name for name in before if name.startswith("vision_tower.")}
    assert tower
    assert {name for name in before if torch.equal(before[name], after[name])} == tower
    start, end = (p["mapper.model.2.weight"].flatten() for p in (before, after))
    assert torch.cosine_similarity(start, end, dim=0) > 0.8  # the seed gave both runs the same mapper to begin with
