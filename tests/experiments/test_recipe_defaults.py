"""Defaults that recipes share."""

import dataclasses
import json

import pytest

from hf_captionrl.apps.experiments.arguments import DataArguments, GuardedRecipe
from hf_captionrl.apps.experiments.data import load_data
from hf_captionrl.apps.experiments.self_retrieval import SelfRetrievalRecipeConfig
from hf_captionrl.apps.experiments.smile import SmileRecipeConfig
from hf_captionrl.data import SPLITS
from hf_captionrl.trainers import SelfRetrievalConfig, SmileConfig
from tests.tiny import tiny_images


def defaults(config: type) -> dict[str, object]:
    return {field.name: field.default for field in dataclasses.fields(config)}


@pytest.mark.parametrize(
    ("recipe", "trainer", "own"),
    [
        (
            SmileRecipeConfig,
            SmileConfig,
            {
                "eval_strategy": "epoch",
                "save_strategy": "epoch",
                "save_total_limit": 1,
                "load_best_model_at_end": True,
            },
        ),
        (
            SelfRetrievalRecipeConfig,
            SelfRetrievalConfig,
            {
                "eval_strategy": "epoch",
                "save_strategy": "epoch",
                "save_total_limit": 2,
                "load_best_model_at_end": None,
                "guard": "rollback",
                "output_dir": "outputs/self_retrieval",
            },
        ),
    ],
)
def test_a_recipe_changes_only_these_defaults(recipe, trainer, own):
    before, after = defaults(trainer), defaults(recipe)
    assert {name: value for name, value in after.items() if value != before[name]} == {**own, "save_on_signal": True}


def test_the_guard_has_one_help_text():
    fields = SelfRetrievalConfig.__dataclass_fields__, GuardedRecipe.__dataclass_fields__
    assert fields[0]["guard"].metadata == fields[1]["guard"].metadata
    assert [each["guard"].default for each in fields] == ["warn", "rollback"]


def test_the_table_can_show_the_validation_split(tmp_path):
    limits = {"max_train_images": 4, "max_eval_images": 2, "max_test_images": 3}
    plain = load_data(DataArguments(**limits), output_dir=tmp_path)
    swapped = load_data(DataArguments(table_split="validation", **limits), output_dir=tmp_path)
    assert [len(swapped[name]) for name in ("train", "validation", "test")] == [4, 2, 3]  # limits are of the roles
    assert swapped["validation"]["image_id"][:] == plain["test"]["image_id"][:2]
    assert swapped["test"]["image_id"][:2] == plain["validation"]["image_id"][:]
    with pytest.raises(ValueError, match=r"table_split is 'val'\. Use 'test' or 'validation'"):
        load_data(DataArguments(table_split="val"), output_dir=tmp_path)


def test_an_evaluation_can_use_data_without_a_training_split(tmp_path):
    """nocaps has a split per domain; the captions are those of the file."""
    domains = ["in-domain", "near-domain", "out-domain", "near-domain"]
    images = [{"id": n, "file_name": f"{n}.png", "domain": domain} for n, domain in enumerate(domains)]
    annotations = [{"image_id": n, "caption": f"caption {n}"} for n in range(4)]
    (tmp_path / "images").mkdir()
    for n, image in enumerate(tiny_images(4)):
        image.save(tmp_path / "images" / f"{n}.png")
    (tmp_path / "nocaps_val_4500_captions.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    source = {"dataset_name": "nocaps", "data_dir": str(tmp_path)}
    near = DataArguments(table_split="near_domain", **source)
    splits = load_data(near, output_dir=tmp_path, is_training=False)
    assert {name: rows["image_id"][:] for name, rows in splits.items()} == {name: ["1", "3"] for name in SPLITS}
    assert splits["test"]["captions"][:] == [["caption 1"], ["caption 3"]]
    with pytest.raises(ValueError, match=r"has no images for \['train', 'validation', 'test'\]"):
        load_data(near, output_dir=tmp_path)
    with pytest.raises(
        ValueError, match=r"table_split is 'near-domain', but 'nocaps' has \['in_domain', 'near_domain'"
    ):
        load_data(DataArguments(table_split="near-domain", **source), output_dir=tmp_path, is_training=False)
