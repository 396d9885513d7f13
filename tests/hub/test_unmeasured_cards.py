"""Models saved by a trainer without a recipe can be used, get a card and are pushed; galleries are not uploaded."""

import json
from types import SimpleNamespace

import pytest

from hf_captionrl import SmileConfig, SmileTrainer
from hf_captionrl.cli import main
from hf_captionrl.hub import check_card, folder_contents, push_folder, write_manifest
from hf_captionrl.scenes import load_scenes
from tests.hub.folders import publishable
from tests.hub.server import READ, WRITE
from tests.tiny import tiny_captioner


@pytest.fixture
def saved(tmp_path):
    """Output of the Python example in the README."""
    rows = load_scenes(num_train=4, num_validation=0, num_test=0)["train"]
    settings = {
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
    }
    trainer = SmileTrainer(
        tiny_captioner("blip"), SmileConfig(str(tmp_path / "smile run"), **settings), train_dataset=rows
    )
    trainer.train()
    trainer.save_model()
    return tmp_path / "smile run"


def test_model_saved_by_a_trainer_can_be_used_and_pushed(saved, hub, monkeypatch, capfd, tmp_path):
    folder = str(saved)
    output = str(tmp_path / "captions.jsonl")
    assert (
        main(["caption", folder, "--output", output, "--max_images", "2", "--max_new_tokens", "4", "--num_beams", "1"])
        == 0
    )
    monkeypatch.setenv("HF_TOKEN", WRITE)
    # Without a card, the error message of push contains the command that writes it, and that command works.
    assert main(["push", folder, "--repo_id", "smile"]) == 2
    assert f"captionrl card {folder}" in capfd.readouterr().err
    assert main(["card", folder, "--base_model", "someone/blip", "--dataset", "photos"]) == 0
    said = capfd.readouterr().out
    assert "without results" in said
    assert "--license" in said
    card = (saved / "README.md").read_text()
    assert check_card(card)["license"] == "other"
    assert "nothing was measured" in card
    assert "finetuned from someone/blip on photos" in card
    assert main(["card", folder, "--check"]) == 0
    assert main(["push", folder, "--repo_id", "smile"]) == 0
    repo = hub.repo("tester/smile")
    assert repo.private
    assert {"README.md", "model.safetensors", "training_manifest.json", "captioner.json"} <= set(repo.files)
    assert str(tmp_path).encode() not in b"".join(repo.files.values())


def test_texts_that_must_not_be_published_raise(tmp_path, capfd):
    tiny_captioner("blip").save_pretrained(tmp_path / "model")
    for given, message in (
        (["--dataset", "/" + "home/me/photos"], "local path"),
        (["--base_model", "TODO"], "a placeholder"),
        (["--dataset_description", "[x](javascript:alert)"], None),
    ):
        code = main(["card", str(tmp_path / "model"), *given])
        said = capfd.readouterr().err
        assert code == (2 if message else 0), said
        assert message is None or message in said
    assert "[x](" not in (tmp_path / "model/README.md").read_text()  # text, not a link
    (tmp_path / "empty").mkdir()
    assert main(["card", str(tmp_path / "empty")]) == 2
    assert "no captioner.json, so it is not a saved captioner. Use" in capfd.readouterr().err
    assert main(["card", str(tmp_path / "nowhere")]) == 2
    assert "There is no folder" in capfd.readouterr().err


@pytest.mark.parametrize("settings", ["", "null", "[1]", '{"family": 3}'])
def test_invalid_captioner_settings_raise(tmp_path, settings, capfd):
    tiny_captioner("blip").save_pretrained(tmp_path / "model")
    (tmp_path / "model/captioner.json").write_text(settings)
    assert main(["card", str(tmp_path / "model")]) == 2
    assert "captioner.json" in capfd.readouterr().err


def test_model_with_results_needs_its_numbers(tmp_path):
    folder = publishable(tmp_path / "model")
    card = (folder / "README.md").read_text()
    (folder / "README.md").write_text(card.replace("model-index:", "index:"))
    with pytest.raises(ValueError, match="no retrieval number"):
        folder_contents(folder)
    (folder / "results.json").unlink()
    assert "README.md" in folder_contents(folder).published


def test_captioner_push_to_hub(hub, monkeypatch):
    captioner = tiny_captioner("git")
    monkeypatch.setenv("HF_TOKEN", WRITE)
    assert "commit" in captioner.push_to_hub("git-tiny")
    repo = hub.repo("tester/git-tiny")
    assert repo.private
    assert {"README.md", "training_manifest.json", "model.safetensors"} <= set(repo.files)
    assert 'load_captioner("tester/git-tiny", revision="' in repo.files["README.md"].decode()
    captioner.push_to_hub("open", private=False)
    assert not hub.repo("tester/open").private
    with pytest.raises(PermissionError, match=r"may not write.*Call push_to_hub again"):
        captioner.push_to_hub("other", token=READ)
    hub.add("tester/thesis", {"thesis.tex": b"..."})
    with pytest.raises(FileExistsError, match="other content"):
        captioner.push_to_hub("thesis")
    # A key in the prompt is not uploaded.
    captioner.prompt = f"key {WRITE} "
    with pytest.raises(ValueError, match="contains an access token"):
        captioner.push_to_hub("leak")
    assert "tester/leak" not in {name for _, name in hub.repos}


def manifest(folder, **data):
    write_manifest(folder, command=[], seeds={}, data=data)


def test_galleries_of_local_images_are_only_uploaded_on_request(hub, tmp_path, monkeypatch, capfd):
    folder = publishable(tmp_path / "model")
    (folder / "gallery.html").write_text("<img src='data:image/jpeg;base64,AAAA'>")
    (folder / "curves.png").write_bytes(b"\x89PNG")
    monkeypatch.setenv("HF_TOKEN", WRITE)
    for data in ({}, {"public_images": False}, {"public_images": "true"}):
        manifest(folder, **data)
        assert "gallery.html" in folder_contents(folder).left_out
        assert "curves.png" in folder_contents(folder).published
    assert main(["push", str(folder), "--repo_id", "smile", "--dry_run"]) == 0
    assert "- gallery.html" in capfd.readouterr().out
    push_folder(folder, "smile")
    assert "gallery.html" not in hub.repo("tester/smile").files
    assert main(["push", str(folder), "--gallery"]) == 0
    assert "gallery.html" in hub.repo("tester/smile").files
    assert json.loads((folder / "push_state.json").read_text())["gallery"] is True
    manifest(folder, public_images=True)
    assert "gallery.html" in folder_contents(folder).published
    assert "gallery.html" in folder_contents(folder, gallery=False).left_out


@pytest.mark.parametrize(
    ("name", "asked", "goes_up"),
    [("scenes", False, True), ("owner/data", False, True), ("photos", False, False), ("photos", True, True)],
)
def test_recipe_records_whether_its_images_are_public(name, asked, goes_up, tmp_path, monkeypatch):
    from hf_captionrl.apps.experiments import report as publication
    from hf_captionrl.apps.experiments.arguments import DataArguments, ModelArguments
    from hf_captionrl.evaluation.options import EvaluationArguments
    from tests.hub.test_cards import make_results

    monkeypatch.setattr(publication, "describe_data", lambda *_: "24 images.")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text(json.dumps(make_results()))
    (tmp_path / "out" / "gallery.html").write_text("pictures")
    config = SmileConfig(str(tmp_path / "out"), use_cpu=True, report_to="none")
    held_out_scorer = SimpleNamespace(signature="clip @ 1", max_text_tokens=77, count_truncated=lambda captions: 0)
    publication.write_publication(
        tmp_path / "out" / "results.json",
        SimpleNamespace(family="blip", prompt=""),
        ["a"],
        "SMILE",
        SimpleNamespace(held_out_scorer=held_out_scorer),
        (ModelArguments(), DataArguments(dataset_name=name), EvaluationArguments(push_gallery=asked), config),
        {},
        {"objective": "smile", "mle_weight": 0.0},
    )
    found = json.loads((tmp_path / "out/model/training_manifest.json").read_text())
    assert found["data"]["public_images"] is goes_up
    assert (tmp_path / "out/model/gallery.html").exists() is goes_up
