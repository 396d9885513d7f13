"""The shipped models reach the bars that the experiments stand on, on the test split of 1,000 scenes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_captionrl.captioners import load_captioner
from hf_captionrl.metrics import caption_perplexity, self_retrieval
from hf_captionrl.metrics.suites import smile_suite
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.scenes import BAG_SIZES, bags, check, load_scenes
from hf_captionrl.scenes.models import MODELS, model_path
from hf_captionrl.trainers.captioning import generate_captions

CHECKPOINTS = Path(model_path("scenes:blip-mle")).parent


@pytest.fixture(scope="module")
def test_split():
    return load_scenes(num_train=0, num_validation=0)["test"]


@pytest.mark.parametrize("name", ["clip-reward", "clip-judge"])
def test_true_captions_find_their_image(test_split, name):
    scorer = load_scorer(model_path(f"scenes:{name}"))
    images = torch.as_tensor(scorer.image_features(list(test_split["image"])))
    text = torch.as_tensor(scorer.text_features(list(test_split["full_caption"])))
    assert self_retrieval(text, images, num_distractors=99, num_bootstrap=0)["recall_at_1"] >= 0.97
    for size in BAG_SIZES:
        members = bags(list(test_split["bag_id"]), size)
        assert self_retrieval(text, images, bags=members, num_bootstrap=0)["recall_at_1"] >= 0.95, size
    # A bar that a blind scorer passes would be no bar.
    wrong = torch.roll(text, 500, 0)  # far from its near-duplicates
    assert self_retrieval(wrong, images, num_distractors=99, num_bootstrap=0)["recall_at_1"] < 0.2


def test_the_two_scorers_are_two(test_split):
    features = [
        torch.as_tensor(load_scorer(model_path(f"scenes:{name}")).text_features(["a pig", "two small trees"]))
        for name in ("clip-reward", "clip-judge")
    ]
    assert not torch.allclose(features[0], features[1], atol=1e-2)
    assert features[0].norm(dim=1) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("name", ["blip-mle", "clipcap-mle"])
def test_the_captioners_are_generic_and_right(test_split, name):
    captioner = load_captioner(model_path(f"scenes:{name}"), dtype=torch.float32)
    captions = generate_captions(captioner, list(test_split["image"]), batch_size=250, num_beams=3, max_new_tokens=30)
    row = smile_suite(captions, facts=list(test_split["facts"]), check=check)
    references = np.mean([len(c.split()) for group in test_split["captions"] for c in group])
    assert row["length"] <= references
    assert row["hallucination"] <= 0.05
    assert row["empty_captions"] == 0


def test_clipcap_sees_by_the_tower_of_the_scorer_that_rewards():
    captioner = load_captioner(model_path("scenes:clipcap-mle"), dtype=torch.float32)
    scorer = load_scorer(model_path("scenes:clip-reward"))
    images = load_scenes(num_train=0, num_validation=0, num_test=8)["test"]["image"]
    with torch.no_grad():
        mine = captioner.image_features(**captioner.encode_images(list(images)))[:, 0]
    theirs = torch.as_tensor(scorer.image_features(list(images)))
    torch.testing.assert_close(torch.nn.functional.normalize(mine, dim=-1), theirs, atol=1e-5, rtol=0)


def test_the_language_model_prefers_the_grammar(test_split):
    path = model_path("scenes:gpt2-perplexity")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    captions = list(test_split["full_caption"])[:100]
    shuffled = [" ".join(np.random.default_rng(i).permutation(c.split())) for i, c in enumerate(captions)]
    fluent = caption_perplexity(captions, model, tokenizer)["perplexity"]
    assert fluent < 10
    assert caption_perplexity(shuffled, model, tokenizer)["perplexity"] > 20 * fluent


def test_small_safe_and_documented():
    files = [file for file in CHECKPOINTS.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 18_000_000
    assert not [file for file in files if file.suffix in (".bin", ".pt", ".pth", ".pkl")]
    log = {entry["name"]: entry for entry in json.loads((CHECKPOINTS / "training_log.json").read_text())}
    assert log.keys() == MODELS.keys()
    for name, entry in log.items():
        assert entry["seed"] >= 0
        assert entry["command"].startswith("python scripts/train_scenes_models.py")
        assert entry["measured"]
        card = (CHECKPOINTS / name / "README.md").read_text()
        assert "license: apache-2.0" in card
        assert entry["command"] in card
    assert len({entry["seed"] for entry in log.values()}) == len(log)


def test_names():
    assert model_path("openai/clip-vit-base-patch32") == "openai/clip-vit-base-patch32"
    with pytest.raises(ValueError, match="scenes:clip-judge"):
        model_path("scenes:clip-jury")
