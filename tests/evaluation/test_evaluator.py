"""Pools, bags, prefixes and second references of the papers, in the tables of recipes."""

import hashlib
import json
import random

import datasets
import pytest
import torch
from PIL import Image

from hf_captionrl.apps.experiments.arguments import DataArguments
from hf_captionrl.apps.experiments.data import load_data
from hf_captionrl.evaluation.evaluator import Evaluator, draw_references, pool_images
from hf_captionrl.evaluation.options import EvaluationArguments
from hf_captionrl.metrics import cider_d
from hf_captionrl.metrics.columns import COLUMNS
from hf_captionrl.metrics.table import results_markdown
from tests.tolerances import close


class Scorer:
    """Features from a hash of the text, and from the colour of the image."""

    logit_scale, max_text_tokens, signature = 100.0, 77, "hash|1"

    def text_features(self, captions):
        rows = [list(hashlib.sha256(c.encode()).digest()[:8]) for c in captions]
        return torch.nn.functional.normalize(torch.tensor(rows, dtype=torch.float32) - 128, dim=1)

    def image_features(self, images):
        return self.text_features([str(image.getpixel((0, 0))) for image in images])

    def count_truncated(self, captions):
        return sum(len(caption.split()) > self.max_text_tokens - 2 for caption in captions)


def split(numbers):
    text = datasets.Value("string")
    columns = {
        "image": [Image.new("RGB", (4, 4), (n, 2 * n, 255 - n)) for n in numbers],
        "image_id": [f"COCO_val2014_{n:012d}" for n in numbers],
        "captions": [[f"a cat {n}", f"a dog {n} runs"] for n in numbers],
    }
    features = datasets.Features({"image": datasets.Image(), "image_id": text, "captions": [text]})
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    """Function from arguments to (evaluator, row)."""
    monkeypatch.setattr("hf_captionrl.evaluation.evaluator.optional_scorer", lambda name: Scorer())
    splits = {"train": split(range(50, 60)), "validation": split(range(20, 26)), "test": split(range(8))}

    def make(captions=None, more=None, reward_scorer=None, **settings):
        models = {"held_out_scorer_name_or_path": "openai/clip-vit-base-patch32", "perplexity_name_or_path": "none"}
        others = {"splits": splits, "cache_dir": str(tmp_path / "cache"), "reward_scorer": reward_scorer}
        arguments = EvaluationArguments(**models, **settings)
        evaluator = Evaluator.from_arguments(split(range(8)), arguments, seed=0, **others)
        captions = captions or [f"caption {n}" for n in range(8)]
        more = more or [f"more {n}" for n in range(0 if evaluator.bag_images is None else len(evaluator.bag_images))]
        return evaluator, evaluator.row("x", captions, more_captions=more), captions, more

    return make


def colours(numbers):
    return Scorer().text_features([str((n, 2 * n, 255 - n)) for n in numbers])


def test_captions_are_ranked_in_the_pool(evaluated, tmp_path):
    names = [f"COCO_val2014_{n:012d}" for n in (*range(8), 21, 22, 55)]
    (tmp_path / "pool.json").write_text(json.dumps(names))
    evaluator, row, captions, _ = evaluated(pool=str(tmp_path / "pool.json"))
    text, images = Scorer().text_features(captions), colours([*range(8), 55, 21, 22])
    assert evaluator.pool_features.shape == (11, 8)
    found = [all(text[i] @ images[i] > text[i] @ images[j] for j in range(11) if j != i) for i in range(8)]
    assert row["pool_recall_at_1"] == close(sum(found) / 8)
    without = evaluated()[1]
    assert without["pool_recall_at_1"] >= row["pool_recall_at_1"]


def test_a_pool_that_the_data_lack_is_refused(tmp_path):
    (tmp_path / "pool.json").write_text('["COCO_val2014_000000000099"]')
    with pytest.raises(ValueError, match=r"\(1\), such as COCO image 99"):
        pool_images(tmp_path / "pool.json", split(range(8)), split(range(20, 26)))


def test_bags_may_hold_images_of_the_validation_split(evaluated, tmp_path):
    name = "COCO_val2014_{:012d}".format
    bags = {"3": [[name(0), name(21), name(5)], [name(25), name(1), name(2)]]}
    (tmp_path / "bags.json").write_text(json.dumps(bags))
    evaluator, row, captions, more = evaluated(bags=str(tmp_path / "bags.json"))
    assert evaluator.bag_images["image_id"] == [name(21), name(25)]
    text = dict(zip([0, 1, 2, 3, 4, 5, 6, 7, 21, 25], Scorer().text_features([*captions, *more]), strict=True))
    images = dict(zip(range(30), colours(range(30)), strict=True))
    pairs = [(i, bag) for bag in ([0, 21, 5], [25, 1, 2]) for i in bag]
    found = [all(text[i] @ images[i] > text[i] @ images[j] for j in bag if j != i) for i, bag in pairs]
    assert row["bag_3_recall_at_1"] == close(sum(found) / 6)
    assert row["bag_7_recall_at_1"] is None
    assert "no bags of 7" in row["bag_7_recall_at_1_reason"]
    assert evaluator.reference_row()[0]["bag_3_recall_at_1"] is not None


def test_clip_score_has_the_papers_prefix_outside_of_the_embedded_world(evaluated):
    _, row, captions, _ = evaluated()
    images, plain = colours(range(8)), evaluated(clip_prefix="")[1]["clip_score"]
    for prefix, found in (("A photo depicts ", row["clip_score"]), ("", plain)):
        text = Scorer().text_features([prefix + caption for caption in captions])
        expected = sum(max(float(text[i] @ images[i]), 0.0) for i in range(8)) / 8 * 2.5
        assert found == close(expected, dtype="float32", magnitude=1)
    assert plain != row["clip_score"]


class RewardScorer(Scorer):
    """Another scorer: it reads everything backwards."""

    signature = "hash backwards|1"

    def text_features(self, captions):
        return super().text_features([caption[::-1] for caption in captions])


def test_a_bag_with_two_images_of_one_concept_has_no_number(evaluated, tmp_path):
    ids = [f"COCO_val2014_{n:012d}" for n in range(8)]
    (tmp_path / "bags.json").write_text(json.dumps({"3": [ids[:3]]}))
    evaluator, row, captions, _ = evaluated(bags=str(tmp_path / "bags.json"))
    assert row["bag_3_recall_at_1"] is not None
    evaluator.concepts = [0, 0, 1, 2, 3, 4, 5, 6]
    by_concept = evaluator.row("x", captions)
    assert (by_concept["bag_3_recall_at_1"], row["pool_recall_at_1"]) != (row["bag_3_recall_at_1"], None)
    assert "one concept" in by_concept["bag_3_recall_at_1_reason"]
    assert by_concept["pool_recall_at_1"] >= row["pool_recall_at_1"]


def test_captions_that_a_scorer_truncates_are_noted(evaluated):
    short = Scorer()
    short.max_text_tokens = 6
    captions = ["a cat", "word " * 80, *["word " * 5] * 6]
    row = evaluated(captions, reward_scorer=short)[1]
    text = results_markdown([row, evaluated()[1] | {"name": "fits"}], columns=COLUMNS).split("truncates ")
    assert [part[:5] for part in text[1:]] == ["0.125", "0.875"]  # none of the second row
    assert text[1].endswith("x: the reward scorer ")


def test_columns_of_the_papers_by_both_scorers(evaluated):
    captions = ["a cat runs on a red mat"] * 8
    evaluator, row, *_ = evaluated(paper="ndlb", captions=captions, reward_scorer=RewardScorer())
    scores = ["ndlb_clip_score", "reward_ndlb_clip_score"]
    by_reward = ["reward_rd100_recall_at_1", "degenerate"]  # no bags
    assert [c.key for c in evaluator.columns] == [*by_reward, "bleu_4", scores[0], "vocabulary_size", scores[1]]
    assert row["vocabulary_size"] == 6  # all words occur at least five times
    for key, scorer in zip(scores, (Scorer(), RewardScorer()), strict=True):
        text = scorer.text_features(captions)
        images = scorer.text_features([str((n, 2 * n, 255 - n)) for n in range(8)])
        expected = 100 * sum(float(text[i] @ images[i]) for i in range(8)) / 8
        assert row[key] == close(expected, dtype="float32", magnitude=100)
    assert row[scores[0]] != row[scores[1]]
    evaluator, row, *_ = evaluated(paper="discritune", reward_scorer=RewardScorer())
    keys = [c.key for c in evaluator.columns]
    assert keys == [*by_reward, "blocks_recall_at_1", "bleu_4", "meteor", "spice", "reward_blocks_recall_at_1"]
    assert row["reward_blocks_recall_at_1_reason"] == "fewer than 100 images"
    assert all(key in row and (row[key] is not None or row[f"{key}_reason"]) for key in keys)


def test_second_references_have_a_separate_cider_d(tmp_path):
    texts = [[f"a red cat {n}", "a mat"] for n in range(12)]
    meta = [{"file_name": f"i{n}.png", "image_id": f"i{n}", "captions": own} for n, own in enumerate(texts)]
    for n, row in enumerate(meta):
        Image.new("RGB", (4, 4), (n * 9, 0, 0)).save(tmp_path / row["file_name"])
    boosted = [{"image_id": f"i{n}", "captions": [f"a large red cat i{n} sits"]} for n in range(12)]
    for name, rows in {"metadata": meta, "boosted": boosted}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"validation_share": 0.3, "test_share": 0.3, "test_references": str(tmp_path / "boosted.jsonl")}
    arguments = DataArguments(dataset_name="imagefolder", data_dir=str(tmp_path), **settings)
    test = load_data(arguments, output_dir=tmp_path / "out")["test"]
    evaluator = Evaluator(test, None, None, seed=0)
    captions = [f"a large red cat {i}" for i in test["image_id"]]
    row = evaluator.row("x", captions)
    assert [c.key for c in evaluator.columns] == ["degenerate", "more_cider_d"]
    more = [[f"a large red cat {i} sits"] for i in test["image_id"]]
    assert row["more_cider_d"] == close(cider_d(captions, more)["cider_d"])
    assert row["cider_d"] == close(cider_d(captions, [list(t) for t in test["captions"]])["cider_d"])


# --- References in another order ---------------------------------------------------------------------------------------


def test_drawn_references_equal_a_plain_loop():
    rows, seed, expected = [["a", "b", "c"], ["d", "d"], ["e"], [], ["f", "g"]], 3, []
    rng = random.Random(seed)
    for group in rows:
        place = rng.randrange(len(group)) if group else 0
        expected.append([*group[place : place + 1], *(c for i, c in enumerate(group) if i != place)])
    features = datasets.Features({"captions": datasets.List(datasets.Value("string"))})
    dataset = datasets.Dataset.from_dict({"captions": rows}, features=features)
    assert list(draw_references(dataset["captions"][:], seed)) == expected
