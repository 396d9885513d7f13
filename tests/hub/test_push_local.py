"""Checks of a push before anything is sent, and its behaviour when the Hub fails; without a server."""

import json
from types import SimpleNamespace
from typing import ClassVar

import pytest

from hf_captionrl.cli import main
from hf_captionrl.hub import folder_contents, pin_examples, push_folder, read_push_state, write_manifest
from hf_captionrl.hub.push import check_secret, public_command, public_values, redact
from tests.hub.folders import publishable
from tests.hub.server import WRITE


class FakeHub:
    """Records what would be uploaded; can be set to fail."""

    calls: ClassVar[list[tuple[str, dict]]] = []
    broken = False

    def __init__(self, token=None):
        pass

    def create_repo(self, repo_id, **kwargs):
        if self.broken:
            raise ConnectionError("no route to host")
        self.calls.append(("create", {"repo_id": repo_id, **kwargs}))
        return SimpleNamespace(repo_id=f"me/{repo_id.rpartition('/')[2]}")

    def repo_info(self, **kwargs):
        return SimpleNamespace(siblings=[], sha="0" * 40)

    def upload_folder(self, **kwargs):
        self.calls.append(("upload", kwargs))
        return f"commit in {kwargs['repo_id']}"

    def upload_file(self, **kwargs):
        return f"commit in {kwargs['repo_id']}"


@pytest.fixture
def checkpoint(tmp_path):
    return publishable(tmp_path / "model")


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr("hf_captionrl.hub.push.HfApi", FakeHub)
    FakeHub.calls.clear()
    return FakeHub


def test_push_is_private_and_leaves_trainer_state_behind(checkpoint, hub):
    assert push_folder(checkpoint, "smile") == "commit in me/smile"
    (_, created), (_, uploaded) = hub.calls
    assert created["private"] is True
    assert not any("checkpoint-" in name or name.endswith((".bin", ".pt")) for name in uploaded["allow_patterns"])
    assert read_push_state(checkpoint)["state"] == "pushed"
    assert read_push_state(checkpoint)["repo_id"] == "me/smile"


def test_failed_push_prints_the_folder_of_the_checkpoint(checkpoint, hub, monkeypatch):
    monkeypatch.setattr(hub, "broken", True)
    before, waits = (checkpoint / "model.safetensors").read_bytes(), []
    with pytest.raises(RuntimeError, match=r"still in .*push_folder"):
        push_folder(checkpoint, "smile", attempts=9, sleep=waits.append)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert (checkpoint / "model.safetensors").read_bytes() == before
    assert read_push_state(checkpoint)["state"] == "failed"
    assert "no route to host" in read_push_state(checkpoint)["reason"]


def test_incomplete_folder_is_not_pushed(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"README.md"):
        push_folder(tmp_path, "smile")


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("model.safetensors", r"no \*.safetensors"),
        ("tokenizer.json", "no tokenizer"),
        ("processor_config.json", "no image processor"),
        ("training_manifest.json", "no training_manifest.json"),
    ],
)
def test_each_part_is_required(checkpoint, hub, gone, message):
    (checkpoint / gone).unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(b"pickle")  # does not replace the missing part
    with pytest.raises(FileNotFoundError, match=message):
        push_folder(checkpoint, "smile")
    assert hub.calls == []


def test_only_listed_kinds_of_files_are_published(checkpoint):
    unfit = ["training_args.bin", "optimizer.pt", "rng_state.pth", "a.pkl", "weights.npz", ".env", "notes.docx"]
    unfit += ["checkpoint-7/model.safetensors", "checkpoint-7/optimizer.pt", "runs/events.out", "card.json"]
    unfit += ["push_state.json", "trainer_state.json", ".git/config.json", "deep/er/model.safetensors"]
    for name in unfit:
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text("x")
    contents = folder_contents(checkpoint)
    assert set(contents.left_out) == set(unfit)
    assert {"model.safetensors", "README.md", "generation_config.json", "results.json"} <= set(contents.published)


@pytest.mark.parametrize("name", ["results.json", "README.md", "gallery.html"])
def test_token_in_a_file_stops_the_push_and_is_not_printed(checkpoint, hub, name):
    path = checkpoint / name
    path.write_text((path.read_text() if path.exists() else "") + f"\n{WRITE}\n")
    with pytest.raises(ValueError, match=f"{name} contains an access token") as error:
        push_folder(checkpoint, "smile", gallery=True)
    assert WRITE not in str(error.value)
    assert hub.calls == []


@pytest.mark.parametrize(
    "secret",
    [
        "sk-proj-" + "aB3" * 10,
        "ghp_" + "a1" * 18,
        "github_pat_" + "a1_" * 10,
        "_sk-" + "aB3" * 10,
        "AKIA" + "ABCD1234" * 2,
        "ASIA" + "ABCD1234" * 2,
        "-----BEGIN OPENSSH PRIVATE KEY-----\\nAAAA\\n-----END OPENSSH PRIVATE KEY-----",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----",
    ],
    ids=lambda secret: secret[:12],
)
def test_keys_of_other_services_stop_the_push_too(checkpoint, hub, secret):
    (checkpoint / "notes.json").write_text(json.dumps({"command": f"run --key {secret}"}))
    with pytest.raises(ValueError, match=r"notes.json contains an access token or a private key\. Remove it") as error:
        push_folder(checkpoint, "smile")
    assert secret not in str(error.value)
    assert hub.calls == []
    (checkpoint / "notes.json").write_text(json.dumps({"note": "sk-learn-contrib-0-24-intelex, AKIA, ghp_x"}))
    push_folder(checkpoint, "smile")


def test_private_key_is_redacted_completely():
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA PRIVATE KEY-----"
    assert redact(f"before\n{key}\nafter {WRITE}") == "before\n[removed]\nafter [removed]"
    assert redact(f"before\n{key[:50]}") == "before\n[removed]"
    check_secret("text", redact(key))


def test_symlink_out_of_the_folder_is_not_followed(checkpoint, hub, tmp_path):
    (tmp_path / "private.json").write_text("{}")
    (checkpoint / "extra.json").symlink_to(tmp_path / "private.json")
    with pytest.raises(ValueError, match="outside the folder"):
        push_folder(checkpoint, "smile")
    assert hub.calls == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<script>alert(1)</script>", "HTML"),
        ('<img src="x" onerror="alert(1)">', "HTML"),
        ("<!-- hidden -->", "HTML"),
        ("[weights](../../secret)", "outside its folder"),
        ("![picture](/etc/passwd)", "outside its folder"),
        ("[here](javascript:alert)", "outside its folder"),
        ("[a]: file:///etc/passwd", "outside its folder"),
        ("More information needed", "placeholder"),
        ("Trained by ORGANISATION/model", "placeholder"),
        ("TODO", "placeholder"),
    ],
)
def test_edited_card_is_checked_again(checkpoint, hub, text, message):
    card = checkpoint / "README.md"
    card.write_text(card.read_text() + f"\n{text}\n")
    with pytest.raises(ValueError, match=message):
        push_folder(checkpoint, "smile")
    assert hub.calls == []


def test_code_formulas_and_urls_are_not_html(checkpoint, hub):
    card = checkpoint / "README.md"
    card.write_text(
        card.read_text() + "\n`List<int>` and $a<b$ and <https://example.org>\n```cpp\nstd::vector<int> x;\n```\n"
    )
    assert push_folder(checkpoint, "smile")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("license: bsd-3-clause", "", "has no licence"),
        ("model-index:", "index:", "no retrieval number"),
        ("---\n", "", "does not begin with metadata"),
        ("language: en", "language: [en", "not valid YAML"),
    ],
)
def test_metadata_are_required(checkpoint, hub, old, new, message):
    card = checkpoint / "README.md"
    card.write_text(card.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        push_folder(checkpoint, "smile")


@pytest.mark.parametrize("name", ["a b", "a/b/c", "-x", "a..b", "x" * 97, ""])
def test_invalid_names_raise(checkpoint, hub, name):
    with pytest.raises(ValueError, match="not a name that the Hub accepts"):
        push_folder(checkpoint, name)
    assert hub.calls == []


@pytest.mark.parametrize("tail", ["\n", " ", "\u00e4", "\0"])
def test_invalid_token_is_not_printed(checkpoint, hub, tail):
    with pytest.raises(ValueError, match="Copy it again") as error:
        push_folder(checkpoint, "smile", token=WRITE + tail)
    assert WRITE not in str(error.value)


def test_settings_of_a_push_to_another_repository_are_not_reused(checkpoint, hub):
    push_folder(checkpoint, "me/open", private=False, commit_message="First")
    hub.calls.clear()
    assert main(["push", str(checkpoint), "--repo_id", "me/secret"]) == 0
    (_, created), *_, (_, uploaded) = hub.calls
    assert (created["repo_id"], created["private"]) == ("me/secret", True)
    assert uploaded["commit_message"] == "Add captioner"
    hub.calls.clear()
    assert main(["push", str(checkpoint), "--repo_id", "me/secret", "--public"]) == 0
    assert hub.calls[0][1]["private"] is False
    hub.calls.clear()
    assert main(["push", str(checkpoint)]) == 0  # settings of the same repository are reused
    assert hub.calls[0][1]["private"] is False


def test_numbers_and_settings_of_smile_are_not_secrets():
    command = ["smile.py", "--first_token", "shift", "--generation_max_new_tokens", "20", "--max_tokens=30"]
    assert public_command(command) == command
    assert public_command(["a", "--authtoken", "x", "--password", "12345", "--mytoken=abc"]) == (
        ["a", "--authtoken", "***", "--password", "***", "--mytoken=***"]
    )
    assert public_values({"password": "12345", "max_new_tokens": "20", "pin": "1"}) == {
        "max_new_tokens": "20",
        "pin": "1",
    }
    assert public_command(["a", "--api-key", "20", "--hub_token=x", "--hub-token", "y"]) == (
        ["a", "--api-key", "***", "--hub_token=***", "--hub-token", "***"]
    )


def test_manifest_contains_no_local_paths_or_secrets(tmp_path):
    home = "/" + "home/me"
    path = write_manifest(
        tmp_path,
        command=[
            "recipe.py",
            "--hub_token",
            WRITE,
            f"--wandb_api_key={WRITE}",
            "--data_dir",
            f"{home}/photos",
            "--x=1",
        ],
        seeds={"seed": 3},
        data={"name": "photos", "revision": "abc", "fingerprints": {"train": "f1"}},
        config={"Model": {"path": f"{home}/model", "hub_token": WRITE, "note": f"with {WRITE}"}},
    )
    text = path.read_text()
    found = json.loads(text)
    assert WRITE not in text
    assert home not in text
    assert "git" not in text
    assert found["command"] == [
        "recipe.py",
        "--hub_token",
        "***",
        "--wandb_api_key=***",
        "--data_dir",
        "photos",
        "--x=1",
    ]
    assert found["config"]["Model"] == {"path": "model", "note": "with [removed]"}
    assert found["seeds"] == {"seed": 3}
    assert {"torch", "transformers", "python", "hf_captionrl"} <= set(found["versions"])
    assert public_command(["a", "--out=../x/y"]) == ["a", "--out=y"]
    assert public_values({"ratio": "3/4", "text": "a b"}) == {
        "ratio": "3/4",
        "text": "a b",
    }  # not a path, so not changed


def test_code_examples_are_pinned_but_not_prose():
    card = 'At revision="main": "m".\n\n```python\nload("m", revision="main")\nload("o/base", revision="main")\n```\n'
    once = pin_examples(card, "me/m", "a" * 40)
    assert once == (
        'At revision="main": "m".\n\n```python\nload("me/m", revision="'
        + "a" * 40
        + '")\nload("o/base", revision="main")\n```\n'
    )
    assert pin_examples(once, "me/m", "b" * 40) == once
    assert pin_examples(once, "me/m", "b" * 40, again=True) == once.replace("a" * 40, "b" * 40)


def test_command_line(checkpoint, hub, capsys, monkeypatch):
    assert main(["push", str(checkpoint)]) == 2
    assert "Use --repo_id" in capsys.readouterr().err
    assert main(["push", str(checkpoint), "--dry_run", "--json"]) == 0
    assert "model.safetensors" in json.loads(capsys.readouterr().out)["published"]
    assert hub.calls == []
    assert main(["push", str(checkpoint), "--repo_id", "smile", "--public"]) == 0
    assert hub.calls[0][1]["private"] is False
    assert "commit in me/smile" in capsys.readouterr().out
    assert main(["push", str(checkpoint), "--json"]) == 0  # the destination is known
    assert json.loads(capsys.readouterr().out)["repo_id"] == "me/smile"
    monkeypatch.setattr(hub, "broken", True)
    monkeypatch.setitem(push_folder.__kwdefaults__, "attempts", 1)
    assert main(["push", str(checkpoint)]) == 1
    assert "Nothing is lost" in capsys.readouterr().err


def test_card_command(checkpoint, capsys):
    card = checkpoint / "README.md"
    before = card.read_text()
    card.write_text(before + "\nTODO\n")
    assert main(["card", str(checkpoint), "--check"]) == 2
    assert "placeholder" in capsys.readouterr().err
    assert main(["card", str(checkpoint)]) == 0
    assert card.read_text() == before
    assert main(["card", str(checkpoint), "--check", "--json"]) == 0
    assert main(["card", str(checkpoint), "--license", "mit"]) == 0
    assert "license: mit" in card.read_text()
    assert main(["card", str(checkpoint), "--license", "TODO"]) == 2
    assert "license: mit" in card.read_text()
    (checkpoint / "results.json").unlink()
    assert main(["card", str(checkpoint)]) == 2
