"""The world as a data set for the Hub."""

import json
from functools import partial
from pathlib import Path

import datasets
import pytest
from huggingface_hub import DatasetCard

from hf_captionrl.scenes import load_scenes
from scripts import export_scenes

DIGESTS = Path(__file__).parents[2] / "docs" / "results" / "scenes_digests.json"


@pytest.fixture
def exported(tmp_path, monkeypatch):
    small = partial(load_scenes, num_train=6, num_validation=3, num_test=7)
    monkeypatch.setattr(export_scenes, "load_scenes", small)
    assert export_scenes.main(["--dataset_id", "me/scenes", "--output_dir", str(tmp_path / "scenes")]) == 0
    return tmp_path / "scenes"


def test_exported_data_set_is_read_by_load_dataset(exported, tmp_path):
    for name, arguments in export_scenes.CONFIGURATIONS.items():
        rows = datasets.load_dataset(str(exported), name, cache_dir=str(tmp_path / "cache"))
        made = export_scenes.load_scenes(**arguments)
        assert {split: len(rows[split]) for split in rows} == {"train": 6, "validation": 3, "test": 7}
        for split in made:
            assert rows[split].features == made[split].features
            assert export_scenes.digest_split(rows[split]) == export_scenes.digest_split(made[split])


def test_card_lists_configurations_digests_and_columns(exported):
    card = DatasetCard.load(exported / "README.md")
    assert [config["config_name"] for config in card.data.configs] == ["captions", "alt_text", "shapes"]
    written = json.loads((exported / "digests.json").read_text())
    assert len({entry["texts"] for entry in written["splits"]}) == 9
    assert all(entry["texts"][:16] in card.text for entry in written["splits"])
    assert list(export_scenes.COLUMNS) == export_scenes.load_scenes()["test"].column_names
    assert all(what in card.text for what in export_scenes.COLUMNS.values())


def test_digest_changes_with_a_word_and_with_a_pixel():
    rows = load_scenes(num_train=0, num_validation=0, num_test=7)["test"]
    before = export_scenes.digest_split(rows)
    said = export_scenes.digest_split(rows.map(lambda row: {"full_caption": row["full_caption"] + " indeed"}))
    assert said["texts"] != before["texts"]
    assert said["pixels"] == before["pixels"]
    drawn = rows.map(lambda row: {"image": row["image"].point(lambda value: value ^ 1)})
    assert export_scenes.digest_split(drawn)["pixels"] != before["pixels"]


def test_committed_digests_are_those_of_the_test_split():
    """The world is frozen: whoever changes its rules gives it another version and makes the results again."""
    committed = json.loads(DIGESTS.read_text())
    entry = next(e for e in committed["splits"] if (e["configuration"], e["split"]) == ("captions", "test"))
    assert committed["world_version"] == export_scenes.WORLD_VERSION
    assert export_scenes.digest_split(load_scenes()["test"])["texts"] == entry["texts"]


@pytest.mark.parametrize("arguments", [[], ["--dataset_id", "me/scenes"], ["--output_dir", "x"]])
def test_incomplete_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        export_scenes.main(arguments)
    assert error.value.code == 2
    assert "Give" in capsys.readouterr().err
