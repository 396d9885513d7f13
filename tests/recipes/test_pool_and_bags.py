"""The options --pool and --bags of recipes, on a data set in COCO's layout."""

from __future__ import annotations

import json

import pytest

from hf_captionrl.scenes import load_scenes
from recipes import smile_blip as recipe
from tests.recipes.short_runs import GENERATION

TEST, OTHERS = range(100, 112), range(200, 224)


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    """Folder with dataset_coco.json: 12 test images, and each of them twice more in the validation split."""
    folder = tmp_path_factory.mktemp("coco")
    (folder / "images/val2014").mkdir(parents=True)
    scenes = load_scenes(num_train=0, num_validation=0, num_test=12)["test"]
    images = []
    for row, number in enumerate([*TEST, *OTHERS, 300]):
        scene, name = scenes[row % 12], f"COCO_val2014_{number:012d}.jpg"
        scene["image"].save(folder / "images/val2014" / name, quality=95)
        images.append(
            {
                "filename": name,
                "filepath": "val2014",
                "cocoid": number,
                "imgid": row,
                "split": "test" if number in TEST else "val" if number in OTHERS else "train",
                "sentences": [{"raw": text} for text in scene["captions"]],
            }
        )
    (folder / "dataset_coco.json").write_text(json.dumps({"dataset": "coco", "images": images}))
    return folder


def start(coco, out, *options):
    path = recipe.main(
        [
            *("--dataset_name", str(coco / "dataset_coco.json"), "--image_root", str(coco / "images")),
            *("--model_name_or_path", "scenes:blip-mle", "--held_out_scorer_name_or_path", "scenes:siglip-held-out"),
            *("--scorer_name_or_path", "scenes:clip-reward"),
            *("--perplexity_name_or_path", "none", "--num_train_epochs", "0", "--output_dir", str(out)),
            *("--feature_cache_dir", str(coco / "cache"), "--per_device_eval_batch_size", "12"),
            *GENERATION,
            *options,
        ]
    )
    return json.loads(path.read_text())["rows"][0]


def test_captions_are_ranked_in_the_pool_and_in_the_bags_of_the_files(coco, tmp_path):
    alone = start(coco, tmp_path / "alone")
    assert not any(key.startswith("bag_") for key in alone)
    pool, bags = tmp_path / "pool.json", tmp_path / "bags.json"
    pool.write_text(json.dumps([f"COCO_val2014_{number:012d}.jpg" for number in [*TEST, *OTHERS]]))
    names = [str(number) for number in TEST]
    bags.write_text(json.dumps({"3": [names[at : at + 3] for at in range(0, 12, 3)]}))
    found = start(coco, tmp_path / "both", "--pool", str(pool), "--bags", str(bags))
    assert found["length"] == alone["length"]
    # Two copies of every image: of the five nearest images, at most two are different from each other.
    assert 0 < found["pool_recall_at_5"] < alone["pool_recall_at_5"]
    assert alone["pool_recall_at_1"] <= found["bag_3_recall_at_1"] <= 1


def test_files_that_do_not_fit_the_data_are_refused_before_training(coco, tmp_path):
    (tmp_path / "pool.json").write_text(json.dumps(["COCO_val2014_000000000999.jpg"]))
    with pytest.raises((SystemExit, ValueError), match="not in the data set, such as COCO image 999"):
        start(coco, tmp_path / "out", "--pool", str(tmp_path / "pool.json"))
    (tmp_path / "bags.json").write_text(json.dumps({"2": [["100", "999"]]}))
    with pytest.raises((SystemExit, ValueError), match="holds image '999', which is not used here"):
        start(coco, tmp_path / "out", "--bags", str(tmp_path / "bags.json"))
    assert not (tmp_path / "out" / "model").exists()
