"""The recipe that trains a scorer: what it writes is a scorer, it learns, and its loss is the contrastive one."""

import json

import pytest
import torch
import torch.nn.functional as F
from transformers import set_seed

from hf_captionrl.retrieval import load_scorer
from hf_captionrl.scenes import load_scenes
from recipes import scorer as recipe

SHORT = [
    *("--config", str(recipe.CONFIGS / "scenes.yaml")),
    *("--max_train_images", "400", "--max_eval_images", "60", "--max_test_images", "105", "--num_train_epochs", "2"),
    *("--use_cpu", "--disable_tqdm", "true", "--per_device_train_batch_size", "50", "--seed", "3"),
]


def test_the_folder_is_a_scorer_whose_recall_is_the_reported_one(run):
    results = json.loads((run / "results.json").read_text())
    assert (results["images"], results["captions"]) == (105, 525)
    scorer = load_scorer(str(run / "model"))
    rows = load_scenes(num_train=0, num_validation=0)["test"].select(range(105))
    images = scorer.image_features(list(rows["image"]))
    captions = [text for texts in rows["captions"] for text in texts]
    similarity = scorer.text_features(captions) @ images.T  # (525, 105)
    own = torch.arange(105).repeat_interleave(5)
    rank = (similarity >= similarity.gather(1, own[:, None])).sum(1)
    for k in (1, 5, 10):
        found = results["recall"][str(k)]
        assert found["low"] <= found["value"] <= found["high"]
        share = (rank <= k).double().mean().item()
        assert found["value"] == pytest.approx(share, abs=0.006)  # rounding swaps near ties
    assert results["recall"]["1"]["low"] > 1 / 105  # better than chance
    card = (run / "model" / "README.md").read_text()
    assert f"{results['recall']['1']['value']:.3f}" in card
    assert str(run) not in card
    assert not list((run / "model").glob("*.bin"))


def test_the_loss_is_the_symmetric_contrastive_one(run, tmp_path):
    parts, _, config = recipe.parse_args([*SHORT, "--output_dir", str(tmp_path)])
    set_seed(0)
    model, processor = parts.load()
    trainer = recipe.ScorerTrainer(parts, model, config, eval_dataset=[], processing_class=processor)
    inputs = {
        "features": torch.randn(6, model.visual_projection.in_features),
        **trainer._tokens(["a pig"] * 3 + ["a red car"] * 3),
    }
    model.eval()
    loss = trainer.compute_loss(model, dict(inputs)).item()
    images = F.normalize(model.visual_projection(inputs.pop("features")), dim=-1)
    texts = F.normalize(model.get_text_features(**inputs).pooler_output, dim=-1)
    scale = model.logit_scale.exp().item()
    expected = 0.0
    for i in range(6):
        of_image = [scale * float(images[i] @ texts[j]) for j in range(6)]
        of_text = [scale * float(images[j] @ texts[i]) for j in range(6)]
        for logits in (of_image, of_text):
            expected -= (logits[i] - torch.tensor(logits).logsumexp(0).item()) / 12
    assert loss == pytest.approx(expected, rel=1e-4)

    config.bf16, dtypes = True, []
    model.text_projection.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    inputs["features"] = torch.randn(6, model.visual_projection.in_features)
    assert trainer.compute_loss(model, inputs).dtype == torch.float32
    assert dtypes == [torch.bfloat16]


def test_the_tower_is_frozen_and_the_rest_learns(run):
    parts, *_ = recipe.parse_args(SHORT)
    before = parts.load()[0].state_dict()
    after = load_scorer(str(run / "model")).model.state_dict()
    for name, value in before.items():
        if name.startswith("vision_model."):
            assert torch.equal(value, after[name]), name
    assert not torch.equal(before["text_projection.weight"], after["text_projection.weight"])
    changed = [
        name for name in before if name.startswith("text_model.") and not torch.equal(before[name], after[name])
    ]
    assert len(changed) > 5
