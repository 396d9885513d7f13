"""The shipped models reach the bars that the experiments stand on, on the test split of 1,000 scenes."""

import json
import shutil
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
from hf_captionrl.trainers.caption_generation import generate_captions
from tests.closeness import assert_close

CHECKPOINTS = Path(model_path("scenes:blip-mle")).parent


@pytest.fixture(scope="module")
def test_split():
    return load_scenes(num_train=0, num_validation=0)["test"]


@pytest.mark.parametrize("name", ["clip-reward", "siglip-held-out"])
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
        for name in ("clip-reward", "siglip-held-out")
    ]
    assert (features[0] - features[1]).abs().max() > 1e-2
    assert_close(features[0].norm(dim=1), 1.0)


@pytest.mark.parametrize("name", ["blip-mle", "clipcap-mle"])
def test_the_captioners_are_generic_and_right(test_split, name):
    captioner = load_captioner(model_path(f"scenes:{name}"), dtype=torch.float32)
    captions = generate_captions(captioner, list(test_split["image"]), batch_size=250, num_beams=3, max_new_tokens=30)
    row = smile_suite(captions, facts=list(test_split["facts"]), check=check)
    references = np.mean([len(c.split()) for group in test_split["captions"] for c in group])
    assert row["length"] <= references
    assert row["hallucination"] <= 0.05
    assert row["empty_captions"] == 0


def test_the_adapters_say_what_tells_images_apart(test_split):
    """On the bags of 5: SMILE and self-retrieval find more than twice as many as maximum likelihood, and stay right."""
    rows = test_split.select([i for bag in bags(list(test_split["bag_id"]), 5)[:12] for i in bag])
    held_out_scorer = load_scorer(model_path("scenes:siglip-held-out"))
    images = held_out_scorer.image_features(list(rows["image"]))
    members = [list(range(start, start + 5)) for start in range(0, len(rows), 5)]
    recall = {}
    for name in ("blip-mle", "blip-smile", "blip-sr"):
        captioner = load_captioner(model_path(f"scenes:{name}"), dtype=torch.float32)
        captions = generate_captions(captioner, list(rows["image"]), batch_size=60, num_beams=3, max_new_tokens=40)
        text = held_out_scorer.text_features(captions)
        row = smile_suite(
            captions,
            text_features=text,
            image_features=images,
            bags={5: members},
            facts=list(rows["facts"]),
            check=check,
        )
        recall[name] = row["bag_5_recall_at_1"]
        assert row["hallucination"] <= 0.06
    assert recall["blip-mle"] <= 0.45
    assert min(recall["blip-smile"], recall["blip-sr"]) >= 0.8


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
    with pytest.raises(ValueError, match="scenes:siglip-held-out"):
        model_path("scenes:clip-jury")
