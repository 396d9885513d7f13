"""Evaluation of a model sharded by FSDP2: all processes run the same number of forwards."""

import json
from pathlib import Path

import pytest
import torch

from hf_captionrl.captioners.captioner import is_sharded
from hf_captionrl.captioners.pipeline import generate_captions
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import SmileConfig, SmileTrainer
from tests.captioners.test_distributed import shard
from tests.processes import run_in_processes
from tests.tiny import tiny_captioner

FAMILIES = ("blip", "vit-gpt2")
BEAMS = (1, 3)


def images(number):
    return load_scenes(num_train=number, num_validation=1, num_test=0)["train"]


def make(folder, family):
    args = SmileConfig(
        str(folder),
        use_cpu=True,
        report_to="none",
        per_device_eval_batch_size=1,
        generation_max_new_tokens=6,
        freeze_vision_tower=True,
        cache_image_features=True,
        feature_cache_dir=str(folder / "cache"),
    )
    return SmileTrainer(tiny_captioner(family), args)


def _evaluate(folder: str) -> None:
    found = {}
    for family in FAMILIES:
        trainer = make(Path(folder) / family, family)
        shard(trainer.captioner, head_alone=False)
        assert is_sharded(trainer.captioner.model)
        for number in (3, 1):  # two images and one; one and none
            for beams in BEAMS:
                found[f"{family} {number} {beams}"] = trainer.generate_captions(images(number), num_beams=beams)
        metrics = trainer.evaluate(images(3))
        found[f"{family} length"] = metrics["eval_length"]
    (Path(folder) / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    run_in_processes(2, _evaluate, str(folder), folder=folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_unequal_shares_give_the_captions_of_one_process(found, family):
    assert found[0] == found[1]
    captioner = tiny_captioner(family)
    for number in (3, 1):
        for beams in BEAMS:
            alone = generate_captions(
                captioner, [row["image"] for row in images(number)], batch_size=1, num_beams=beams, max_new_tokens=6
            )
            assert found[0][f"{family} {number} {beams}"] == alone
    assert found[0][f"{family} length"] > 0
