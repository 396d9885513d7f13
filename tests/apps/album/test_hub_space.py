"""The demo as a Space: pushed to a test Hub; its page starts `captionrl demo`."""

import json
import runpy

import pytest

from hf_captionrl.apps.album.page import named_models
from hf_captionrl.cli import main
from hf_captionrl.cli.main import build_parser
from hf_captionrl.hub import PushError
from hf_captionrl.hub.push import check_card
from hf_captionrl.hub.spaces import push_demo, write_demo_space
from tests.hub.server import READ, WRITE

MODELS = {"MLE": "Salesforce/blip-image-captioning-base", "my SR": "me/blip-sr"}


def started(folder, monkeypatch):
    """Parsed arguments that the page of the Space gives to the command."""
    called = []
    monkeypatch.setattr("hf_captionrl.cli.main", lambda argv: called.append(argv) or 0)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(folder / "app.py"), run_name="__main__")
    assert stop.value.code == 0
    return build_parser().parse_args(called[0])


def test_page_of_the_space_starts_the_demo(tmp_path, monkeypatch):
    arguments = started(write_demo_space(tmp_path / "mine", MODELS), monkeypatch)
    assert named_models(arguments.model) == MODELS
    assert arguments.scorer == "openai/clip-vit-base-patch32"
    assert (arguments.host, arguments.port, arguments.no_browser, arguments.share) == ("0.0.0.0", 7860, True, False)
    arguments = started(write_demo_space(tmp_path / "embedded"), monkeypatch)
    assert named_models(arguments.model) == named_models(None)
    assert arguments.scorer == "scenes:siglip-held-out"


def test_card_of_the_space(tmp_path):
    folder = write_demo_space(tmp_path, {"<b>*A*</b>": "me/a|b"}, scorer="me/clip")
    card = (folder / "README.md").read_text()
    meta = check_card(card)
    assert (meta["sdk"], meta["app_file"], meta["license"]) == ("gradio", "app.py", "apache-2.0")
    assert len(meta["short_description"]) <= 60
    assert "<b>" not in card.replace("\\<b", "")
    assert "me/clip" in card
    assert (folder / "requirements.txt").read_text().startswith("hf-captionrl[demo]")


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"A": "outputs/sr/model"}, "is a local folder"),
        ({"A": "me/a\n--share"}, "invisible character"),
        ({"A": "scenes:nothing"}, "no shipped model"),
        ({"TODO": "me/a"}, "a placeholder"),
        ({"A": "me/hf_" + "a" * 34}, "contains an access token"),
    ],
)
def test_unusable_models_of_a_space_are_refused(tmp_path, models, message):
    with pytest.raises(ValueError, match=message):
        write_demo_space(tmp_path / "space", models)
    assert not (tmp_path / "space").exists()


def test_push_and_repeated_push(hub, monkeypatch, capfd):
    address = push_demo("tester/album", MODELS, token=WRITE)
    repo = hub.repo("tester/album", "space")
    assert set(repo.files) - {".gitattributes"} == {"README.md", "app.py", "arguments.txt", "requirements.txt"}
    assert repo.private
    assert "tester/album" in address
    assert repo.files["arguments.txt"].decode().splitlines()[1:] == [f"--model={n}={m}" for n, m in MODELS.items()]
    # The command does the same, and knows the Space as one of ours.
    monkeypatch.setenv("HF_TOKEN", WRITE)
    command = ["push", "demo", "--type", "space", "--repo_id", "tester/album", "--json"]
    assert main([*command, "--model", "SR=me/blip-sr"]) == 0
    assert json.loads(capfd.readouterr().out)["repo_id"] == "tester/album"
    assert repo.files["arguments.txt"].decode().splitlines()[1:] == ["--model=SR=me/blip-sr"]
    hub.fail("POST .*/commit/", 500)
    with pytest.raises(PushError, match=r"Repeat with `captionrl push demo --type space --repo_id tester/album`"):
        push_demo("tester/album", token=WRITE, sleep=lambda seconds: None)
    hub.end_fault()
    hub.add("tester/other", {"app.py": b"print()"}, repo_type="space")
    with pytest.raises(FileExistsError, match="has other content"):
        push_demo("tester/other", token=WRITE)
    with pytest.raises(PermissionError):
        push_demo("tester/album", token=READ)
    assert main(["push", "self_retrieval", "--type", "space", "--repo_id", "me/self_retrieval", "--model", "A=b"]) == 2
    assert "--model and --scorer belong to the demo" in capfd.readouterr().err
