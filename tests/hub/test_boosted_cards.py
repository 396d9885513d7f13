"""Boosted captions get a card when they are created; it can be rendered again and pushed without editing."""

import json
import re

import datasets
import pytest

from hf_captionrl.cli import main
from hf_captionrl.hub import check_card, folder_contents
from tests.apps.boosting.doubles import scenes
from tests.apps.boosting.test_command import photographs
from tests.hub.server import WRITE


@pytest.fixture(scope="module")
def boosted(tmp_path_factory):
    """Boosted captions of the embedded world, with the images in the file."""
    folder = tmp_path_factory.mktemp("hub") / "scenes-boosted"
    assert main(["boost", "--max_images", "6", "--output", str(folder), "--license", "cc-by-4.0"]) == 0
    return folder


def test_card_describes_the_boosted_captions(boosted):
    card = (boosted / "README.md").read_text()
    metadata = check_card(card)
    assert metadata["license"] == "cc-by-4.0"
    assert metadata["configs"] == [{"config_name": "default", "data_files": "captions.parquet"}]
    assert "| test | 6 |" in card
    assert "The images are in the column `image`" in card
    assert re.search(r"\d of 6 HolisticCaps contradict their BlendCap", card)
    rows = datasets.load_dataset(str(boosted), split="train")
    for name in rows.column_names:
        assert f"| {name} |" in card.replace("\\_", "_")
    manifest = json.loads((boosted / "boosting.json").read_text())
    assert (manifest["rows"], manifest["card"]["sizes"]) == (6, {"test": 6})


def test_card_is_rendered_again_from_the_manifest(boosted, capsys):
    before = (boosted / "README.md").read_bytes()
    (boosted / "README.md").unlink()
    assert main(["card", str(boosted)]) == 0
    assert (boosted / "README.md").read_bytes() == before
    assert main(["card", str(boosted), "--dataset_id", "me/other"]) == 0
    assert '"me/other"' in (boosted / "README.md").read_text()
    for bad, message in (
        (["--license", "TODO"], "placeholder"),
        (["--dataset_id", "a b"], "not a name that the Hub accepts"),
        (["--model_id", "me/x"], "not a fact of a data set's card"),
    ):
        assert main(["card", str(boosted), *bad]) == 2
        assert message in capsys.readouterr().err
    assert '"me/other"' in (boosted / "README.md").read_text()
    assert main(["card", str(boosted), "--dataset_id", "scenes-boosted"]) == 0
    assert (boosted / "README.md").read_bytes() == before


def test_damaged_manifest_raises(boosted, tmp_path, capsys):
    (tmp_path / "boosting.json").write_text('{"format": 1}')
    assert main(["card", str(tmp_path)]) == 2
    assert "boosting.json is not a manifest" in capsys.readouterr().err


def test_push_publishes_captions_and_card_but_no_journal(boosted, hub, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", WRITE)
    assert main(["push", str(boosted), "--repo_id", "boosted"]) == 0
    files = hub.repo("tester/boosted", "dataset").files
    assert {"README.md", "captions.parquet", "boosting.json", "statistics.json"} <= set(files)
    assert not [name for name in files if name.startswith("journal") or name == "quarantine.jsonl"]
    assert "{{" not in files["README.md"].decode()


def test_local_paths_of_images_are_not_published(tmp_path, capsys):
    words = ["--text", "captionless", "--vision", "captionless"]
    command = [*photographs(tmp_path / "photos"), "--output", str(tmp_path / "out")]
    assert main([*command, *words]) == 2  # no such backend
    capsys.readouterr()
    from tests.apps.boosting.doubles import endpoint_answer
    from tests.apps.boosting.server import ChatServer

    with ChatServer(endpoint_answer(scenes())) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "*")
        command += ["--text", "openai:writer", "--vision", "openai:describer", "--text_url", server.url]
        assert main(command) == 0
    with pytest.raises(ValueError, match=r"by local paths, such as '\w+.png'") as error:
        folder_contents(tmp_path / "out", "dataset")
    assert str(tmp_path) not in str(error.value)
    assert main([*command, "--no_images"]) == 0
    assert "captions.parquet" in folder_contents(tmp_path / "out", "dataset").published
    card = (tmp_path / "out/README.md").read_text()
    assert "The images are not part of this data set" in card
    assert "| image |" not in card
    assert main([*command, "--embed_images"]) == 0
    assert "captions.parquet" in folder_contents(tmp_path / "out", "dataset").published
    assert str(tmp_path).encode() not in (tmp_path / "out/captions.parquet").read_bytes()
    assert main([*command, "--embed_images", "--no_images"]) == 2
