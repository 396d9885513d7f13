"""The shipped models reach the bars that the experiments stand on, on the test split of 1,000 scenes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.pipeline import generate_captions
from hf_captionrl.metrics import caption_perplexity, self_retrieval
from hf_captionrl.metrics.suites import suite
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.scenes import bags, check, load_scenes
from hf_captionrl.utils.model_files import model_path
from tests.tolerances import assert_close

CHECKPOINTS = Path(model_path("scenes:blip-mle")).parent


@pytest.fixture(scope="module")
def test_split():
    return load_scenes(num_train=0, num_validation=0)["test"]


def test_held_out_scorer_finds_images_by_full_captions_and_half_of_them_by_references(test_split):
    scorer = load_scorer(model_path("scenes:siglip-held-out"))
    images = torch.as_tensor(scorer.image_features(list(test_split["image"])))
    full = torch.as_tensor(scorer.text_features(list(test_split["full_caption"])))
    short = torch.as_tensor(scorer.text_features([texts[2] for texts in test_split["captions"]]))
    assert self_retrieval(full, images, num_distractors=99, num_bootstrap=0)["recall_at_1"] >= 0.95
    members = bags(list(test_split["bag_id"]), 7)
    assert self_retrieval(full, images, bags=members, num_bootstrap=0)["recall_at_1"] >= 0.85
    assert 0.5 <= self_retrieval(short, images, num_distractors=99, num_bootstrap=0)["recall_at_1"] <= 0.75
    # A bar that a blind scorer passes would be no bar.
    wrong = torch.roll(full, 500, 0)  # far from its look-alikes
    assert self_retrieval(wrong, images, num_distractors=99, num_bootstrap=0)["recall_at_1"] < 0.2


@pytest.mark.parametrize("name", ["blip-mle", "clipcap-mle"])
def test_captioners_are_generic_and_seldom_wrong(test_split, name):
    captioner = load_captioner(model_path(f"scenes:{name}"), dtype=torch.float32)
    captions = generate_captions(captioner, list(test_split["image"]), batch_size=250, num_beams=1, max_new_tokens=30)
    row = suite("smile", captions, facts=list(test_split["facts"]), check=check)
    references = np.mean([len(c.split()) for group in test_split["captions"] for c in group])
    assert 0.65 <= row["length"] / references <= 1.35
    assert row["fact_recall"] <= 0.5
    assert row["empty_captions"] == 0
    if name == "blip-mle":
        assert 0.05 <= row["hallucination"] <= 0.15


def test_an_adapter_is_found_beside_its_base_model_wherever_they_lie(tmp_path):
    """Nothing of the machine that it was trained on is in it."""
    for name in ("blip-mle", "blip-sr"):
        shutil.copytree(CHECKPOINTS / name, tmp_path / name)
    config = json.loads((tmp_path / "blip-sr" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "../blip-mle"
    image = load_scenes(num_train=0, num_validation=0, num_test=1)["test"][0]["image"]
    said = [
        generate_captions(load_captioner(folder, dtype=torch.float32), [image], num_beams=1, max_new_tokens=20)
        for folder in (str(tmp_path / "blip-sr"), model_path("scenes:blip-sr"), model_path("scenes:blip-mle"))
    ]
    assert said[0] == said[1] != said[2]
    shutil.rmtree(tmp_path / "blip-mle")
    with pytest.raises((OSError, ValueError), match="blip-mle"):
        load_captioner(str(tmp_path / "blip-sr"))


def test_clipcap_sees_by_the_tower_of_the_scorer_that_rewards():
    captioner = load_captioner(model_path("scenes:clipcap-mle"), dtype=torch.float32)
    scorer = load_scorer(model_path("scenes:clip-reward"))
    images = load_scenes(num_train=0, num_validation=0, num_test=8)["test"]["image"]
    with torch.no_grad():
        mine = captioner.image_features(**captioner.encode_images(list(images)))[:, 0]
    theirs = torch.as_tensor(scorer.image_features(list(images)))
    assert_close(torch.nn.functional.normalize(mine, dim=-1), theirs)


def test_the_language_model_prefers_the_grammar(test_split):
    path = model_path("scenes:gpt2-perplexity")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    captions = list(test_split["full_caption"])[:100]
    shuffled = [" ".join(np.random.default_rng(i).permutation(c.split())) for i, c in enumerate(captions)]
    fluent = caption_perplexity(captions, model, tokenizer)["perplexity"]
    assert fluent < 10
    assert caption_perplexity(shuffled, model, tokenizer)["perplexity"] > 20 * fluent


def test_small_and_safe():
    files = [file for file in CHECKPOINTS.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 15_000_000
    assert not [file for file in files if file.suffix in (".bin", ".pt", ".pth", ".pkl")]
