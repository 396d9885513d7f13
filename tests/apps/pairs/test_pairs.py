"""Preference pairs: the choice against an enumeration, files against scores, TRL's data path, refusals."""

import itertools
import json
import math
import random

import datasets
import pytest
import torch
from trl import DPOConfig, DPOTrainer

from hf_captionrl.apps.pairs.pairs import choose_pairs
from hf_captionrl.cli import main
from hf_captionrl.data import open_image
from hf_captionrl.evaluation.reward_scores import reward_scores
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.rewards import SelfRetrieval, resolve_rewards
from hf_captionrl.scenes import load_scenes
from tests.rewards.conftest import TableScorer
from tests.tiny.chat import tiny_chat
from tests.tolerances import assert_close, close


@pytest.mark.parametrize("margin", [0.25, 0.5, 2.0])
def test_pairs_equal_an_enumeration(margin):
    for seed in range(30):
        draw = random.Random(seed)
        scores = {f"caption {n}": draw.choice([0.0, 0.25, 0.5, 1.0]) for n in range(draw.randint(2, 6))}
        wide = [(a, b) for a, b in itertools.permutations(scores, 2) if scores[a] - scores[b] >= margin]
        gaps = sorted((scores[a] - scores[b] for a, b in wide), reverse=True)
        for most in (1, 3, 99):
            chosen = choose_pairs(scores, margin, most)
            assert set(chosen) <= set(wide)
            assert [scores[a] - scores[b] for a, b in chosen] == gaps[:most]


@pytest.fixture(scope="module")
def scenes():
    return load_scenes(num_train=0, num_validation=0)["test"].select(range(6))


@pytest.fixture
def sampled(scenes, tmp_path):
    """Two files: two references of five images, one of them twice; the full caption of four."""
    lines = [{"image_id": row["image_id"], "captions": row["captions"][:2]} for row in scenes]
    lines[3]["captions"] = ["a pig", "a pig"]
    full = [{"image_id": row["image_id"], "caption": row["full_caption"]} for row in scenes.select(range(3))]
    for name, rows in (("a", lines[:5]), ("b", full)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {row["image_id"]: row["captions"] for row in lines[:5]}, {row["image_id"]: row["caption"] for row in full}


def pairs(folder, *arguments):
    files = ["--captions", folder / "a.jsonl", folder / "b.jsonl", "--output", folder / "pairs.parquet"]
    given = [*files, "--dataset", "scenes", "--max_images", 6, "--cache_dir", folder / "cache", *arguments]
    return main(["pairs", *map(str, given)])


def self_retrieval_by_a_loop(scenes, several):
    """Log softmax of the similarity of each caption to its image among all images with several captions."""
    scorer = load_scorer("scenes:clip-reward")
    rows = [row for row in scenes if row["image_id"] in several]
    images = scorer.image_features([open_image(row["image"]) for row in rows]).double()
    scores = {}
    for position, row in enumerate(rows):
        for text in several[row["image_id"]]:
            similarities = [
                scorer.logit_scale * float(scorer.text_features([text])[0].double() @ image) for image in images
            ]
            scores[row["image_id"], text] = similarities[position] - math.log(sum(map(math.exp, similarities)))
    return scores


def test_pairs_by_a_reward(scenes, sampled, tmp_path, capsys):
    assert pairs(tmp_path, "--reward", "self_retrieval", "--margin", 0.01, "--max_pairs_per_image", 2, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    several = {i: [*dict.fromkeys([*texts, *filter(None, [sampled[1].get(i)])])] for i, texts in sampled[0].items()}
    several = {image_id: texts for image_id, texts in several.items() if len(texts) > 1}
    assert (said["images"], said["images_with_several"]) == (5, len(several))
    scores = self_retrieval_by_a_loop(scenes, several)
    written = datasets.load_dataset("parquet", data_files=str(tmp_path / "pairs.parquet"), split="train")
    assert len(written) == said["written"] > 4
    rows = {row["image_id"]: row for row in scenes}
    for row in written:
        texts = [row[name][0]["content"] for name in ("chosen", "rejected")]
        values = [scores[row["image_id"], text] for text in texts]
        assert_close(
            torch.tensor([row["score_chosen"], row["score_rejected"]]), torch.tensor(values), dtype=torch.float32
        )
        assert values[0] - values[1] >= 0.01
        assert row["prompt"] == [{"role": "user", "content": "Describe the image in one sentence."}]
        assert open_image(row["images"][0]).tobytes() == open_image(rows[row["image_id"]]["image"]).tobytes()


def test_scores_of_captions_in_files_use_the_column_of_concepts():
    images = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [0.99, 0.1], [0.98, 0.2]]), dim=1)
    scorer = TableScorer({"a": images[0]}, images)
    arguments = (["x", "y", "z"], [["a"]] * 3, lambda scorer: scorer.images)
    values = []
    for concepts in ([1, 2, 3], [1, 1, 2]):
        score = reward_scores(resolve_rewards(SelfRetrieval(scorer)), *arguments, {"concept": concepts}, scorer)
        values += score(["a"], [0], range(3))
    logits = (100 * images @ images[0]).double()
    by_image = logits.log_softmax(0)[0]
    by_concept = torch.stack([logits[[row, 2]].log_softmax(0)[0] for row in (0, 1)]).mean()
    assert values == close([float(by_image), float(by_concept)], dtype="float32")


def test_pairs_by_cider(scenes, sampled, tmp_path, capsys):
    assert pairs(tmp_path, "--reward", "cider", "length", "--margin", 1e-6, "--max_pairs_per_image", 9) == 0
    assert "pairs of" in capsys.readouterr().out
    written = datasets.load_dataset("parquet", data_files=str(tmp_path / "pairs.parquet"), split="train")
    assert len(written) > 5
    assert all(row["score_chosen"] - row["score_rejected"] >= 1e-6 for row in written)


def test_trl_trains_on_the_file(sampled, tmp_path):
    assert pairs(tmp_path, "--reward", "cider", "--margin", 1e-6) == 0
    data = datasets.load_dataset("parquet", data_files=str(tmp_path / "pairs.parquet"), split="train")
    model, processor = tiny_chat("llava")
    settings = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    args = DPOConfig(
        str(tmp_path / "dpo"), per_device_train_batch_size=2, max_steps=2, max_length=None, logging_steps=1, **settings
    )
    trainer = DPOTrainer(
        model, ref_model=tiny_chat("llava")[0], args=args, train_dataset=data, processing_class=processor
    )
    batch = next(iter(trainer.get_train_dataloader()))
    texts = processor.batch_decode(batch["input_ids"])
    chosen = [row["chosen"][0]["content"] for row in data]
    assert all(any(caption in text for caption in chosen) for text in texts[:2])  # the chosen ones come first
    assert batch["pixel_values"].shape[0] == 4
    trainer.train()
    assert trainer.state.log_history[0]["rewards/accuracies"] >= 0


@pytest.mark.parametrize("name", ["a.jsonl", "rows.parquet", "pairs.parquet"])
def test_only_a_file_of_pairs_is_replaced(sampled, tmp_path, capsys, name):
    """Not the captions themselves, and not the images."""
    datasets.Dataset.from_dict({"image": ["a.png"], "captions": [["a pig"]]}).to_parquet(tmp_path / "rows.parquet")
    options = ["--reward", "self_retrieval", "--margin", 1e-6, "--output", tmp_path / name]
    is_ours = name == "pairs.parquet"
    if is_ours:
        assert pairs(tmp_path, *options) == 0
    before = (tmp_path / name).read_bytes()
    assert pairs(tmp_path, *options, "--prompt", "Other words") == (0 if is_ours else 2)
    assert ((tmp_path / name).read_bytes() != before) == is_ours
    assert ("--output" in capsys.readouterr().err) == (not is_ours)
